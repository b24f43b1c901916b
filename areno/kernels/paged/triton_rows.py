# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Writing and reading rows of an FP8 KV cache as Triton kernels. Other caches have the form in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.fixed_order.triton import with_contiguous_heads
from areno.kernels.fp8.triton import decode, quantize, scales
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64
from areno.kernels.paged import rows


def store_rows(k_NKC: Tensor, v_NKC: Tensor, kv_blocks: Tensor, exponents: Tensor | None, indices_N: Tensor) -> None:
    if exponents is None:
        rows.store_rows(k_NKC, v_NKC, kv_blocks, exponents, indices_N)
    elif len(indices_N):
        k_NKC, v_NKC = with_contiguous_heads(k_NKC), with_contiguous_heads(v_NKC)
        _store_kernel[(len(indices_N), 2)](
            k_NKC,
            v_NKC,
            rows.as_bytes(kv_blocks),
            exponents,
            indices_N,
            k_NKC.stride(0),
            v_NKC.stride(0),
            kv_blocks[0].numel(),
            exponents[0].numel(),
            **_sizes(kv_blocks),
        )


def load_rows(
    kv_blocks: Tensor, exponents: Tensor | None, indices_M: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if exponents is None:
        return rows.load_rows(kv_blocks, exponents, indices_M, dtype)
    n, (_, _, _, n_heads, dim) = len(indices_M), kv_blocks.shape
    out_2MKC = torch.empty((2, n, n_heads, dim), dtype=dtype, device=kv_blocks.device)
    if n:
        sizes = kv_blocks[0].numel(), exponents[0].numel(), out_2MKC[0].numel()
        _load_kernel[(n, 2)](rows.as_bytes(kv_blocks), exponents, indices_M, out_2MKC, *sizes, **_sizes(kv_blocks))
    return out_2MKC[0], out_2MKC[1]


def _sizes(kv_blocks: Tensor) -> dict[str, Any]:
    _, _, block_size, n_heads, dim = kv_blocks.shape
    return {
        "BLOCK_SIZE": block_size,
        "HEADS": n_heads,
        "DIM": dim,
        "HEADS_BLOCK": triton.next_power_of_2(n_heads),
        "DIM_BLOCK": triton.next_power_of_2(dim),
        "num_warps": 4,
    }


@triton.jit
def store_codes(codes_ptr, exponent_ptr, x, dim, inside):
    """Quantize a key or value of one head, (C,), and write its codes and the byte of its scale."""
    codes, exponent = quantize(x.to(tl.float32)[None, :])
    tl.store(codes_ptr + dim[None, :], codes.to(tl.uint8, bitcast=True), mask=inside[None, :])
    tl.store(exponent_ptr + tl.arange(0, 1), exponent.to(tl.uint8))


@triton.jit
def _places(indices_ptr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, head, dim):
    """Return the places of a row's codes, (heads, C), and of its exponents, (heads,)."""
    index = tl.load(indices_ptr + tl.program_id(0)).to(tl.int64)
    codes = (index * HEADS + head[:, None]) * DIM + dim[None, :]
    return codes, (index // BLOCK_SIZE * HEADS + head) * BLOCK_SIZE + index % BLOCK_SIZE


@kernel(do_not_specialize=["part_size", "part_exponents"])
def _store_kernel(
    k_ptr,
    v_ptr,
    codes_ptr,
    exponents_ptr,
    indices_ptr,
    k_stride,
    v_stride,
    part_size,
    part_exponents,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    head, dim = tl.arange(0, HEADS_BLOCK), tl.arange(0, DIM_BLOCK)
    inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    part = program_id_64(1)
    source = head[:, None] * DIM + dim[None, :]
    if part == 0:
        x = load_fp32(k_ptr + program_id_64(0) * k_stride + source, inside)
    else:
        x = load_fp32(v_ptr + program_id_64(0) * v_stride + source, inside)
    codes, exponent = quantize(x)
    code_places, exponent_places = _places(indices_ptr, BLOCK_SIZE, HEADS, DIM, head, dim)
    tl.store(codes_ptr + part * part_size + code_places, codes.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(exponents_ptr + part * part_exponents + exponent_places, exponent.to(tl.uint8), mask=head < HEADS)


@kernel(do_not_specialize=["part_size", "part_exponents", "out_size"])
def _load_kernel(
    codes_ptr,
    exponents_ptr,
    indices_ptr,
    out_ptr,
    part_size,
    part_exponents,
    out_size,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    head, dim = tl.arange(0, HEADS_BLOCK), tl.arange(0, DIM_BLOCK)
    inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    part = program_id_64(1)
    code_places, exponent_places = _places(indices_ptr, BLOCK_SIZE, HEADS, DIM, head, dim)
    codes = load_masked(codes_ptr + part * part_size + code_places, inside)
    scale = scales(load_masked(exponents_ptr + part * part_exponents + exponent_places, head < HEADS))
    place = out_ptr + part * out_size + program_id_64(0) * (HEADS * DIM) + head[:, None] * DIM + dim[None, :]
    tl.store(place, decode(codes, tl.float32) * scale[:, None], mask=inside)
