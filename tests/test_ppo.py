"""The loop of PPO: a step against transformers and formulas written out; critic, reward models, reference; scripts."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import warm_python
from policy_runs import MODEL, Played, classifier, other_actor, trained, watched
from safetensors.torch import load_file

import areno
from areno.api import get_algorithm
from areno.config.datasets import DatasetConfig
from areno.config.models import CriticConfig, NormConfig, OptimizerConfig, RefConfig
from areno.config.rollout.reward import RewardConfig
from areno.config.rollout.sampling import GenerationConfig
from areno.config.run import ClusterConfig, EngineConfig, EvaluatorConfig, SaverConfig
from areno.errors import ConfigError
from areno.launch import command
from areno.launch.compose import load
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from areno.recipes.ppo import PPOActorConfig, PPOConfig
from areno.tracking.reader import RunReader
from areno.types import TrainSequence

PROBLEMS = [{"prompt": f"{a}+{b}=", "solutions": str(a + b)} for a in (17, 28, 39, 46) for b in (5, 27)]
TEMPERATURE = 2.0  # completions that differ, also in length


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a run can have beside the actor."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "reward": classifier(folder / "reward", seed=1),
        "critic": classifier(folder / "critic", seed=2),
        "lm": other_actor(folder / "lm"),
    }


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Of a run of one step without a path to any data."""
    return {
        "experiment_name": "script",
        "total_train_steps": 1,
        "train_dataset": DatasetConfig(batch_size=4, max_length=64),
        "gconfig": GenerationConfig(n_samples=2, max_new_tokens=8, temperature=TEMPERATURE),
        "reward": RewardConfig(workers=1),
        "engine": EngineConfig(device="cpu"),
        "saver": SaverConfig(freq_steps=None),
        "cluster": ClusterConfig(fileroot=str(folder)),
        **more,
    }


def optimizer(lr: float = 1e-3) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, lr_scheduler_type="constant", warmup_steps_proportion=0.0)


def ppo_config(folder: Path, actor: Any = None, critic: Any = None, **more: Any) -> PPOConfig:
    how = {"path": str(MODEL), "gradient_checkpointing": False, "optimizer": optimizer(), **(actor or {})}
    values = {"warmup_steps": 0, "gradient_checkpointing": False, "optimizer": optimizer(), **(critic or {})}
    return PPOConfig(**settings(folder, actor=PPOActorConfig(**how), critic=CriticConfig(**values), **more))


def without_reference(**actor: Any) -> dict[str, Any]:
    return {"actor": {"kl_ctl": 0.0, **actor}, "ref": None}


def run(config: PPOConfig, folder: Path, reward_fn: Any = None, **given: Any) -> Played:
    given = {"train_dataset": PROBLEMS, "reward_fn": reward_fn, **given}
    return watched(folder, lambda: areno.PPOTrainer(config, run_dir=folder, **given))


@cache
def hf(folder: Path, head: str) -> Any:
    kind = {"lm": transformers.AutoModelForCausalLM, "value": transformers.AutoModelForSequenceClassification}[head]
    return kind.from_pretrained(folder, dtype=torch.float32)


def hf_values(folder: Path, row: TrainSequence) -> list[float]:
    """Of the states before the trained tokens."""
    assert row.prompt_mask is not None
    model = hf(folder, "value")
    with torch.no_grad():
        scores = model.score(model.model(torch.tensor([row.tokens])).last_hidden_state)[0, :, 0].tolist()
    return [scores[t - 1] for t, masked in enumerate(row.prompt_mask) if not masked]


def hf_score(folder: Path, row: TrainSequence) -> float:
    with torch.no_grad():
        return hf(folder, "value")(torch.tensor([row.tokens])).logits.item()


def hf_logprobs(folder: Path, row: TrainSequence) -> list[float]:
    assert row.tokens is not None
    assert row.prompt_mask is not None
    with torch.no_grad():
        table = (hf(folder, "lm")(torch.tensor([row.tokens])).logits[0].double() / TEMPERATURE).log_softmax(-1)
    return [table[t - 1, row.tokens[t]].item() for t, masked in enumerate(row.prompt_mask) if not masked]


