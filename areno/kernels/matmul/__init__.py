"""Matrix products that torch lacks: sums in a higher precision than the factors, and sums in a fixed order.

`add_matmul` and `float32_matmul` compute weight gradients and logits. `FixedOrderMatmul` is for `engine.exact`: a row
of its result does not depend on the number of other rows. Both factors of a product have the same dtype.

Shape letters: N rows, I inputs, O outputs, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def add_matmul(out: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """Add scale * a @ b to `out` in place, summed in the precision of `out` on CUDA and of the factors elsewhere."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, alpha=scale)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, alpha=scale, out=out)
    else:
        out.add_(torch.mm(a, b), alpha=scale)


def float32_matmul(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x W^T in at least fp32. In bfloat16, a logit of 20 would be off by up to 0.06.

    On CUDA and outside autograd, half-precision products are summed and returned in fp32. Otherwise the product is
    computed in the dtype of x and converted.
    """
    if x_NI.is_cuda and x_NI.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled():
        return torch.mm(x_NI, weight_OI.t(), out_dtype=torch.float32)
    y_NO = F.linear(x_NI, weight_OI)
    return y_NO.to(torch.promote_types(y_NO.dtype, torch.float32))


def pad_rows(x_ND: Tensor, multiple: int) -> Tensor:
    more = -len(x_ND) % multiple
    return F.pad(x_ND, (0, 0, 0, more)) if more else x_ND  # without `more`, `pad` copies x


def fixed_order_matmul(x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T without split-K: each sum over the inputs is in order, for any number of rows. Needs Triton."""
    from areno.kernels.matmul.triton import fixed_order_matmul as product

    return product(x_NI, weight_OI, dtype)


@dataclass(frozen=True)
class FixedOrderMatmul:
    """A callable that computes x W^T so that a row's result does not depend on the number of rows, outside autograd.

    Products of at most `triton_rows` rows run as a Triton kernel, and those of at most `library_rows` in cuBLASLt with
    split-K switched off. For products with more rows, cuBLASLt never uses split-K.
    """

    triton_rows: int = 0
    library_rows: int = 0

    def __call__(self, x_NI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        if len(x_NI) <= self.triton_rows:
            return fixed_order_matmul(x_NI, weight_OI, dtype)
        with _without_split_k() if len(x_NI) <= self.library_rows else nullcontext():
            return F.linear(x_NI, weight_OI) if dtype == x_NI.dtype else float32_matmul(x_NI, weight_OI).to(dtype)


@contextmanager
def _without_split_k() -> Iterator[None]:
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
