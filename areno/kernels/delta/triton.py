# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
"""One token of each row in two kernels: the convolution, then all that happens in a head. Letters as in the package.

Where a program takes a part of a state's columns, a third kernel is the norm behind the rule.

The form of Triton: packed rows forward and backward, and one token of each row. See the package.

The rule itself is in `triton_chunks.py`, what comes before and behind it in `around/`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.delta.parts import DeltaGradients, DeltaStates, DeltaWeights, RowChunks
from areno.kernels.delta.triton_chunks import chunks_forward
from areno.kernels.delta.triton_chunks_backward import chunks_backward
from areno.kernels.delta.triton_gated_norm import gated_norm, gated_norm_backward
from areno.kernels.delta.triton_rows import LENGTH_EPS, last_inputs, mixed_rows, mixed_rows_backward, rounded, softplus
from areno.kernels.jit import kernel

_CHANNELS = 256  # of a program of the convolution
# Columns of a state that a program takes, and its warps. An H200 does the states of 256 rows of 32 heads of 128 x 128
# in 276 us so, of which moving them is 256; in 411 where a program takes all 128 columns, 8 warps; in 296 with 32.
COLUMNS, WARPS = 64, 4


def delta_step(given_BP: Tensor, weights: DeltaWeights, states: DeltaStates, slots_B: Tensor) -> Tensor:
    """See the package."""
    n_rows, n_given = given_BP.shape
    n_channels, n_inner, n_heads, _ = weights.sizes
    out_BI = given_BP.new_empty(n_rows, n_inner)
    if not n_rows:
        return out_BI
    given_BP, key_dim, value_dim = given_BP.contiguous(), weights.key_dim, weights.value_dim
    mixed_BX = torch.empty(n_rows, n_channels, dtype=torch.float32, device=given_BP.device)
    _convolve_kernel[(n_rows, triton.cdiv(n_channels, _CHANNELS))](
        given_BP, weights.conv_XW, states.inputs_SXw, slots_B, mixed_BX, n_given, n_channels,
        WIDTH=weights.conv_XW.shape[1], BLOCK=_CHANNELS, NEXT_USES_PDL=jit.supports_pdl(given_BP.device),
    )  # fmt: skip
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    _head_kernel[(n_rows * triton.cdiv(value_dim, columns), n_heads)](
        given_BP, mixed_BX, weights.log_decay_H, weights.bias_H, weights.norm_V, states.matrices_SHKV, slots_B, out_BI,
        n_given, n_channels, n_heads, n_heads // weights.n_key_heads, weights.n_key_heads * key_dim, weights.eps,
        key_dim**-0.5,
        KEY=key_dim, VALUE=value_dim,
        KEY_BLOCK=triton.next_power_of_2(key_dim), COLUMNS=columns,
        num_warps=WARPS, **jit.pdl_options(given_BP.device),
    )  # fmt: skip
    if columns < value_dim:
        return gated_norm(out_BI.view(n_rows, n_heads, value_dim), given_BP, weights, pdl=True)
    return out_BI


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def _convolve_kernel(
    given_ptr,
    conv_ptr,
    inputs_ptr,
    slots_ptr,
    mixed_ptr,
    n_given,
    n_channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT_USES_PDL: tl.constexpr,
):
    """silu of the convolution of some channels of a row, whose last inputs move on by one."""
    if NEXT_USES_PDL:
        jit.launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < n_channels
    slot = tl.load(slots_ptr + row).to(tl.int64)
    kept = inputs_ptr + (slot * n_channels + channel) * (WIDTH - 1)
    x = tl.load(given_ptr + row * n_given + channel, mask=inside, other=0.0)
    total = x.to(tl.float32) * tl.load(conv_ptr + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for place in tl.static_range(WIDTH - 1):
        earlier = tl.load(kept + place, mask=inside, other=0.0)
        total += earlier.to(tl.float32) * tl.load(conv_ptr + channel * WIDTH + place, mask=inside, other=0.0).to(
            tl.float32
        )
        if place > 0:
            tl.store(kept + place - 1, earlier, mask=inside)
    if WIDTH > 1:
        tl.store(kept + WIDTH - 2, x, mask=inside)
    tl.store(mixed_ptr + row * n_channels + channel, total * tl.sigmoid(total), mask=inside)


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def _head_kernel(
    given_ptr,
    mixed_ptr,
    log_decay_ptr,
    bias_ptr,
    norm_ptr,
    matrices_ptr,
    slots_ptr,
    out_ptr,
    n_given,
    n_channels,
    n_heads,
    shared,
    n_key,
    eps,
    scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Gates and the step of the state of one head of a row; and its gated norm, unless other programs have a part.

    PDL: see `kernels/jit.py`. All but q, k and v was there before the convolution.
    """
    if PDL:
        jit.launch_dependents()
    PARTS: tl.constexpr = (VALUE + COLUMNS - 1) // COLUMNS
    row, head = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    key, value = tl.arange(0, KEY_BLOCK), tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    has_key, has_value = key < KEY, value < VALUE
    mixed, given = mixed_ptr + row * n_channels, given_ptr + row * n_given
    n_inner = n_heads * VALUE
    z = tl.load(given + n_channels + head * VALUE + value, mask=has_value, other=0.0).to(tl.float32)
    b = tl.load(given + n_channels + n_inner + head).to(tl.float32)
    a = tl.load(given + n_channels + n_inner + n_heads + head).to(tl.float32)
    a += tl.load(bias_ptr + head).to(tl.float32)
    decay = tl.exp(-tl.exp(tl.load(log_decay_ptr + head).to(tl.float32)) * softplus(a))
    place = matrices_ptr + (slot * n_heads + head) * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
    inside = has_key[:, None] & has_value[None, :]
    state = tl.load(place, mask=inside, other=0.0) * decay
    if PDL:
        jit.wait_for_previous()
    q = tl.load(mixed + head // shared * KEY + key, mask=has_key, other=0.0)
    k = tl.load(mixed + n_key + head // shared * KEY + key, mask=has_key, other=0.0)
    v = tl.load(mixed + 2 * n_key + head * VALUE + value, mask=has_value, other=0.0)
    q = rounded(q * tl.rsqrt(tl.sum(q * q, 0) + LENGTH_EPS) * scale, given_ptr)
    k = rounded(k * tl.rsqrt(tl.sum(k * k, 0) + LENGTH_EPS), given_ptr)
    v = rounded(v, given_ptr)
    missing = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (missing * tl.sigmoid(b))[None, :]
    tl.store(place, state, mask=inside)
    out = rounded(tl.sum(state * q[:, None], 0), given_ptr)
    if PARTS == 1:
        weight = tl.load(norm_ptr + value, mask=has_value, other=0.0).to(tl.float32)
        out = out * tl.rsqrt(tl.sum(out * out, 0) / VALUE + eps) * weight * z * tl.sigmoid(z)
    tl.store(out_ptr + row * n_inner + head * VALUE + value, out.to(out_ptr.dtype.element_ty), mask=has_value)


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
