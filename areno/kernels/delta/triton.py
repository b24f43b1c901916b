# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
"""The gated delta rule as Triton kernels: packed sequences forward and backward, decoding steps, and the gated norm.

Packed sequences (rows) take the kernels of `triton_rows.py` (convolution and gates), then those of `triton_chunks.py`
(the rule), then the gated norm, which is here. A decoding step takes two kernels: the convolution, then all other
operations on a head. If a program computes only some columns of a state, the norm is a third kernel.

L programs of a kernel. A line of the norm is one head of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.delta import reference
from areno.kernels.delta.parts import DeltaGradients, DeltaStates, DeltaWeights, RowChunks
from areno.kernels.delta.triton_chunks import chunks_forward
from areno.kernels.delta.triton_chunks_backward import chunks_backward
from areno.kernels.delta.triton_rows import LENGTH_EPS, conv_and_gates, conv_states, softplus
from areno.kernels.delta.triton_rows_backward import conv_and_gates_backward
from areno.kernels.elementwise.triton_norm import add_sums, n_multiprocessors
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64, round_to_dtype

_CHANNELS = 256  # channels that one program of the convolution computes
# Columns of a head's state that one program of `_head_kernel` updates, and warps of the program. An H200 takes 276 us
# for 256 rows of 32 heads with states of 128 x 128, of which 256 us are memory traffic. With all 128 columns and 8
# warps it takes 411 us, and with 32 columns 296 us.
COLUMNS, WARPS = 64, 4
NORM_LINES, NORM_WARPS = 32, 8  # of a program of the norm: lines (one head of one token each) in a tile, and warps
NORM_PROGRAMS = 8  # programs of the norm's backward kernel for each multiprocessor


def delta_step(proj_BP: Tensor, weights: DeltaWeights, states: DeltaStates, slots_B: Tensor) -> Tensor:
    n_rows, proj_size = proj_BP.shape
    n_channels, n_inner, n_heads, _ = weights.projection_sizes
    out_BI = proj_BP.new_empty(n_rows, n_inner)
    if not n_rows:
        return out_BI
    proj_BP, key_dim, value_dim = proj_BP.contiguous(), weights.key_dim, weights.value_dim
    mixed_BX = torch.empty(n_rows, n_channels, dtype=torch.float32, device=proj_BP.device)
    how = {"WIDTH": weights.conv_XW.shape[1], "BLOCK": _CHANNELS, "NEXT_USES_PDL": jit.supports_pdl(proj_BP.device)}
    conv = (proj_BP, weights.conv_XW, states.inputs_SXw, slots_B, mixed_BX)
    _convolve_kernel[(n_rows, triton.cdiv(n_channels, _CHANNELS))](*conv, proj_size, n_channels, **how)
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    rule = (weights.A_log_H, weights.dt_bias_H, weights.norm_V, states.matrices_SHKV)
    n_shared = n_heads // weights.n_key_heads
    numbers = (proj_size, n_channels, n_heads, n_shared, weights.n_key_heads * key_dim, weights.eps, key_dim**-0.5)
    how = {"KEY": key_dim, "VALUE": value_dim, "KEY_BLOCK": triton.next_power_of_2(key_dim), "COLUMNS": columns}
    _head_kernel[(n_rows * triton.cdiv(value_dim, columns), n_heads)](
        proj_BP, mixed_BX, *rule, slots_B, out_BI, *numbers, **how, num_warps=WARPS, **jit.pdl_options(proj_BP.device)
    )
    if columns < value_dim:
        return gated_norm(out_BI.view(n_rows, n_heads, value_dim), proj_BP, weights, pdl=True)
    return out_BI


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def _convolve_kernel(
    proj_ptr,
    conv_ptr,
    inputs_ptr,
    slots_ptr,
    mixed_ptr,
    proj_size,
    n_channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT_USES_PDL: tl.constexpr,
):
    """Compute silu of the convolution for some channels of a row, and shift the row's last inputs."""
    if NEXT_USES_PDL:
        jit.launch_dependents()
    row = program_id_64(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < n_channels
    slot = tl.load(slots_ptr + row).to(tl.int64)
    kept = inputs_ptr + (slot * n_channels + channel) * (WIDTH - 1)
    x = load_masked(proj_ptr + row * proj_size + channel, inside)
    total = x.to(tl.float32) * load_fp32(conv_ptr + channel * WIDTH + WIDTH - 1, inside)
    for place in tl.static_range(WIDTH - 1):
        earlier = load_masked(kept + place, inside)
        total += earlier.to(tl.float32) * load_fp32(conv_ptr + channel * WIDTH + place, inside)
        if place > 0:
            tl.store(kept + place - 1, earlier, mask=inside)
    if WIDTH > 1:
        tl.store(kept + WIDTH - 2, x, mask=inside)
    tl.store(mixed_ptr + row * n_channels + channel, total * tl.sigmoid(total), mask=inside)


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def _head_kernel(
    proj_ptr,
    mixed_ptr,
    A_log_ptr,
    bias_ptr,
    norm_ptr,
    matrices_ptr,
    slots_ptr,
    out_ptr,
    proj_size,
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
    """In each program, compute the gates of one head in one row, and update COLUMNS columns of its state matrix.

    If these are all columns, the gated norm is computed, too. With PDL, a program loads everything but q, k and v
    before the convolution kernel has ended.
    """
    if PDL:
        jit.launch_dependents()
    PARTS: tl.constexpr = (VALUE + COLUMNS - 1) // COLUMNS
    row, head = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    key, value = tl.arange(0, KEY_BLOCK), tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    has_key, has_value = key < KEY, value < VALUE
    mixed, given = mixed_ptr + row * n_channels, proj_ptr + row * proj_size
    n_inner = n_heads * VALUE
    z = load_fp32(given + n_channels + head * VALUE + value, has_value)
    b = tl.load(given + n_channels + n_inner + head).to(tl.float32)
    a = tl.load(given + n_channels + n_inner + n_heads + head).to(tl.float32)
    a += tl.load(bias_ptr + head).to(tl.float32)
    decay = tl.exp(-tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * softplus(a))
    place = matrices_ptr + (slot * n_heads + head) * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
    inside = has_key[:, None] & has_value[None, :]
    state = load_masked(place, inside) * decay
    if PDL:
        jit.wait_for_previous()
    q = load_masked(mixed + head // shared * KEY + key, has_key)
    k = load_masked(mixed + n_key + head // shared * KEY + key, has_key)
    v = load_masked(mixed + 2 * n_key + head * VALUE + value, has_value)
    q = round_to_dtype(q * tl.rsqrt(tl.sum(q * q, 0) + LENGTH_EPS) * scale, proj_ptr)
    k = round_to_dtype(k * tl.rsqrt(tl.sum(k * k, 0) + LENGTH_EPS), proj_ptr)
    v = round_to_dtype(v, proj_ptr)
    missing = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (missing * tl.sigmoid(b))[None, :]
    tl.store(place, state, mask=inside)
    out = round_to_dtype(tl.sum(state * q[:, None], 0), proj_ptr)
    if PARTS == 1:
        weight = load_fp32(norm_ptr + value, has_value)
        out = out * tl.rsqrt(tl.sum(out * out, 0) / VALUE + eps) * weight * z * tl.sigmoid(z)
    tl.store(out_ptr + row * n_inner + head * VALUE + value, out, mask=has_value)


def delta_rows(
    proj_NP: Tensor,
    weights: DeltaWeights,
    chunks: RowChunks,
    initial: DeltaStates | None = None,
    return_states: bool = False,
) -> tuple[Tensor, DeltaStates | None]:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (proj_NP, *weights[:4])):
        return reference.delta_rows(proj_NP, weights, chunks, initial, return_states)
    proj_NP = proj_NP.contiguous()
    inputs_RXw, matrices_RHKV = (None, None) if initial is None else initial
    mixed = conv_and_gates(proj_NP, weights, chunks, inputs_RXw)
    out_NHV, after_RHKV, _ = chunks_forward(*mixed, chunks, matrices_RHKV, return_states)
    after = None
    if after_RHKV is not None:
        after = DeltaStates(conv_states(proj_NP, inputs_RXw, weights, chunks), after_RHKV)
    return gated_norm(out_NHV, proj_NP, weights), after


def delta_rows_backward(
    grad_NI: Tensor, proj_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, of_weights: bool = True
) -> tuple[Tensor, DeltaGradients | None]:
    proj_NP = proj_NP.contiguous()
    mixed = conv_and_gates(proj_NP, weights, chunks)  # the forward pass, again
    out_NHV, _, saved = chunks_forward(*mixed, chunks)
    grad_proj_NP = torch.empty_like(proj_NP)
    grad_out_NHV, grad_norm_V = gated_norm_backward(grad_NI, out_NHV, proj_NP, weights, grad_proj_NP, of_weights)
    del out_NHV
    grads = chunks_backward(grad_out_NHV, *mixed, chunks, saved)
    del grad_out_NHV, saved, mixed
    found = conv_and_gates_backward(grads, proj_NP, weights, chunks, grad_proj_NP, of_weights)
    if found is None or grad_norm_V is None:
        return grad_proj_NP, None
    return grad_proj_NP, DeltaGradients(*found, grad_norm_V)


def gated_norm(out_NHV: Tensor, proj_NP: Tensor, weights: DeltaWeights, pdl: bool = False) -> Tensor:
    """Return the RMS norm of each head, times silu(z). `pdl` says that the previous kernel computes `out_NHV`."""
    n, n_heads, value_dim = out_NHV.shape
    normed_NI = proj_NP.new_empty(n, n_heads * value_dim)
    if n:
        options = jit.pdl_options(proj_NP.device) if pdl else {}
        tensors = (out_NHV.contiguous(), proj_NP, weights.norm_V, normed_NI)
        _gated_norm_kernel[(triton.cdiv(n * n_heads, NORM_LINES),)](
            *tensors, n * n_heads, weights.eps, **_norm_sizes(weights), **options
        )
    return normed_NI


def gated_norm_backward(
    grad_NI: Tensor, out_NHV: Tensor, proj_NP: Tensor, weights: DeltaWeights, grad_proj_NP: Tensor, of_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of z to `grad_proj_NP`, and return those of `out_NHV` and, if `of_weights`, of the norm."""
    n, n_heads, value_dim = out_NHV.shape
    grad_out_NHV = torch.empty_like(out_NHV, memory_format=torch.contiguous_format)
    n_tiles = triton.cdiv(n * n_heads, NORM_LINES)
    n_programs = min(n_tiles, NORM_PROGRAMS * n_multiprocessors(proj_NP.device))
    sums_LV = torch.empty(n_programs, value_dim, dtype=torch.float32, device=proj_NP.device) if of_weights else None
    if n:
        tensors = (grad_NI.contiguous(), out_NHV.contiguous(), proj_NP, weights.norm_V)
        results = (grad_out_NHV, grad_proj_NP, sums_LV)
        _gated_norm_backward_kernel[(n_programs,)](*tensors, *results, n * n_heads, weights.eps, **_norm_sizes(weights))
    if sums_LV is None:
        return grad_out_NHV, None
    grad_norm_V = sums_LV.new_zeros(value_dim)
    add_sums(sums_LV, grad_norm_V)
    return grad_out_NHV, grad_norm_V


def _norm_sizes(weights: DeltaWeights) -> dict[str, int]:
    return {
        "CHANNELS": weights.projection_sizes[0],
        "HEADS": weights.n_heads,
        "VALUE": weights.value_dim,
        "BLOCK": triton.next_power_of_2(weights.value_dim),
        "LINES": NORM_LINES,
        "num_warps": NORM_WARPS,
    }


@kernel(do_not_specialize=["n_lines"])
def _gated_norm_kernel(
    out_ptr,
    proj_ptr,
    norm_ptr,
    normed_ptr,
    n_lines,
    eps,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    PROJ: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    line = program_id_64(0) * LINES + tl.arange(0, LINES)
    value = tl.arange(0, BLOCK)
    inside = (line < n_lines)[:, None] & (value < VALUE)[None, :]
    place = line[:, None] * VALUE + value[None, :]
    given = (line // HEADS * PROJ + CHANNELS + line % HEADS * VALUE)[:, None] + value[None, :]
    z = load_fp32(proj_ptr + given, inside)
    weight = load_fp32(norm_ptr + value, value < VALUE)[None, :]
    if PDL:
        jit.wait_for_previous()
    out = load_fp32(out_ptr + place, inside)
    out = out * tl.rsqrt(tl.sum(out * out, axis=1) / VALUE + eps)[:, None] * weight * z * tl.sigmoid(z)
    tl.store(normed_ptr + place, out, mask=inside)


@kernel(do_not_specialize=["n_lines"])
def _gated_norm_backward_kernel(
    grad_ptr,
    out_ptr,
    proj_ptr,
    norm_ptr,
    grad_out_ptr,
    grad_proj_ptr,
    sums_ptr,
    n_lines,
    eps,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
):
    """In program i of L, compute tiles i, i + L, ... of LINES lines, and a partial sum of the weight's gradient."""
    PROJ: tl.constexpr = CHANNELS + HEADS * VALUE + 2 * HEADS
    value = tl.arange(0, BLOCK)
    weight = load_fp32(norm_ptr + value, value < VALUE)[None, :]
    sums = tl.zeros([LINES, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_lines, LINES), tl.num_programs(0)):
        line = tl.cast(tile, tl.int64) * LINES + tl.arange(0, LINES)
        inside = (line < n_lines)[:, None] & (value < VALUE)[None, :]
        place = line[:, None] * VALUE + value[None, :]
        given = (line // HEADS * PROJ + CHANNELS + line % HEADS * VALUE)[:, None] + value[None, :]
        grad = load_fp32(grad_ptr + place, inside)
        out = load_fp32(out_ptr + place, inside)
        z = load_fp32(proj_ptr + given, inside)
        sigmoid = tl.sigmoid(z)
        per_size = tl.rsqrt(tl.sum(out * out, axis=1) / VALUE + eps)[:, None]
        out *= per_size
        grad_z = grad * out * weight * sigmoid * (1.0 + z * (1.0 - sigmoid))
        tl.store(grad_proj_ptr + given, grad_z, mask=inside)
        grad *= z * sigmoid
        sums += grad * out
        grad *= weight
        grad = per_size * (grad - out * (tl.sum(grad * out, axis=1) / VALUE)[:, None])
        tl.store(grad_out_ptr + place, grad, mask=inside)
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0) * VALUE + value, tl.sum(sums, axis=0), mask=value < VALUE)
