"""What matrix products need beside torch: sums in a higher precision than their factors', and more rows."""

from __future__ import annotations

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
    from areno.kernels.products.triton import unsplit_product as product

    return product(x_NI, weight_OI, dtype)
