"""The head's softmax in plain torch: its statistics and its gradient.

Shape letters: C positions of one chunk, V vocabulary rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_statistics(logits_CV: Tensor, targets_C: Tensor, first: int, temperature: float | Tensor) -> Tensor:
    """(4, C) float32 (float64 for float64 logits) of x = logits / temperature over this rank's rows: the largest, and
    with x counted from there the sum of exp x, the sum of x exp x, and x of the target, 0 where another rank has it.

    first: this rank's first row. temperature: one for all positions, or (C,) float32.
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
    """d log softmax(x)[target] / d x = onehot - softmax(x) into out, in its dtype. lse: log-sum-exp of x, all ranks.

    Destroys the logits.
    """
    if logits_CV.shape[1]:
        grad_CV = logits_CV.div_(temperature).sub_(lse_C.unsqueeze(-1)).exp_().neg_()
        row_C1, here_C = local_rows(targets_C, first, logits_CV.shape[1])
        grad_CV.scatter_add_(-1, row_C1, here_C.to(grad_CV.dtype).unsqueeze(-1))
        out_CV.copy_(grad_CV)


def local_rows(targets_C: Tensor, first: int, n_rows: int) -> tuple[Tensor, Tensor]:
    """(C, 1) row of each target in this rank's part, and (C,) whether it is there (elsewhere the row is 0)."""
    local_C = targets_C - first
    here_C = (local_C >= 0) & (local_C < n_rows)
    return local_C.where(here_C, 0).unsqueeze(-1), here_C
