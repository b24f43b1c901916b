"""python -m benchmarks trl: settings of TRL from those of areno, the comparison, and a tiny run of both."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areno.api.algorithms import get_algorithm
from areno.api.trainer import Trainer
from areno.bench.arguments import Settings
from areno.config.norms import NormConfig
from areno.errors import ArenoError
from areno.launch.compose import load
from areno.loss_fns.advantages import group_advantages
from areno.plan.plan import TrainerPlan
from areno.types import TrainSequence
from benchmarks import trl, trl_contender
from benchmarks.__main__ import figures_page, main, parser
from benchmarks.trl import config_of, reward_chart, training_figures
from benchmarks.trl_contender import (
    Training,
    prompts_of,
    smaller_divisor,
    trl_problems,
    trl_settings,
    with_formulas_of_trl,
)
from tests.helpers import warm
from tests.helpers.tiny_engine import engine_spec

WARM_UP = "actor.optimizer.warmup_steps_proportion=0.5"
MODEL = Path(__file__).parents[2] / "examples/quickstart/model"


@pytest.fixture(scope="module")
def config() -> Any:
    return load(get_algorithm("grpo").config, "countdown_cpu", [f"actor.path={MODEL}", "seed=7"])


def test_the_settings_of_trl_are_those_of_areno(config: Any) -> None:
    assert list(trl_problems(config)) == []
    found = trl_settings(config, 60, 64, "cpu")
    expected = {
        "max_steps": 60,
        "seed": 7,
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 4,  # 32 prompts, 8 samples each, one optimizer step
        "num_generations": 8,
        "max_completion_length": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "scale_rewards": "group",
        "mask_truncated_completions": False,
        "learning_rate": 5e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
    }
    assert {name: found[name] for name in expected} == expected


def test_other_settings_of_the_loss(config: Any) -> None:
    norm = NormConfig(std_level=None)
    actor = replace(config.actor, eps_clip_higher=0.28, reduction="token_mean", adv_norm=norm, dtype="bfloat16")
    gconfig = replace(config.gconfig, top_k=20, min_p=0.1)
    found = trl_settings(replace(config, actor=actor, gconfig=gconfig), 1, 256, "cuda:0")
    names = ("epsilon", "epsilon_high", "loss_type", "scale_rewards", "bf16", "top_k", "min_p", "use_cpu")
    assert [found[name] for name in names] == [0.2, 0.28, "dapo", "none", True, 20, 0.1, False]
    assert with_formulas_of_trl(replace(config, actor=actor)).actor.adv_norm == norm


def test_the_settings_of_gspo() -> None:
    found = trl_settings(load(get_algorithm("gspo").config, "countdown_cpu", [f"actor.path={MODEL}"]), 1, 256, "cpu")
    names = ("importance_sampling_level", "loss_type", "epsilon", "gradient_accumulation_steps")
    assert [found[name] for name in names] == ["sequence", "grpo", 3e-4, 1]


def test_areno_divides_by_the_deviation_of_trl(config: Any) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5])
    norm = with_formulas_of_trl(config).actor.adv_norm
    ours = group_advantages(rewards.tolist(), [0] * 4, **dataclasses.asdict(norm))
    assert ours.tolist() == pytest.approx(((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist())


def test_settings_without_a_counterpart_are_told_together(config: Any) -> None:
    norm = NormConfig(mean_level="batch")
    actor = replace(config.actor, reward_scaling=2.0, mask_no_eos_with_zero=True, ppo_n_minibatches=2, adv_norm=norm)
    changed = replace(config, actor=actor, gconfig=replace(config.gconfig, stop=["."]))
    assert {problem.key for problem in trl_problems(changed)} == {
        "actor.reward_scaling",
        "actor.mask_no_eos_with_zero",
        "actor.ppo_n_minibatches",
        "actor.adv_norm.mean_level",
        "gconfig.stop",
    }
    masked = replace(config.actor, mask_no_eos_with_zero=True, reduction="token_mean")
    assert not list(trl_problems(replace(config, actor=masked)))


def test_prompts_come_in_the_order_of_a_run(config: Any) -> None:
    few = replace(config, train_dataset=replace(config.train_dataset, dataset_kwargs={"count": 10}, batch_size=4))
    items = prompts_of(replace(few, total_train_epochs=2), 4)
    assert len(items) == 16
    assert len({item.index for item in items[:8]}) == 8  # an epoch
    assert [item.index for item in items[:8]] != [item.index for item in items[8:]]
    with pytest.raises(ArenoError, match="--steps: is 5, and 2 epochs have 4 steps"):
        prompts_of(replace(few, total_train_epochs=2), 5)


def test_smaller_micro_batches_divide_the_step() -> None:
    sizes, size = [], 96
    while (size := smaller_divisor(96, size) or 0) > 0:
        sizes.append(size)
    assert sizes == [48, 24, 12, 6, 3, 1]


def test_a_training_out_of_memory_begins_again(config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def run(work: Any, config: Any, items: Any, size: int, *_: Any) -> Training | None:
        tried.append(size)
        return None if size > fits else Training("model", rows_at_once=size)

    monkeypatch.setattr(trl, "_run_in_process", run)
    fits = 64
    assert trl._trained_by_trl(config, [], 256, "cuda:0", 1, tmp_path).rows_at_once == 64
    assert tried == [256, 128, 64]
    fits = 0
    with pytest.raises(ArenoError, match="even with one row at a time"):
        trl._trained_by_trl(config, [], 256, "cuda:0", 1, tmp_path)


def test_the_figures_of_a_training_its_page_and_its_picture() -> None:
    first = Training("model", rewards=[0.1, 0.3], step_s=[9.0, 1.0], rollout_s=[5.0, 0.5])
    second = Training("model", rewards=[0.2, 0.5], step_s=[9.0, 2.0], rollout_s=[5.0, 0.5])
    found = training_figures(first, before=0.1, after=0.2)
    lines = figures_page({"seed 1, areno": found, "ratio": 5.0}).splitlines()
    assert lines[1].split() == ["seed", "1,", "areno", "0.1", "0.3", "0.1", "0.2", "5", "2.75"]
    assert lines[2].split() == ["ratio", "5"]
    shapes = xml.etree.ElementTree.fromstring(reward_chart("c", {"areno": [first, second], "trl": [first, second]}))
    assert len(list(shapes.iter("{http://www.w3.org/2000/svg}polyline"))) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trl --config countdown_cpu", "the following arguments are required: --model"),
        (f"trl --model {MODEL}", "the following arguments are required: --config"),
        (f"trl --model {MODEL} --config a --prompts 3", "unrecognized arguments: --prompts 3"),
        (f"trl --model {MODEL} --config a --device cuda:1", "--device: invalid choice"),
        (f"trl --model {MODEL} --config a --seeds x", "--seeds: invalid int value"),
        ("train --config a --device cpu", "unrecognized arguments: --config a"),
    ],
)
def test_arguments_that_do_not_fit(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.trl.find_spec", lambda name: None)
    assert main(["trl", "--model", str(MODEL), "--config", "countdown_cpu"]) == 2
    assert "trl: needs packages that are not installed here: trl accelerate datasets" in capsys.readouterr().err


def settings_with(*more: str) -> Any:
    return parser().parse_args(
        ["trl", "--model", str(MODEL), "--config", "countdown_cpu", "--device", "cpu", *more], Settings()
    )


def test_settings_that_the_command_sets_itself() -> None:
    settings = settings_with("--set", "seed=3", "--set", "actor.adv_norm.eps=1")
    with pytest.raises(ArenoError) as caught:
        config_of(settings, 1)
    assert [problem.key for problem in caught.value.problems] == ["actor.adv_norm.eps", "seed"]
    found: Any = config_of(settings_with("--steps", "9", "--set", "gconfig.n_samples=2"), 5)
    values = found.seed, found.total_train_steps, found.gconfig.n_samples, found.actor.path, found.engine.device
    assert values == (5, 9, 2, str(MODEL), "cpu")


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
def test_a_tiny_run_of_both(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("trl", "accelerate", "datasets"):
        pytest.importorskip(name)
    if device == "cpu":  # processes that start at once know of no GPU
        monkeypatch.setattr("benchmarks.trl.get_context", warm.workers().get_context)
    command = f"trl --model {MODEL} --config quickstart --steps 3 --device {device} --json --folder {tmp_path}".split()
    assert main([*command, "--set", "train_dataset.batch_size=16", "--set", "reward.workers=1"]) == 0
    found = json.loads(capfd.readouterr().out)
    ours, theirs = (found[f"seed 1, {name}"] for name in ("areno", "trl"))
    for name, of in (("areno/checkpoints/latest", ours), ("trl/model", theirs)):
        assert len(of["rewards"]) == 3
        assert 0 < of["rollout_s"] < of["step_s"]
        assert list(tmp_path.glob(f"seed-1-*/{name}/model.safetensors"))
    # 128 samples of the same policy: the deviation of the difference is at most 0.063.
    assert ours["rewards"][0] == pytest.approx(theirs["rewards"][0], abs=0.2)
    assert f"bf16={device != 'cpu'}," in found["trl_settings"]
    assert found["ratio"] == theirs["step_s"] / ours["step_s"]
    assert json.loads((tmp_path / "result.json").read_text()) == found
    assert (tmp_path / "curves.svg").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "more"),
    [
        ("grpo", ["actor.optimizer.gradient_clipping=0"]),
        ("grpo", ["actor.reduction=token_mean", "actor.adv_norm.std_level=null", "gconfig.temperature=0.7"]),
        ("grpo", ["actor.reduction=seq_mean_token_sum_norm", "actor.optimizer.gradient_clipping=0.01"]),
        ("gspo", ["actor.adv_norm.std_level=batch", "actor.optimizer.gradient_clipping=0", WARM_UP]),
    ],
)
def test_areno_updates_as_trl_on_the_samples_of_trl(
    algo: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trl", "accelerate", "datasets"):
        pytest.importorskip(name)
    own = [f"actor.path={MODEL}", "train_dataset.batch_size=8", "reward.workers=1"]
    own += [
        "actor.optimizer.eps=0.1",
        "actor.optimizer.lr=0.02",
    ]  # so that Adam does not divide the size of gradients out
    steps: list[list[Any]] = []
    reward_of = trl_contender._reward_fn

    def recorded(config: Any, items: Any, pool: Any) -> Any:
        reward = reward_of(config, items, pool)

        def record(completion_ids: Any, place: Any, **named: Any) -> list[float]:
            found = reward(completion_ids=completion_ids, place=place, **named)
            steps.append(list(zip([items[at] for at in place], completion_ids, found, strict=True)))
            return found

        return record

    monkeypatch.setattr(trl_contender, "_reward_fn", recorded)
    config: Any = with_formulas_of_trl(load(get_algorithm(algo).config, "quickstart", [*own, *more]))
    items = prompts_of(config, 4)
    theirs = trl_contender.train_with_trl(config, items, 32, "cpu", 1, tmp_path / "trl")
    assert theirs is not None
    assert theirs.rewards == pytest.approx([sum(reward for *_, reward in step) / 64 for step in steps])

    optimizer = replace(config.actor.optimizer, lr_decay_steps=4)
    spec = engine_spec(MODEL, optimizer=optimizer, gradient_checkpointing=False)
    with Trainer.from_plan(TrainerPlan(spec=spec, tokenizer=None)) as trainer:
        trainer.init()
        for step in steps:
            rows = [
                TrainSequence(
                    prompt_mask=[True] * len(item.tokens) + [False] * len(tokens),
                    tokens=[*item.tokens, *tokens],
                    logprobs=[0.0] * (len(item.tokens) + len(tokens)),
                    advantages=[0.0] * (len(item.tokens) + len(tokens)),
                    reward=reward,
                )
                for item, tokens, reward in step
            ]
            found = config.advantages(rows, [number // 8 for number in range(64)])
            for row, advantages, (item, *_) in zip(rows, found, step, strict=True):
                row.advantages = [0.0] * len(item.tokens) + list(map(float, advantages))
            trainer.train(rows, config.loss_fn(), temperature=config.gconfig.temperature)
        trainer.save_checkpoint(tmp_path / "ours")
    start, ours, after = (load_file(Path(at) / "model.safetensors") for at in (MODEL, tmp_path / "ours", theirs.model))
    moved = sum((after[name] - start[name]).double().square().sum() for name in ours)
    apart = sum((after[name] - ours[name]).double().square().sum() for name in ours)
    assert moved > 0
    assert (apart / moved) ** 0.5 < 1e-3
