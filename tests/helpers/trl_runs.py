"""Short runs of TRL's trainers on the quickstart's model, and the comparison with the same run of areno."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areno.api.trainer import Trainer
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.files.paths import find_file
from areno.plan.plan import TrainerPlan
from areno.types import TrainSequence
from tests.helpers.tiny_engine import engine_spec

MODEL = find_file("examples/quickstart/model")
STEPS = 20
LR, EPS = 1e-3, 1e-4


@dataclass(kw_only=True)
class Training:
    """What a run of TRL left: the loss before each update, and the weights at the start and at the end."""

    losses: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


@cache
def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def train_with_trl(
    trainer: Callable[..., Any], rows: Sequence[dict[str, Any]], folder: Path, model: Any = None
) -> Training:
    """20 steps on all rows at once, in their order, by Adam with eps 1e-4 in float32.

    `trainer(model, rows, **settings)` makes TRL's trainer; `settings` are those of transformers.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) if model is None else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    theirs = trainer(
        model,
        Dataset.from_list(list(rows)),
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(rows),
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_epsilon=EPS,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    theirs.train()
    losses = [line["loss"] for line in theirs.state.log_history if "loss" in line]
    return Training(losses=losses, before=before, after=dict(theirs.model.state_dict()))


def same_training(
    theirs: Training,
    rows: Sequence[TrainSequence],
    loss_fn: Any,
    *,
    rows_per_unit: int = 1,
    reference: bool = False,
    folder: Path = MODEL,
    head: Any = "lm",
    point: Callable[[Trainer], dict[str, float]] | None = None,
) -> None:
    """Train as TRL did: losses agree to 1e-5, and the weights to a thousandth of the distance that they moved.

    Late losses may differ by 0.2 %, since 20 steps multiply a difference in rounding.

    `point(trainer)` returns further keyword arguments of the loss for the next step.
    """
    optimizer = OptimizerConfig(
        lr=LR, eps=EPS, weight_decay=0.0, lr_scheduler_type="constant", warmup_steps_proportion=0.0
    )
    spec = engine_spec(folder, optimizer=optimizer, gradient_checkpointing=False)
    spec = replace(spec, actor=replace(spec.actor, head=head))
    with Trainer.from_plan(TrainerPlan(spec=spec, tokenizer=None)) as trainer:
        trainer.init()
        rows = [replace(row) for row in rows]
        if reference:
            for row, scores in zip(
                rows, trainer.score_logprobs("actor", [row.tokens for row in rows], 1.0), strict=True
            ):
                row.ref_logprobs = scores
        losses = []
        for _ in range(STEPS):
            how = partial(loss_fn, **(point(trainer) if point else {}))
            spec = MicroBatchSpec(mini_bs=2)
            stats = trainer.train(rows, how, mb_spec=spec, temperature=1.0, rows_per_unit=rows_per_unit)
            losses.append(stats["loss"])
        assert losses == pytest.approx(theirs.losses, abs=1e-5, rel=2e-3)
        with TemporaryDirectory() as out:
            trainer.save_checkpoint(Path(out) / "ours")
            ours = load_file(Path(out) / "ours" / "model.safetensors")
    moved = apart = 0.0
    for name, value in ours.items():
        moved += (theirs.after[name] - theirs.before[name]).double().square().sum().item()
        apart += (theirs.after[name] - value).double().square().sum().item()
    assert moved > 0
    assert (apart / moved) ** 0.5 <= 1e-3, (apart / moved) ** 0.5
