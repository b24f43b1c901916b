"""The second matrix product of LoRA adapters: y += scaling * h B^T, where h = x A^T is the first product.

A fused linear layer has several projections side by side in its output y (N, O). P of them have an adapter of rank R,
and only the columns of these projections change. h (N, P R) has R columns for each adapted projection. b (S, R) holds
their B matrices, stacked by rows. Projections that share an A matrix count as one.

During sampling, A is stacked below the layer's weight, so one product gives y and h side by side, (N, X = O + P R or
more). `add_lora_stacked` and `swiglu_stacked` take this stacked output. They exist as Triton kernels only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.adapters import reference
from areno.kernels.adapters.reference import TILE, Place, tiles
from areno.kernels.backend import use_triton

__all__ = ["TILE", "Place", "add_lora", "add_lora_stacked", "swiglu_stacked", "tiles"]


def add_lora(
    y_NO: Tensor, h_NR: Tensor, b_SR: Tensor, places: tuple[Place, ...], tiles_T4: Tensor, scaling: float
) -> Tensor:
    """Add the LoRA adapters to the output of a layer: y + scaling * h B^T.

    A row's result does not depend on the number of rows. Under autograd the torch reference runs, as the Triton kernel
    has no backward pass.

    Args:
        y_NO: output of the layer, (tokens, outputs). Changed in place by the Triton kernel.
        h_NR: first products h = x A^T, R columns for each adapted projection.
        b_SR: B matrices of all adapted projections, stacked.
        places: for each adapted projection, its columns in the layer's output and its rows in b_SR.
        tiles_T4: result of `tiles(places, rank, device)`, on the device of y.
        scaling: alpha / rank.

    Returns:
        (N, O) in the dtype of y. `y_NO` itself with Triton, a new tensor otherwise.
    """
    if use_triton(y_NO) and not torch.is_grad_enabled():
        from areno.kernels.adapters.triton import add_lora as kernel

        return kernel(y_NO, h_NR, b_SR, tiles_T4, scaling)
    return reference.add_lora(y_NO, h_NR, b_SR, places, scaling)


def add_lora_stacked(both_NX: Tensor, b_SR: Tensor, tiles_T4: Tensor, scaling: float, n_columns: int) -> Tensor:
    """Return a layer's output with its LoRA adapters added, from the stacked output [y, h]. Needs Triton.

    Args:
        both_NX: output y of the layer and first products h = x A^T, side by side.
        b_SR: B matrices of all adapted projections, stacked.
        tiles_T4: result of `tiles(places, rank, device, whole=n_columns)`, on the device of y.
        scaling: alpha / rank.
        n_columns: number of columns of y, O.

    Returns:
        y + scaling * h B^T, (N, O) in the dtype of y.
    """
    from areno.kernels.adapters.triton import add_lora_stacked as kernel

    return kernel(both_NX, b_SR, tiles_T4, scaling, n_columns)


def swiglu_stacked(
    both_NX: Tensor, b_SR: Tensor, places: tuple[Place, ...], scaling: float, n_columns: int, gelu: bool
) -> Tensor:
    """Return silu(gate) * up with LoRA adapters added to gate and up. Needs Triton.

    Args:
        both_NX: gate, up and first products h = x A^T, side by side.
        b_SR: B matrices of all adapted projections, stacked.
        places: for each adapted projection, its columns in [gate, up] and its rows in b_SR.
        scaling: alpha / rank.
        n_columns: number of columns of gate and up together, 2 I.
        gelu: whether the activation is the tanh form of GELU instead of SiLU.

    Returns:
        The activation (N, I) in the dtype of gate and up.
    """
    from areno.kernels.adapters.triton import swiglu_stacked as kernel

    return kernel(both_NX, b_SR, places, scaling, n_columns, gelu)
