"""Learning-rate schedules follow the length of the run, and one that was made for another run is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import areno
from areno.bench.work import model_folder as shape_folder
from areno.config.models import OptimizerConfig
from areno.engine.train.learning_rate import DECAY_STEPS, learning_rate
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.plan.lr_schedule import device_warnings, n_updates_by_role, schedule_warnings
from areno.recipes.dpo import DPOConfig
from areno.recipes.gspo import GSPOConfig
from areno.recipes.ppo import PPOConfig
from areno.recipes.sft import SFTConfig
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.tracking.reader import RunReader
from tests.helpers.policy_runs import classifier, play


@pytest.mark.parametrize(
    ("cls", "task", "overrides", "updates"),
    [
        (GSPOConfig, "quickstart", [], {"actor": 50}),
        (GSPOConfig, "quickstart", ["actor.ppo_n_minibatches=4"], {"actor": 200}),
        (PPOConfig, "quickstart_ppo", ["critic.ppo_n_minibatches=2"], {"actor": 20, "critic": 100}),
        (PPOConfig, "quickstart_ppo", ["critic.warmup_steps=60"], {"actor": 0, "critic": 50 * 16}),
        # Of 256 rows, 16 micro-batches; the last of four updates has one.
        (SFTConfig, "quickstart_base", ["actor.gradient_accumulation_steps=5"], {"actor": 200}),
        # Of 32 pairs, 4 micro-batches of 8 pairs each.
        (DPOConfig, "quickstart_dpo", ["actor.gradient_accumulation_steps=1"], {"actor": 200}),
    ],
)
def test_how_many_updates_a_run_has(cls, task, overrides, updates):
    more = ["train_dataset.batch_size=32"] if cls is DPOConfig else []
    assert n_updates_by_role(load(cls, task, [*overrides, *more]), 50) == updates


def test_a_run_that_ends_before_the_steps_that_were_asked_for() -> None:
    config = load(GSPOConfig, "quickstart", ["total_train_steps=100", "total_train_epochs=3"])
    assert list(schedule_warnings(config, 100)) == []
    [told] = schedule_warnings(config, 12)
    assert "ends after at most 12 steps and not after total_train_steps=100, since total_train_epochs=3 ends it" in told
    config.total_train_n_seqs = 9
    assert "total_train_epochs=3 and total_train_n_seqs=9" in next(schedule_warnings(config, 12))


def test_settings_without_effect_on_the_devices_of_a_run() -> None:
    settings = ["engine.zero_stage=2", "enable_offload=true", "critic.offload=true"]
    config = load(PPOConfig, "quickstart_ppo", settings)

    def told(*devices: str, **engine: int) -> list[str]:
        layout = replace(config.engine, world_size=len(devices), **engine)
        return list(device_warnings(config, EngineSpec(actor=RoleSpec(path=""), devices=[*devices], engine=layout)))

    zero = "engine.zero_stage=2 has no effect: the run has one copy of the model, which shares no gradients"
    text = " has no effect: the models of a CPU are in host memory already"
    assert told("cpu") == [zero, f"enable_offload and critic.offload{text}"]
    assert told("cuda:0") == told("cuda:0", "cuda:1", tp_size=2) == [zero]
    assert told("cuda:0", "cuda:1") == []
    config = load(PPOConfig, "quickstart_ppo", ["engine.zero_stage=1", "critic.offload=true"])
    assert told("cpu") == [f"critic.offload{text}"]
    config = load(PPOConfig, "quickstart_ppo", [])
    assert told("cpu") == []


def test_fp8_without_exact_log_probabilities(tmp_path: Path) -> None:
    """With recurrent states, for which `engine.exact` is an error, it is not recommended."""

    def told(*settings: str, shape: str = "tiny") -> list[str]:
        config = load(GSPOConfig, "quickstart", ["actor.fp8_config.mode=e4m3", *settings])
        actor = RoleSpec(path=str(shape_folder(shape, tmp_path / shape)[0]))
        return list(device_warnings(config, EngineSpec(actor=actor, devices=["cpu"], dtype="bfloat16")))

    [text] = told()
    assert text.startswith("linear layers compute in FP8 without engine.exact, so rollout and training differ more")
    assert text.endswith("set engine.exact=true")
    assert told(shape="tiny-qwen3.5")[0].endswith("watch train/logp_abs_diff_mean")
    assert told("engine.exact=true") == told("actor.fp8_config.mode=disabled") == []


def test_drafts_of_samples_that_continue_in_later_steps_are_said_to_be_off() -> None:
    def told(*settings: str) -> list[str]:
        config = load(GSPOConfig, "quickstart", ["rollout.speculation=on", *settings])
        layout = replace(config.engine, world_size=1)
        return list(device_warnings(config, EngineSpec(actor=RoleSpec(path=""), devices=["cpu"], engine=layout)))

    [text] = told("rollout.prompts_ahead=2")
    assert text.startswith("rollout.speculation=on drafts nothing in training")
    assert told("rollout.max_head_offpolicyness=1", "actor.use_decoupled_loss=true") == [text]
    assert told() == []


def test_profiles_of_steps_that_a_run_does_not_have() -> None:
    steps = ["perf_tracer.enabled=true", "perf_tracer.profile_steps=[2,80,90]", "+memory_profiler.profile_steps=[70]"]
    config = load(GSPOConfig, "quickstart", ["total_train_steps=70", *steps])
    [told] = schedule_warnings(config, 70)
    assert told == "perf_tracer.profile_steps has 80, 90, but the run ends after 70 steps"
    of_memory = list(schedule_warnings(config, 60))[-1]
    assert of_memory == "memory_profiler.profile_steps has 70, but the run ends after 60 steps"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], None),
        (["actor.optimizer.lr_decay_steps=100"], None),
        (["actor.optimizer.lr_decay_steps=95"], None),
        (["actor.optimizer.lr_decay_steps=50"], "decays in 50 of the 100 updates of this run, and stays at 2e-05"),
        (["actor.optimizer.lr_decay_steps=1000"], "decays in 1000 updates, and this run has 100"),
        (
            ["actor.optimizer.lr_decay_steps=1000", "actor.optimizer.warmup_steps_proportion=0.2"],
            "warms up for 200 updates, and this run has 100, so it never reaches actor.optimizer.lr=0.0002",
        ),
        (["actor.optimizer.lr_decay_steps=1000", "actor.optimizer.lr_scheduler_type=constant"], None),
        (["actor.optimizer.lr_decay_steps=50", "actor.optimizer.lr=0"], "lr is 0, so the weights of the actor stay as"),
    ],
)
def test_schedules_that_do_not_fit_the_run(settings, told):
    config = load(GSPOConfig, "quickstart", ["actor.optimizer.lr_scheduler_type=cosine", *settings])
    texts = list(schedule_warnings(config, 100))
    assert len(texts) == (told is not None)
    assert told is None or told in texts[0]


@pytest.mark.slow
def test_the_schedule_of_a_run_is_as_long_as_the_run(tmp_path):
    """Also that of its critic; and a warning of one that is not is in the log."""
    model = classifier(tmp_path / "reward")
    overrides = ["reward.fn=null", f"reward.path={model}", "total_train_steps=6", "critic.warmup_steps=2"]
    overrides += ["actor.optimizer.lr_scheduler_type=linear", "actor.optimizer.warmup_steps_proportion=0.25"]
    overrides += ["critic.optimizer.lr_scheduler_type=cosine", "critic.optimizer.lr_decay_steps=60"]
    folder = tmp_path / "run"
    play("ppo", folder, *overrides, "critic.optimizer.lr=1e-3", task="quickstart_ppo")
    rates = RunReader(folder).series("train/lr")
    expected = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", warmup_steps_proportion=0.25, lr_decay_steps=4)
    assert rates.steps == [3, 4, 5, 6]
    assert rates.values == pytest.approx([learning_rate(expected, update) for update in range(4)])
    assert rates.values[-1] < 0.5 * max(rates.values)
    log = (folder / "logs/run.log").read_text()
    assert log.count("warning: the learning rate") == 1
    assert "critic.optimizer.lr_decay_steps=null is as long as the run" in log


def test_a_script_has_a_schedule_of_its_own():
    given, default = (OptimizerConfig(lr=1.0, lr_decay_steps=steps) for steps in (DECAY_STEPS, None))
    assert [learning_rate(default, n) for n in (0, 400, 2000)] == [learning_rate(given, n) for n in (0, 400, 2000)]


def test_a_schedule_whose_length_nobody_knows():
    overrides = ["actor.gradient_accumulation_steps=2", "actor.optimizer.lr_scheduler_type=cosine"]
    load(GSPOConfig, "quickstart", overrides)  # 16 rows in a micro-batch
    overrides.append("actor.mb_spec.max_tokens_per_mb=4096")
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.lr_decay_steps: is null, but with gradient_accumulation"):
        load(GSPOConfig, "quickstart", overrides)
    load(GSPOConfig, "quickstart", [*overrides, "actor.optimizer.lr_decay_steps=10"])


def test_a_run_whose_rows_have_no_answers_says_so(tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    overrides = ["total_train_steps=2", "train_dataset.loader=null", f"train_dataset.path={rows}", "valid_dataset=null"]
    overrides += ["train_dataset.batch_size=2", "gconfig.n_samples=2", "reward.workers=1", "engine.device=cpu"]

    def reward(record):
        return float(record.completion == record.solutions)

    config = load(GSPOConfig, "quickstart", overrides)
    with areno.PolicyOnlyTrainer(config, run_dir=tmp_path / "run", reward_fn=reward) as trainer:
        trainer.fit()
    assert caplog.text.count(f"step 1: all rewards of this step are 0, and no row of {rows} has solutions") == 1
    assert RunReader(tmp_path / "run").series("rollout/frac_groups_zero_std").values == [1.0, 1.0]
