"""The input of every loss: a micro-batch whose rows are packed end to end without padding.

Shape letters: N tokens in the micro-batch, T trained tokens (those in `loss_mask`), R rows. Every per-token tensor is
aligned with `tokens`: entry t belongs to token t, given the earlier tokens of its row. The first token of a row has no
earlier token, so `loss_mask` is False there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areno.errors import DataError, EngineError


@dataclass(kw_only=True)
class DataPack:
    """One micro-batch, with the total numbers of tokens and rows of its optimizer step.

    A loss is called with a pack and (N,) differentiable log-probabilities, or values, and returns (loss, statistics).
    The loss, 0-dim, is the micro-batch's share of the step's loss: a sum divided by `step_tokens` or `step_rows`, which
    count over all micro-batches and data-parallel ranks. So the sum of the shares does not depend on how rows are
    divided into micro-batches. A statistic is a detached 0-dim tensor, which is summed over the micro-batches of the
    step, or a 1-dim tensor of observations, whose mean, standard deviation and maximum are reported. A loss raises
    DataError if the pack lacks a tensor that it needs.

    Attributes:
        tokens: (N,) int64 token ids.
        row_of_token: (N,) int64, index of the row of each token, from 0 to R - 1.
        loss_mask: (N,) bool, True at trained tokens.
        n_rows: Number R of rows in the micro-batch.
        step_tokens: Number of trained tokens in the whole optimizer step.
        step_rows: Number of rows in the whole optimizer step that have at least one trained token.
        old_logprobs: (N,) float32, log-probabilities under the policy before the update, the denominator of importance
            ratios.
        rollout_logprobs: (N,) float32, log-probabilities of the rollout, under the policy that sampled the rows.
        advantages: (N,) float32.
        ref_logprobs: (N,) float32, log-probabilities under the reference model.
        teacher_logprobs: (N,) float32, log-probabilities under the teacher.
        returns: (N,) float32, targets of the critic.
        values: (N,) float32, values of the critic before the update.
        weights: (N,) float32, factor on each token's policy loss. None means 1 for all tokens.
        kl_weights: (N,) float32, factor on each token's absolute log-ratio in the policy loss. None means 0.
        rewards: (R,) float32.
        staleness: (R,) float32, number of optimizer steps since the row was sampled.
        rows_per_unit: Number of adjacent rows that are never split over micro-batches, such as 2 for DPO.
        entropy: (N,) float32, entropy of the current policy in nats. 0 where loss_mask is False. It has a gradient only
            if the training pass is asked for one (`Trainer.train`).
        divergence: (N,) float32, divergence between the trained model and a teacher over the whole vocabulary,
            differentiable. 0 where loss_mask is False. None if the training pass computes no divergence.
        teacher_top_tokens: (N, J) int64, tokens whose probability a teacher lists in the place of each token.
        teacher_top_logprobs: (N, J) float32, log-probabilities of these tokens under the teacher.
        trained_T: (T,) int64, the indices where loss_mask is True. None computes them from loss_mask. The train backend
            passes them in, because indexing with a mask would make the host wait for the device.
        trained_rows: int64, the indices of the rows with trained tokens, ascending. None computes them in each call of
            `of_trained_rows`, which makes the host wait for a GPU.
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
    teacher_logprobs: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    weights: Tensor | None = None
    kl_weights: Tensor | None = None
    rewards: Tensor | None = None
    staleness: Tensor | None = None
    rows_per_unit: int = 1
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    teacher_top_tokens: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None
    trained_T: Tensor = field(default=None, repr=False)  # type: ignore[assignment]
    trained_rows: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.trained_T is None:
            self.trained_T = self.loss_mask.nonzero().squeeze(-1)

    def need(self, name: str) -> Tensor:
        """Return the tensor called `name`. Raises DataError if it is None, because the training rows lack it."""
        value = vars(self)[name]
        if value is None:
            if name == "divergence":
                raise DataError(
                    "this loss needs the divergence from a teacher, which the training pass has not computed; give "
                    "Trainer.train the argument `divergence`, and ensure_roles a role `teacher`"
                )
            field_name = {"old_logprobs": "logprobs or old_logprobs", "rollout_logprobs": "logprobs"}.get(name, name)
            raise DataError(f"this loss needs {name}, but the rows have none; set TrainSequence.{field_name}")
        return value

    def take_divergence(self, values_N: Tensor | None, is_negentropy: bool) -> None:
        """Set `divergence` or, from its negative, an `entropy` with a gradient."""
        if is_negentropy and values_N is not None:
            self.entropy = -values_N
        else:
            self.divergence = values_N

    def trained(self, per_token_N: Tensor) -> Tensor:
        """Return the (T,) values at trained tokens, in the order of the tokens."""
        return per_token_N.index_select(0, self.trained_T)

    def token_mean(self, values_T: Tensor) -> Tensor:
        """Return the micro-batch's share of the step's mean over trained tokens, 0-dim."""
        return values_T.sum() / max(self.step_tokens, 1)

    def row_mean(self, values_R: Tensor) -> Tensor:
        """Return the micro-batch's share of the step's mean over rows, 0-dim.

        Rows without trained tokens must have the value 0.
        """
        return values_R.sum() / max(self.step_rows, 1)

    def sum_rows(self, values_T: Tensor) -> Tensor:
        """Sum (T,) values over the trained tokens of each row: (R,), 0 for rows without any."""
        # A GPU adds in any order. In float64, the order does not change the result after rounding to float32.
        out = torch.zeros(self.n_rows, dtype=torch.float64, device=values_T.device)
        rows_T = self.row_of_token.index_select(0, self.trained_T)
        return out.index_add(0, rows_T, values_T.double()).to(values_T.dtype)

    def mean_rows(self, values_T: Tensor) -> Tensor:
        """Average (T,) values over the trained tokens of each row: (R,), 0 for rows without any."""
        return self.sum_rows(values_T) / self.row_lengths().clamp(min=1)

    def discounted_sums(self, values_T: Tensor, discount: float) -> Tensor:
        """Return for each trained token t the sum of discount^(u - t) values_u over the trained u >= t of its row.

        Sums are computed in float64.
        """
        rows_T = self.row_of_token.index_select(0, self.trained_T)
        sums_T, step = values_T.double(), 1
        while step < len(sums_T):  # after each turn, sums_T has the next 2 * step values of the row
            same_T = rows_T[step:] == rows_T[:-step]
            later_T = sums_T[step:].where(same_T, 0.0)
            sums_T = sums_T.clone()
            sums_T[:-step] += discount**step * later_T
            step *= 2
        return sums_T.to(values_T.dtype)

    def of_rows(self, values_R: Tensor) -> Tensor:
        """Expand (R,) values of rows to the trained tokens, (T,)."""
        return values_R.index_select(0, self.row_of_token.index_select(0, self.trained_T))

    def of_trained_rows(self, values_R: Tensor) -> Tensor:
        """Return the values of the rows with trained tokens, in order."""
        if self.trained_rows is None:
            return values_R[self.row_lengths() > 0]
        return values_R.index_select(0, self.trained_rows)

    def row_lengths(self) -> Tensor:
        """Count the trained tokens of each row: (R,) float32, 0 for rows without any."""
        return self.sum_rows(torch.ones_like(self.trained_T, dtype=torch.float32))


def check_loss_result(returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of a loss function. Raises EngineError unless it is a valid (loss, statistics)."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise EngineError(
            f"loss_fn returned {_describe_result(returned)}; (loss, stats) is expected, stats a dict, such as {{}}"
        )
    loss, stats = returned
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise EngineError(
            f"the loss of loss_fn is {_describe_result(loss)}; a float tensor with no dimensions is expected: this "
            "micro-batch's share of the loss, as pack.token_mean and pack.row_mean give it"
        )
    if not loss.requires_grad:
        raise EngineError(
            "the loss of loss_fn has no gradient; compute it from its second argument, without .detach(), .item(), "
            "numpy or torch.no_grad()"
        )
    for name, value in stats.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.dim() > 1:
            raise EngineError(
                f"stats[{name!r}] of loss_fn is {_describe_result(value)}; a tensor is expected, with no dimensions "
                "for a share (they are summed over micro-batches) or with one for single observations"
            )
    return loss, dict(stats)


def _describe_result(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
