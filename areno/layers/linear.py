"""Linear layers divided over the tensor-parallel ranks: by output (column) or by input (row).

The fused layers of `models/fused.py` write their backward pass out: they call `input_gradient` and `accumulate`.

Shape letters: N tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.matmul import FixedOrderProduct, add_product
from areno.layers.adapter import Adapter
from areno.layers.config import AdapterSpec
from areno.layers.shard import Layout, Part, WeightSpec


class Linear(nn.Module):
    """What both kinds share: `weight` (O, I) and `bias` (O,) or None, of this rank.

    split (of the methods): outside of such a pair of layers the ranks have a share of the tokens each, n of N.
    unsplit: None, or how products are computed so that a row has the same bits beside any others; see
    areno/engine/exact.py.
    """

    def __init__(self, out_size: int, in_size: int, spec: WeightSpec, *, bias: bool):
        super().__init__()
        self.tp = spec.tp
        self.weight = spec.empty(out_size, in_size)
        self.bias = spec.empty(out_size) if bias else None
        self.unsplit: FixedOrderProduct | None = None
        self.layout: Layout = {}
        self.adapter: Adapter | None = None

    def add_adapter(self, groups: Sequence[Sequence[int]], adapters: AdapterSpec) -> Adapter:
        """Give these of the layer's projections an adapter, with uninitialised weights; see Adapter for the groups."""
        spec = WeightSpec(self.weight.dtype, self.weight.device, self.tp)
        self.adapter = Adapter(self.layout["weight"], groups, adapters, spec)
        return self.adapter

    def _adapted(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """y = x W^T with what the adapter adds."""
        return self.adapter(y_NO, x_NI) if self.adapter is not None and self.adapter.on else y_NO

    def adapter_below(self) -> Adapter | None:
        """The adapter whose first product is computed along with the layer's; see there."""
        return self.adapter if self.adapter is not None and self.adapter.is_stacked else None

    def merged_weight(self) -> Tensor:
        """The weight with what the adapter adds: itself, or a copy."""
        return self.adapter.merged(self.weight) if self.adapter is not None and self.adapter.on else self.weight

    def product(self, x_NI: Tensor) -> Tensor:
        """x W^T."""
        return F.linear(x_NI, self.weight) if self.unsplit is None else self.unsplit(x_NI, self.weight, x_NI.dtype)

    def accumulate(self, grad_NO: Tensor, x_NI: Tensor) -> None:
        """Add what one product contributes to the float32 gradients of weight, bias and adapter.

        What is frozen has none.
        """
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            add_product(self.weight.grad, grad_NO.t(), x_NI)
        if self.bias is not None and self.bias.requires_grad:
            assert self.bias.grad is not None
            self.bias.grad.add_(grad_NO.sum(0, dtype=torch.float32))
        if self.adapter is not None:
            self.adapter.accumulate(grad_NO, x_NI)

    def _input_gradient(self, grad_NO: Tensor) -> Tensor:
        grad_NI = grad_NO @ self.weight
        if self.adapter is not None and self.adapter.on:
            self.adapter.add_input_gradient(grad_NI, grad_NO)
        return grad_NI


class ColumnParallelLinear(Linear):
    """y = x W^T + b for one or several projections of the same input, computed as one matrix product.

    Each rank holds a slice of every projection's outputs; `out_sizes` are the full sizes. The output is this rank's
    slices side by side, `local_sizes` wide. The input is the same on every rank.
    copies: for each projection, how many ranks hold the same slice of it; () is one. The gradients of such a slice are
    those of each rank's own outputs: `Transformer.in_parts` names them to who sums them.
    """

    def __init__(
        self, in_size: int, out_sizes: Sequence[int], spec: WeightSpec, *, bias: bool, copies: Sequence[int] = ()
    ):
        copies = copies or [1] * len(out_sizes)
        local_sizes = tuple(
            spec.tp.shard(size * n, "output features") for size, n in zip(out_sizes, copies, strict=True)
        )
        super().__init__(sum(local_sizes), in_size, spec, bias=bias)
        self.local_sizes = local_sizes
        weights, biases, offset = [], [], 0
        for full, local, n in zip(out_sizes, self.local_sizes, copies, strict=True):
            place = {"offset": offset, "dim": 0, "start": self.tp.rank // n * local, "size": local, "copies": n}
            weights.append(Part((full, in_size), **place))
            biases.append(Part((full,), **place))
            offset += local
        self.layout = {"weight": tuple(weights), "bias": tuple(biases)}

    def forward(self, x_NI: Tensor, split: bool = False) -> Tensor:
        """(N, I), or (n, I) if split, to (N, O)."""
        x_NI = self.tp.join(x_NI) if split else self.tp.copy_in(x_NI)
        if (adapter := self.adapter_below()) is not None:
            return adapter.output(x_NI)
        if self.unsplit is None:
            return self._adapted(F.linear(x_NI, self.weight, self.bias), x_NI)
        y_NO = self.product(x_NI)  # with the bias, a library would round once or twice by the number of rows
        return self._adapted(y_NO if self.bias is None else y_NO.add_(self.bias), x_NI)

    def input_gradient(self, grad_NO: Tensor, split: bool = False) -> Tensor:
        """The gradient of x, summed over the ranks: that of this rank's share if split."""
        grad_NI = self._input_gradient(grad_NO)
        return self.tp.summed(grad_NI) if split else self.tp.all_reduce(grad_NI)


class RowParallelLinear(Linear):
    """y = x W^T + b where each rank holds a slice of the input features, as a column-parallel layer leaves them.

    The ranks' partial products are summed; the output is the same on every rank, or each has its share of the tokens.
    """

    def __init__(self, in_size: int, out_size: int, spec: WeightSpec, *, bias: bool):
        local = spec.tp.shard(in_size, "input features")
        super().__init__(out_size, local, spec, bias=bias)
        self.layout = {
            "weight": (Part((out_size, in_size), dim=1, start=self.tp.rank * local, size=local),),
            "bias": (Part((out_size,)),),
        }

    def forward(self, x_NI: Tensor, split: bool = False, whole: bool = True) -> Tensor:
        """(N, I) to (N, O), or to (n, O) if split. Not `whole`: this rank's part of the sum, without the bias."""
        adapter = self.adapter_below()
        y_NO = self._adapted(self.product(x_NI), x_NI) if adapter is None else adapter.output(x_NI)
        if not whole:
            return y_NO
        y_NO = self.tp.sum_out(y_NO) if split else self.tp.reduce_out(y_NO)
        if self.bias is None:
            return y_NO
        return y_NO.add_(self.tp.copy_in(self.bias) if split else self.bias)

    def input_gradient(self, grad_NO: Tensor) -> Tensor:
        """The gradient of this rank's slice of x."""
        return self._input_gradient(grad_NO)
