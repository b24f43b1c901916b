# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Routing as Triton kernels: from router logits to experts, and from experts to copies sorted by expert.

torch would launch some twenty small kernels in each layer of a decoding step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_masked, program_id_64

MAX_COPIES = 8192  # up to here one kernel sorts, in which every expert's program reads all copies
_BLOCK = 1024
_COUNTED, _EXPERTS, _COMPARED = 512, 32, 16  # of more copies: copies and experts of a program, copies compared at once


def choose_experts(
    logits_NX: Tensor, top_k: int, normalised: bool, bias_X: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Choose experts. Among equal logits, the expert with the lower index comes first."""
    n_tokens, n_experts = logits_NX.shape
    chosen_Nk = torch.empty((n_tokens, top_k), dtype=torch.int64, device=logits_NX.device)
    weights_Nk = torch.empty((n_tokens, top_k), dtype=torch.float32, device=logits_NX.device)
    if n_tokens:
        _choose_kernel[(n_tokens,)](
            logits_NX.contiguous(),
            bias_X,
            chosen_Nk,
            weights_Nk,
            n_experts,
            scale,
            EXPERTS=triton.next_power_of_2(n_experts),
            TOP_K=top_k,
            CHOICES=triton.next_power_of_2(top_k),
            NORMALISED=normalised,
            HAS_BIAS=bias_X is not None,
            num_warps=1 if n_experts <= 128 else 4,
        )
    return chosen_Nk, weights_Nk


@kernel(do_not_specialize=["scale"])
def _choose_kernel(
    logits_ptr,
    bias_ptr,
    chosen_ptr,
    weights_ptr,
    n_experts,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    token = program_id_64(0)
    each = tl.arange(0, EXPERTS)
    left = tl.load(logits_ptr + token * n_experts + each, mask=each < n_experts, other=-float("inf"))
    if HAS_BIAS:
        scores = tl.sigmoid(left)
        left = scores + tl.load(bias_ptr + each, mask=each < n_experts, other=-float("inf"))
    else:
        scores = tl.exp(left - tl.max(left, 0))
        scores = scores / tl.sum(scores, 0)
    choices = tl.arange(0, CHOICES)
    weights = tl.zeros([CHOICES], tl.float32)
    chosen = tl.zeros([CHOICES], tl.int64)
    for choice in range(TOP_K):
        best = tl.argmax(left, 0)
        weight = tl.sum(tl.where(each == best, scores, 0.0), 0)
        weights = tl.where(choices == choice, weight, weights)
        # If logits are NaN, any expert will do: the log-probabilities are then NaN, which the caller rejects.
        chosen = tl.where(choices == choice, tl.minimum(best, n_experts - 1).to(tl.int64), chosen)
        left = tl.where(each == best, -float("inf"), left)
    if NORMALISED:
        weights = weights / (tl.sum(weights, 0) + 1e-20) if TOP_K > 1 else weights * 0.0 + 1.0
    place = token * TOP_K + choices
    tl.store(chosen_ptr + place, chosen, mask=choices < TOP_K)
    tl.store(weights_ptr + place, weights * scale, mask=choices < TOP_K)


def sort_by_expert(chosen_Nk: Tensor, first: int, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Groups`. The copies for other ranks are sorted as those of one more expert.

    Up to MAX_COPIES, each expert has a program. More copies are sorted by counting, in blocks.
    """
    chosen_Nk = chosen_Nk.contiguous()
    n_copies, device = chosen_Nk.numel(), chosen_Nk.device
    tokens_M, choices_M = (torch.empty(n_copies, dtype=torch.int64, device=device) for _ in range(2))
    copies_Nk = torch.empty_like(chosen_Nk)
    ends_E = torch.empty(n_experts, dtype=torch.int32, device=device)
    given, found = (n_copies, first, n_experts), (tokens_M, choices_M, copies_Nk, ends_E)
    if n_copies <= MAX_COPIES:
        _sort_kernel[(n_experts + 1,)](chosen_Nk, *found, *given, chosen_Nk.shape[1], BLOCK=_BLOCK)
        return found
    n_blocks = triton.cdiv(n_copies, _COUNTED)
    counts = torch.empty((n_experts + 1, n_blocks), dtype=torch.int32, device=device)
    _count_kernel[(n_blocks, triton.cdiv(n_experts + 1, _EXPERTS))](
        chosen_Nk, counts, *given, BLOCK=_COUNTED, EXPERTS=_EXPERTS
    )
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)  # after each block's copies of each expert
    _place_kernel[(n_blocks,)](
        chosen_Nk,
        counts,
        ends,
        *found,
        *given,
        chosen_Nk.shape[1],
        BLOCK=_COUNTED,
        COMPARED=_COMPARED,
        EXPERTS=triton.next_power_of_2(n_experts),
    )
    return found


