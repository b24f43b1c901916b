"""Linear layers sharded over the tensor-parallel ranks: by output (column-parallel) or by input (row-parallel).

With the argument `split` (sequence parallelism), each rank has n of the N tokens outside of attention and MLP, and the
layer gathers or scatters them. The layers in `models/fused.py` have backward passes without autograd, which call
`inner_gradient`, `input_gradient` and `accumulate_grad`.

Shape letters: N tokens, n = N / ranks tokens of one rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.fp8.matmul import QuantizedMatrix
from areno.kernels.matmul import FixedOrderMatmul, add_matmul
from areno.layers.adapter import Adapter
from areno.layers.config import AdapterSpec
from areno.layers.shard import Layout, TensorPart, WeightSpec, stacked_parts


class Linear(nn.Module):
    """Base class of column-parallel and row-parallel layers and of `Router`. Sizes and weights are those of this rank.

    `fixed_order`, if set, computes the product for `engine.exact`. `quantized`, if set, is the weight in FP8, and
    computes product and gradients; the weight itself may then have no memory (`has_weight`). `layout` lists, for
    "weight" and "bias", which rows or columns of which checkpoint tensors this rank has.
    """

    def __init__(self, out_size: int, in_size: int, spec: WeightSpec, *, bias: bool):
        super().__init__()
        self.tp = spec.tp
        self.weight = spec.empty(out_size, in_size)
        self.bias = spec.empty(out_size) if bias else None
        self.fixed_order: FixedOrderMatmul | None = None
        self.quantized: QuantizedMatrix | None = None
        self.has_weight = True
        self.layout: Layout = {}
        self.adapter: Adapter | None = None

    def add_adapter(self, groups: Sequence[Sequence[int]], adapters: AdapterSpec) -> Adapter:
        """Add a LoRA adapter with uninitialised weights. `groups` is explained at `Adapter`."""
        spec = WeightSpec(self.weight.dtype, self.weight.device, self.tp)
        self.adapter = Adapter(self.layout["weight"], groups, adapters, spec)
        return self.adapter

    def _add_adapter_output(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """Return `y_NO`, the output without adapter, plus the output of the adapter if there is one and it is on."""
        return self.adapter(y_NO, x_NI) if self.adapter is not None and self.adapter.on else y_NO

    def stacked_adapter(self) -> Adapter | None:
        """Return the adapter if the layer must now compute x W^T and x A^T in one product, else None."""
        return self.adapter if self.adapter is not None and self.adapter.is_stacked else None

    def merged_weight(self) -> Tensor:
        """Return the weight, and a copy of it with the adapter merged in if one is on. Dequantized if not in memory."""
        weight = self.weight
        if not self.has_weight:
            assert self.quantized is not None
            weight = self.quantized.dequantized(weight.dtype)
        return self.adapter.merged_weight(weight) if self.adapter is not None and self.adapter.on else weight

    @torch.no_grad()
    def free_weight(self) -> None:
        """Free the memory of the weight. Its shape and dtype stay, and `quantized` computes all products."""
        self.weight.data, self.has_weight = self.weight.new_zeros(1).expand(self.weight.shape), False

    def matmul(self, x_NI: Tensor) -> Tensor:
        """Return x W^T without bias and adapter."""
        if self.quantized is not None:
            return self.quantized.linear(x_NI, self.weight)
        return (
            F.linear(x_NI, self.weight) if self.fixed_order is None else self.fixed_order(x_NI, self.weight, x_NI.dtype)
        )

    def inner_gradient(self, grad_NO: Tensor) -> Tensor | None:
        """Return `Adapter.inner_gradient` for the next two functions, None without an adapter or if it is off."""
        return self.adapter.inner_gradient(grad_NO) if self.adapter is not None and self.adapter.on else None

    def accumulate_grad(
        self, grad_NO: Tensor, x_NI: Tensor, grad_h_NR: Tensor | None = None, is_rounded: bool = False
    ) -> None:
        """Add the gradients of weight, bias and adapter to their float32 `.grad`. Frozen parameters are skipped.

        With `is_rounded`, x is rounded as `quantized` does. There must be no adapter then.
        """
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            if self.quantized is not None:
                self.quantized.add_weight_gradient(self.weight.grad, grad_NO, x_NI, is_rounded)
            else:
                add_matmul(self.weight.grad, grad_NO.t(), x_NI)
        if self.bias is not None and self.bias.requires_grad:
            assert self.bias.grad is not None
            self.bias.grad.add_(grad_NO.sum(0, dtype=torch.float32))
        if self.adapter is not None and grad_h_NR is not None:
            self.adapter.accumulate_grad(grad_NO, x_NI, grad_h_NR)

    def input_gradient(self, grad_NO: Tensor, grad_h_NR: Tensor | None) -> Tensor:
        """Return the gradient with respect to x. If column-parallel, only this rank's outputs contribute."""
        grad_NI = grad_NO @ self.weight if self.quantized is None else self.quantized.input_gradient(grad_NO)
        if self.adapter is not None and grad_h_NR is not None:
            self.adapter.add_input_gradient(grad_NI, grad_h_NR)
        return grad_NI