def _digits() -> Any:
    """A function within a function travels by value: the reward process does not import this file."""
    return lambda record: sum(float(character) for character in record.completion if character.isdigit())


digits = _digits()


def digits_of(row: TrainSequence) -> float:
    return sum(token - 4 for token in trained(row, "tokens") if 4 <= token <= 13)  # the tokens of 0 to 9


def close(expected: Any, within: float = 1e-4) -> Any:
    return pytest.approx(expected, abs=within, rel=1e-4)


# One step ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_in_reward", [True, False])
def test_one_step_is_what_the_formulas_say(tmp_path: Path, models: dict[str, Path], kl_in_reward: bool) -> None:
    """Rows, values, GAE, whitening, returns and both losses, recomputed from the tokens alone."""
    actor = {
        "kl_ctl": 0.3,
        "use_kl_in_reward": kl_in_reward,
        "kl_estimator": "k1" if kl_in_reward else "k2",
        "discount": 0.9,
        "gae_lambda": 0.8,
        "reward_scaling": 0.5,
    }
    config = ppo_config(
        tmp_path,
        actor if kl_in_reward else {**actor, "adv_norm": None},
        {"path": str(models["critic"]), "value_loss_coef": 0.25},
        ref=RefConfig(path=str(models["lm"])),
        reward=RewardConfig(path=str(models["reward"]), workers=1),
    )
    played = run(config, tmp_path / "run", digits)
    [rows], [critic_rows] = played.rows, played.critic_rows
    assert len(rows) == 8

    all_advantages: list[float] = []
    all_returns: list[float] = []
    all_values: list[float] = []
    all_kl: list[float] = []
    for row, critic_row in zip(rows, critic_rows, strict=True):
        assert row.reward == close(0.5 * (digits_of(row) + hf_score(models["reward"], row)))
        assert trained(row, "logprobs") == close(hf_logprobs(MODEL, row))
        values, ref = hf_values(models["critic"], row), hf_logprobs(models["lm"], row)
        assert np.std(values) > 0.01
        assert trained(row, "values") == close(values)
        assert trained(row, "ref_logprobs") == close(ref)
        log_r = [old - new for old, new in zip(trained(row, "logprobs"), ref, strict=True)]
        earned = [-0.3 * x if kl_in_reward else 0.0 for x in log_r]
        earned[-1] += row.reward
        advantage, advantages = 0.0, []
        for t in reversed(range(len(values))):
            following = values[t + 1] if t + 1 < len(values) else 0.0
            advantage = earned[t] + 0.9 * following - values[t] + 0.9 * 0.8 * advantage
            advantages.insert(0, advantage)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        assert trained(row, "returns") == trained(critic_row, "returns") == close(returns)
        all_advantages += advantages
        all_returns += returns
        all_values += values
        all_kl += [x * x / 2 for x in log_r]
    found = [a for row in rows for a in trained(row, "advantages")]
    policy = 0.0  # the mean of whitened advantages, at the ratio 1
    if kl_in_reward:
        mean, std = np.mean(all_advantages), np.std(all_advantages)
        assert found == close((np.array(all_advantages) - mean) / (std + 1e-6), 1e-3)
    else:
        assert found == close(all_advantages)
        policy = -np.mean(all_advantages)

    errors = np.array(all_returns) - np.array(all_values)
    [scalars] = [row for row in scalars_of(tmp_path / "run") if "train/loss" in row]
    assert scalars["train/critic_value_loss"] == close(np.mean(errors**2))  # of the critic as it was
    assert scalars["train/critic_loss"] == close(0.25 * np.mean(errors**2))
    assert scalars["train/explained_variance"] == close(1 - np.var(errors) / np.var(all_returns), 1e-3)
    assert scalars["train/policy_loss"] == close(policy)
    assert ("train/kl_loss" in scalars) != kl_in_reward
    if not kl_in_reward:
        assert scalars["train/kl_loss"] == close(np.mean(all_kl))
        assert scalars["train/loss"] == close(policy + 0.3 * np.mean(all_kl))
    assert scalars["train/grad_norm"] > 0
    assert scalars["train/critic_grad_norm"] > 0


def scalars_of(run_dir: Path) -> list[dict[str, float]]:
    return RunReader(run_dir).records()


