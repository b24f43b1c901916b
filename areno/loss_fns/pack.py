"""The one input record of every loss: a micro-batch of rows packed end to end, without padding.

Shape letters: N tokens in the micro-batch, T of them trained, R rows. Every per-token tensor is aligned with `tokens`:
entry t speaks of token t given the tokens before it in its row. The first token of a row has no such value and is never
in `loss_mask`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areno.errors import DataError


@dataclass(kw_only=True)
class DataPack:
    """One micro-batch, with the totals of the optimizer step it belongs to.

    A loss returns this micro-batch's share of the step's loss: a sum divided by `step_tokens` or `step_rows`, which
    count over all micro-batches and data-parallel ranks. The shares add up to the same number however the step is cut.
    """

    tokens: Tensor  # (N,) int64
    row_of_token: Tensor  # (N,) int64 in [0, R)
    loss_mask: Tensor  # (N,) bool, True on trained response tokens
    n_rows: int  # R
    step_tokens: int  # trained tokens of the whole optimizer step
    step_rows: int  # rows of the whole optimizer step that have at least one trained token
    old_logprobs: Tensor | None = None  # (N,) float32, of the policy before the update: what ratios divide by
    rollout_logprobs: Tensor | None = None  # (N,) float32, of the policy that sampled the rows, by its rollout
    advantages: Tensor | None = None  # (N,) float32
    ref_logprobs: Tensor | None = None  # (N,) float32
    returns: Tensor | None = None  # (N,) float32
    values: Tensor | None = None  # (N,) float32
    weights: Tensor | None = None  # (N,) float32, factor on each token's policy loss; None is 1 everywhere
    rewards: Tensor | None = None  # (R,) float32
    staleness: Tensor | None = None  # (R,) float32, optimizer steps since the row was sampled
    rows_per_unit: int = 1  # so many adjacent rows belong together; the pack holds whole units of them
    entropy: Tensor | None = None  # (N,) float32 of the current policy, detached; 0 outside loss_mask
    # Where loss_mask is True: (T,) int64. Indexing with it, unlike with the mask, does not make the host wait for the
    # device, so the backend gives the one it knows anyway; None derives it.
    trained_T: Tensor = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.trained_T is None:
            self.trained_T = self.loss_mask.nonzero().squeeze(-1)

    def need(self, name: str) -> Tensor:
        """The per-token tensor `name`. DataError where the rows did not bring it."""
        value = vars(self)[name]
        if value is None:
            field_name = {"old_logprobs": "logprobs or old_logprobs", "rollout_logprobs": "logprobs"}.get(name, name)
            raise DataError(f"this loss needs {name}, but the rows have none; set TrainSequence.{field_name}")
        return value

    def trained(self, per_token_N: Tensor) -> Tensor:
        """(N,) -> (T,): the values at trained tokens, in order."""
        return per_token_N.index_select(0, self.trained_T)

    def token_mean(self, values_T: Tensor) -> Tensor:
        """This micro-batch's share of the step's mean over trained tokens: 0-dim."""
        return values_T.sum() / max(self.step_tokens, 1)

    def row_mean(self, values_R: Tensor) -> Tensor:
        """This micro-batch's share of the step's mean over rows: 0-dim. Rows without trained tokens must hold 0."""
        return values_R.sum() / max(self.step_rows, 1)

    def sum_rows(self, values_T: Tensor) -> Tensor:
        """(T,) -> (R,): sum over the trained tokens of each row, 0 for rows without any."""
        # Devices add in any order; in float64 that order does not show in the float32 result.
        out = torch.zeros(self.n_rows, dtype=torch.float64, device=values_T.device)
        rows_T = self.row_of_token.index_select(0, self.trained_T)
        return out.index_add(0, rows_T, values_T.double()).to(values_T.dtype)

    def mean_rows(self, values_T: Tensor) -> Tensor:
        """(T,) -> (R,): mean over the trained tokens of each row, 0 for rows without any."""
        return self.sum_rows(values_T) / self.row_lengths().clamp(min=1)

    def of_rows(self, values_R: Tensor) -> Tensor:
        """(R,) -> (T,): each trained token has the value of its row."""
        return values_R.index_select(0, self.row_of_token.index_select(0, self.trained_T))

    def row_lengths(self) -> Tensor:
        """(R,) float32: trained tokens of each row, 0 for rows without any."""
        return self.sum_rows(torch.ones_like(self.trained_T, dtype=torch.float32))
