"""Gated delta rule behind a short causal convolution (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).

A layer keeps, of each row, a matrix for each value head and the last inputs of the convolution. For one token:

    x = silu(convolution of the last W inputs), which is q, k and v
    S = exp(g) S;  S = S + beta k (v - S^T k)^T;  out = S^T q

with q and k of length 1, q divided by the root of its size, beta = sigmoid(b), g = -exp(log_decay) softplus(a + bias).
The result is out / rms(out) * norm * silu(z), by heads. All of it is computed in fp32.

Two forms give the same numbers up to rounding. `delta_rows` takes packed rows and computes their tokens in chunks, with
gradients. `delta_step` takes one token of each row and changes the states in place; with Triton, it may be captured in
a CUDA graph.

Shape letters: N tokens, R rows of a pack, B rows of a step, S slots; G key heads, H value heads (a multiple of G),
K and V their sizes; X = 2 G K + H V inputs of the convolution (q, k, v), W its width, w = W - 1;
P = X + H V + 2 H numbers of a token: inputs of the convolution, z, b, a.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.backend import form
from areno.kernels.delta.parts import DeltaStates, DeltaWeights
from areno.kernels.delta.reference import delta_rows
from areno.kernels.delta.row_chunks import RowChunks

__all__ = ["DeltaStates", "DeltaWeights", "RowChunks", "delta_rows", "delta_step"]


def delta_step(given_BP: Tensor, weights: DeltaWeights, states: DeltaStates, slots_B: Tensor) -> Tensor:
    """One token of each row, whose states are changed in place: (B, H V) in the dtype given.

    slots_B: int64, where the states of each row are. Rows with the same slot leave anything finite in its states.
    """
    return form(given_BP, __name__).delta_step(given_BP, weights, states, slots_B)