def test_several_updates_of_actor_and_critic(tmp_path: Path, models: dict[str, Path]) -> None:
    """Actor ratios and critic values both move away from where the rows were made, and are clipped against that."""
    config = ppo_config(
        tmp_path,
        critic={"path": str(models["critic"]), "ppo_n_minibatches": 4, "eps_clip": 0.05, "optimizer": optimizer(1e-2)},
        **without_reference(ppo_n_minibatches=2, optimizer=optimizer(1e-2)),
    )
    played = run(config, tmp_path / "run", digits)
    [ratio_std], [clipped] = played.series("train/ratio_std"), played.series("train/critic_value_clip_frac")
    assert ratio_std > 0.01
    assert 0.1 < clipped < 1
    # One update each: the ratio is 1, and no value has moved yet. A wide clip holds none back.
    for updates, eps_clip in ((1, 0.05), (4, 100.0)):
        how = {"ppo_n_minibatches": updates, "eps_clip": eps_clip, "optimizer": optimizer(1e-2)}
        config = ppo_config(tmp_path, critic={"path": str(models["critic"]), **how}, **without_reference())
        played = run(config, tmp_path / f"{updates}", digits)
        assert played.series("train/ratio_std")[0] < 1e-4
        assert played.series("train/critic_value_clip_frac") == [0]


def test_warm_up_trains_the_critic_alone(tmp_path: Path) -> None:
    how = {"critic": {"warmup_steps": 2}, **without_reference()}
    two_steps = {"total_train_steps": None, "total_train_n_seqs": 16}
    played = run(ppo_config(tmp_path, **two_steps, **how), tmp_path / "two", digits)
    saved = tmp_path / "two/checkpoints/latest"
    start, end = load_file(MODEL / "model.safetensors"), load_file(saved / "model.safetensors")
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)
    critic = load_file(saved / "critic/model.safetensors")
    assert critic["score.weight"].abs().max() > 0  # it starts at 0
    moved = [name for name, value in start.items() if name in critic and not torch.equal(value, critic[name])]
    assert len(moved) > 20
    assert not played.rows
    assert [len(rows) for rows in played.critic_rows] == [8, 8]
    assert all(value == 0 for row in played.critic_rows[0] for value in row.values or [])
    assert any(value != 0 for row in played.critic_rows[1] for value in row.values or [])
    assert not {"train/loss", "time/train", "train/ratio_mean"} & played.names()
    warning = "critic.warmup_steps=2 takes all 2 steps of this run, so its checkpoint is the untrained policy"
    assert warning in (tmp_path / "two/logs/run.log").read_text()
    assert {"train/critic_loss", "train/explained_variance", "time/train_critic", "time/values"} <= played.names()

    played = run(ppo_config(tmp_path, total_train_steps=3, **how), tmp_path / "three", digits)
    end = load_file(tmp_path / "three/checkpoints/latest/model.safetensors")
    assert sum(not torch.equal(start[name], end[name]) for name in start) > 20
    assert "so its checkpoint is the untrained" not in (tmp_path / "three/logs/run.log").read_text()
    assert len(played.rows) == 1
    assert len(played.series("train/loss")) == 1
    assert len(played.series("train/critic_loss")) == 3


# Models beside the actor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("with_model", "with_function"), [(True, False), (False, True), (True, True)])
def test_reward_of_a_model_a_function_or_both(
    tmp_path: Path, models: dict[str, Path], with_model: bool, with_function: bool
) -> None:
    reward = RewardConfig(path=str(models["reward"]) if with_model else None, workers=1)
    config = ppo_config(tmp_path, reward=reward, **without_reference())
    played = run(config, tmp_path / "run", digits if with_function else None)
    expected = [with_model * hf_score(models["reward"], row) + with_function * digits_of(row) for row in played.rows[0]]
    assert np.std(expected) > 0.01
    assert [row.reward for row in played.rows[0]] == close(expected)
    assert played.series("rollout/rewards_mean")[0] == close(np.mean(expected))


