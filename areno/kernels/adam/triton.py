# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""AdamW as Triton kernels, which read and write every element once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.adam.reference import BLOCK, TINY, AdamUpdate, Pair, code_values, midpoints, rounding_key
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

_BLOCK = 1024
_ROWS = 8  # blocks of 8-bit codes that one program handles
MAX_PROGRAMS = 2048  # of `squares_and_nonzeros`; with so many, the count of each program is exact in fp32


def adam(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: AdamUpdate) -> None:
    n = grad.numel()
    if n:
        grid = (triton.cdiv(n, _BLOCK),)
        _adam_kernel[grid](grad, master, param, *moments, n, *_kernel_scalars(update), BLOCK=_BLOCK, num_warps=4)


def adam_bf16(
    grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: AdamUpdate, key: int, start: int
) -> None:
    n = grad.numel()
    if n:
        given = n, rounding_key(key, update.step), start, *_kernel_scalars(update)
        grid = (triton.cdiv(n, _BLOCK),)
        _adam_bf16_kernel[grid](grad, master, param, *moments, *given, BLOCK=_BLOCK, num_warps=4)


def adam_8bit(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, scales: Pair, update: AdamUpdate) -> None:
    n, device = grad.numel(), grad.device
    if n:
        _adam_8bit_kernel[(triton.cdiv(n, BLOCK * _ROWS),)](
            grad,
            master,
            param,
            *moments,
            *scales,
            code_values(True, device),
            midpoints(True, device),
            code_values(False, device),
            midpoints(False, device),
            n,
            *_kernel_scalars(update),
            TINY,
            BLOCK=BLOCK,
            ROWS=_ROWS,
            num_warps=8,
        )


def squares_and_nonzeros(grad: Tensor) -> Tensor:
    n_programs = min(triton.cdiv(grad.numel(), _BLOCK), MAX_PROGRAMS)
    partial_P2 = grad.new_zeros((max(n_programs, 1), 2))
    if n_programs:
        _squares_kernel[(n_programs,)](grad, partial_P2, grad.numel(), BLOCK=_BLOCK, num_warps=4)
    return partial_P2.double().sum(0)


def _kernel_scalars(update: AdamUpdate) -> tuple[float, ...]:
    return (
        update.beta1,
        (1.0 - update.beta1) * update.scale,
        update.beta2,
        (1.0 - update.beta2) * update.scale**2,
        update.eps * update.correction_2,
        update.decay,
        update.lr * update.correction_2 / update.correction_1,
    )


