"""Matrix products that add into a buffer of higher precision than their factors: weight gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, in the precision of out where the device can multiply so."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += torch.mm(a, b)