def test_a_sample_without_a_reward_is_left_out(tmp_path: Path, models: dict[str, Path]) -> None:
    def picky(record: Any) -> float:
        if record.prompt.startswith("17"):
            raise ValueError("not this one")
        return 1.0

    config = ppo_config(
        tmp_path,
        train_dataset=DatasetConfig(batch_size=8, max_length=64),
        reward=RewardConfig(path=str(models["reward"]), workers=1),
        **without_reference(),
    )
    played = run(config, tmp_path / "run", picky)
    assert played.series("rollout/reward_errors") == [4]
    assert played.series("rollout/num_sequences") == [16]
    assert len(played.rows[0]) == len(played.critic_rows[0]) == 12


def test_checkpoint_has_actor_and_critic(tmp_path: Path) -> None:
    how = {"critic": {"optimizer": optimizer(3e-3)}, **without_reference()}
    run(ppo_config(tmp_path, total_train_steps=2, **how), tmp_path / "first", digits)
    saved = tmp_path / "first/checkpoints/latest"
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(saved / "critic")
    assert type(critic).__name__ == "Qwen3ForSequenceClassification"
    assert critic.config.num_labels == 1
    assert type(transformers.AutoModelForCausalLM.from_pretrained(saved)).__name__ == "Qwen3ForCausalLM"
    how = {"critic": {"path": str(saved / "critic")}, **without_reference(path=str(saved))}
    second = run(ppo_config(tmp_path, **how), tmp_path / "second", digits)
    for row in second.critic_rows[0]:
        values = hf_values(saved / "critic", row)
        assert max(map(abs, values)) > 0.05
        assert trained(row, "values") == close(values)


def test_critic_from_another_language_model(tmp_path: Path, models: dict[str, Path]) -> None:
    """Takes the body; the head starts at 0."""
    how = {"critic": {"path": str(models["lm"]), "optimizer": optimizer(1e-8)}, **without_reference()}
    played = run(ppo_config(tmp_path, **how), tmp_path / "run", digits)
    assert all(value == 0 for row in played.critic_rows[0] for value in row.values or [])
    saved = load_file(tmp_path / "run/checkpoints/latest/critic/model.safetensors")
    body = load_file(models["lm"] / "model.safetensors")
    own = load_file(MODEL / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(saved[name], body[name], atol=1e-6, rtol=0)
    assert (saved[name] - own[name]).abs().max() > 1e-3


def test_offloaded_roles_give_the_same_numbers(tmp_path: Path, models: dict[str, Path]) -> None:
    found = []
    for offload in (False, True):
        config = ppo_config(
            tmp_path,
            critic={"offload": offload},
            ref=RefConfig(path=str(models["lm"]), offload=offload),
            reward=RewardConfig(path=str(models["reward"]), offload=offload, workers=1),
            total_train_steps=2,
        )
        run(config, tmp_path / str(offload))
        clock = re.compile("^time|time_s|tokens_per_second|memory")
        rows = scalars_of(tmp_path / str(offload))
        found.append([{name: value for name, value in row.items() if not clock.search(name)} for row in rows])
    assert found[0] == found[1]
    assert any(row.get("train/kl_loss", 0) > 0 for row in found[0])


def test_the_reference_is_the_actor_as_it_starts(tmp_path: Path) -> None:
    config = ppo_config(tmp_path, {"kl_ctl": 0.1, "optimizer": optimizer(5e-3)}, total_train_steps=3)
    kl = run(config, tmp_path / "run", digits).series("train/kl_loss")
    assert abs(kl[0]) < 1e-8
    assert kl[2] > 1e-4


def test_a_step_without_a_token_to_train_on(tmp_path: Path) -> None:
    config = ppo_config(
        tmp_path,
        gconfig=GenerationConfig(n_samples=2, max_new_tokens=1),
        **without_reference(mask_no_eos_with_zero=True),
    )
    played = run(config, tmp_path / "run", digits)
    assert played.series("train/skipped_steps") == played.series("train/critic_skipped_steps") == [1]
    assert played.series("train/explained_variance") == [0]


def test_values_of_the_samples_own_critic_are_used_by_advantages_of_a_script(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    """advantage_fn gets rows with values and returns advantages and returns."""

    def advantage_fn(rows: Any, groups: Any, actor: Any) -> Any:
        assert len(set(groups)) == 4
        values = [np.array(trained(row, "values")) for row in rows]
        return [row.reward - v for row, v in zip(rows, values, strict=True)], [0 * v + 3.0 for v in values]

    config = ppo_config(tmp_path, critic={"path": str(models["critic"])}, **without_reference())
    played = run(config, tmp_path / "run", digits, advantage_fn=advantage_fn)
    for row in played.rows[0]:
        assert trained(row, "returns") == [3.0] * len(trained(row, "values"))
        assert trained(row, "advantages") == close([row.reward - v for v in trained(row, "values")])


# Bad input -----------------------------------------------------------------------------------------------------------


def fails(capsys: pytest.CaptureFixture[str], folder: Path, *overrides: str) -> str:
    """The one line of an error of the PPO recipe, which leaves nothing behind."""
    small = ["train_dataset.batch_size=4", "total_train_steps=1", "reward.workers=1", "critic.ppo_n_minibatches=1"]
    small += ["engine.device=cpu", f"cluster.fileroot={folder / 'out'}"]
    try:
        code = command.run(get_algorithm("ppo"), "python -m areno.recipes.ppo", [*small, *overrides])
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert error.endswith(line + "\n")
    assert "Traceback" not in error
    assert not (folder / "out").exists()
    return f"{code} {line}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ref=null", "actor.kl_ctl=0.1"], r"actor.kl_ctl: is 0.1, but there is no reference model; add ref=default"),
        (["ref=default", "actor.kl_ctl=0"], r"ref: is loaded but not used, since actor.kl_ctl is 0"),
        (["reward.fn=null"], r"reward.fn: missing \(file.py\[:function\] or the built-in math\); or set reward.path"),
        (["reward.offload=true"], r"reward.offload: is true, but reward.path is null, so there is no reward model"),
        (["critic.ppo_n_minibatches=3"], r"critic.ppo_n_minibatches: is 3, which does not divide the 4 rows"),
        (["actor.gae_lambda=1.5"], r"actor.gae_lambda: is 1.5; it must be"),
        (["actor.adv_norm.mean_leave1out=true"], r"actor.adv_norm.mean_leave1out: needs one advantage per sample"),
        (["critic.warmup_step=3"], r"critic.warmup_step: unknown key; did you mean critic.warmup_steps\?"),
        (["critic=null"], r"critic: is null"),
    ],
)
def test_settings_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert re.search(f"^2 error: {message}", fails(capsys, tmp_path, *overrides))


