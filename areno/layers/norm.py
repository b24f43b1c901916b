"""Root-mean-square normalisation (arXiv 1910.07467). Tensor-parallel ranks hold the whole weight or a slice of it.

Shape letters: N tokens, D size of the norm, I this rank's slice of D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.symmetric_memory import SymmetricMemory
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import Layout, TensorPart, WeightSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with the mean in fp32.

    With `plus_one`, the factor is 1 + weight, in fp32. With `own_data`, each tensor-parallel rank normalises different
    features with the same weight, such as its own heads, and this layer sums the weight's gradient over the ranks.
    Without `own_data`, the ranks have the same x, or with sequence parallelism different tokens. In the second case,
    the weight's gradient must still be summed, and `Transformer.partial_gradient_slices` lists it.
    """

    def __init__(self, size: int, eps: float, spec: WeightSpec, *, own_data: bool = False, plus_one: bool = False):
        super().__init__()
        self.eps, self.plus_one, self.own_data = eps, plus_one, own_data
        self.tp = spec.tp if own_data else ParallelGroup()
        self.weight = spec.empty(size)
        self.layout: Layout = {"weight": (TensorPart((size,)),)}

    def forward(self, x: Tensor) -> Tensor:
        if self.plus_one:
            factor = 1.0 + self.tp.copy_in(self.weight).float()
            return F.rms_norm(x.float(), factor.shape, factor, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.tp.copy_in(self.weight), self.eps)

    def norm_heads_with(self, other: RMSNorm, x_NJD: Tensor, n_own: int) -> Tensor:
        """Norm the first `n_own` heads with this norm and the remaining heads with `other`. float32, no autograd."""
        size, n_other = len(self.weight), x_NJD.shape[1] - n_own
        factors_JD = torch.cat((self.weight.expand(n_own, size), other.weight.expand(n_other, size)))
        return F.rms_norm(x_NJD, (size,), None, self.eps).mul_(1.0 + factors_JD if self.plus_one else factors_JD)

    # Methods for fused layers, outside autograd and with Triton.

    def add_and_norm(self, x_ND: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + delta in the dtype of x, and the norm of this sum in the dtype of the weight.

        `delta` is (N, D), or (parts, N, D) to be summed over the parts, or None for 0.
        """
        from areno.kernels.elementwise.triton_norm import add_rms_norm

        return add_rms_norm(x_ND, delta, self.weight, self.eps, self.plus_one)

    def add_parts_and_norm(self, x_ND: Tensor, part_ND: Tensor, memory: SymmetricMemory) -> tuple[Tensor, Tensor]:
        """Do `add_and_norm`, where delta is the sum of `part_ND` over the ranks. All ranks must call this."""
        return memory.add_and_norm(x_ND, part_ND, self.weight, self.eps, self.plus_one)

    def add_and_norm_backward(
        self, grad_ND: Tensor, grad_sum_ND: Tensor | None, sum_ND: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient with respect to the norm's input `sum_ND` twice: in its dtype and in that of `grad_ND`.

        `grad_sum_ND` is the gradient that reaches the residual stream past the norm. The gradient of the weight is
        added to its `.grad`.
        """
        from areno.kernels.elementwise.triton_norm import rms_norm_backward

        weight_grad = self.weight.grad if self.weight.requires_grad else None
        return rms_norm_backward(grad_ND, grad_sum_ND, sum_ND, self.weight, self.eps, weight_grad, self.plus_one)

    def accumulate_grad(self, grad_D: Tensor) -> None:
        """Add `grad_D` to the weight's float32 `.grad` unless it is frozen. With `own_data`, sum over ranks first."""
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            self.weight.grad.add_(self.tp.all_reduce(grad_D))


class ShardedRMSNorm(nn.Module):
    """RMS norm of a vector that is divided over the tensor-parallel ranks, as is the weight."""

    def __init__(self, size: int, eps: float, spec: WeightSpec):
        super().__init__()
        self.size, self.eps, self.tp = size, eps, spec.tp
        local = spec.tp.shard_size(size, "features of a norm")
        self.weight = spec.empty(local)
        self.layout: Layout = {"weight": (TensorPart((size,), dim=0, start=spec.tp.rank * local, size=local),)}

    def forward(self, x_NI: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.rms_norm(x_NI, self.weight.shape, self.weight, self.eps)
        squares_N1 = x_NI.float().square().sum(-1, keepdim=True)
        # The gradient of the sum of squares is partial on each rank, and `copy_in` sums it.
        mean_N1 = self.tp.copy_in(self.tp.reduce_out(squares_N1)) / self.size
        return (x_NI.float() * torch.rsqrt(mean_N1 + self.eps) * self.weight.float()).to(x_NI.dtype)

    def backward(self, grad_NI: Tensor, x_NI: Tensor) -> Tensor:
        """Return the gradient with respect to x, and add the gradient of the weight to its `.grad`."""
        with torch.enable_grad():
            x_NI = x_NI.detach().requires_grad_()
            wanted = [x_NI, self.weight] if self.weight.requires_grad else [x_NI]
            grads = torch.autograd.grad(self(x_NI), wanted, grad_NI)
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            self.weight.grad.add_(grads[1])
        return grads[0]
