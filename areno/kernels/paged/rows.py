"""Writing and reading rows of the KV cache in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.fp8 import dequantize_rows, quantize_rows


def store_rows(k_NKC: Tensor, v_NKC: Tensor, kv_blocks: Tensor, exponents: Tensor | None, indices_N: Tensor) -> None:
    if exponents is None:
        for part, new in zip(kv_blocks.flatten(1, 2), (k_NKC, v_NKC), strict=True):
            part.index_copy_(0, indices_N, new)
        return
    size = kv_blocks.shape[2]
    for codes, of_part, new in zip(as_bytes(kv_blocks).flatten(1, 2), exponents, (k_NKC, v_NKC), strict=True):
        codes_NKC, exponents_NK = quantize_rows(new)
        codes.index_copy_(0, indices_N, as_bytes(codes_NKC))
        of_part[indices_N // size, :, indices_N % size] = exponents_NK


def load_rows(
    kv_blocks: Tensor, exponents: Tensor | None, indices_M: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cached_k, cached_v = as_bytes(kv_blocks).flatten(1, 2)
    k_MKC, v_MKC = cached_k.index_select(0, indices_M), cached_v.index_select(0, indices_M)
    if exponents is None:
        return k_MKC, v_MKC
    size = kv_blocks.shape[2]
    of_k, of_v = (part[indices_M // size, :, indices_M % size] for part in exponents)
    return dequantize_bytes(k_MKC, of_k, dtype), dequantize_bytes(v_MKC, of_v, dtype)


def as_bytes(x: Tensor) -> Tensor:
    """Return FP8 codes as bytes, because few operations of torch support FP8. Other tensors stay as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def dequantize_bytes(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(codes.view(torch.float8_e4m3fn), exponents, dtype)