def test_models_that_do_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = classifier(tmp_path / "small", vocab_size=12)
    two = classifier(tmp_path / "two", num_labels=2)
    for override, message in (
        (f"reward.path={MODEL}", "architectures is .'Qwen3ForCausalLM'., .* expected a reward model in reward.path"),
        (f"reward.path={two}", "the model has 2 labels .* expected 1; .* reward.path"),
        (f"reward.path={small}", "reward.path has a vocabulary of 12 tokens, the actor one of 16"),
        (f"critic.path={small}", "critic.path has a vocabulary of 12 tokens, the actor one of 16"),
        ("critic.path=no/such/folder", "critic.path"),
        ("reward.path=no/such/folder", "reward.path"),
    ):
        said = fails(capsys, tmp_path, override)
        assert re.search(f"^[12] error: .*{message}", said), said


# Scripts -------------------------------------------------------------------------------------------------------------


def grpo_config(folder: Path, **more: Any) -> GRPOConfig:
    actor = GRPOActorConfig(path=str(MODEL), gradient_checkpointing=False, optimizer=optimizer())
    return GRPOConfig(**settings(folder, actor=actor, **more))


@pytest.mark.parametrize("loop", ["policy_only", "ppo"])
@pytest.mark.parametrize("kind", ["lambda", "closure", "async"])
def test_rows_and_functions_of_a_script(tmp_path: Path, loop: str, kind: str) -> None:
    right = 1.0

    def closure(record: Any) -> float:
        return right * (record.completion == record.solutions)

    async def slow(record: Any) -> float:
        await asyncio.sleep(0)
        return closure(record)

    reward_fn = {"lambda": lambda record: right * (record.completion == record.solutions), "closure": closure}
    how = {"evaluator": EvaluatorConfig(eval_before_train=True), "total_train_steps": 2}
    given = {"reward_fn": reward_fn.get(kind, slow), "train_dataset": PROBLEMS, "valid_dataset": PROBLEMS[:3]}
    if loop == "ppo":
        trainer: Any = areno.PPOTrainer(ppo_config(tmp_path, **without_reference(), **how), **given)
    else:
        trainer = areno.PolicyOnlyTrainer(grpo_config(tmp_path, **how), **given)
    with trainer:
        result = trainer.fit()
        again = trainer.evaluate()
    [folder] = (tmp_path / "script").iterdir()  # made and described without a word about it
    assert RunReader(folder).versions["areno"] == areno.__version__
    accuracies = [row["eval/accuracy"] for row in scalars_of(folder) if "eval/accuracy" in row]
    assert len(accuracies) == 3
    assert accuracies[1] == accuracies[2] == result == again["accuracy"]
    assert [row["eval/num_sequences"] for row in scalars_of(folder) if "eval/accuracy" in row] == [6, 6, 6]
    assert (folder / "checkpoints/step-000002/critic").exists() == (loop == "ppo")


