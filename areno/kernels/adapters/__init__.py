"""The second product of LoRA adapters: y += scaling * h B^T, in the columns of each projection that has an adapter.

A fused layer has several projections side by side in y (N, O). h (N, P R) holds the first products x A^T of the P
adapted projections, R columns each. b (S, R) holds their B matrices, stacked. Projections that share an A count as one.

While sampling, A is stacked below the layer's weight, so one product gives y and h side by side, (N, X = O + P R or
more). `add_lora_stacked` and `swiglu_stacked` take this result; they exist as Triton kernels alone.
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
    """Add the adapters to the output of a layer. Each row is computed in the same order of operations, whatever N.

    Under autograd the torch reference runs, as the Triton kernel has no backward pass.

    Args:
        y_NO: the output of the layer; the Triton kernel adds in place.
        h_NR: the first products x A^T.
        b_SR: the stacked B matrices.
        places: where the outputs of each A are.
        tiles_T4: `tiles(places, ...)`, on the device of y.
        scaling: alpha / rank.

    Returns:
        (N, O) in the dtype of y; y itself or a new tensor.
    """
    if use_triton(y_NO) and not torch.is_grad_enabled():
        from areno.kernels.adapters.triton import add_lora as kernel

        return kernel(y_NO, h_NR, b_SR, tiles_T4, scaling)
    return reference.add_lora(y_NO, h_NR, b_SR, places, scaling)


def add_lora_stacked(both_NX: Tensor, b_SR: Tensor, tiles_T4: Tensor, scaling: float, n_columns: int) -> Tensor:
    """Add the adapters to a stacked output [y, h]. Needs Triton.

    Args:
        both_NX: y and h side by side.
        b_SR: the stacked B matrices.
        tiles_T4: `tiles(places, ..., whole=n_columns)`, on the device of y.
        scaling: alpha / rank.
        n_columns: O, the number of columns of y.

    Returns:
        (N, O) in the dtype of y.
    """
    from areno.kernels.adapters.triton import add_lora_stacked as kernel

    return kernel(both_NX, b_SR, tiles_T4, scaling, n_columns)


def swiglu_stacked(
    both_NX: Tensor, b_SR: Tensor, places: tuple[Place, ...], scaling: float, n_columns: int, gelu: bool
) -> Tensor:
    """Return silu(gate) * up of a stacked output [gate, up, h] with its adapters added. Needs Triton.

    Args:
        both_NX: gate, up and h side by side.
        b_SR: the stacked B matrices.
        places: where the outputs of each A are.
        scaling: alpha / rank.
        n_columns: 2 I, the number of columns of gate and up.
        gelu: use the tanh form of GELU instead of SiLU.

    Returns:
        (N, I) in the dtype of y.
    """
    from areno.kernels.adapters.triton import swiglu_stacked as kernel

    return kernel(both_NX, b_SR, places, scaling, n_columns, gelu)
