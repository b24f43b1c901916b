# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""The softmax of the LM head as Triton kernels: one pass over the logits for its statistics, one for its gradient."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_fp32, program_id_64

_BLOCK = 4096


def softmax_statistics(logits_CV: Tensor, targets_C: Tensor, first: int, temperature: float | Tensor) -> Tensor:
    n_positions, n_rows = logits_CV.shape
    out_4C = logits_CV.new_empty((4, n_positions))
    block = min(_BLOCK, triton.next_power_of_2(max(n_rows, 1)))
    if n_positions:
        _softmax_statistics_kernel[(n_positions,)](
            logits_CV,
            targets_C,
            out_4C,
            logits_CV.stride(0),
            n_rows,
            first,
            _inverse_temperature(temperature),
            PER_ROW=isinstance(temperature, Tensor),
            BLOCK=block,
            num_warps=8,
        )
    return out_4C


def logprob_gradient(
    logits_CV: Tensor, lse_C: Tensor, targets_C: Tensor, first: int, temperature: float, out_CV: Tensor
) -> None:
    n_positions, n_rows = logits_CV.shape
    if not n_positions or not n_rows:
        return
    block, strides = min(_BLOCK, triton.next_power_of_2(n_rows)), (logits_CV.stride(0), out_CV.stride(0))
    _logprob_gradient_kernel[(n_positions, triton.cdiv(n_rows, block))](
        logits_CV, lse_C, targets_C, out_CV, *strides, n_rows, first, 1.0 / temperature, BLOCK=block, num_warps=8
    )


def _inverse_temperature(temperature: float | Tensor) -> float | Tensor:
    """Return 1 / temperature, divided in float32, so that a float and a tensor give exactly the same result."""
    return 1.0 / temperature if isinstance(temperature, Tensor) else float(np.float32(1.0) / np.float32(temperature))


