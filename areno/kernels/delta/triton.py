"""The form of Triton: packed rows forward and backward, and one token of each row. See the package.

The rule itself is in `triton_chunks.py`, what comes before and behind it in `around/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.delta.around.triton_gated_norm import gated_norm, gated_norm_backward
from areno.kernels.delta.around.triton_rows import last_inputs, mixed_rows
from areno.kernels.delta.around.triton_rows_backward import mixed_rows_backward
from areno.kernels.delta.parts import DeltaGradients, DeltaStates, DeltaWeights
from areno.kernels.delta.row_chunks import RowChunks
from areno.kernels.delta.triton_chunks import chunks_forward
from areno.kernels.delta.triton_chunks_backward import chunks_backward
from areno.kernels.delta.triton_step import delta_step

__all__ = ["delta_rows", "delta_rows_backward", "delta_step"]


def delta_rows(
    given_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, before: DeltaStates | None = None, keep: bool = False
) -> tuple[Tensor, DeltaStates | None]:
    """See the package. Nothing of it is recorded by autograd."""
    given_NP = given_NP.contiguous()
    inputs_RXw, matrices_RHKV = (None, None) if before is None else before
    mixed = mixed_rows(given_NP, weights, chunks, inputs_RXw)
    out_NHV, after_RHKV, _ = chunks_forward(*mixed, chunks, matrices_RHKV, keep)
    after = None
    if after_RHKV is not None:
        after = DeltaStates(last_inputs(given_NP, inputs_RXw, weights, chunks), after_RHKV)
    return gated_norm(out_NHV, given_NP, weights), after


def delta_rows_backward(
    grad_NI: Tensor, given_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, of_weights: bool
) -> tuple[Tensor, DeltaGradients | None]:
    """See the package."""
    given_NP = given_NP.contiguous()
    mixed = mixed_rows(given_NP, weights, chunks)  # again
    out_NHV, _, saved = chunks_forward(*mixed, chunks)
    grad_given_NP = torch.empty_like(given_NP)
    grad_out_NHV, grad_norm_V = gated_norm_backward(grad_NI, out_NHV, given_NP, weights, grad_given_NP, of_weights)
    del out_NHV
    grads = chunks_backward(grad_out_NHV, *mixed, chunks, saved)
    del grad_out_NHV, saved, mixed
    found = mixed_rows_backward(grads, given_NP, weights, chunks, grad_given_NP, of_weights)
    if found is None or grad_norm_V is None:
        return grad_given_NP, None
    return grad_given_NP, DeltaGradients(*found, grad_norm_V)
