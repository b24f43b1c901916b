"""Linear layers divided over the tensor-parallel ranks: by output (column) or by input (row).

Shape letters: N tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.layers.parallel import TensorParallel
from areno.layers.shard import Layout, Part


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b for one or several projections of the same input, computed as one matrix product.

    Each rank holds a slice of every projection's outputs; `out_sizes` are the full sizes. The output is this rank's
    slices side by side, `local_sizes` wide. The input is the same on every rank.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.tp = tp
        self.local_sizes = tuple(tp.shard(size, "output features") for size in out_sizes)
        rows = sum(self.local_sizes)
        self.weight = nn.Parameter(torch.empty(rows, in_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if bias else None
        weights, biases, offset = [], [], 0
        for full, local in zip(out_sizes, self.local_sizes, strict=True):
            place = {"offset": offset, "dim": 0, "start": tp.rank * local, "size": local}
            weights.append(Part((full, in_size), **place))
            biases.append(Part((full,), **place))
            offset += local
        self.layout: Layout = {"weight": tuple(weights), "bias": tuple(biases)}

    def forward(self, x_NI: Tensor) -> Tensor:
        return F.linear(self.tp.copy_in(x_NI), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x W^T + b where each rank holds a slice of the input features, as a column-parallel layer leaves them.

    The ranks' partial products are summed; the output is the same on every rank.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.tp = tp
        local = tp.shard(in_size, "input features")
        self.weight = nn.Parameter(torch.empty(out_size, local, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=device)) if bias else None
        self.layout: Layout = {
            "weight": (Part((out_size, in_size), dim=1, start=tp.rank * local, size=local),),
            "bias": (Part((out_size,)),),
        }

    def forward(self, x_NI: Tensor) -> Tensor:
        y_NO = self.tp.reduce_out(F.linear(x_NI, self.weight))
        return y_NO if self.bias is None else y_NO + self.bias
