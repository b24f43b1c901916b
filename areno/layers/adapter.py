"""The low-rank adapter of a linear layer (LoRA, arXiv 2106.09685). The layer calls it; nothing else knows of it.

It is divided over the tensor-parallel ranks as the layer is. A column-parallel layer divides outputs, so each rank has
its rows of B and all of A. A row-parallel layer divides inputs, so each rank has its columns of A and all of B; the
adapter's partial products are summed along with those of the layer. So no collective is added to the forward pass. In
the backward pass the ranks sum the gradient of the factor that they all hold.

Sampling has few rows, and a product of few rows costs about as much with some columns more. So A has a copy below the
layer's weight, as far as `make_room` was called: one product gives both. It is refreshed before sampling begins, by
`refresh`, and nothing else looks at it: see `sampling`.

Shape letters: N tokens, I input features, O output features, R rank times the number of A matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.adapters import Place, add_lora, add_lora_stacked, swiglu_stacked, tiles
from areno.kernels.backend import use_triton
from areno.kernels.matmul import add_product, fixed_order_product
from areno.layers.config import ROW_MULTIPLE, AdapterSpec
from areno.layers.shard import Layout, Part, WeightSpec

_is_sampling = False


@contextmanager
def sampling() -> Iterator[None]:
    """Within it adapters may use their copies of A, which training does not refresh."""
    global _is_sampling
    before, _is_sampling = _is_sampling, True
    try:
        yield
    finally:
        _is_sampling = before


class Adapter(nn.Module):
    """Of some projections of a layer whose weights are at `parts` of the layer's.

    groups: the numbers of the projections. Those of one group share an A, as those do that a checkpoint keeps as one;
    they are side by side in the layer.
    a: (R, I), the A matrices one below the other, so that one product serves all. b: (sum of the outputs, rank),
    likewise. on: without it the layer is as if it had no adapter. in_order: products may not divide the sum over I,
    whatever N; see areno/engine/exact.py.
    below: the layer's weight with a copy of A below it, (O + R or more, I), and its bias with zeros; None where no room
    was made.
    """

    def __init__(self, parts: Sequence[Part], groups: Sequence[Sequence[int]], adapters: AdapterSpec, spec: WeightSpec):
        super().__init__()
        self.groups = tuple(map(tuple, groups))
        self.tp, self.scaling, self.rank = spec.tp, adapters.scaling, adapters.rank
        self.divides_inputs = parts[0].dim == 1
        self.on, self.in_order = True, False
        rank, of_a, of_b, places, row = self.rank, [], [], [], 0
        for number, group in enumerate(self.groups):
            column, first_row = parts[group[0]].offset, row
            for part in (parts[index] for index in group):
                assert part.offset - column == row - first_row, "projections that share an A are not side by side"
                cut = {"dim": part.dim, "start": part.start, "size": part.size, "copies": part.copies}
                n_out, n_in = part.full_shape
                of_b.append(Part((n_out, rank), offset=row, **({} if self.divides_inputs else cut)))
                row += n_out if self.divides_inputs else part.size
            of_a.append(Part((rank, n_in), offset=number * rank, **(cut if self.divides_inputs else {})))
            places.append(Place(column, first_row, row - first_row))
        self.layout: Layout = {"a": tuple(of_a), "b": tuple(of_b)}
        self.places = tuple(places)
        n_in = parts[0].size if self.divides_inputs else parts[0].full_shape[1]
        self.a, self.b = spec.empty(len(groups) * rank, n_in), spec.empty(row, rank)
        self.register_buffer("tiles", tiles(self.places, rank, self.a.device), persistent=False)
        self.tiles: Tensor
        self.below: tuple[Tensor, Tensor | None] | None = None
        self._n_out = 0
        self._tiles_of_all: Tensor | None = None

    def forward(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """y with what the adapter adds, perhaps in place of y. x: as the layer multiplies it."""
        a, b = self.a, self.b
        if self.divides_inputs:
            b = self.tp.copy_in(b)
        else:
            a = self.tp.copy_in(a)
        return add_lora(y_NO, self.first_product(x_NI, a), b, self.places, self.tiles, self.scaling)

    def first_product(self, x_NI: Tensor, a_RI: Tensor | None = None) -> Tensor:
        """x A^T, (N, R). a: A where autograd is to go through what the ranks share."""
        a_RI = self.a if a_RI is None else a_RI
        if self.in_order and not torch.is_grad_enabled():
            return fixed_order_product(x_NI, a_RI, x_NI.dtype)
        return F.linear(x_NI, a_RI)

    # What sampling calls.

    @torch.no_grad()
    def make_room(self, weight_OI: nn.Parameter, bias_O: nn.Parameter | None) -> None:
        """Move the layer's weights to where A has room below them. Nothing without Triton, or a device.

        Not for a layer whose products are to be `in_order`.
        """
        if not use_triton(weight_OI) or weight_OI.is_meta:
            return
        n_out = len(weight_OI)
        end = -(-(n_out + len(self.a)) // ROW_MULTIPLE) * ROW_MULTIPLE
        weight = weight_OI.new_zeros((end, weight_OI.shape[1]))
        weight[:n_out] = weight_OI
        weight_OI.data, bias = weight[:n_out], None
        if bias_O is not None and not self.divides_inputs:  # partial products are summed before a bias is added
            bias = bias_O.new_zeros(end)
            bias[:n_out] = bias_O
            bias_O.data = bias[:n_out]
        self.below = weight, bias
        self._n_out, self._tiles_of_all = n_out, tiles(self.places, self.rank, weight.device, whole=n_out)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy A to where sampling reads it."""
        if self.below is not None:
            self.below[0][self._n_out : self._n_out + len(self.a)] = self.a

    @property
    def is_stacked(self) -> bool:
        """Whether the layer's own product is left to `output`, or `stacked_product`."""
        return self.below is not None and _is_sampling and self.on

    def stacked_product(self, x_NI: Tensor) -> Tensor:
        """x W^T (with the bias where outputs are divided) and x A^T side by side, (N, O + R or more)."""
        assert self.below is not None
        return F.linear(x_NI, *self.below)

    def output(self, x_NI: Tensor) -> Tensor:
        """What the layer and the adapter give together, (N, O)."""
        assert self._tiles_of_all is not None
        return add_lora_stacked(self.stacked_product(x_NI), self.b, self._tiles_of_all, self.scaling, self._n_out)

    def swiglu_stacked(self, both_NX: Tensor, gelu: bool) -> Tensor:
        """silu(gate) * up, (N, O / 2), of `stacked_product` where the layer gives gate and up side by side."""
        return swiglu_stacked(both_NX, self.b, self.places, self.scaling, self._n_out, gelu)

    # What the fused layers call, outside autograd.

    def add_input_gradient(self, grad_x_NI: Tensor, grad_NO: Tensor) -> Tensor:
        """The gradient of x through the layer, with that through the adapter added in place."""
        return grad_x_NI.addmm_(self._back(grad_NO), self.a)

    def accumulate(self, grad_NO: Tensor, x_NI: Tensor) -> None:
        """Add what one product contributes to the float32 gradients of a and b. Nothing where they are frozen."""
        if not (self.on and self.a.requires_grad):
            return
        assert self.a.grad is not None
        assert self.b.grad is not None
        h_NR, back_NR = self.first_product(x_NI), self._back(grad_NO)
        self.tp.all_reduce(h_NR if self.divides_inputs else back_NR)
        h_NR = h_NR * self.scaling
        for index, (column, row, size) in enumerate(self.places):
            h_Nr = h_NR[:, index * self.rank : (index + 1) * self.rank]
            add_product(self.b.grad[row : row + size], grad_NO[:, column : column + size].t(), h_Nr)
        add_product(self.a.grad, back_NR.t(), x_NI)

    def _back(self, grad_NO: Tensor) -> Tensor:
        """The gradient of the first product, (N, R), through this rank's outputs."""
        pieces = [grad_NO[:, column : column + size] @ self.b[row : row + size] for column, row, size in self.places]
        return torch.cat(pieces, dim=-1) * self.scaling

    # Outside training and decoding.

    @torch.no_grad()
    def init(self, generator: torch.Generator) -> None:
        """A uniform in +-1/sqrt(I), as peft has it, and B zero, so that the model starts as its base.

        The full tensors are drawn on the CPU: they depend on the generator alone, whatever the ranks and the device.
        """
        for part in self.layout["a"]:
            bound = 1.0 / math.sqrt(part.full_shape[1])
            full = torch.empty(part.full_shape).uniform_(-bound, bound, generator=generator)
            part.region(self.a).copy_(part.cut(full))
        self.b.detach().zero_()

    @torch.no_grad()
    def merged(self, weight_OI: Tensor) -> Tensor:
        """The layer's weight with the adapter's product added, computed in fp32: a copy."""
        out = weight_OI.detach().clone()
        for index, (column, row, size) in enumerate(self.places):
            a = self.a[index * self.rank : (index + 1) * self.rank].float()
            product = self.b[row : row + size].float() @ a
            out[column : column + size] = (out[column : column + size].float() + self.scaling * product).to(out.dtype)
        return out
