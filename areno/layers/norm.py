"""Root-mean-square normalisation (arXiv 1910.07467).

Shape letters: N tokens, D size of the norm.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from areno.layers.parallel import ParallelGroup
from areno.layers.shard import Layout, Part, WeightSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean is taken in fp32 whatever the dtype of x.

    own_data: the ranks normalise different data with the same weight (each rank its own heads), so the gradient of the
    weight is summed over them. Otherwise all ranks see the same x. Or each sees a share of its rows; then the gradient
    of the weight is left in parts, see `Transformer.in_parts`.
    """

    def __init__(self, size: int, eps: float, spec: WeightSpec, *, own_data: bool = False):
        super().__init__()
        self.eps = eps
        self.own_data = own_data
        self.tp = spec.tp if own_data else ParallelGroup()
        self.weight = spec.empty(size)
        self.layout: Layout = {"weight": (Part((size,)),)}

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.tp.copy_in(self.weight), self.eps)

    # What the fused layers call, outside autograd and with Triton only.

    def add_and_norm(self, x_ND: Tensor, delta_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum x + delta (x itself where delta is None) and its norm: in the dtypes of x and of the weight."""
        from areno.kernels.elementwise.triton_norm import add_rms_norm

        return add_rms_norm(x_ND, delta_ND, self.weight, self.eps)

    def sum_gradient(self, grad_ND: Tensor, grad_sum_ND: Tensor | None, sum_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the sum, in the dtypes of the sum and of grad. Adds to the gradient of the weight.

        grad: of the norm. grad_sum: what the sum gets from elsewhere.
        """
        from areno.kernels.elementwise.triton_norm import rms_norm_backward

        weight_grad = self.weight.grad if self.weight.requires_grad else None
        return rms_norm_backward(grad_ND, grad_sum_ND, sum_ND, self.weight, self.eps, weight_grad)

    def accumulate(self, grad_D: Tensor) -> None:
        """Add to the float32 gradient of the weight what a kernel that applied this norm computed on this rank."""
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            self.weight.grad.add_(self.tp.all_reduce(grad_D))