@kernel
def _squares_kernel(grad_ptr, partial_ptr, n, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    nonzeros = tl.zeros([BLOCK], tl.float32)
    first = program_id_64(0) * BLOCK
    for start in range(first, n, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        grad = load_masked(grad_ptr + place, place < n)
        squares += grad * grad
        nonzeros += (grad != 0.0).to(tl.float32)
    out = partial_ptr + 2 * tl.program_id(0)
    tl.store(out, tl.sum(squares, axis=0))
    tl.store(out + 1, tl.sum(nonzeros, axis=0))


@triton.jit
def _step(grad, first, second, master, keep_first, take_first, keep_second, take_second, eps, decay, rate):
    first = first * keep_first + grad * take_first
    second = second * keep_second + grad * grad * take_second
    return first, second, master * decay - rate * first / (tl.sqrt(second) + eps)


@kernel
def _adam_kernel(
    grad_ptr,
    master_ptr,
    param_ptr,
    first_ptr,
    second_ptr,
    n,
    keep_first,
    take_first,
    keep_second,
    take_second,
    eps,
    decay,
    rate,
    BLOCK: tl.constexpr,
):
    place = program_id_64(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    grad = load_masked(grad_ptr + place, inside)
    first, second = load_masked(first_ptr + place, inside), load_masked(second_ptr + place, inside)
    master = load_masked(master_ptr + place, inside)
    first, second, master = _step(
        grad, first, second, master, keep_first, take_first, keep_second, take_second, eps, decay, rate
    )
    tl.store(first_ptr + place, first, mask=inside)
    tl.store(second_ptr + place, second, mask=inside)
    tl.store(master_ptr + place, master, mask=inside)
    tl.store(param_ptr + place, master, mask=inside)


@kernel
def _adam_bf16_kernel(
    grad_ptr,
    master_ptr,
    param_ptr,
    first_ptr,
    second_ptr,
    n,
    key,
    start,
    keep_first,
    take_first,
    keep_second,
    take_second,
    eps,
    decay,
    rate,
    BLOCK: tl.constexpr,
):
    place = program_id_64(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    grad = load_masked(grad_ptr + place, inside)
    first, second = load_fp32(first_ptr + place, inside), load_fp32(second_ptr + place, inside)
    master = load_masked(master_ptr + place, inside)
    first, second, master = _step(
        grad, first, second, master, keep_first, take_first, keep_second, take_second, eps, decay, rate
    )
    key_64 = key + tl.zeros([BLOCK], tl.int64)
    bits = _mixed((place + start + key_64).to(tl.uint32)) ^ _mixed((key_64 ^ 0x5BD1E995).to(tl.uint32))
    tl.store(first_ptr + place, _round_to_bf16(first, bits & 0xFFFF), mask=inside)
    tl.store(second_ptr + place, _round_to_bf16(second, bits >> 16), mask=inside)
    tl.store(master_ptr + place, master, mask=inside)
    tl.store(param_ptr + place, master, mask=inside)


@triton.jit
def _mixed(x):
    """Hash 32 bits, as `_mixed` of the reference."""
    x = (x ^ (x >> 16)) * tl.full(x.shape, 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full(x.shape, 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _round_to_bf16(values, bits):
    rounded = (values.to(tl.uint32, bitcast=True) + bits) & tl.full(values.shape, 0xFFFF0000, tl.uint32)
    return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)


@kernel
def _adam_8bit_kernel(
    grad_ptr,
    master_ptr,
    param_ptr,
    first_ptr,
    second_ptr,
    first_scale_ptr,
    second_scale_ptr,
    signed_ptr,
    signed_borders_ptr,
    unsigned_ptr,
    unsigned_borders_ptr,
    n,
    keep_first,
    take_first,
    keep_second,
    take_second,
    eps,
    decay,
    rate,
    tiny,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = program_id_64(0) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = place < n
    real_row = row * BLOCK < n
    grad = load_masked(grad_ptr + place, inside)

    scale = load_masked(first_scale_ptr + row, real_row)
    code = load_masked(first_ptr + place, inside).to(tl.int32)
    first = tl.load(signed_ptr + code) * scale[:, None] * keep_first + grad * take_first
    first = tl.where(inside, first, 0.0)
    scale = tl.max(tl.abs(first), axis=1)
    code = _nearest(first / tl.maximum(scale, tiny)[:, None], signed_borders_ptr, True)
    tl.store(first_ptr + place, code, mask=inside)
    tl.store(first_scale_ptr + row, scale, mask=real_row)

    scale = load_masked(second_scale_ptr + row, real_row)
    code = load_masked(second_ptr + place, inside).to(tl.int32)
    second = tl.load(unsigned_ptr + code) * scale[:, None] * keep_second + grad * grad * take_second
    second = tl.where(inside, second, 0.0)
    scale = tl.max(second, axis=1)
    share = second / tl.maximum(scale, tiny)[:, None]
    code = tl.maximum(_nearest(share, unsigned_borders_ptr, False), (share > 0.0).to(tl.int32))
    tl.store(second_ptr + place, code, mask=inside)
    tl.store(second_scale_ptr + row, scale, mask=real_row)

    master = load_masked(master_ptr + place, inside) * decay - rate * first / (tl.sqrt(second) + eps)
    tl.store(master_ptr + place, master, mask=inside)
    tl.store(param_ptr + place, master, mask=inside)


@triton.jit
def _nearest(share, borders_ptr, SIGNED: tl.constexpr):
    """Return the 8-bit code of each element of `share`, a moment divided by the scale of its block.

    A formula gives a code that is off by at most one, and a comparison with `midpoints` (`borders_ptr`) corrects it.
    """
    size = tl.abs(share)
    scaled = size
    n_fractions = tl.full(share.shape, 64 if SIGNED else 128, tl.int32)
    for _ in tl.static_range(6):  # type: ignore[misc]
        is_small = scaled < 0.1
        scaled = tl.where(is_small, scaled * 10.0, scaled)
        n_fractions = tl.where(is_small, n_fractions // 2, n_fractions)
    fraction = tl.floor((scaled - 0.1) * (n_fractions.to(tl.float32) / 0.9)).to(tl.int32)
    number = tl.maximum(n_fractions + tl.minimum(fraction, n_fractions), 0)  # `fraction` may be -1 near 0
    if SIGNED:
        number = 127 + tl.where(share < 0.0, -number, number)
    else:
        number = number - 1
    number = tl.minimum(tl.maximum(number, 1), 254)
    number -= (share <= tl.load(borders_ptr + number - 1)).to(tl.int32)
    number += (share > tl.load(borders_ptr + number)).to(tl.int32)
    return number
