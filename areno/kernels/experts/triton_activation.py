# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The activations of experts as Triton kernels. `ends_E` says which expert's bias a row has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.elementwise.triton_swiglu import swiglu
from areno.kernels.experts.reference import BiasedClamp
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64, round_to_dtype


def expert_glu(gate_up_M2I: Tensor, ends_E: Tensor, clamp: BiasedClamp | None = None) -> Tensor:
    if clamp is None:
        return swiglu(gate_up_M2I)
    n_rows, inner = gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2
    act_MI = gate_up_M2I.new_empty((n_rows, inner))
    if n_rows:
        _clamped_glu_kernel[(n_rows, triton.cdiv(inner, 1024))](
            gate_up_M2I.contiguous(),
            clamp.bias_EO,
            ends_E,
            act_MI,
            len(ends_E),
            inner,
            clamp.alpha,
            clamp.limit,
            EXPERTS=triton.next_power_of_2(len(ends_E)),
            BLOCK=1024,
        )
    return act_MI


def weighted_glu_backward(
    grad_MI: Tensor,
    gate_up_M2I: Tensor,
    weights_Nk: Tensor,
    choices_M: Tensor,
    ends_E: Tensor,
    clamp: BiasedClamp | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, inner = grad_MI.shape
    given = grad_MI.contiguous(), gate_up_M2I.contiguous(), weights_Nk.float().contiguous(), choices_M
    of_weights = torch.empty(weights_Nk.shape, dtype=torch.float32, device=grad_MI.device)
    found = torch.empty_like(gate_up_M2I), torch.empty_like(grad_MI), of_weights
    block = min(1024, triton.next_power_of_2(inner))
    if n_rows and clamp is None:
        _weighted_swiglu_kernel[(n_rows,)](*given, ends_E[-1:], *found, inner, BLOCK=block)
    elif n_rows and clamp is not None:
        _weighted_clamped_glu_kernel[(n_rows,)](
            *given,
            clamp.bias_EO,
            ends_E,
            *found,
            len(ends_E),
            inner,
            clamp.alpha,
            clamp.limit,
            EXPERTS=triton.next_power_of_2(len(ends_E)),
            BLOCK=block,
        )
    return found


@kernel
def _weighted_swiglu_kernel(
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    choices_ptr,
    end_ptr,
    grad_gate_up_ptr,
    act_ptr,
    grad_weights_ptr,
    inner,
    BLOCK: tl.constexpr,
):
    row = program_id_64(0)
    choice = tl.load(choices_ptr + row)
    if row >= tl.load(end_ptr):
        tl.store(grad_weights_ptr + choice, 0.0)
        return
    weight = tl.load(weights_ptr + choice)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < inner
        place = row * (2 * inner) + column
        gate = load_fp32(gate_up_ptr + place, inside)
        up = load_fp32(gate_up_ptr + place + inner, inside)
        grad = load_fp32(grad_ptr + row * inner + column, inside)
        sigmoid = tl.sigmoid(gate)
        silu = round_to_dtype(gate * sigmoid, act_ptr)
        act = silu * up
        total += grad * act
        gate_grad = grad * weight * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(grad_gate_up_ptr + place, gate_grad, mask=inside)
        tl.store(grad_gate_up_ptr + place + inner, grad * weight * silu, mask=inside)
        tl.store(act_ptr + row * inner + column, act * weight, mask=inside)
    tl.store(grad_weights_ptr + choice, tl.sum(total, 0))


@triton.jit
def _expert_of(row, ends_ptr, n_experts, EXPERTS: tl.constexpr):
    """Return the expert of a row, or `n_experts` after the last group."""
    each = tl.arange(0, EXPERTS)
    real = each < n_experts
    return tl.sum((real & (load_masked(ends_ptr + each, real) <= row)).to(tl.int64), 0)


@triton.jit
def _load_biased(place, bias_place, inside):
    """Return the sum of product and bias, rounded to the dtype of the product."""
    return round_to_dtype(load_fp32(place, inside) + load_fp32(bias_place, inside), place)


@triton.jit
def _load_clamped(place, bias_place, inside, limit):
    """Return gate and up with biases, before and after clamping. They alternate from `place` and `bias_place` on."""
    gate, up = _load_biased(place, bias_place, inside), _load_biased(place + 1, bias_place + 1, inside)
    return gate, up, tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)


@kernel
def _clamped_glu_kernel(
    gate_up_ptr,
    bias_ptr,
    ends_ptr,
    act_ptr,
    n_experts,
    inner,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = program_id_64(0)
    expert = _expert_of(row, ends_ptr, n_experts, EXPERTS)
    if expert >= n_experts:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place, bias_place = gate_up_ptr + row * (2 * inner) + 2 * column, bias_ptr + expert * (2 * inner) + 2 * column
    _, _, gate, up = _load_clamped(place, bias_place, inside, limit)
    tl.store(act_ptr + row * inner + column, (up + 1.0) * (gate * tl.sigmoid(alpha * gate)), mask=inside)


@kernel
def _weighted_clamped_glu_kernel(
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    choices_ptr,
    bias_ptr,
    ends_ptr,
    grad_gate_up_ptr,
    act_ptr,
    grad_weights_ptr,
    n_experts,
    inner,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = program_id_64(0)
    expert = _expert_of(row, ends_ptr, n_experts, EXPERTS)
    choice = tl.load(choices_ptr + row)
    if expert >= n_experts:
        tl.store(grad_weights_ptr + choice, 0.0)
        return
    weight = tl.load(weights_ptr + choice)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < inner
        place, bias_place = row * (2 * inner) + 2 * column, bias_ptr + expert * (2 * inner) + 2 * column
        raw_gate, raw_up, gate, up = _load_clamped(gate_up_ptr + place, bias_place, inside, limit)
        grad = load_fp32(grad_ptr + row * inner + column, inside)
        sigmoid = tl.sigmoid(alpha * gate)
        act = (up + 1.0) * (gate * sigmoid)
        total += grad * act
        gate_grad = grad * weight * (up + 1.0) * sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid))
        up_grad = grad * weight * gate * sigmoid
        tl.store(grad_gate_up_ptr + place, tl.where(raw_gate > limit, 0.0, gate_grad), mask=inside)
        tl.store(grad_gate_up_ptr + place + 1, tl.where(tl.abs(raw_up) > limit, 0.0, up_grad), mask=inside)
        tl.store(act_ptr + row * inner + column, act * weight, mask=inside)
    tl.store(grad_weights_ptr + choice, tl.sum(total, 0))
