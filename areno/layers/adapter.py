"""The low-rank adapter of a linear layer (LoRA, arXiv 2106.09685). The layer calls it; nothing else knows of it.

It is divided over the tensor-parallel ranks as the layer is. A column-parallel layer divides outputs, so each rank has
its rows of B and all of A. A row-parallel layer divides inputs, so each rank has its columns of A and all of B; the
adapter's partial products are summed along with those of the layer. So no collective is added to the forward pass. In
the backward pass the ranks sum the gradient of the factor that they all hold.

Shape letters: N tokens, I input features, O output features, R rank times the number of A matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.adapters import Place, add_up, tiles
from areno.kernels.products import add_product, unsplit_product
from areno.layers.adapter_config import AdapterSpec
from areno.layers.shard import Layout, Part, WeightSpec


class Adapter(nn.Module):
    """Of some projections of a layer whose weights are at `parts` of the layer's.

    groups: the numbers of the projections. Those of one group share an A, as those do that a checkpoint keeps as one;
    they are side by side in the layer.
    a: (R, I), the A matrices one below the other, so that one product serves all. b: (sum of the outputs, rank),
    likewise. on: without it the layer is as if it had no adapter. in_order: products may not divide the sum over I,
    whatever N; see areno/engine/same_bits/exact.py.
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

    def forward(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """y with what the adapter adds, perhaps in place of y. x: as the layer multiplies it."""
        a, b = self.a, self.b
        if self.divides_inputs:
            b = self.tp.copy_in(b)
        else:
            a = self.tp.copy_in(a)
        return add_up(y_NO, self.first_product(x_NI, a), b, self.places, self.tiles, self.scaling)

    def first_product(self, x_NI: Tensor, a_RI: Tensor | None = None) -> Tensor:
        """x A^T, (N, R). a: A where autograd is to go through what the ranks share."""
        a_RI = self.a if a_RI is None else a_RI
        if self.in_order and not torch.is_grad_enabled():
            return unsplit_product(x_NI, a_RI, x_NI.dtype)
        return F.linear(x_NI, a_RI)

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
