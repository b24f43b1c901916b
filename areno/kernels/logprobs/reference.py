"""The softmax of the LM head in plain torch: its statistics and its gradient for one chunk of positions.

Shape letters: C positions of one chunk, V vocabulary rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_statistics(logits_CV: Tensor, targets_C: Tensor, first: int, temperature: float | Tensor) -> Tensor:
    """Return the softmax statistics of x = logits / temperature over this rank's columns.

    The caller combines the statistics of all tensor-parallel ranks.

    Args:
        logits_CV: this rank's columns of the logits, for the C positions of a chunk.
        targets_C: int64, vocabulary index of the target token at each position.
        first: vocabulary index of this rank's first column.
        temperature: divisor of the logits. A number, or a float32 tensor (C,).

    Returns:
        (4, C) float32, or float64 for float64 logits. Row 0 is the maximum of x. The other rows use y = x - maximum:
        the sum of exp(y), the sum of y exp(y), and y at the target, which is 0 if another rank has the target's
        column.
    """
    if not logits_CV.shape[1]:  # a rank whose part of the vocabulary is all padding
        none_C = logits_CV.new_zeros(logits_CV.shape[0])
        return torch.stack([none_C - 1e30, none_C, none_C, none_C])
    x_CV = logits_CV / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    top_C = x_CV.amax(-1)
    x_CV.sub_(top_C.unsqueeze(-1))
    row_C1, here_C = local_rows(targets_C, first, logits_CV.shape[1])
    target_C = x_CV.gather(-1, row_C1).squeeze(-1).where(here_C, 0.0)
    exp_CV = x_CV.exp()
    return torch.stack([top_C, exp_CV.sum(-1), exp_CV.mul_(x_CV).sum(-1), target_C])


def logprob_gradient(
    logits_CV: Tensor, lse_C: Tensor, targets_C: Tensor, first: int, temperature: float, out_CV: Tensor
) -> None:
    """Write d log softmax(x)[target] / dx = onehot - softmax(x), with x = logits / temperature.

    Args:
        logits_CV: this rank's columns of the logits, for the C positions of a chunk. Overwritten.
        lse_C: log-sum-exp of x over all ranks.
        targets_C: int64, vocabulary index of the target token at each position.
        first: vocabulary index of this rank's first column.
        temperature: divisor of the logits.
        out_CV: the result, in its own dtype.
    """
    if logits_CV.shape[1]:
        grad_CV = logits_CV.div_(temperature).sub_(lse_C.unsqueeze(-1)).exp_().neg_()
        row_C1, here_C = local_rows(targets_C, first, logits_CV.shape[1])
        grad_CV.scatter_add_(-1, row_C1, here_C.to(grad_CV.dtype).unsqueeze(-1))
        out_CV.copy_(grad_CV)


def local_rows(targets_C: Tensor, first: int, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return the index of each target among this rank's rows of the vocabulary, and whether this rank has the target.

    Args:
        targets_C: int64, vocabulary index of each target.
        first: vocabulary index of this rank's first row.
        n_rows: number of rows on this rank.

    Returns:
        (indices, is_here): the local indices (C, 1) int64, which are 0 for targets of other ranks, and whether this
        rank has the target, (C,) bool.
    """
    local_C = targets_C - first
    here_C = (local_C >= 0) & (local_C < n_rows)
    return local_C.where(here_C, 0).unsqueeze(-1), here_C
