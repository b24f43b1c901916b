"""AdamW in plain torch, in fp32, and the constants and codes that the Triton kernels share with it.

8-bit moments (arXiv 2110.02861, section 2.1) are quantised in blocks of BLOCK elements. The scale of a block is the
largest absolute value of its elements. An element divided by its scale is stored as the uint8 index of the nearest
value in a table of 256 values, which is denser near 0, so that small moments keep their relative precision. The first
moment is signed, the second is not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.config.optimizers import MOMENT_BLOCK

BLOCK = MOMENT_BLOCK  # elements quantised together
_ROW = 1024  # elements whose squares are summed in float32; the sums of rows are summed in float64
TINY = 1e-37  # values are divided by the block's scale or, if larger, by this, whose reciprocal is finite
_ROUNDED = 2**22  # elements whose random bits are in memory at once
_MASK = 0xFFFFFFFF
Pair = tuple[Tensor, Tensor]  # one tensor for the first moment and one for the second


@dataclass(frozen=True, kw_only=True)
class AdamUpdate:
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float  # 1 - lr * weight_decay
    scale: float  # of gradient clipping, a factor of the gradient
    correction_1: float  # 1 - beta1^t at step t, counted from 1
    correction_2: float  # sqrt(1 - beta2^t)
    step: int = 0  # t, on which stochastic rounding depends


def adam(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: AdamUpdate) -> None:
    _update_moments(grad, *moments, update)
    _update_parameters(master, param, *moments, update)


def adam_8bit(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, scales: Pair, update: AdamUpdate) -> None:
    (first, second), (first_scale, second_scale) = moments, scales
    first_32 = dequantise(first, first_scale, signed=True)
    second_32 = dequantise(second, second_scale, signed=False)
    _update_moments(grad, first_32, second_32, update)
    # As in the paper, the parameters are updated with the moments before quantisation.
    quantise(first_32, first, first_scale, signed=True)
    quantise(second_32, second, second_scale, signed=False)
    _update_parameters(master, param, first_32, second_32, update)


def adam_bf16(
    grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: AdamUpdate, key: int, start: int
) -> None:
    for low in range(0, grad.numel(), _ROUNDED):  # bounds the temporaries
        each = slice(low, low + _ROUNDED)
        first, second = (moment[each] for moment in moments)
        first_32, second_32 = first.float(), second.float()
        _update_moments(grad[each], first_32, second_32, update)
        bits = random_bits(rounding_key(key, update.step), start + low, grad[each].numel(), grad.device)
        first.copy_(round_to_bf16(first_32, bits & 0xFFFF))
        second.copy_(round_to_bf16(second_32, bits >> 16))
        # As with 8 bits, the parameters are updated with the moments before rounding.
        _update_parameters(master[each], param[each], first_32, second_32, update)


def rounding_key(key: int, step: int) -> int:
    """Return a number with 31 bits for a parameter and a step."""
    return (_mixed(step) ^ key) & 0x7FFFFFFF


def random_bits(key: int, start: int, n: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each of n elements, int64. They depend on the key and the element's index only."""
    index = torch.arange(start, start + n, device=device)
    return _mixed((index + key) & _MASK) ^ (_mixed(key ^ 0x5BD1E995))


def _mixed(x: Any) -> Any:
    """Hash 32 bits (the multipliers of lowbias32), of an int or an int64 tensor."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 up with the probability of the part that bf16 cuts off. `bits`: 16 random bits, int64."""
    rounded = (values.view(torch.int32) + bits.int()) & -0x10000
    return rounded.view(torch.float32).bfloat16()


def squares_and_nonzeros(grad: Tensor) -> Tensor:
    # On a CPU, torch would sum a whole vector in one float32 variable, which is off by 0.1 % for 16 million elements.
    whole = grad[: grad.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = grad[whole.numel() :]
    norms = [torch.linalg.vector_norm(whole, dim=1), torch.linalg.vector_norm(rest).view(1)]
    squares = torch.cat(norms).double().square().sum()
    return torch.stack([squares, grad.count_nonzero().double()])


def _update_moments(grad: Tensor, first: Tensor, second: Tensor, update: AdamUpdate) -> None:
    first.mul_(update.beta1).add_(grad, alpha=(1.0 - update.beta1) * update.scale)
    second.mul_(update.beta2).addcmul_(grad, grad, value=(1.0 - update.beta2) * update.scale**2)


def _update_parameters(master: Tensor, param: Tensor, first: Tensor, second: Tensor, update: AdamUpdate) -> None:
    if update.decay != 1.0:
        master.mul_(update.decay)
    # Bias corrections go into the step size and eps, which saves a pass over memory.
    root = second.sqrt().add_(update.eps * update.correction_2)
    master.addcdiv_(first, root, value=-update.lr * update.correction_2 / update.correction_1)
    if param.data_ptr() != master.data_ptr():
        param.copy_(master)


def dequantise(code: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    values = code_values(signed, code.device)[code.long()]
    return values * scale.repeat_interleave(BLOCK)[: values.numel()]


def quantise(values: Tensor, code: Tensor, scale: Tensor, *, signed: bool) -> None:
    """Quantise `values`: write the 8-bit codes to `code`, and the scale of each block to `scale`.

    If `signed` is False, a value above 0 is never rounded to 0, because AdamW divides by the root of the second moment.
    """
    n = values.numel()
    padded = F.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    scale.copy_(padded.abs().amax(1))
    share = (padded / scale.clamp_min(TINY).unsqueeze(1)).flatten()[:n]
    number = torch.bucketize(share, midpoints(signed, values.device))
    code.copy_(number if signed else number.maximum((share > 0).long()))


@functools.cache
def code_values(signed: bool, device: torch.device) -> Tensor:
    """Return the table of the values that the 256 codes stand for, (256,) float32, in ascending order.

    The values are between -1 (or 0 if not signed) and 1. The values 0 and 1 have codes of their own. Every other value
    is a sign (if signed) times 10^-e times a fraction, with e from 0 to 6. The fractions are the midpoints of 2^(7 - e)
    equal intervals between 0.1 and 1, or of 2^(6 - e) intervals if signed.
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
def midpoints(signed: bool, device: torch.device) -> Tensor:
    """Return the midpoints between neighbouring values of the table, (255,), at which rounding changes the code."""
    table = code_values(signed, device)
    return (table[1:] + table[:-1]) / 2
