"""Drafts of the next tokens of samples, from a table of the tokens that followed the same tokens before.

For each suffix of some lengths (LEVELS), the table keeps the last C tokens that followed it. It is a hash table with
one entry for each index. A new suffix replaces another one with the same index. An entry holds 31 more bits of the
hash, so the entry of another suffix is mistaken for the wanted one about once in 2^31 times. Such a draft is harmless.

A scope is a set of texts that resemble each other, such as the samples of a prompt. Some levels look at texts of the
row's scope, others at all texts. The idea of drafts from a growing index of samples is from SuffixDecoding (arXiv
2411.04975) and DAS (arXiv 2511.13841).

Shape letters: B rows, W = CONTEXT last tokens of a row, N tokens of texts, L levels, M = N L suffixes, C tokens kept
for a suffix, J drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areno.kernels.sampling.random_keys import logical_shift_right, mix_bits, uniform
from areno.kernels.sampling.reference import SamplingSettings

# (tokens of the suffix, whether it counts only in texts of the same scope), the most reliable first. In a replay of
# samples of countdown, drafts of 8 tokens are right for 1.56 tokens, with 10 levels for 1.56, and with 8, 5, 4 and 3
# tokens of the same scope for 1.21.
LEVELS = ((12, False), (8, False), (6, True), (4, True), (6, False), (3, True), (4, False), (2, True))
CONTEXT = max(n_tokens for n_tokens, _ in LEVELS)
KEPT = 8  # tokens that followed a suffix last; with 64 of them, 1.59 tokens are right
_TAG = (1 << 31) - 1
_NONE = -1  # key of a suffix that does not exist


@dataclass(frozen=True, slots=True)
class NgramTable:
    """The table, on the device of the sampler. Its last entry receives values that are dropped."""

    tags: Tensor  # int32 (entries + 1,), bits of the hash of the suffix
    counts: Tensor  # int32 (entries + 1,), tokens that followed so far, 0 for an empty entry
    tokens: Tensor  # int32 (entries + 1, C), the last of them; token number i is at index i modulo C
    factors_W: Tensor  # int64, of the hash
    lengths_L: Tensor  # int64, tokens of the suffix
    is_scoped_L: Tensor  # int64, 1 for a level that counts only texts of the same scope
    marks_L: Tensor  # int64, random

    @classmethod
    def empty(cls, n_bits: int, device: torch.device) -> NgramTable:
        """Return a table of 2 ** n_bits entries of 40 bytes."""
        rng, n = np.random.default_rng(0), (1 << n_bits) + 1
        random = torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, size=CONTEXT + len(LEVELS))).to(device)
        levels = torch.tensor(LEVELS, dtype=torch.int64).T.to(device)
        return cls(
            tags=torch.zeros(n, dtype=torch.int32, device=device),
            counts=torch.zeros(n, dtype=torch.int32, device=device),
            tokens=torch.zeros(n, KEPT, dtype=torch.int32, device=device),
            factors_W=random[:CONTEXT] | 1,
            lengths_L=levels[0].contiguous(),
            is_scoped_L=levels[1].contiguous(),
            marks_L=random[CONTEXT:].contiguous(),
        )

    @property
    def n_bits(self) -> int:
        return (len(self.counts) - 1).bit_length() - 1

    def clear(self) -> None:
        self.counts.zero_()


def _suffix_hashes(table: NgramTable, before_NW: Tensor, scopes_N: Tensor) -> Tensor:
    """Return the hash of the suffix of each level, (N, L) int64, with `_NONE` where the text is too short."""
    sums_NW = ((before_NW + 1) * table.factors_W).cumsum(1)
    last_L = table.lengths_L - 1
    value_NL = sums_NW[:, last_L] ^ (scopes_N[:, None] * table.is_scoped_L) ^ table.marks_L
    return torch.where(before_NW[:, last_L] >= 0, mix_bits(value_NL), _NONE)


def add_texts(table: NgramTable, texts_4N: Tensor) -> None:
    """Enter in the table, for each new token of some texts, the suffixes before it, in the same way on all devices.

    `texts_4N` has the texts one after the other, with four rows: token, number of tokens of its text before it, scope
    of the text, and 1 for a new token or 0 for a token that was entered before.
    """
    token_N, offset_N, scope_N, is_new_N = texts_4N.unbind()
    n_levels, n_entries, device = len(table.lengths_L), len(table.counts) - 1, token_N.device
    back_W = torch.arange(1, CONTEXT + 1, device=device)
    at_NW = torch.arange(len(token_N), device=device)[:, None] - back_W
    before_NW = torch.where(back_W <= offset_N[:, None], token_N[at_NW.clamp_(min=0)], -1)
    keys_NL = torch.where(is_new_N[:, None] > 0, _suffix_hashes(table, before_NW, scope_N), _NONE)
    # Stable, so that the tokens of a suffix stay in the order of the texts. Keys of an entry become neighbours.
    keys_M, order_M = keys_NL.flatten().sort(stable=True)
    number_M = torch.arange(len(keys_M), device=device)
    differs = keys_M[1:] != keys_M[:-1]
    begins_M, ends_M = _append_true(differs, at_start=True), _append_true(differs, at_start=False)
    first_M = torch.where(begins_M, number_M, 0).cummax(0).values
    last_M = torch.where(ends_M, number_M, len(keys_M)).flip(0).cummin(0).values.flip(0)
    entry_M = logical_shift_right(keys_M, 64 - table.n_bits)
    tag_M = (keys_M & _TAG).int()
    # Of several new suffixes with one entry, the last one is kept.
    is_last_of_entry_M = _append_true(entry_M[1:] != entry_M[:-1], at_start=False)[last_M]
    is_written_M = is_last_of_entry_M & (keys_M != _NONE)
    known_M = torch.where(table.tags[entry_M] == tag_M, table.counts[entry_M], 0)
    into_M = torch.where(is_written_M & (last_M - number_M < KEPT), entry_M, n_entries)
    place_M = (known_M + number_M - first_M) % KEPT
    table.tokens[into_M, place_M] = token_N[order_M // n_levels].int()
    into_M = torch.where(is_written_M & ends_M, entry_M, n_entries)
    table.tags[into_M] = tag_M
    table.counts[into_M] = known_M + (last_M - first_M + 1).int()


def _append_true(inner: Tensor, *, at_start: bool) -> Tensor:
    edge = torch.ones(1, dtype=torch.bool, device=inner.device)
    return torch.cat((edge, inner) if at_start else (inner, edge))


def draft_tokens(
    table: NgramTable,
    contexts_WB: Tensor,
    scopes_B: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    settings: SamplingSettings,
    n_tokens: int,
) -> Tensor:
    context_BW = contexts_WB.T.contiguous()
    key_B, is_greedy_B = settings.key[slots_B], settings.greedy[slots_B]
    place_C = torch.arange(KEPT, device=scopes_B.device)
    found_B = torch.ones_like(is_greedy_B)
    drafts = []
    for number in range(n_tokens):
        keys_BL = _suffix_hashes(table, context_BW, scopes_B)
        entry_BL = logical_shift_right(keys_BL, 64 - table.n_bits)
        has_entry_BL = (table.tags[entry_BL] == (keys_BL & _TAG)) & (table.counts[entry_BL] > 0) & (keys_BL != _NONE)
        level_B1 = has_entry_BL.int().argmax(1, keepdim=True)  # the first
        entry_B = entry_BL.gather(1, level_B1).squeeze(1)
        n_known_B = table.counts[entry_B].clamp(max=KEPT)
        stored_BC = torch.where(place_C < n_known_B[:, None], table.tokens[entry_B], _TAG)
        drawn_B1 = (uniform(key_B, positions_B + number) * n_known_B).long()[:, None]
        token_B = stored_BC.sort(1).values.gather(1, drawn_B1).squeeze(1)
        n_same_BC = (stored_BC[:, :, None] == stored_BC[:, None, :]).sum(2)
        n_same_BC = torch.where(stored_BC == _TAG, 0, n_same_BC)
        frequent_B = stored_BC.gather(1, n_same_BC.argmax(1, keepdim=True)).squeeze(1)
        found_B = found_B & has_entry_BL.any(1)
        token_B = torch.where(found_B, torch.where(is_greedy_B, frequent_B, token_B).long(), -1)
        drafts.append(token_B)
        context_BW = torch.cat((token_B[:, None], context_BW[:, :-1]), dim=1)
    return torch.stack(drafts, dim=1)
