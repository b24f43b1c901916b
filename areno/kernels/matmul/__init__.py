"""What matrix products need beside torch: sums in a higher precision than their factors', and more rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, in the precision of out where the device can multiply so."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += torch.mm(a, b)


def float_product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T, (N, O), in at least fp32.

    It is kept in fp32 where the device can, outside autograd. In bf16 a logit of 20 is off by 0.06.
    """
    if x_NI.is_cuda and x_NI.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled():
        return torch.mm(x_NI, weight_OI.t(), out_dtype=torch.float32)
    y_NO = F.linear(x_NI, weight_OI)
    return y_NO.to(torch.promote_types(y_NO.dtype, torch.float32))


def fill_rows(x_ND: Tensor, multiple: int) -> Tensor:
    """x with zeros below, up to a multiple of so many rows."""
    return F.pad(x_ND, (0, 0, 0, -len(x_ND) % multiple))


def unsplit_product(x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """x W^T in `dtype`, (N, O): the sum over I in order, whatever N, outside autograd. Needs Triton."""
    from areno.kernels.matmul.triton import unsplit_product as product

    return product(x_NI, weight_OI, dtype)


@dataclass(frozen=True)
class UnsplitProduct:
    """x W^T in one order of operations, whatever the number of rows, outside autograd.

    Products of at most triton_rows rows come from a Triton kernel. Those of at most library_rows come from the
    library, which is told not to divide the sum over I. Larger ones it does not divide anyway.
    """

    triton_rows: int = 0
    library_rows: int = 0

    def __call__(self, x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        if len(x_NI) <= self.triton_rows:
            return unsplit_product(x_NI, weight_OI, dtype)
        with _no_splits() if len(x_NI) <= self.library_rows else nullcontext():
            return F.linear(x_NI, weight_OI) if dtype == x_NI.dtype else float_product(x_NI, weight_OI).to(dtype)


@contextmanager
def _no_splits() -> Iterator[None]:
    """Products on CUDA are computed by cuBLASLt, by kernels that do not divide the sum."""
    library, matmul = torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul
    bf16 = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
    fp16 = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction_split_k
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = (False, False)
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = bf16, fp16
        torch.backends.cuda.preferred_blas_library(library)
