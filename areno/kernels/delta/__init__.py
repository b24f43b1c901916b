"""Gated delta rule after a short causal convolution (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).

For each sequence (row), a layer keeps a state matrix S for each value head, and the last inputs of the convolution. For
one token:

    x = silu(convolution of the last W inputs), which is q, k and v
    S = exp(g) S;  S = S + beta k (v - S^T k)^T;  out = S^T q

q and k are normalised to length 1, and q is also divided by the root of its size. beta = sigmoid(b), and g =
-exp(A_log) softplus(a + dt_bias). The result is out / rms(out) * norm * silu(z) for each head.

`delta_rows` computes packed rows in chunks of tokens, from `initial` states or zeros. `delta_rows_backward` computes
the forward pass from zero states again, outside autograd, and sums gradients in a fixed order. `delta_step` is a
decoding step of one token for each row, which a CUDA graph can capture with Triton. It updates the states at the int64
indices `slots_B` in place. If rows share a slot, its state becomes undefined but finite.

All implementations give the same values up to the order of sums and the precision of products. Arithmetic, decays, beta
and states are fp32. With bfloat16 inputs, the Triton products of chunks are less precise (`PRECISION` in
`triton_chunks.py`). Three things are rounded to the dtype of the inputs: q, k and v before the rule, the output of the
rule, and the result.

Shape letters: N tokens, R packed sequences (rows), B rows of a step, S slots; G key heads, H value heads (a multiple of
G), K and V their sizes; X = 2 G K + H V channels of the convolution (q, k, v), W its width, w = W - 1; I = H V results;
P = X + I + 2 H projections of a token, side by side: channels of the convolution, z, b, a.
"""

from __future__ import annotations

from areno.kernels.backend import dispatch_by_device
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


delta_rows = dispatch_by_device(reference.delta_rows)
"""Return the output (N, I), and the states after the last tokens of the R rows (None unless `return_states`)."""
delta_rows_backward = dispatch_by_device(reference.delta_rows_backward)
"""Return the gradients with respect to projections and weights. The latter are None unless `of_weights`."""
delta_step = dispatch_by_device(reference.delta_step)
