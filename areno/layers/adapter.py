"""LoRA adapters of linear layers (arXiv 2106.09685): y = x W^T + scaling * (x A^T) B^T. `Linear` calls them.

An adapter is sharded as its layer is. In a column-parallel layer each rank has all of A and its rows of B. In a
row-parallel layer each rank has its columns of A and all of B, and the adapter's partial sums are reduced together with
those of the layer. So the adapter needs no collective in the forward pass. In the backward pass, the gradient of the
matrix that every rank has in full (A or B) is reduced over the ranks.

For sampling, `Adapter.stack` places a copy of A below the layer's weight, so that one product gives both x W^T and x
A^T. This is faster, because a product with few rows costs little more with more columns. The copy is used only within
the context manager `use_stacked_adapters`. `refresh_stacked` updates the copy before sampling begins.

Shape letters: N tokens, I input features, O output features, R = rank times the number of A matrices; X columns of the
stacked product, at least O + R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.adapters import AdapterSlice, add_lora, column_tiles
from areno.kernels.backend import can_use_triton
from areno.kernels.matmul import add_matmul, fixed_order_matmul
from areno.layers.config import ROW_MULTIPLE, AdapterSpec
from areno.layers.shard import Layout, TensorPart, WeightSpec

_is_sampling = False


@contextmanager
def use_stacked_adapters() -> Iterator[None]:
    """Let layers use the stacked copies of A inside the `with` block. Call `Adapter.refresh_stacked` before."""
    global _is_sampling
    before, _is_sampling = _is_sampling, True
    try:
        yield
    finally:
        _is_sampling = before


@torch.no_grad()
def draw_adapter(parts_of_a: Sequence[TensorPart], a: Tensor, b: Tensor, generator: torch.Generator) -> None:
    """Draw A uniformly from +-1/sqrt(I), as peft does, and set B to zero, so that the adapter changes nothing yet.

    The full tensors are drawn on the CPU, so the values do not depend on the number of ranks or the device.
    """
    drawn = torch.zeros(a.shape)  # of all parts, as experts have thousands, each too small for a copy of its own
    for part in parts_of_a:
        bound = 1.0 / math.sqrt(part.full_shape[1])
        full = torch.empty(part.full_shape).uniform_(-bound, bound, generator=generator)
        part.region(drawn).copy_(part.shard_of(full))
    a.detach().copy_(drawn)
    b.detach().zero_()


class Adapter(nn.Module):
    """The LoRA adapters of some projections of one linear layer.

    `groups` lists indices of projections. Those in one group share one A, because the checkpoint stores them as one
    matrix. They must be neighbours in the layer.

    Attributes:
        a: the A matrices, stacked (R, I), so that one product computes x A^T for all of them.
        b: the B matrices, stacked (sum of the output sizes, rank).
        layout: for "a" and "b", which rows or columns of which checkpoint tensors this rank has.
        slices: for each A, the columns of the layer's output and the rows of `b` that belong to it.
        on: if False, the layer computes as if it had no adapter.
        in_order: whether products sum in a fixed order, for `engine.exact`.
        stacked: (the layer's weight with a copy of A below it, (X, I); the bias padded with zeros, or None). None
            before `stack` is called.
    """

    def __init__(
        self, parts: Sequence[TensorPart], groups: Sequence[Sequence[int]], adapters: AdapterSpec, spec: WeightSpec
    ):
        super().__init__()
        self.groups = tuple(map(tuple, groups))
        self.tp, self.scaling, self.rank = spec.tp, adapters.scaling, adapters.rank
        self.row_parallel = parts[0].dim == 1
        self.on, self.in_order = True, False
        rank, of_a, of_b, slices, row = self.rank, [], [], [], 0
        for number, group in enumerate(self.groups):
            column, first_row = parts[group[0]].offset, row
            for part in (parts[index] for index in group):
                assert part.offset - column == row - first_row, "projections that share an A are not neighbours"
                cut = {"dim": part.dim, "start": part.start, "size": part.size, "copies": part.copies}
                n_out, n_in = part.full_shape
                of_b.append(TensorPart((n_out, rank), offset=row, **({} if self.row_parallel else cut)))
                row += n_out if self.row_parallel else part.size
            of_a.append(TensorPart((rank, n_in), offset=number * rank, **(cut if self.row_parallel else {})))
            slices.append(AdapterSlice(column, first_row, row - first_row))
        self.layout: Layout = {"a": tuple(of_a), "b": tuple(of_b)}
        self.slices = tuple(slices)
        n_in = parts[0].size if self.row_parallel else parts[0].full_shape[1]
        self.a, self.b = spec.empty(len(groups) * rank, n_in), spec.empty(row, rank)
        self.register_buffer("tiles", column_tiles(self.slices, rank, self.a.device), persistent=False)
        self.tiles: Tensor
        self.stacked: tuple[Tensor, Tensor | None] | None = None
        self._n_out = 0
        self._tiles_of_all: Tensor | None = None

    def forward(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """Return `y_NO`, the output of the layer, plus the adapter's output. May change `y_NO` in place."""
        a, b = self.a, self.b
        if self.row_parallel:
            b = self.tp.copy_in(b)
        else:
            a = self.tp.copy_in(a)
        return add_lora(y_NO, self.project_a(x_NI, a), b, self.slices, self.tiles, self.scaling)

    def project_a(self, x_NI: Tensor, a_RI: Tensor | None = None) -> Tensor:
        """Return x A^T, (N, R). Pass `a_RI` = copy_in(A) if the backward pass must sum the gradient of A over ranks."""
        a_RI = self.a if a_RI is None else a_RI
        if self.in_order and not torch.is_grad_enabled():
            return fixed_order_matmul(x_NI, a_RI, x_NI.dtype)
        return F.linear(x_NI, a_RI)

    # Methods for sampling.

    @torch.no_grad()
    def stack(self, weight_OI: nn.Parameter, bias_O: nn.Parameter | None) -> None:
        """Move the layer's weight into a tensor with more rows, for a copy of the LoRA matrix A under the weight.

        A column-parallel bias gets such a tensor, too. The parameters become views of these tensors. Does nothing
        without Triton kernels or on `meta`. Must not be called with `in_order`.
        """
        if not can_use_triton(weight_OI) or weight_OI.is_meta:
            return
        n_out = len(weight_OI)
        end = -(-(n_out + len(self.a)) // ROW_MULTIPLE) * ROW_MULTIPLE
        weight = weight_OI.new_zeros((end, weight_OI.shape[1]))
        weight[:n_out] = weight_OI
        weight_OI.data, bias = weight[:n_out], None
        if bias_O is not None and not self.row_parallel:  # row-parallel: the bias is added after the sum over the ranks
            bias = bias_O.new_zeros(end)
            bias[:n_out] = bias_O
            bias_O.data = bias[:n_out]
        self.stacked = weight, bias
        self._n_out, self._tiles_of_all = n_out, column_tiles(self.slices, self.rank, weight.device, whole=n_out)

    @torch.no_grad()
    def refresh_stacked(self) -> None:
        if self.stacked is not None:
            self.stacked[0][self._n_out : self._n_out + len(self.a)] = self.a

    @property
    def is_stacked(self) -> bool:
        """Whether `stacked_product` is used: in `use_stacked_adapters`, if A is stacked and `on` is set."""
        return self.stacked is not None and _is_sampling and self.on

    def stacked_product(self, x_NI: Tensor) -> Tensor:
        """Return (N, X): the columns of x W^T (plus a column-parallel bias), of x A^T, and zeros as padding."""
        assert self.stacked is not None
        return F.linear(x_NI, *self.stacked)

    def layer_output(self, x_NI: Tensor) -> Tensor:
        """Return the layer's output with the adapter's. Column-parallel: with bias. Row-parallel: a partial sum."""
        assert self._tiles_of_all is not None
        from areno.kernels.adapters.triton import add_lora_stacked

        return add_lora_stacked(self.stacked_product(x_NI), self.b, self._tiles_of_all, self.scaling, self._n_out)

    def swiglu_stacked(self, both_NX: Tensor, gelu: bool) -> Tensor:
        """Return silu(gate) * up from `both_NX`, a stacked product. `gelu`: tanh form of GELU in place of SiLU."""
        from areno.kernels.adapters.triton import swiglu_stacked

        return swiglu_stacked(both_NX, self.b, self.slices, self.scaling, self._n_out, gelu)

    # Methods for fused layers, outside autograd.

    def inner_gradient(self, grad_NO: Tensor) -> Tensor:
        """Return the gradient with respect to x A^T, (N, R), from this rank's outputs only."""
        grad_h_NR = grad_NO.new_empty((len(grad_NO), len(self.a)))
        for index, (column, row, size) in enumerate(self.slices):
            grad_h_Nr = grad_h_NR[:, index * self.rank : (index + 1) * self.rank]
            given = grad_NO[:, column : column + size], self.b[row : row + size]
            grad_h_Nr.addmm_(*given, beta=0, alpha=self.scaling)
        return grad_h_NR

    def add_input_gradient(self, grad_x_NI: Tensor, grad_h_NR: Tensor) -> Tensor:
        """Add the gradient of x through the adapter in place to `grad_x_NI`, the gradient of x through W."""
        return grad_x_NI.addmm_(grad_h_NR, self.a)

    def accumulate_grad(self, grad_NO: Tensor, x_NI: Tensor, grad_h_NR: Tensor) -> None:
        """Add the gradients of A and B to their float32 `.grad`, unless they are frozen."""
        if not self.a.requires_grad:
            return
        assert self.a.grad is not None
        assert self.b.grad is not None
        h_NR = self.project_a(x_NI)
        if self.row_parallel:
            self.tp.all_reduce(h_NR)
        elif self.tp.size > 1:  # the sum is in place, and the input's gradient needs this rank's part
            grad_h_NR = self.tp.all_reduce(grad_h_NR.clone())
        for index, (column, row, size) in enumerate(self.slices):
            h_Nr = h_NR[:, index * self.rank : (index + 1) * self.rank]
            add_matmul(self.b.grad[row : row + size], grad_NO[:, column : column + size].t(), h_Nr, self.scaling)
        add_matmul(self.a.grad, grad_h_NR.t(), x_NI)

    # Methods outside of training and decoding.

    def init_weights(self, generator: torch.Generator) -> None:
        draw_adapter(self.layout["a"], self.a, self.b, generator)

    @torch.no_grad()
    def merged_weight(self, weight_OI: Tensor) -> Tensor:
        """Compute weight + scaling * B A in fp32, and return it in the dtype of the weight."""
        out = weight_OI.detach().clone()
        for index, (column, row, size) in enumerate(self.slices):
            a = self.a[index * self.rank : (index + 1) * self.rank].float()
            product = self.b[row : row + size].float() @ a
            out[column : column + size] = (out[column : column + size].float() + self.scaling * product).to(out.dtype)
        return out
