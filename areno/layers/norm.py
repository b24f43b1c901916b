"""Root-mean-square normalisation (arXiv 1910.07467), whole and sharded over the tensor-parallel ranks.

Shape letters: N tokens, D size of the norm, I this rank's slice of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.symmetric_memory import SymmetricMemory
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import Layout, Part, WeightSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with the mean in fp32.

    Args:
        size: D.
        eps: added to the mean.
        spec: dtype, device and ranks of the weight.
        own_data: each rank normalises its own heads with the same weight, so the gradient of the weight is summed over
            the ranks. Otherwise all ranks see the same x, or each a share of its rows; the gradient of the weight is
            partial in the latter case, see `Transformer.partial_gradients`.
        plus_one: the factor is 1 + weight, computed in fp32.
    """

    def __init__(self, size: int, eps: float, spec: WeightSpec, *, own_data: bool = False, plus_one: bool = False):
        super().__init__()
        self.eps, self.plus_one, self.own_data = eps, plus_one, own_data
        self.tp = spec.tp if own_data else ParallelGroup()
        self.weight = spec.empty(size)
        self.layout: Layout = {"weight": (Part((size,)),)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x (..., D), in its dtype."""
        if self.plus_one:
            factor = 1.0 + self.tp.copy_in(self.weight).float()
            return F.rms_norm(x.float(), factor.shape, factor, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.tp.copy_in(self.weight), self.eps)

    # Methods for fused layers, outside autograd and with Triton.

    def add_and_norm(self, x_ND: Tensor, delta_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add delta to x, and normalise the sum.

        Args:
            x_ND: the residual stream.
            delta_ND: the output to add. None: normalise x itself.

        Returns:
            The sum in the dtype of x, and its norm in the dtype of the weight.
        """
        from areno.kernels.elementwise.triton_norm import add_rms_norm

        return add_rms_norm(x_ND, delta_ND, self.weight, self.eps, self.plus_one)

    def add_parts_and_norm(self, x_ND: Tensor, part_ND: Tensor, memory: SymmetricMemory) -> tuple[Tensor, Tensor]:
        """Add the sum of `part` over the tensor-parallel ranks to x, and normalise the result.

        Args:
            x_ND: the residual stream.
            part_ND: this rank's partial sum.
            memory: the symmetric memory of the ranks.

        Returns:
            The sum in the dtype of x, and its norm in the dtype of the weight.
        """
        return memory.add_and_norm(x_ND, part_ND, self.weight, self.eps, self.plus_one)

    def sum_gradient(self, grad_ND: Tensor, grad_sum_ND: Tensor | None, sum_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of the residual stream before the norm. Adds to the gradient of the weight.

        Args:
            grad_ND: the gradient of the norm's output.
            grad_sum_ND: the gradient of the stream from its other uses. None: there are none.
            sum_ND: the stream, the first result of `add_and_norm`.

        Returns:
            The gradient in the dtype of sum, and in the dtype of grad.
        """
        from areno.kernels.elementwise.triton_norm import rms_norm_backward

        weight_grad = self.weight.grad if self.weight.requires_grad else None
        return rms_norm_backward(grad_ND, grad_sum_ND, sum_ND, self.weight, self.eps, weight_grad, self.plus_one)

    def accumulate(self, grad_D: Tensor) -> None:
        """Add a gradient that a kernel computed to the float32 gradient of the weight.

        Args:
            grad_D: the gradient from this rank's data.
        """
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            self.weight.grad.add_(self.tp.all_reduce(grad_D))


class ShardedRMSNorm(nn.Module):
    """The same norm of a vector of which each tensor-parallel rank holds a slice, as it does of the weight.

    Args:
        size: D over all ranks.
        eps: added to the mean.
        spec: dtype, device and ranks of the weight.
    """

    def __init__(self, size: int, eps: float, spec: WeightSpec):
        super().__init__()
        self.size, self.eps, self.tp = size, eps, spec.tp
        local = spec.tp.shard(size, "features of a norm")
        self.weight = spec.empty(local)
        self.layout: Layout = {"weight": (Part((size,), dim=0, start=spec.tp.rank * local, size=local),)}

    def forward(self, x_NI: Tensor) -> Tensor:
        """Return the norm of this rank's slice (N, I), in its dtype."""
        if self.tp.size == 1:
            return F.rms_norm(x_NI, self.weight.shape, self.weight, self.eps)
        squares_N1 = x_NI.float().square().sum(-1, keepdim=True)
        # The gradient of the sum of squares is partial on each rank, and `copy_in` sums it.
        mean_N1 = self.tp.copy_in(self.tp.reduce_out(squares_N1)) / self.size
        return (x_NI.float() * torch.rsqrt(mean_N1 + self.eps) * self.weight.float()).to(x_NI.dtype)

    def backward(self, grad_NI: Tensor, x_NI: Tensor) -> Tensor:
        """Compute the gradient of x, for the fused layers. Adds to the gradient of the weight.

        Args:
            grad_NI: the gradient of the output.
            x_NI: the input.

        Returns:
            (N, I).
        """
        with torch.enable_grad():
            x_NI = x_NI.detach().requires_grad_()
            wanted = [x_NI, self.weight] if self.weight.requires_grad else [x_NI]
            grads = torch.autograd.grad(self(x_NI), wanted, grad_NI)
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            self.weight.grad.add_(grads[1])
        return grads[0]
