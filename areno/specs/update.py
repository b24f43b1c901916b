"""How one call of training divides its rows into optimizer steps and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence

if TYPE_CHECKING:
    pass  # imports numpy, which takes a tenth of the time of `areno plan`


OldLogprobs = Literal["recompute", "loglinear", "rollout"]
"""Source of the log-probabilities that importance ratios divide by; see UpdateSpec.old_logprobs."""


@dataclass(frozen=True)
class UpdateSpec:
    """How one call of `Engine.train` divides its rows into optimizer steps and micro-batches.

    Attributes:
        mb_spec: Size of a micro-batch, the rows of one forward pass. It does not change the result. If it sets no size,
            the engine chooses one or, with gradient_accumulation_steps, takes 16 rows.
        n_minibatches: Number of optimizer steps. If greater than 1, the rows are shuffled by `seed` and divided equally
            over the steps. Must be 1 if gradient_accumulation_steps is set.
        gradient_accumulation_steps: Number of micro-batches in one optimizer step, in the order of the rows. None
            divides the rows by n_minibatches instead.
        sampling: Settings that the rows were sampled with. Ignored for models with a value head.
        seed: Seed of the shuffle.
        rows_per_unit: Number of adjacent rows that stay together in one micro-batch: 2 for preference pairs.
        old_logprobs: Source of the old log-probabilities, the denominator of importance ratios. "rollout" takes
            those of the rollout. "recompute" takes the old_logprobs of the rows. For rows without old_logprobs,
            "recompute" computes them with the weights before the first update: for the first step in the step's own
            forward pass, so that the ratios are exactly 1, and for later steps in a scoring pass over the same
            micro-batches. "loglinear" is "recompute" for the first step. In later steps it computes nothing, and the
            loss interpolates the old log-probabilities.
        may_halve: Whether a step that runs out of memory continues with micro-batches of half the size. Otherwise
            running out of memory is an error.
        divergence: The divergence from a teacher that the training passes compute for the loss, as
            `DataPack.divergence`. None computes none.
    """

    mb_spec: MicroBatchSpec
    n_minibatches: int = 1
    gradient_accumulation_steps: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    rows_per_unit: int = 1
    old_logprobs: OldLogprobs = "recompute"
    may_halve: bool = False
    divergence: Divergence | None = None
