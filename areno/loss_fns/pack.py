"""The input of every loss: a micro-batch of rows packed end to end, without padding.

Shape letters: N tokens in the micro-batch, T of them trained, R rows. Every per-token tensor is aligned with `tokens`:
entry t is about token t, given the tokens before it in its row. The first token of a row has no such value and is never
in `loss_mask`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areno.errors import DataError


@dataclass(kw_only=True)
class DataPack:
    """One micro-batch, with the totals of the optimizer step that it belongs to.

    A loss returns the micro-batch's share of the step's loss: a sum divided by `step_tokens` or `step_rows`, which
    count over all micro-batches and data-parallel ranks. So the shares add up to the same loss for any micro-batches.

    Attributes:
        tokens: (N,) int64 token ids.
        row_of_token: (N,) int64, the row of each token, from 0 to R - 1.
        loss_mask: (N,) bool, True on trained response tokens.
        n_rows: R.
        step_tokens: Trained tokens of the whole optimizer step.
        step_rows: Rows of the whole optimizer step that have at least one trained token.
        old_logprobs: (N,) float32, under the policy before the update: the denominator of ratios.
        rollout_logprobs: (N,) float32, under the policy that sampled the rows, as the rollout computed them.
        advantages: (N,) float32.
        ref_logprobs: (N,) float32, under the reference.
        returns: (N,) float32, targets of the critic.
        values: (N,) float32, values of the critic before the update.
        weights: (N,) float32, factor on each token's policy loss. None is 1 for all tokens.
        rewards: (R,) float32.
        staleness: (R,) float32, optimizer steps since the row was sampled.
        rows_per_unit: The number of adjacent rows that belong together. The pack has whole units.
        entropy: (N,) float32, entropy of the current policy in nats, detached. 0 outside of loss_mask.
        trained_T: (T,) int64, the indices where loss_mask is True. None computes it. The backend knows it already, and
            indexing with it does not make the host wait for the device, unlike indexing with the mask.
    """

    tokens: Tensor
    row_of_token: Tensor
    loss_mask: Tensor
    n_rows: int
    step_tokens: int
    step_rows: int
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    ref_logprobs: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    weights: Tensor | None = None
    rewards: Tensor | None = None
    staleness: Tensor | None = None
    rows_per_unit: int = 1
    entropy: Tensor | None = None
    trained_T: Tensor = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.trained_T is None:
            self.trained_T = self.loss_mask.nonzero().squeeze(-1)

    def need(self, name: str) -> Tensor:
        """Return a tensor that the loss needs.

        Args:
            name: The name of an attribute.

        Returns:
            The tensor.

        Raises:
            DataError: The rows have no such values.
        """
        value = vars(self)[name]
        if value is None:
            field_name = {"old_logprobs": "logprobs or old_logprobs", "rollout_logprobs": "logprobs"}.get(name, name)
            raise DataError(f"this loss needs {name}, but the rows have none; set TrainSequence.{field_name}")
        return value

    def trained(self, per_token_N: Tensor) -> Tensor:
        """Return the values at trained tokens, in order.

        Args:
            per_token_N: (N,) values.

        Returns:
            (T,) values.
        """
        return per_token_N.index_select(0, self.trained_T)

    def token_mean(self, values_T: Tensor) -> Tensor:
        """Return the micro-batch's share of the step's mean over trained tokens.

        Args:
            values_T: (T,) values of trained tokens.

        Returns:
            A 0-dim tensor.
        """
        return values_T.sum() / max(self.step_tokens, 1)

    def row_mean(self, values_R: Tensor) -> Tensor:
        """Return the micro-batch's share of the step's mean over rows.

        Args:
            values_R: (R,) values of rows. Rows without trained tokens must have 0.

        Returns:
            A 0-dim tensor.
        """
        return values_R.sum() / max(self.step_rows, 1)

    def sum_rows(self, values_T: Tensor) -> Tensor:
        """Sum over the trained tokens of each row.

        Args:
            values_T: (T,) values of trained tokens.

        Returns:
            (R,) sums, 0 for rows without trained tokens.
        """
        # Devices add in any order; in float64 that order does not show in the float32 result.
        out = torch.zeros(self.n_rows, dtype=torch.float64, device=values_T.device)
        rows_T = self.row_of_token.index_select(0, self.trained_T)
        return out.index_add(0, rows_T, values_T.double()).to(values_T.dtype)

    def mean_rows(self, values_T: Tensor) -> Tensor:
        """Average over the trained tokens of each row.

        Args:
            values_T: (T,) values of trained tokens.

        Returns:
            (R,) means, 0 for rows without trained tokens.
        """
        return self.sum_rows(values_T) / self.row_lengths().clamp(min=1)

    def of_rows(self, values_R: Tensor) -> Tensor:
        """Give each trained token the value of its row.

        Args:
            values_R: (R,) values of rows.

        Returns:
            (T,) values.
        """
        return values_R.index_select(0, self.row_of_token.index_select(0, self.trained_T))

    def row_lengths(self) -> Tensor:
        """Count the trained tokens of each row: (R,) float32, 0 for rows without any."""
        return self.sum_rows(torch.ones_like(self.trained_T, dtype=torch.float32))
