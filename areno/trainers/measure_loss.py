"""A loss function as a measure of rows that are not trained on: the same numbers as in training, by the same code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areno.config.experiments import LossFn
from areno.config.models import MicroBatchSpec
from areno.engine.spec import UpdateSpec
from areno.engine.train.micro_batches import share_steps
from areno.engine.train.packing import pack_rows
from areno.engine.train.rows import read_rows
from areno.loss_fns.pack import DataPack
from areno.trainers.rows import token_rows
from areno.types import TrainSequence


def measure_loss(
    loss_fn: LossFn, rows: Sequence[TrainSequence], logprobs: Sequence[Sequence[float]], *, rows_per_unit: int = 1
) -> dict[str, float]:
    """The loss of all rows as one step, under "loss", and the loss function's statistics by name.

    logprobs: of all tokens of each row, under the model that is measured. rows_per_unit: see Trainer.train.
    """
    loss, stats = loss_fn(
        pack_of(rows, rows_per_unit), torch.cat([torch.tensor(row, dtype=torch.float32) for row in logprobs])
    )
    return {"loss": loss.item(), **{name: value.item() for name, value in stats.items() if value.dim() == 0}}


def pack_of(rows: Sequence[TrainSequence], rows_per_unit: int = 1) -> DataPack:
    """All rows, as one micro-batch that is a whole step."""
    vocab_size = 1 + max(max(tokens) for tokens in token_rows(rows))
    whole = UpdateSpec(MicroBatchSpec(mini_bs=len(rows)), rows_per_unit=rows_per_unit)
    ((step,),) = share_steps(read_rows(rows, vocab_size), whole)
    return pack_rows(step.micro_batches[0], step, rows_per_unit, torch.device("cpu"))[1]
