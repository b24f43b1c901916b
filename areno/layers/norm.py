"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.layers.parallel import TensorParallel
from areno.layers.shard import Layout, Part


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean is taken in fp32 whatever the dtype of x.

    tp: give it where the ranks normalise different data with the same weight (each its own heads), so that the
    weight's gradient is summed over them; leave it out where all ranks see the same x.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tp: TensorParallel | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.tp = tp or TensorParallel()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.layout: Layout = {"weight": (Part((size,)),)}

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.tp.copy_in(self.weight), self.eps)