def test_what_a_script_forgets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataset\.path: missing"):
        areno.PPOTrainer(ppo_config(tmp_path, **without_reference()), reward_fn=digits)
    with pytest.raises(ConfigError, match=r"reward\.fn: is null, and no function was given; set it, or pass reward_fn"):
        areno.PPOTrainer(ppo_config(tmp_path, **without_reference()), train_dataset=PROBLEMS)
    with pytest.raises(ConfigError, match="mean_leave1out: needs one advantage per sample"):
        ppo_config(tmp_path, **without_reference(adv_norm=NormConfig(mean_level="batch", mean_leave1out=True)))
    assert not list(tmp_path.iterdir())


# Several processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path, models: dict[str, Path]) -> None:
    found = []
    for world_size in (1, 2):
        config = ppo_config(
            tmp_path,
            {"kl_ctl": 0.1},
            {"path": str(models["critic"])},
            ref=RefConfig(path=str(models["lm"])),
            reward=RewardConfig(path=str(models["reward"]), workers=1),
            engine=EngineConfig(device="cpu", world_size=world_size),
            total_train_steps=3,
        )
        run(config, tmp_path / str(world_size), digits)
        rows = [row for row in scalars_of(tmp_path / str(world_size)) if "train/loss" in row]
        names = ("loss", "grad_norm", "kl_loss", "critic_loss", "critic_grad_norm", "explained_variance")
        found.append([[row[f"train/{name}"] for name in names] for row in rows])
    assert len(found[0]) == 3
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), atol=1e-4, rtol=1e-3)


# The quickstart ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_quickstart_learns_with_a_critic(seed: int, tmp_path: Path) -> None:
    started = time.perf_counter()
    root = str(Path(areno.__file__).parents[1])
    words = ["-m", "areno.recipes.ppo", f"seed={seed}", "trial_name=t"]
    done = warm_python.commands().run(words, tmp_path, {**os.environ, "PYTHONPATH": root}, timeout=400)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr[-3000:]
    found = scalars_of(tmp_path / "outputs/quickstart_ppo/t")
    rewards, explained, accuracies = (
        [row[name] for row in found if name in row]
        for name in ("rollout/rewards_mean", "train/explained_variance", "eval/accuracy")
    )
    last, variance = np.mean(rewards[-5:]), np.mean(explained[-10:])
    print(f"seed {seed}: {seconds:.1f} s, {rewards[0]:.3f} -> {last:.3f}, held out {accuracies[0]:.3f} -> ", end="")
    print(f"{accuracies[-1]:.3f}, explained variance {variance:.2f}")
    assert rewards[0] <= 0.5
    assert last >= 0.85
    assert variance > 0.3
    assert accuracies[-1] >= 0.9
    # While the critic learned alone, the policy stayed what it was.
    warmup = load(PPOConfig, "quickstart_ppo", []).critic.warmup_steps
    assert len([row for row in found if "train/loss" in row]) == len(rewards) - warmup
    assert math.isclose(np.mean(rewards[:warmup]), rewards[0], abs_tol=0.05)