class ColumnParallelLinear(Linear):
    """y = x W^T + b for one or several projections of the same input, computed as one matrix product.

    Each rank holds a slice of the outputs of every projection, side by side. `copies`: for each projection, the number
    of neighbouring ranks that hold the same slice (empty: 1 each). Each such rank computes the slice's gradient from
    its own heads only, so the gradients of all copies must be summed. `Transformer.partial_gradient_slices` lists these
    slices.
    """

    def __init__(
        self, in_size: int, out_sizes: Sequence[int], spec: WeightSpec, *, bias: bool, copies: Sequence[int] = ()
    ):
        copies = copies or [1] * len(out_sizes)
        local_sizes = tuple(
            spec.tp.shard_size(size * n, "output features") for size, n in zip(out_sizes, copies, strict=True)
        )
        super().__init__(sum(local_sizes), in_size, spec, bias=bias)
        self.local_sizes = local_sizes
        shapes = {"weight": [(size, in_size) for size in out_sizes], "bias": [(size,) for size in out_sizes]}
        self.layout = {name: stacked_parts(each, local_sizes, self.tp, copies) for name, each in shapes.items()}

    def forward(self, x_NI: Tensor, split: bool = False) -> Tensor:
        x_NI = self.tp.gather_rows(x_NI) if split else self.tp.copy_in(x_NI)
        if (adapter := self.stacked_adapter()) is not None:
            return adapter.layer_output(x_NI)
        if self.fixed_order is None and self.quantized is None:
            return self._add_adapter_output(F.linear(x_NI, self.weight, self.bias), x_NI)
        y_NO = self.matmul(x_NI)  # with bias, F.linear rounds once or twice, depending on the number of rows
        return self._add_adapter_output(y_NO if self.bias is None else y_NO.add_(self.bias), x_NI)

    def input_gradient(self, grad_NO: Tensor, grad_h_NR: Tensor | None, split: bool = False) -> Tensor:
        """Return the gradient with respect to x, summed over the ranks."""
        return self.sum_input_gradient(self.partial_input_gradient(grad_NO, grad_h_NR), split)

    def partial_input_gradient(
        self, grad_NO: Tensor, grad_h_NR: Tensor | None, codes: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return this rank's part. `codes`, if any, as in `QuantizedMatrix.input_gradient`; then without adapter."""
        if codes is None or self.quantized is None:
            return super().input_gradient(grad_NO, grad_h_NR)
        return self.quantized.input_gradient(grad_NO, codes)

    def sum_input_gradient(self, grad_NI: Tensor, split: bool = False) -> Tensor:
        """Return the gradient with respect to x, given this rank's `partial_input_gradient`."""
        return self.tp.reduce_scatter_rows(grad_NI) if split else self.tp.all_reduce(grad_NI)


class RowParallelLinear(Linear):
    """y = x W^T + b. Each rank has a slice of the input features, such as the output of a column-parallel layer."""

    def __init__(self, in_size: int, out_size: int, spec: WeightSpec, *, bias: bool):
        local = spec.tp.shard_size(in_size, "input features")
        super().__init__(out_size, local, spec, bias=bias)
        self.layout = {
            "weight": (TensorPart((out_size, in_size), dim=1, start=self.tp.rank * local, size=local),),
            "bias": (TensorPart((out_size,)),),
        }

    def forward(self, x_NI: Tensor, split: bool = False, whole: bool = True) -> Tensor:
        """Return the output, summed over the ranks. If not `whole`, return this rank's partial sum without bias."""
        adapter = self.stacked_adapter()
        y_NO = self._add_adapter_output(self.matmul(x_NI), x_NI) if adapter is None else adapter.layer_output(x_NI)
        return self.sum_over_ranks(y_NO, split) if whole else y_NO

    def sum_over_ranks(self, y_NO: Tensor, split: bool = False) -> Tensor:
        """Return the output, given this rank's partial sum. With `split`, of this rank's tokens."""
        y_NO = self.tp.scatter_rows(y_NO) if split else self.tp.reduce_out(y_NO)
        if self.bias is None:
            return y_NO
        return y_NO.add_(self.tp.copy_in(self.bias) if split else self.bias)
