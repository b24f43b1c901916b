"""How one call of training divides its rows into optimizer steps and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence

OldLogprobs = Literal["recompute", "loglinear", "rollout"]
"""Source of the log-probabilities that importance ratios divide by; see UpdateSpec.old_logprobs."""


@dataclass(frozen=True)
class UpdateSpec:
    """How one call of `Engine.train` divides its rows into optimizer steps and micro-batches.

    Micro-batches do not change the result. If `mb_spec` sets no size, the engine chooses one or, with
    gradient_accumulation_steps, takes 16 rows.

    With old_logprobs="rollout", the importance ratios divide by the log-probabilities of the rollout. "recompute" takes
    the old_logprobs of the rows. If a row has none, they are computed with the weights before the first update. The
    first optimizer step takes them from its own forward pass, so that the ratios are exactly 1. Later steps take them
    from a scoring pass over the same micro-batches. "loglinear" is "recompute" for the first step. For later steps it
    computes nothing, and the loss interpolates.
    """

    mb_spec: MicroBatchSpec
    n_minibatches: int = 1  # optimizer steps, over which shuffled rows are divided equally
    gradient_accumulation_steps: int | None = None  # micro-batches of a step, in the order of the rows
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # of the rows; no effect on a value head
    seed: int = 0  # of the shuffle
    rows_per_unit: int = 1  # adjacent rows that stay together in a micro-batch: 2 for preference pairs
    old_logprobs: OldLogprobs = "recompute"
    may_halve: bool = False  # a step that runs out of memory continues with micro-batches of half the size
    divergence: Divergence | None = None  # from a teacher, computed in training passes for `DataPack.divergence`
    differentiates_entropy: bool = False  # `DataPack.entropy` has a gradient; not together with a divergence
