"""Gated delta rule behind a short causal convolution (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).

A layer keeps, of each row, a matrix for each value head and the last inputs of the convolution. For one token:

    x = silu(convolution of the last W inputs), which is q, k and v
    S = exp(g) S;  S = S + beta k (v - S^T k)^T;  out = S^T q

with q and k of length 1, q divided by the root of its size, beta = sigmoid(b), g = -exp(log_decay) softplus(a + bias).
The result is out / rms(out) * norm * silu(z), by heads. All of it is computed in fp32, but for the rule's products with
Triton where bfloat16 is given: `PRODUCTS` of `triton_chunks.py` and of `triton_chunks_backward.py`, with sums in fp32.
Three things are rounded to the dtype given: q, k and v as the rule takes them, what the rule gives, and the result.
Decays, beta and states are fp32.

Two forms give the same numbers up to the order of sums and those products. `delta_rows` takes packed rows and computes
their tokens in chunks; `delta_rows_backward` computes that again, and goes back through it. `delta_step` takes one
token of each row and changes the states in place; with Triton, it may be captured in a CUDA graph.

Shape letters: N tokens, R rows of a pack, B rows of a step, S slots; G key heads, H value heads (a multiple of G),
K and V their sizes; X = 2 G K + H V inputs of the convolution (q, k, v), W its width, w = W - 1; I = H V results;
P = X + I + 2 H numbers of a token: inputs of the convolution, z, b, a.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.backend import form
from areno.kernels.delta import reference
from areno.kernels.delta.parts import DeltaGradients, DeltaStates, DeltaWeights, RowChunks

__all__ = [
    "DeltaGradients",
    "DeltaStates",
    "DeltaWeights",
    "RowChunks",
    "delta_rows",
    "delta_rows_backward",
    "delta_step",
]


def delta_rows(
    given_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, before: DeltaStates | None = None, keep: bool = False
) -> tuple[Tensor, DeltaStates | None]:
    """The tokens of packed rows: (N, I) in the dtype given, and with `keep` the states behind each row.

    before: the states of the R rows in front of their first tokens, where these do not begin with zeros. Where autograd
    records, this is torch's form, with gradients by what is given and by the weights.
    """
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in (given_NP, *weights[:4]))
    rows = reference.delta_rows if recorded else form(given_NP, __name__).delta_rows
    return rows(given_NP, weights, chunks, before, keep)


def delta_rows_backward(
    grad_NI: Tensor, given_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, of_weights: bool = True
) -> tuple[Tensor, DeltaGradients | None]:
    """The gradient of what `delta_rows` was given for rows that begin with zeros, in its dtype, outside autograd.

    And with `of_weights` those of the weights, summed over tokens in a fixed order.
    """
    return form(given_NP, __name__).delta_rows_backward(grad_NI, given_NP, weights, chunks, of_weights)


def delta_step(given_BP: Tensor, weights: DeltaWeights, states: DeltaStates, slots_B: Tensor) -> Tensor:
    """One token of each row, whose states are changed in place: (B, I) in the dtype given.

    slots_B: int64, where the states of each row are. Rows with the same slot leave anything finite in its states.
    """
    return form(given_BP, __name__).delta_step(given_BP, weights, states, slots_B)
