"""What PPO refuses, and what a script gives it: rows, reward functions."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import areno
from areno.api import get_algorithm
from areno.config.norms import NormConfig
from areno.config.run import EvaluatorConfig
from areno.errors import ConfigError
from areno.launch import command
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from areno.tracking.reader import RunReader
from tests.helpers.policy_runs import MODEL, classifier
from tests.helpers.ppo_runs import PROBLEMS, digits, optimizer, ppo_config, scalars_of, settings, without_reference


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


@pytest.mark.slow
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