@kernel
def _softmax_statistics_kernel(
    logits_ptr, targets_ptr, out_ptr, stride, n_rows, first, rate, PER_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    position = program_id_64(0)
    scale = tl.load(rate + position) if PER_ROW else rate
    base = logits_ptr + position * stride
    best = tl.full([], -1e30, tl.float32)  # finite, so that differences are not NaN if this rank has no rows
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_rows, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < n_rows
        x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        new_best = tl.maximum(best, tl.max(x, axis=0))
        decay = tl.exp(best - new_best)
        weight = tl.exp(x - new_best)
        weighted = (weighted + (best - new_best) * total) * decay + tl.where(inside, x - new_best, 0.0) * weight
        total = total * decay + weight
        best = new_best
    target = tl.load(targets_ptr + position) - first
    here = (target >= 0) & (target < n_rows)
    chosen = load_fp32(base + target, here) * scale
    chosen = tl.where(here, chosen - best, 0.0)
    out, out_stride = out_ptr + position, tl.num_programs(0)
    tl.store(out, best)
    tl.store(out + out_stride, tl.sum(total, axis=0))
    tl.store(out + 2 * out_stride, tl.sum(weighted, axis=0))
    tl.store(out + 3 * out_stride, chosen)


@kernel
def _logprob_gradient_kernel(
    logits_ptr, lse_ptr, targets_ptr, out_ptr, stride, out_stride, n_rows, first, scale, BLOCK: tl.constexpr
):
    position = program_id_64(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n_rows
    x = load_fp32(logits_ptr + position * stride + column, inside) * scale
    target = tl.load(targets_ptr + position) - first
    grad = tl.where(column == target, 1.0, 0.0) - tl.exp(x - tl.load(lse_ptr + position))
    tl.store(out_ptr + position * out_stride + column, grad, mask=inside)


_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "tv": 3}


def divergence_sums(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    norm_2C: Tensor,
    teacher_norm_2C: Tensor,
    temperature: float,
    kind: str,
    beta: float,
) -> Tensor:
    n_positions, n_rows = logits_CV.shape
    norm_2C, teacher_norm_2C = norm_2C.contiguous(), teacher_norm_2C.contiguous()
    out_2C = torch.zeros_like(norm_2C)
    if not n_positions or not n_rows:
        return out_2C
    block = min(_BLOCK, triton.next_power_of_2(n_rows))
    _divergence_sums_kernel[(n_positions,)](
        logits_CV,
        teacher_CV,
        norm_2C,
        teacher_norm_2C,
        out_2C,
        logits_CV.stride(0),
        teacher_CV.stride(0),
        n_rows,
        _inverse_temperature(temperature),
        beta,
        KIND=_KINDS[kind],
        BLOCK=block,
        num_warps=8,
    )
    return out_2C


def divergence_gradient(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    norm_2C: Tensor,
    teacher_norm_2C: Tensor,
    mean_C: Tensor,
    temperature: float,
    kind: str,
    beta: float,
    out_CV: Tensor,
) -> None:
    n_positions, n_rows = logits_CV.shape
    if not n_positions or not n_rows:
        return
    norm_2C, teacher_norm_2C = norm_2C.contiguous(), teacher_norm_2C.contiguous()
    block = min(_BLOCK, triton.next_power_of_2(n_rows))
    _divergence_gradient_kernel[(n_positions, triton.cdiv(n_rows, block))](
        logits_CV,
        teacher_CV,
        norm_2C,
        teacher_norm_2C,
        mean_C,
        out_CV,
        logits_CV.stride(0),
        teacher_CV.stride(0),
        out_CV.stride(0),
        n_rows,
        _inverse_temperature(temperature),
        beta,
        KIND=_KINDS[kind],
        BLOCK=block,
        num_warps=8,
    )


@triton.jit
def _half_sign(x):
    return tl.where(x > 0.0, 0.5, tl.where(x < 0.0, -0.5, 0.0))


@triton.jit
def _mixture_minus_student(student, teacher, beta):
    d = teacher - student
    share = tl.where(d > 0.0, 1.0 - beta, beta)
    return tl.log(1.0 + share * (tl.exp(-tl.abs(d)) - 1.0)) + tl.maximum(d, 0.0)


@kernel
def _divergence_sums_kernel(
    logits_ptr,
    teacher_ptr,
    norm_ptr,
    teacher_norm_ptr,
    out_ptr,
    stride,
    teacher_stride,
    n_rows,
    scale,
    beta,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = program_id_64(0)
    n_positions = tl.num_programs(0)
    top, rest = tl.load(norm_ptr + position), tl.load(norm_ptr + n_positions + position)
    teacher_top, teacher_rest = tl.load(teacher_norm_ptr + position), tl.load(teacher_norm_ptr + n_positions + position)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_rows, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < n_rows
        x = load_fp32(logits_ptr + position * stride + column, inside)
        y = load_fp32(teacher_ptr + position * teacher_stride + column, inside)
        student, teacher = (x * scale - top) - rest, (y * scale - teacher_top) - teacher_rest
        if KIND == 0:
            total += tl.where(inside, tl.exp(teacher) * (teacher - student), 0.0)
        elif KIND == 1:
            total += tl.where(inside, tl.exp(student) * (student - teacher), 0.0)
        elif KIND == 3:
            q = tl.exp(student)
            total += tl.where(inside, 0.5 * tl.abs(tl.exp(teacher) - q), 0.0)
            weighted += tl.where(inside, q * _half_sign(student - teacher), 0.0)
        else:
            q = tl.exp(student)
            mixed = _mixture_minus_student(student, teacher, beta)
            of_student = q * mixed
            of_teacher = tl.exp(teacher) * (teacher - student - mixed)
            total += tl.where(inside, beta * of_teacher - (1.0 - beta) * of_student, 0.0)
            weighted += tl.where(inside, -(1.0 - beta) * of_student, 0.0)
    found = tl.sum(total, axis=0)
    tl.store(out_ptr + position, found)
    if KIND == 1:  # h is log q - log p, so the mean is the divergence
        tl.store(out_ptr + tl.num_programs(0) + position, found)
    elif KIND >= 2:
        tl.store(out_ptr + tl.num_programs(0) + position, tl.sum(weighted, axis=0))


@kernel
def _divergence_gradient_kernel(
    logits_ptr,
    teacher_ptr,
    norm_ptr,
    teacher_norm_ptr,
    mean_ptr,
    out_ptr,
    stride,
    teacher_stride,
    out_stride,
    n_rows,
    scale,
    beta,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = program_id_64(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n_rows
    x = load_fp32(logits_ptr + position * stride + column, inside)
    y = load_fp32(teacher_ptr + position * teacher_stride + column, inside)
    n_positions = tl.num_programs(0)
    student = (x * scale - tl.load(norm_ptr + position)) - tl.load(norm_ptr + n_positions + position)
    teacher = (y * scale - tl.load(teacher_norm_ptr + position)) - tl.load(teacher_norm_ptr + n_positions + position)
    q = tl.exp(student)
    if KIND == 0:
        grad = q - tl.exp(teacher)
    elif KIND == 1:
        grad = q * (student - teacher - tl.load(mean_ptr + position))
    elif KIND == 3:
        grad = q * (_half_sign(student - teacher) - tl.load(mean_ptr + position))
    else:
        factor = -(1.0 - beta) * _mixture_minus_student(student, teacher, beta)
        grad = q * (factor - tl.load(mean_ptr + position))
    tl.store(out_ptr + position * out_stride + column, grad, mask=inside)
