# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
"""Routing as Triton kernels: from router logits to experts, and from experts to copies sorted by expert.

torch would launch some twenty small kernels in each layer of a decoding step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

MAX_COPIES = 8192  # up to here one kernel sorts, in which every expert's program reads all copies
_BLOCK = 1024
_COUNTED, _EXPERTS, _COMPARED = 512, 32, 16  # of more copies: copies and experts of a program, copies compared at once
_TOKENS, _TILES = 16, 4  # of the statistics: tokens in a tile, and tiles of a program


def choose_experts(
    logits_NX: Tensor, top_k: int, normalised: bool, bias_X: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Choose experts. Among equal logits, the expert with the lower index comes first."""
    chosen_Nk = torch.empty((len(logits_NX), top_k), dtype=torch.int64, device=logits_NX.device)
    how = normalised, bias_X is not None, scale
    return chosen_Nk, _launch_choose(logits_NX, bias_X, chosen_Nk, *how, is_given=False)


def expert_weights(logits_NX: Tensor, chosen_Nk: Tensor, normalised: bool, sigmoid: bool, scale: float) -> Tensor:
    return _launch_choose(logits_NX, None, chosen_Nk.contiguous(), normalised, sigmoid, scale, is_given=True)


def _launch_choose(
    logits_NX: Tensor,
    bias_X: Tensor | None,
    chosen_Nk: Tensor,
    normalised: bool,
    sigmoid: bool,
    scale: float,
    is_given: bool,
) -> Tensor:
    """Return the weights. Writes the choice to `chosen_Nk` unless it is given."""
    n_tokens, top_k = chosen_Nk.shape
    weights_Nk = torch.empty((n_tokens, top_k), dtype=torch.float32, device=logits_NX.device)
    if n_tokens:
        given = logits_NX.contiguous(), bias_X, chosen_Nk, weights_Nk, logits_NX.shape[1], scale
        how = _how(logits_NX.shape[1], top_k, normalised, sigmoid)
        _choose_kernel[(n_tokens,)](*given, HAS_BIAS=bias_X is not None, GIVEN=is_given, **how)
    return weights_Nk


def _how(n_experts: int, top_k: int, normalised: bool, sigmoid: bool) -> dict[str, int]:
    return {
        "EXPERTS": triton.next_power_of_2(n_experts),
        "TOP_K": top_k,
        "CHOICES": triton.next_power_of_2(top_k),
        "NORMALISED": normalised,
        "SIGMOID": sigmoid,
        "num_warps": 1 if n_experts <= 128 else 4,
    }


@triton.jit
def _scores(logits, SIGMOID: tl.constexpr):
    """Return the scores of a token's experts, 0 after the last one, whose logit is -inf."""
    if SIGMOID:
        return tl.sigmoid(logits)
    scores = tl.exp(logits - tl.max(logits, 0))
    return scores / tl.sum(scores, 0)


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
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GIVEN: tl.constexpr,
):
    token = program_id_64(0)
    each = tl.arange(0, EXPERTS)
    left = tl.load(logits_ptr + token * n_experts + each, mask=each < n_experts, other=-float("inf"))
    scores = _scores(left, SIGMOID)
    if HAS_BIAS:
        left = scores + tl.load(bias_ptr + each, mask=each < n_experts, other=-float("inf"))
    choices = tl.arange(0, CHOICES)
    weights = tl.zeros([CHOICES], tl.float32)
    chosen = tl.zeros([CHOICES], tl.int64)
    for choice in range(TOP_K):
        if GIVEN:
            best = tl.load(chosen_ptr + token * TOP_K + choice)
        else:
            best = tl.argmax(left, 0)
        weight = tl.sum(tl.where(each == best, scores, 0.0), 0)
        weights = tl.where(choices == choice, weight, weights)
        if not GIVEN:
            # If logits are NaN, any expert will do: the log-probabilities are then NaN, which the caller rejects.
            chosen = tl.where(choices == choice, tl.minimum(best, n_experts - 1).to(tl.int64), chosen)
            left = tl.where(each == best, -float("inf"), left)
    if NORMALISED:
        weights = weights / (tl.sum(weights, 0) + 1e-20) if TOP_K > 1 else weights * 0.0 + 1.0
    place = token * TOP_K + choices
    if not GIVEN:
        tl.store(chosen_ptr + place, chosen, mask=choices < TOP_K)
    tl.store(weights_ptr + place, weights * scale, mask=choices < TOP_K)


def expert_weights_backward(
    grad_Nk: Tensor, logits_NX: Tensor, chosen_Nk: Tensor, normalised: bool, sigmoid: bool, scale: float
) -> Tensor:
    """Return the gradient with respect to the logits."""
    grad_NX = torch.empty_like(logits_NX, memory_format=torch.contiguous_format)
    if len(grad_NX):
        given = grad_Nk, logits_NX.contiguous(), chosen_Nk.contiguous(), grad_NX, *grad_Nk.stride(), logits_NX.shape[1]
        _weights_backward_kernel[(len(grad_NX),)](
            *given, scale, **_how(logits_NX.shape[1], chosen_Nk.shape[1], normalised, sigmoid)
        )
    return grad_NX


