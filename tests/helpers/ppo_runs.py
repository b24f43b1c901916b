"""Short runs of PPO in this process, and what transformers computes of their rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import areno
from areno.config.datasets import DatasetConfig
from areno.config.models import CriticConfig, OptimizerConfig
from areno.config.reward import RewardConfig
from areno.config.rollout import GenerationConfig
from areno.config.run import ClusterConfig, EngineConfig, SaverConfig
from areno.recipes.ppo import PPOActorConfig, PPOConfig
from areno.tracking.reader import RunReader
from areno.types import TrainSequence
from tests.helpers.policy_runs import MODEL, Played, trained, watched

PROBLEMS = [{"prompt": f"{a}+{b}=", "solutions": str(a + b)} for a in (17, 28, 39, 46) for b in (5, 27)]
TEMPERATURE = 2.0  # completions that differ, also in length


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


def fitted(config: PPOConfig, folder: Path, reward_fn: Any = None, **given: Any) -> Played:
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


def scalars_of(run_dir: Path) -> list[dict[str, float]]:
    return RunReader(run_dir).records()
