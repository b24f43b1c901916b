"""The second product of an adapter: y += scaling * h B^T, in the columns of each projection that has an adapter.

A fused layer has several projections side by side in y (N, O). h (N, P R) holds the first products, x A^T, of the P
adapted ones, R columns each. b (S, R) holds their B matrices one below the other. Projections that share an A count as
one.

Where A lies below the layer's weight, one product gives both (N, O + P R), y and h side by side. `add_below` and
`swiglu_below` go on from there, in the Triton form alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.adapters import reference
from areno.kernels.adapters.reference import TILE, Place, tiles
from areno.kernels.backend import use_triton

__all__ = ["TILE", "Place", "add_below", "add_up", "swiglu_below", "tiles"]


def add_up(
    y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, places: tuple[Place, ...], tiles_T4: Tensor, scaling: float
) -> Tensor:
    """The sum, perhaps in place of y. One order of operations for each row, whatever N.

    Under autograd the plain form runs: the Triton kernel has no backward pass.
    """
    if use_triton(y_NO) and not torch.is_grad_enabled():
        from areno.kernels.adapters.triton import add_up as kernel

        return kernel(y_NO, h_NR, b_SR, tiles_T4, scaling)
    return reference.add_up(y_NO, h_NR, b_SR, places, scaling)


def add_below(both_NX: Tensor, b_SR: Tensor, tiles_T4: Tensor, scaling: float, n_columns: int) -> Tensor:
    """y with what the adapter adds, (N, O). tiles: of all O columns."""
    from areno.kernels.adapters.triton import add_below as kernel

    return kernel(both_NX, b_SR, tiles_T4, scaling, n_columns)


def swiglu_below(
    both_NX: Tensor, b_SR: Tensor, places: tuple[Place, ...], scaling: float, n_columns: int, gelu: bool
) -> Tensor:
    """silu(gate) * up, (N, I), of y with what the adapter adds: gate and up side by side, n_columns together."""
    from areno.kernels.adapters.triton import swiglu_below as kernel

    return kernel(both_NX, b_SR, places, scaling, n_columns, gelu)
