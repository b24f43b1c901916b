"""The one input record of every loss: a micro-batch of rows packed end to end, without padding.

Shape letters: N tokens in the micro-batch, R rows in it. Every per-token tensor is aligned with `tokens`: entry t speaks
of token t given the tokens before it in its row. The first token of a row has no such value and is never in `loss_mask`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class DataPack:
    """One micro-batch, with the totals of the optimizer step it belongs to.

    A loss returns this micro-batch's share of the step's loss: a sum divided by `step_tokens` or `step_rows`, which count over all
    micro-batches and data-parallel ranks. The shares add up to the same number however the step is cut.
    """

    tokens: Tensor  # (N,) int64
    row_of_token: Tensor  # (N,) int64 in [0, R)
    loss_mask: Tensor  # (N,) bool, True on trained response tokens
    n_rows: int  # R
    step_tokens: int  # trained tokens of the whole optimizer step
    step_rows: int  # rows of the whole optimizer step that have at least one trained token
    old_logprobs: Tensor | None = None  # (N,) float32, of the policy that sampled the rows
    advantages: Tensor | None = None  # (N,) float32
    ref_logprobs: Tensor | None = None  # (N,) float32
    returns: Tensor | None = None  # (N,) float32
    values: Tensor | None = None  # (N,) float32
    rewards: Tensor | None = None  # (R,) float32
    entropy: Tensor | None = None  # (N,) float32 of the current policy, detached; 0 outside loss_mask

    def sum_rows(self, per_token: Tensor) -> Tensor:
        """(N,) -> (R,): sum over the trained tokens of each row."""
        masked = torch.where(self.loss_mask, per_token, torch.zeros_like(per_token))
        out = torch.zeros(self.n_rows, dtype=per_token.dtype, device=per_token.device)
        return out.index_add(0, self.row_of_token, masked)

    def row_lengths(self) -> Tensor:
        """(R,) float32: trained tokens of each row, 0 for rows without any."""
        out = torch.zeros(self.n_rows, dtype=torch.float32, device=self.tokens.device)
        return out.index_add(0, self.row_of_token, self.loss_mask.float())
