# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Rounding to FP8 as Triton kernels, a row in each program. `quantize` and `scales` are for other kernels, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.backend import is_triton_interpreted
from areno.kernels.fp8 import reference
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

_LEAST_EXPONENT = tl.constexpr(reference.LEAST_EXPONENT)
IS_INTERPRETED = tl.constexpr(is_triton_interpreted())


@triton.jit
def quantize(x):
    """Quantize rows of float32, (R, C) -> codes (R, C) float8e4nv, exponents (R,) int32."""
    exponent, inverse = scales_for(_largest(x))
    return to_e4m3(x * inverse[:, None]), exponent


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)  # as integers, so that a nan is the largest


@triton.jit
def scales_for(largest):
    """Return the exponents of the scales of rows, and the inverse scales."""
    exponent = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, _LEAST_EXPONENT)
    return exponent, tl.where((largest >> 23) == 255, float("nan"), scales(254 - exponent))


@triton.jit
def to_e4m3(x):
    if IS_INTERPRETED:  # it converts 31.9 to 16, and nan to a number
        is_nan = x != x
        step = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23) - (3 << 23)
        step = step.to(tl.float32, bitcast=True)
        size = tl.abs(x) / step + 12582912.0 - 12582912.0  # the nearest whole number of steps
        x = tl.where(x.to(tl.int32, bitcast=True) < 0, -(size * step), size * step)
        bits = tl.where(is_nan, 0x7F, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)).to(tl.uint8)
        return bits.to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def decode(codes, dtype: tl.constexpr):
    """Convert codes, as bytes, to a float type."""
    codes = codes.to(tl.float8e4nv, bitcast=True)
    if IS_INTERPRETED:  # it converts to float32 only
        codes = codes.to(tl.float32)
    return codes.to(dtype)


@triton.jit
def load_exponents(ptr, place, inside):
    """Load bytes as parts of words, because copies that run ahead of a loop have at least four bytes."""
    word = load_masked(ptr.to(tl.pointer_type(tl.int32)) + place // 4, inside)
    return (word >> (place % 4 * 8).to(tl.int32)) & 255


@triton.jit
def decode_pairs(pairs, dtype: tl.constexpr):
    """Convert pairs of codes, as int16, to float16 or float32. Return the first and the second code of each."""
    if tl.float16 == dtype and not IS_INTERPRETED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 p;
            .reg .b16 firsts, seconds;
            prmt.b32 p, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, p;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return decode((pairs & 255).to(tl.uint8), dtype), decode((pairs >> 8).to(tl.uint8), dtype)


@triton.jit
def scales(exponent):
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_scales(place, exponent, inside):
    """Store exponents or, if the pointers are to float32, scales."""
    if place.dtype.element_ty == tl.float32:
        tl.store(place, scales(exponent), mask=inside)
    else:
        tl.store(place, exponent.to(tl.uint8), mask=inside)


@triton.jit
def round_to_fp8(x):
    """Return rows of float32 quantized and dequantized."""
    codes, exponent = quantize(x)
    return codes.to(tl.float32) * scales(exponent)[:, None]


@triton.jit
def round_halves_to_fp8(a, b):
    """Do `round_to_fp8` for rows whose first half is in a and whose second half is in b."""
    exponent, inverse = scales_for(tl.maximum(_largest(a), _largest(b)))
    scale = scales(exponent)[:, None]
    a = to_e4m3(a * inverse[:, None]).to(tl.float32) * scale
    return a, to_e4m3(b * inverse[:, None]).to(tl.float32) * scale


def quantize_rows(
    x_NC: Tensor, exponents_C: Tensor | None = None, row_multiple: int = 1, as_scales: bool = False
) -> tuple[Tensor, Tensor]:
    shape = x_NC.shape if row_multiple == 1 else (len(x_NC) + -len(x_NC) % row_multiple, x_NC.shape[1])
    codes_NC = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x_NC.device)
    exponents_N = torch.empty(shape[:-1], dtype=torch.float32 if as_scales else torch.uint8, device=x_NC.device)
    _launch(_quantize_kernel, x_NC, exponents_C, codes_NC, exponents_N, exponents_N.numel(), n_out=exponents_N.numel())
    return codes_NC, exponents_N


def dequantize_rows(codes_NC: Tensor, exponents_N: Tensor, dtype: torch.dtype) -> Tensor:
    out_NC = torch.empty(codes_NC.shape, dtype=dtype, device=codes_NC.device)
    _launch(_dequantize_kernel, codes_NC, exponents_N.contiguous(), out_NC)
    return out_NC


def round_rows(x_NC: Tensor) -> Tensor:
    out_NC = torch.empty_like(x_NC, memory_format=torch.contiguous_format)
    _launch(_round_kernel, x_NC, out_NC)
    return out_NC


