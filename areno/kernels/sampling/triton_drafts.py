# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Draft tokens from a table of n-grams with a Triton kernel, one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels.jit import kernel, load_masked, program_id_64
from areno.kernels.sampling.drafts import CONTEXT, KEPT, NgramTable
from areno.kernels.sampling.reference import SamplingSettings
from areno.kernels.sampling.triton import _mix_bits, _uniform


def draft_tokens(
    table: NgramTable,
    contexts_WB: Tensor,
    scopes_B: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    n_tokens: int,
) -> Tensor:
    n_rows = len(scopes_B)
    out = torch.empty((n_rows, n_tokens), dtype=torch.int64, device=scopes_B.device)
    _draft_tokens_kernel[(n_rows,)](
        contexts_WB,
        scopes_B,
        slots_B,
        positions_B,
        settings.key,
        settings.greedy,
        table.tags,
        table.counts,
        table.tokens,
        table.factors_W,
        table.lengths_L,
        table.is_scoped_L,
        table.marks_L,
        out,
        contexts_WB.stride(0),
        n_tokens,
        SHIFT=64 - table.n_bits,
        CONTEXT=CONTEXT,
        PADDED_CONTEXT=triton.next_power_of_2(CONTEXT),
        N_LEVELS=len(table.lengths_L),
        KEPT=KEPT,
        num_warps=1,
    )
    return out


@kernel(
    do_not_specialize=["context_stride", "n_tokens"],
    do_not_specialize_on_alignment=["contexts_ptr", "scopes_ptr", "slots_ptr", "positions_ptr", "out_ptr"],
)
def _draft_tokens_kernel(
    contexts_ptr,
    scopes_ptr,
    slots_ptr,
    positions_ptr,
    key_ptr,
    greedy_ptr,
    tags_ptr,
    counts_ptr,
    tokens_ptr,
    factors_ptr,
    lengths_ptr,
    scoped_ptr,
    marks_ptr,
    out_ptr,
    context_stride,
    n_tokens,
    SHIFT: tl.constexpr,
    CONTEXT: tl.constexpr,
    PADDED_CONTEXT: tl.constexpr,
    N_LEVELS: tl.constexpr,
    KEPT: tl.constexpr,
):
    row = program_id_64(0)
    back = tl.arange(0, PADDED_CONTEXT)
    exists = back < CONTEXT
    context = tl.load(contexts_ptr + back * context_stride + row, mask=exists, other=-1)
    factors = load_masked(factors_ptr + back, exists)
    level = tl.arange(0, N_LEVELS)
    in_suffix = back[None, :] < tl.load(lengths_ptr + level)[:, None]
    mark = tl.load(marks_ptr + level) ^ (tl.load(scoped_ptr + level) * tl.load(scopes_ptr + row))
    place = tl.arange(0, KEPT)
    slot = tl.load(slots_ptr + row)
    key = tl.load(key_ptr + slot)
    is_greedy = tl.load(greedy_ptr + slot)
    position = tl.load(positions_ptr + row)
    is_found = True
    for number in range(n_tokens):
        parts = tl.where(in_suffix, ((context + 1) * factors)[None, :], 0)
        value = _mix_bits((tl.sum(parts, axis=1) ^ mark).to(tl.uint64, bitcast=True))
        entries = (value >> SHIFT).to(tl.int64)
        tags = (value & 0x7FFFFFFF).to(tl.int32)
        is_whole = tl.min(tl.where(in_suffix, context[None, :], 0), axis=1) >= 0
        is_known = is_whole & (tl.load(tags_ptr + entries) == tags)
        counts = tl.where(is_known, tl.load(counts_ptr + entries), 0)
        first = tl.min(tl.where(counts > 0, level, N_LEVELS), axis=0)
        n_known = tl.minimum(tl.sum(tl.where(level == first, counts, 0), axis=0), KEPT)
        entry = tl.sum(tl.where(level == first, entries, 0), axis=0)
        stored = tl.load(tokens_ptr + entry * KEPT + place, mask=place < n_known, other=0x7FFFFFFF)
        is_less = (stored[None, :] < stored[:, None]) | (
            (stored[None, :] == stored[:, None]) & (place[None, :] < place[:, None])
        )
        rank = tl.sum(is_less.to(tl.int32), axis=1)
        drawn = (_uniform(key, position + number) * n_known.to(tl.float64)).to(tl.int32)
        n_same = tl.sum((stored[None, :] == stored[:, None]).to(tl.int32), axis=1)
        n_same = tl.where(place < n_known, n_same, 0)
        frequent = tl.min(tl.where(n_same == tl.max(n_same, axis=0), place, KEPT), axis=0)
        chosen = tl.where(is_greedy, place == frequent, rank == drawn)
        is_found = is_found & (n_known > 0)
        token = tl.where(is_found, tl.sum(tl.where(chosen, stored, 0), axis=0).to(tl.int64), -1)
        tl.store(out_ptr + row * n_tokens + number, token)
        shifted = tl.sum(tl.where(back[None, :] + 1 == back[:, None], context[None, :], 0), axis=1)
        context = tl.where(back == 0, token, shifted)
