# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The softmax of the LM head as Triton kernels: one pass over the logits for its statistics, one for its gradient.

Shape letters: C positions of one chunk, V vocabulary rows of this rank.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel

_BLOCK = 4096


def softmax_statistics(logits_CV: Tensor, targets_C: Tensor, first: int, temperature: float | Tensor) -> Tensor:
    """Return the softmax statistics of x = logits / temperature over this rank's columns.

    Args:
        logits_CV: this rank's columns of the logits, for the C positions of a chunk.
        targets_C: int64, vocabulary index of the target token at each position.
        first: vocabulary index of this rank's first column.
        temperature: divisor of the logits. A number, or a float32 tensor (C,).

    Returns:
        (4, C) float32. Row 0 is the maximum of x. The other rows use y = x - maximum: the sum of exp(y), the sum of
        y exp(y), and y at the target, which is 0 if another rank has the target's column.
    """
    n_positions, n_rows = logits_CV.shape
    out_4C = logits_CV.new_empty((4, n_positions))
    block = min(_BLOCK, triton.next_power_of_2(max(n_rows, 1)))
    if n_positions:
        _softmax_statistics_kernel[(n_positions,)](
            logits_CV,
            targets_C,
            out_4C,
            logits_CV.stride(0),
            n_rows,
            first,
            _rate(temperature),
            PER_ROW=isinstance(temperature, Tensor),
            BLOCK=block,
            num_warps=8,
        )
    return out_4C


def logprob_gradient(
    logits_CV: Tensor, lse_C: Tensor, targets_C: Tensor, first: int, temperature: float, out_CV: Tensor
) -> None:
    """Write onehot - softmax(logits / temperature), the gradient of the log-probability, to `out_CV`.

    Args:
        logits_CV: this rank's columns of the logits, for the C positions of a chunk. Not changed.
        lse_C: log-sum-exp of logits / temperature over all ranks.
        targets_C: int64, vocabulary index of the target token at each position.
        first: vocabulary index of this rank's first column.
        temperature: divisor of the logits.
        out_CV: the result, in its own dtype.
    """
    n_positions, n_rows = logits_CV.shape
    if not n_positions or not n_rows:
        return
    block, strides = min(_BLOCK, triton.next_power_of_2(n_rows)), (logits_CV.stride(0), out_CV.stride(0))
    _logprob_gradient_kernel[(n_positions, triton.cdiv(n_rows, block))](
        logits_CV, lse_C, targets_C, out_CV, *strides, n_rows, first, 1.0 / temperature, BLOCK=block, num_warps=8
    )


def _rate(temperature: float | Tensor) -> float | Tensor:
    """Return 1 / temperature, divided in float32, so that a float and a tensor give exactly the same result."""
    return 1.0 / temperature if isinstance(temperature, Tensor) else float(np.float32(1.0) / np.float32(temperature))


@kernel
def _softmax_statistics_kernel(
    logits_ptr, targets_ptr, out_ptr, stride, n_rows, first, rate, PER_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    position = tl.program_id(0).to(tl.int64)
    scale = tl.load(rate + position) if PER_ROW else rate
    base = logits_ptr + position * stride
    best = tl.full([], -1e30, tl.float32)  # finite, so that differences are not NaN if this rank has no rows
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_rows, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < n_rows
        x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        new_best = tl.maximum(best, tl.max(x, axis=0))
        decay = tl.exp(best - new_best)
        weight = tl.exp(x - new_best)
        weighted = (weighted + (best - new_best) * total) * decay + tl.where(inside, x - new_best, 0.0) * weight
        total = total * decay + weight
        best = new_best
    target = tl.load(targets_ptr + position) - first
    here = (target >= 0) & (target < n_rows)
    chosen = tl.load(base + target, mask=here, other=0.0).to(tl.float32) * scale
    chosen = tl.where(here, chosen - best, 0.0)
    out, out_stride = out_ptr + position, tl.num_programs(0)
    tl.store(out, best)
    tl.store(out + out_stride, tl.sum(total, axis=0))
    tl.store(out + 2 * out_stride, tl.sum(weighted, axis=0))
    tl.store(out + 3 * out_stride, chosen)


@kernel
def _logprob_gradient_kernel(
    logits_ptr, lse_ptr, targets_ptr, out_ptr, stride, out_stride, n_rows, first, scale, BLOCK: tl.constexpr
):
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n_rows
    x = tl.load(logits_ptr + position * stride + column, mask=inside, other=0.0).to(tl.float32) * scale
    target = tl.load(targets_ptr + position) - first
    grad = tl.where(column == target, 1.0, 0.0) - tl.exp(x - tl.load(lse_ptr + position))
    tl.store(out_ptr + position * out_stride + column, grad.to(out_ptr.dtype.element_ty), mask=inside)