def _launch(of_rows, x_NC: Tensor, *others: Tensor | int | None, n_out: int | None = None) -> None:
    """Launch a kernel over the rows of x, or over `n_out` rows. Other tensors are contiguous."""
    if not x_NC.numel():
        return
    size = x_NC.shape[-1]
    rows = x_NC if x_NC.dim() == 2 and x_NC.stride(1) == 1 else x_NC.contiguous().view(-1, size)
    block = triton.next_power_of_2(size)
    n_rows = max(1, 2048 // block)
    of_rows[(triton.cdiv(n_out or len(rows), n_rows),)](
        rows,
        *others,
        len(rows),
        size,
        rows.stride(0),
        BLOCK=block,
        ROWS=n_rows,
        num_warps=min(16, max(4, block // 1024)),
    )


_TILE = 128  # rows and columns of a tile of `transpose` and of `quantize_columns`


def quantize_columns(x_NC: Tensor, row_multiple: int) -> tuple[Tensor, Tensor]:
    """Return codes (C, N) and scales (C,) of the columns of x. N is filled up to a multiple of `row_multiple`."""
    n, size = x_NC.shape
    n_out = n + -n % row_multiple
    largest_C = torch.linalg.vector_norm(x_NC, torch.inf, dim=0, dtype=torch.float32).view(torch.int32)
    codes_CN = torch.empty((size, n_out), dtype=torch.float8_e4m3fn, device=x_NC.device)
    scales_C = torch.empty(size, dtype=torch.float32, device=x_NC.device)
    x_NC = x_NC.contiguous()
    grid = triton.cdiv(n_out, _TILE), triton.cdiv(size, _TILE)
    _quantize_columns_kernel[grid](x_NC, largest_C, codes_CN, scales_C, n, n_out, size, TILE=_TILE, num_warps=8)
    return codes_CN, scales_C


def transpose(codes_NC: Tensor) -> Tensor:
    """Return a contiguous transpose of a matrix with elements of one byte."""
    n, size = codes_NC.shape
    out_CN = codes_NC.new_empty((size, n))
    grid = triton.cdiv(n, _TILE), triton.cdiv(size, _TILE)
    _transpose_kernel[grid](codes_NC.view(torch.uint8), out_CN.view(torch.uint8), n, size, TILE=_TILE, num_warps=8)
    return out_CN


@triton.jit
def _tile(n, size, TILE: tl.constexpr):
    row = program_id_64(0) * TILE + tl.arange(0, TILE)
    column = program_id_64(1) * TILE + tl.arange(0, TILE)
    return row, column, (row < n)[:, None] & (column < size)[None, :]


@kernel(do_not_specialize=["n", "n_out"])
def _quantize_columns_kernel(x_ptr, largest_ptr, codes_ptr, scales_ptr, n, n_out, size, TILE: tl.constexpr):
    row, column, inside = _tile(n, size, TILE)
    x = load_fp32(x_ptr + row[:, None] * size + column[None, :], inside)
    exponent, inverse = scales_for(load_masked(largest_ptr + column, column < size))
    codes = to_e4m3(x * inverse[None, :])
    inside = (row < n_out)[None, :] & (column < size)[:, None]
    tl.store(codes_ptr + column[:, None] * n_out + row[None, :], tl.trans(codes), mask=inside)
    if tl.program_id(0) == 0:
        store_scales(scales_ptr + column, exponent, column < size)


@kernel
def _transpose_kernel(codes_ptr, out_ptr, n, size, TILE: tl.constexpr):
    row, column, inside = _tile(n, size, TILE)
    tile = tl.load(codes_ptr + row[:, None] * size + column[None, :], mask=inside)
    tl.store(out_ptr + column[:, None] * n + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def _place(n, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = program_id_64(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    return row, column, (row < n)[:, None] & (column < size)[None, :]


@kernel(do_not_specialize=["n", "n_out"])
def _quantize_kernel(
    x_ptr, columns_ptr, codes_ptr, exponents_ptr, n_out, n, size, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row, column, inside = _place(n, size, ROWS, BLOCK)
    x = load_fp32(x_ptr + row[:, None] * stride + column[None, :], inside)
    if columns_ptr is not None:
        x *= scales(load_masked(columns_ptr + column, column < size))[None, :]
    codes, exponent = quantize(x)
    inside = (row < n_out)[:, None] & (column < size)[None, :]
    tl.store(codes_ptr + row[:, None] * size + column[None, :], codes, mask=inside)
    store_scales(exponents_ptr + row, exponent, row < n_out)


@kernel(do_not_specialize=["n"])
def _dequantize_kernel(codes_ptr, exponents_ptr, out_ptr, n, size, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, column, inside = _place(n, size, ROWS, BLOCK)
    codes = tl.load(codes_ptr + row[:, None] * stride + column[None, :], mask=inside).to(tl.float32)
    scale = scales(load_masked(exponents_ptr + row, row < n))
    tl.store(out_ptr + row[:, None] * size + column[None, :], codes * scale[:, None], mask=inside)


@kernel(do_not_specialize=["n"])
def _round_kernel(x_ptr, out_ptr, n, size, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, column, inside = _place(n, size, ROWS, BLOCK)
    x = load_fp32(x_ptr + row[:, None] * stride + column[None, :], inside)
    tl.store(out_ptr + row[:, None] * size + column[None, :], round_to_fp8(x), mask=inside)
