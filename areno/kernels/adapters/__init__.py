"""The second matrix product of LoRA adapters: y += scaling * h B^T, where h = x A^T is the first product.

A fused linear layer has several projections side by side in its output y (N, O). P of them have an adapter of rank R,
and only the columns of these projections change. h (N, P R) has R columns for each of them. b (S, R) holds
their B matrices, stacked by rows. Projections that share an A matrix count as one. `scaling` is alpha / rank, and
`tiles_T4` the result of `tiles(slices, rank, device)`.

During sampling, A is stacked below the layer's weight, so one product gives y and h side by side, (N, X = O + P R or
more). `add_lora_stacked` and `swiglu_stacked` of `triton.py` take this stacked output.

A row's result does not depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.adapters import reference
from areno.kernels.adapters.reference import TILE, AdapterSlice, column_tiles
from areno.kernels.backend import can_use_triton

__all__ = ["TILE", "AdapterSlice", "add_lora", "column_tiles"]


def add_lora(
    y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, slices: tuple[AdapterSlice, ...], tiles_T4: Tensor, scaling: float
) -> Tensor:
    """Return y + scaling * h B^T. Triton changes `y_NO` in place. Plain torch, which autograd needs, copies `y_NO`."""
    if can_use_triton(y_NO) and not torch.is_grad_enabled():
        from areno.kernels.adapters.triton import add_lora as kernel

        return kernel(y_NO, h_NR, b_SR, tiles_T4, scaling)
    return reference.add_lora(y_NO, h_NR, b_SR, slices, scaling)
