"""Root-mean-square normalisation (arXiv 1910.07467).

Shape letters: N tokens, D size of the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.symmetric_memory import SymmetricMemory
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import Layout, Part, WeightSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean is taken in fp32 whatever the dtype of x.

    own_data: the ranks normalise different data with the same weight (each rank its own heads), so the gradient of the
    weight is summed over them. Otherwise all ranks see the same x. Or each sees a share of its rows; then the gradient
    of the weight is left in parts, see `Transformer.in_parts`.
    plus_one: the factor is 1 + weight, computed in fp32.
    """

    def __init__(self, size: int, eps: float, spec: WeightSpec, *, own_data: bool = False, plus_one: bool = False):
        super().__init__()
        self.eps, self.plus_one, self.own_data = eps, plus_one, own_data
        self.tp = spec.tp if own_data else ParallelGroup()
        self.weight = spec.empty(size)
        self.layout: Layout = {"weight": (Part((size,)),)}

    def forward(self, x: Tensor) -> Tensor:
        if self.plus_one:
            factor = 1.0 + self.tp.copy_in(self.weight).float()
            return F.rms_norm(x.float(), factor.shape, factor, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.tp.copy_in(self.weight), self.eps)

    # What the fused layers call, outside autograd and with Triton only.

    def add_and_norm(self, x_ND: Tensor, delta_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum x + delta (x itself where delta is None) and its norm: in the dtypes of x and of the weight."""
        from areno.kernels.elementwise.triton_norm import add_rms_norm

        return add_rms_norm(x_ND, delta_ND, self.weight, self.eps, self.plus_one)

    def add_parts_and_norm(self, x_ND: Tensor, part_ND: Tensor, memory: SymmetricMemory) -> tuple[Tensor, Tensor]:
        """As `add_and_norm`, where delta is the sum of what each rank of a tensor-parallel group gives."""
        return memory.add_and_norm(x_ND, part_ND, self.weight, self.eps, self.plus_one)

    def sum_gradient(self, grad_ND: Tensor, grad_sum_ND: Tensor | None, sum_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the sum, in the dtypes of the sum and of grad. Adds to the gradient of the weight.

        grad: of the norm. grad_sum: what the sum gets from elsewhere.
        """
        from areno.kernels.elementwise.triton_norm import rms_norm_backward

        weight_grad = self.weight.grad if self.weight.requires_grad else None
        return rms_norm_backward(grad_ND, grad_sum_ND, sum_ND, self.weight, self.eps, weight_grad, self.plus_one)

    def accumulate(self, grad_D: Tensor) -> None:
        """Add to the float32 gradient of the weight what a kernel that applied this norm computed on this rank."""
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            self.weight.grad.add_(self.tp.all_reduce(grad_D))


class ShardedRMSNorm(nn.Module):
    """The same norm over a vector that the tensor-parallel ranks hold a slice of each, as they do of the weight."""

    def __init__(self, size: int, eps: float, spec: WeightSpec):
        super().__init__()
        self.size, self.eps, self.tp = size, eps, spec.tp
        local = spec.tp.shard(size, "features of a norm")
        self.weight = spec.empty(local)
        self.layout: Layout = {"weight": (Part((size,), dim=0, start=spec.tp.rank * local, size=local),)}

    def forward(self, x_NI: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.rms_norm(x_NI, self.weight.shape, self.weight, self.eps)
        squares_N1 = x_NI.float().square().sum(-1, keepdim=True)
        # Each rank's part of the gradient of the sum comes from its own slice.
        mean_N1 = self.tp.copy_in(self.tp.reduce_out(squares_N1)) / self.size
        return (x_NI.float() * torch.rsqrt(mean_N1 + self.eps) * self.weight.float()).to(x_NI.dtype)

    def backward(self, grad_NI: Tensor, x_NI: Tensor) -> Tensor:
        """The gradient of x, for the fused layers. Adds to the gradient of the weight."""
        with torch.enable_grad():
            x_NI = x_NI.detach().requires_grad_()
            wanted = [x_NI, self.weight] if self.weight.requires_grad else [x_NI]
            grads = torch.autograd.grad(self(x_NI), wanted, grad_NI)
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            self.weight.grad.add_(grads[1])
        return grads[0]