@kernel(do_not_specialize=["scale"])
def _weights_backward_kernel(
    grad_ptr,
    logits_ptr,
    chosen_ptr,
    grad_logits_ptr,
    grad_stride,
    grad_step,
    n_experts,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALISED: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    token = program_id_64(0)
    each = tl.arange(0, EXPERTS)
    real = each < n_experts
    scores = _scores(tl.load(logits_ptr + token * n_experts + each, mask=real, other=-float("inf")), SIGMOID)
    total, product = 0.0, 0.0  # of the weights, and of the weights times their gradients
    grad = tl.zeros([EXPERTS], tl.float32)
    for choice in tl.static_range(TOP_K):
        is_chosen = each == tl.load(chosen_ptr + token * TOP_K + choice)
        of_choice = tl.load(grad_ptr + token * grad_stride + choice * grad_step).to(tl.float32) * scale
        weight = tl.sum(tl.where(is_chosen, scores, 0.0), 0)
        total += weight
        product += weight * of_choice
        grad += tl.where(is_chosen, of_choice, 0.0)
    if NORMALISED:
        is_used = tl.zeros([EXPERTS], tl.float32)
        for choice in tl.static_range(TOP_K):
            is_used += (each == tl.load(chosen_ptr + token * TOP_K + choice)).to(tl.float32)
        total += 1e-20
        grad = (grad - is_used * (product / total)) / total if TOP_K > 1 else grad * 0.0
    grad *= scores
    grad = grad * (1.0 - scores) if SIGMOID else grad - scores * tl.sum(grad, 0)
    tl.store(grad_logits_ptr + token * n_experts + each, grad, mask=real)


def expert_load(
    logits_NX: Tensor,
    chosen_Nk: Tensor,
    own_Nk: Tensor | None,
    sigmoid: bool,
    n_tokens: int,
    counts_N: Tensor | None = None,
) -> Tensor:
    n_experts = logits_NX.shape[1]
    n_parts = max(1, triton.cdiv(n_tokens, _TOKENS * _TILES))
    sums = torch.empty((n_parts, 2 * n_experts + 2), dtype=torch.float32, device=logits_NX.device)
    _expert_load_kernel[(n_parts,)](
        logits_NX.contiguous(),
        chosen_Nk.contiguous(),
        own_Nk if own_Nk is None else own_Nk.contiguous(),
        counts_N if counts_N is None else counts_N.contiguous(),
        sums,
        n_tokens,
        n_experts,
        EXPERTS=triton.next_power_of_2(n_experts),
        TOP_K=chosen_Nk.shape[1],
        SIGMOID=sigmoid,
        HAS_OWN=own_Nk is not None,
        HAS_COUNTS=counts_N is not None,
        TOKENS=_TOKENS,
        TILES=_TILES,
    )
    return sums


@kernel(do_not_specialize=["n_tokens"])
def _expert_load_kernel(
    logits_ptr,
    chosen_ptr,
    own_ptr,
    counts_ptr,
    sums_ptr,
    n_tokens,
    n_experts,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    part, each = program_id_64(0), tl.arange(0, EXPERTS)
    real = each < n_experts
    n_chosen, probability = tl.zeros([EXPERTS], tl.float32), tl.zeros([EXPERTS], tl.float32)
    entropy, n_changed = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    for tile in range(TILES):
        token = (part * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        inside = token < n_tokens
        times = inside.to(tl.float32)
        if HAS_COUNTS:
            times = load_fp32(counts_ptr + token, inside)
        place = logits_ptr + token[:, None] * n_experts + each[None, :]
        logits = load_masked(place, inside[:, None] & real[None, :])
        if SIGMOID:
            probs = tl.where(real[None, :], tl.sigmoid(logits), 0.0)
        else:
            logits = tl.where(real[None, :], logits, -float("inf"))
            probs = tl.exp(logits - tl.max(logits, 1)[:, None])
        probs = probs / tl.sum(probs, 1)[:, None]
        probability += tl.sum(probs * times[:, None], 0)
        terms = tl.where(probs > 0.0, -probs * tl.log(tl.maximum(probs, 2e-38)), 0.0)
        entropy += tl.sum(terms, 1) * times
        for choice in range(TOP_K):
            expert = tl.load(chosen_ptr + token * TOP_K + choice, mask=inside, other=0)
            n_chosen += tl.sum(tl.where(expert[:, None] == each[None, :], times[:, None], 0.0), 0)
            if HAS_OWN:
                is_changed = inside
                for other in range(TOP_K):
                    own = tl.load(own_ptr + token * TOP_K + other, mask=inside, other=0)
                    is_changed = is_changed & (own != expert)
                n_changed += tl.where(is_changed, times, 0.0)
    sums = sums_ptr + part * (2 * n_experts + 2)
    tl.store(sums + each, n_chosen, mask=real)
    tl.store(sums + n_experts + each, probability, mask=real)
    tl.store(sums + 2 * n_experts, tl.sum(entropy, 0))
    tl.store(sums + 2 * n_experts + 1, tl.sum(n_changed, 0))


def sort_by_expert(chosen_Nk: Tensor, first: int, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Groups`. The copies for other ranks are sorted as those of one more expert.

    Up to MAX_COPIES, each expert has a program. More copies are sorted by counting, in blocks.
    """
    chosen_Nk = chosen_Nk.contiguous()
    n_copies, device = chosen_Nk.numel(), chosen_Nk.device
    tokens_M, choices_M = (torch.empty(n_copies, dtype=torch.int64, device=device) for _ in range(2))
    copies_Nk = torch.empty_like(chosen_Nk, dtype=torch.int64)
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
