"""Short runs of the policy recipes in this process, and what went through them. No reward processes: a tiny reward
model gives every completion a score of its own, so that every group has a gradient.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areno.api import get_algorithm
from areno.api.trainer import Trainer
from areno.files.paths import find_file
from areno.launch.compose import load
from areno.tracking.reader import RunReader
from areno.types import TrainSequence

MODEL = find_file("examples/quickstart/model")
SMALL = [
    "total_train_steps=2",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=8",
    "gconfig.temperature=2.0",  # completions that differ, also in length
    "valid_dataset=null",
    "actor.optimizer.lr=1e-3",
    "rollout.dump_to_file=true",
    "engine.device=cpu",
]


@dataclass
class Played:
    """A run that has ended."""

    folder: Path
    result: float = 0.0
    rows: list[list[TrainSequence]] = field(default_factory=list)  # of each update of the actor
    critic_rows: list[list[TrainSequence]] = field(default_factory=list)

    def series(self, name: str) -> list[float]:
        """The values of one scalar, by step."""
        return RunReader(self.folder).series(name).values

    def names(self) -> set[str]:
        """Of all scalars."""
        return set(RunReader(self.folder).metrics())

    def samples(self, step: int) -> list[dict[str, Any]]:
        """All completions of a step, with their rewards as they were given."""
        return RunReader(self.folder).samples(step)


def classifier(folder: Path, seed: int = 1, **changes: Any) -> Path:
    """A random model of one score, in the shape of the quickstart's model, as transformers saves it."""
    values = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**{**values, "num_labels": 1, "initializer_range": 0.2, **changes})
    transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def other_actor(folder: Path, amount: float = 0.1) -> Path:
    """The quickstart's model with other weights, and its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + amount * torch.randn_like(parameter))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def play(
    recipe: str, folder: Path, *overrides: str, task: str = "quickstart", loss_fn: Any = None, **given: Any
) -> Played:
    """Run a recipe to its end. loss_fn: in place of the recipe's. `given`: what a script would hold."""
    algorithm = get_algorithm(recipe)
    stateless = [] if any("recover." in text for text in overrides) else ["recover.mode=off"]
    config = load(algorithm.config, task, [*SMALL, *stateless, *overrides])
    if loss_fn is not None:
        algorithm = dataclasses.replace(algorithm, loss_fn=lambda config: loss_fn)
    return watched(folder, lambda: algorithm.trainer(config, folder, **given))


def watched(folder: Path, make: Callable[[], Any]) -> Played:
    """Fit a trainer and keep the rows of its updates, as they were given to it."""
    played = Played(folder)
    train, train_values = Trainer.train, Trainer.train_values

    def keep(kept: list[list[TrainSequence]], rows: Sequence[TrainSequence]) -> None:
        kept.append(copy.deepcopy(list(rows)))

    def spy(self: Trainer, rows: Sequence[TrainSequence], *args: Any, **how: Any) -> dict[str, float]:
        keep(played.rows, rows)
        return train(self, rows, *args, **how)

    def critic_spy(self: Trainer, role: str, rows: Sequence[TrainSequence], **how: Any) -> dict[str, float]:
        keep(played.critic_rows, rows)
        return train_values(self, role, rows, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", spy)
        patch.setattr(Trainer, "train_values", critic_spy)
        with make() as trainer:
            played.result = trainer.fit()
    return played


def trained(row: TrainSequence, name: str) -> list[float]:
    """A per-token field at the row's trained tokens."""
    values, mask = getattr(row, name), row.prompt_mask
    assert values is not None
    assert mask is not None
    return [value for value, masked in zip(values, mask, strict=True) if not masked]


def groups(rows: Sequence[TrainSequence], size: int = 4) -> list[list[TrainSequence]]:
    """Rows of the same prompt, which come one after another."""
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]