@triton.jit
def _local_expert(chosen_ptr, copy, n_copies, first, n_experts):
    """Return the index of each copy's expert among those of this rank.

    The index is n_experts for experts of other ranks, and n_experts + 1 for copies beyond n_copies.
    """
    expert = tl.load(chosen_ptr + copy, mask=copy < n_copies, other=0).to(tl.int32) - first
    expert = tl.where((expert < 0) | (expert >= n_experts), n_experts, expert)
    return tl.where(copy < n_copies, expert, n_experts + 1)


@kernel(do_not_specialize=["n_copies", "first"])
def _sort_kernel(
    chosen_ptr,
    tokens_ptr,
    choices_ptr,
    places_ptr,
    ends_ptr,
    n_copies,
    first,
    n_experts,
    top_k,
    BLOCK: tl.constexpr,
):
    mine = tl.program_id(0)
    at = 0
    for start in range(0, n_copies, BLOCK):
        expert = _local_expert(chosen_ptr, start + tl.arange(0, BLOCK), n_copies, first, n_experts)
        at += tl.sum((expert < mine).to(tl.int32), 0)
    for start in range(0, n_copies, BLOCK):
        copy = start + tl.arange(0, BLOCK)
        is_mine = _local_expert(chosen_ptr, copy, n_copies, first, n_experts) == mine
        count = is_mine.to(tl.int32)
        place = (at + tl.cumsum(count, 0) - 1).to(tl.int64)
        tl.store(tokens_ptr + place, copy // top_k, mask=is_mine)
        tl.store(choices_ptr + place, copy, mask=is_mine)
        tl.store(places_ptr + copy, place, mask=is_mine)
        at += tl.sum(count, 0)
    tl.store(ends_ptr + mine, at, mask=mine < n_experts)


@kernel(do_not_specialize=["n_copies", "first"])
def _count_kernel(chosen_ptr, counts_ptr, n_copies, first, n_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Count the copies of some experts in a block. `counts` is (experts and one more, blocks)."""
    block, each = tl.program_id(0), tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    expert = _local_expert(chosen_ptr, block * BLOCK + tl.arange(0, BLOCK), n_copies, first, n_experts)
    count = tl.sum((each[:, None] == expert[None, :]).to(tl.int32), 1)
    tl.store(counts_ptr + each * tl.num_programs(0) + block, count, mask=each <= n_experts)


@kernel(do_not_specialize=["n_copies", "first"])
def _place_kernel(
    chosen_ptr,
    counts_ptr,
    ends_ptr,
    tokens_ptr,
    choices_ptr,
    places_ptr,
    group_ends_ptr,
    n_copies,
    first,
    n_experts,
    top_k,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Place each copy of a block after those of its expert in earlier blocks, and after those before it in its own."""
    block, n_blocks = tl.program_id(0), tl.num_programs(0)
    copy = block * BLOCK + tl.arange(0, BLOCK)
    inside = copy < n_copies
    expert = _local_expert(chosen_ptr, copy, n_copies, first, n_experts)
    entry = expert * n_blocks + block
    place = load_masked(ends_ptr + entry, inside) - load_masked(counts_ptr + entry, inside)
    for start in range(0, BLOCK, COMPARED):
        other = block * BLOCK + start + tl.arange(0, COMPARED)
        expert_of_other = _local_expert(chosen_ptr, other, n_copies, first, n_experts)
        is_before = (expert[:, None] == expert_of_other[None, :]) & (other[None, :] < copy[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    place = place.to(tl.int64)
    tl.store(tokens_ptr + place, copy // top_k, mask=inside)
    tl.store(choices_ptr + place, copy, mask=inside)
    tl.store(places_ptr + copy, place, mask=inside)
    if block == n_blocks - 1:
        each = tl.arange(0, EXPERTS)
        end = load_masked(ends_ptr + each * n_blocks + block, each < n_experts)
        tl.store(group_ends_ptr + each, end, mask=each < n_experts)
