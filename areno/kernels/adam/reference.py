"""The AdamW update in plain torch, computed in fp32, and what the Triton kernels share: its numbers and the codes.

Codes of 8-bit moments (arXiv 2110.02861, section 2.1): moments are quantised in blocks of BLOCK elements. A block
stores the largest absolute value of its elements as its scale. Each element stores the number of the code nearest to
its share of that scale. The spacing of the codes grows with their size, so small moments keep a relative precision.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256  # elements quantised together
_ROW = 1024  # elements whose squares are added in float32
TINY = 1e-37  # the least scale that is divided by, so that its reciprocal is finite
Pair = tuple[Tensor, Tensor]  # of the first moment and of the second


@dataclass(frozen=True, kw_only=True)
class Update:
    """The numbers of one update, the same for all parameters of a stretch.

    scale: of the gradient (clipping). correction_1, correction_2: 1 - beta1^t and the root of 1 - beta2^t.
    decay: 1 - lr * weight_decay, 1 where there is none.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    scale: float
    correction_1: float
    correction_2: float


def adam(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: Update) -> None:
    """As `areno.kernels.adam.adam`."""
    _moments(grad, *moments, update)
    _apply(master, param, *moments, update)


def adam_8bit(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, scales: Pair, update: Update) -> None:
    """As `areno.kernels.adam.adam_8bit`."""
    (first, second), (first_scale, second_scale) = moments, scales
    first_32 = dequantise(first, first_scale, signed=True)
    second_32 = dequantise(second, second_scale, signed=False)
    _moments(grad, first_32, second_32, update)
    # The update uses the moments before they are rounded, as the paper's does.
    quantise(first_32, first, first_scale, signed=True)
    quantise(second_32, second, second_scale, signed=False)
    _apply(master, param, first_32, second_32, update)


def squares_and_nonzeros(grad: Tensor) -> Tensor:
    """As `areno.kernels.adam.squares_and_nonzeros`."""
    # On a CPU torch adds the squares of a vector one after another: of 16 million it loses a thousandth in float32.
    whole = grad[: grad.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = grad[whole.numel() :]
    norms = [torch.linalg.vector_norm(whole, dim=1), torch.linalg.vector_norm(rest).view(1)]
    squares = torch.cat(norms).double().square().sum()
    return torch.stack([squares, grad.count_nonzero().double()])


def _moments(grad: Tensor, first: Tensor, second: Tensor, update: Update) -> None:
    first.mul_(update.beta1).add_(grad, alpha=(1.0 - update.beta1) * update.scale)
    second.mul_(update.beta2).addcmul_(grad, grad, value=(1.0 - update.beta2) * update.scale**2)


def _apply(master: Tensor, param: Tensor, first: Tensor, second: Tensor, update: Update) -> None:
    if update.decay != 1.0:
        master.mul_(update.decay)
    # The bias corrections are folded into the step size and eps: one pass over memory less.
    root = second.sqrt().add_(update.eps * update.correction_2)
    master.addcdiv_(first, root, value=-update.lr * update.correction_2 / update.correction_1)
    if param.data_ptr() != master.data_ptr():
        param.copy_(master)


def dequantise(code: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """(n,) float32."""
    values = codes(signed, code.device)[code.long()]
    return values * scale.repeat_interleave(BLOCK)[: values.numel()]


def quantise(values: Tensor, code: Tensor, scale: Tensor, *, signed: bool) -> None:
    """Write the nearest codes of values (n,) and the scales of their blocks. Unsigned values above 0 stay above it: a
    second moment that vanished beside a first one that did not would make a step of any size.
    """
    n = values.numel()
    padded = F.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    scale.copy_(padded.abs().amax(1))
    share = (padded / scale.clamp_min(TINY).unsqueeze(1)).flatten()[:n]
    number = torch.bucketize(share, borders(signed, values.device))
    code.copy_(number if signed else number.maximum((share > 0).long()))


@functools.cache
def codes(signed: bool, device: torch.device) -> Tensor:
    """The 256 codes in ascending order, (256,) float32, from -1 (or 0) to 1.

    A code has a sign (if any), a decimal exponent 0 .. 6, told by leading zero bits, and a fraction in what bits are
    left: linearly spaced between 0.1 and 1, at the middle of its interval. 0 and 1 are codes of their own.
    """
    n_bits = 7 if signed else 8
    values: list[float] = []
    for exponent in range(7):
        n_fractions = 2 ** (n_bits - 1 - exponent)
        width = 0.9 / n_fractions
        values += [10.0**-exponent * (0.1 + (i + 0.5) * width) for i in range(n_fractions)]
    if signed:
        values += [-value for value in values]
    return torch.tensor(sorted([*values, 0.0, 1.0]), dtype=torch.float32, device=device)


@functools.cache
def borders(signed: bool, device: torch.device) -> Tensor:
    """(255,) float32, midway between adjacent codes."""
    table = codes(signed, device)
    return (table[1:] + table[:-1]) / 2
