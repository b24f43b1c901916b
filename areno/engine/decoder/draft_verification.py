"""Verification of drafts: one decode pass has the last token of each sequence and its draft tokens as inputs.

The batch of such a pass has one row for each of these positions. Each row draws its token with the random number of its
position, as a step without drafts would do. So a drafted token is accepted exactly if the draw of the row before it
gives the same token. The first draw that differs from the draft is itself the next token, and the rows after it are
dropped. Their keys and values lie beyond the end of the sequence, where later tokens overwrite them.

Shape letters: B sequences, N rows, W words of 32 tokens (in TableDrafts, W = CONTEXT last tokens), J drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.attention_split import AttentionSplit, PrefixGroups
from areno.engine.decoder.cuda_graphs import DecodeGraphs, GraphCache, GraphCapturer, GraphKey, draft_capture_sizes
from areno.engine.decoder.grammar import allowed_token_masks_along_draft
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import SlotTable
from areno.kernels.backend import to_device
from areno.kernels.sampling import CONTEXT, NgramTable, SamplingFlags, SamplingSettings, draft_tokens

# Numbers of drafted tokens of a sequence. With its last token, these are 2, 4 and 8 rows, at most a group of rows that
# share prefixes.
DRAFT_LENGTHS = (1, 3, 7)


@dataclass(frozen=True, slots=True)
class TableDrafts:
    """Drafts that the device looks up in a table of n-grams at the start of the step that verifies them.

    `contexts_BW` are the last W arrived tokens, padded with -1 in front. `limits_B` is the first position that must not
    be computed: it has no KV block, or comes after the last input token. `follows_B` marks sequences with tokens in
    flight, from a step with TableDrafts: the device adds these tokens to `contexts_BW` and `n_new_B`. `verified` is
    called when the tokens have arrived. Its arguments are these drafts, the sampled tokens (B, 1 + J), the number of
    tokens that each sequence got (B,), and whether each drafted token and all before it were right (B, J).
    """

    n_tokens: int
    slots_B: np.ndarray
    contexts_BW: np.ndarray
    scopes_B: np.ndarray
    n_new_B: np.ndarray
    limits_B: np.ndarray
    follows_B: np.ndarray
    verified: Callable[[TableDrafts, np.ndarray, np.ndarray, np.ndarray], None]

    @property
    def n_rows(self) -> int:
        return 1 + self.n_tokens


Drafts = list[list[int]] | TableDrafts
"""The drafted tokens of each sequence as lists, or TableDrafts, which the device looks up."""


def n_accepted_tokens(sequence: Sequence, draft: list[int], n_new: int) -> int:
    """Return how many leading tokens of a draft were right. `n_new` is the number of tokens that the sequence got."""
    if sequence.finish_reason is not None and 0 < n_new <= len(draft) and sequence.tokens[-1] == draft[n_new - 1]:
        return n_new  # the sample ends with a drafted token
    return max(0, n_new - 1)


def truncate_draft(sequence: Sequence, draft: list[int]) -> list[int]:
    """Cut a draft to the tokens that are worth verifying.

    The draft ends before the first token that ends the sequence or that the sequence's grammar does not allow. With the
    token that is sampled after the draft, the completion has at most `max_new` tokens.
    """
    draft = draft[: max(0, sequence.max_new - sequence.n_new - 1)]
    for index, token in enumerate(draft):
        if token in sequence.stop_ids:
            draft = draft[:index]
            break
    if draft and sequence.grammar is not None:
        draft = draft[: sequence.grammar.n_allowed(draft)]
    return draft


@dataclass(slots=True)
class DraftedRows:
    """The rows of a verification: for each sequence a row for its last token, then a row for each drafted token."""

    sequences: list[Sequence]
    drafts: list[list[int]]
    slots_N: np.ndarray
    positions_N: np.ndarray
    index_N: np.ndarray  # index in the completion of the token that each row draws
    tokens_N: np.ndarray  # input tokens

    @classmethod
    def for_step(cls, sequences: list[Sequence], drafts: list[list[int]], table: SlotTable) -> DraftedRows:
        """Return the rows of a step. `table.n_kv` and `table.n_sampled` must already include the tokens of the step."""
        n_rows_B = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
        row_of_N = np.repeat(np.arange(len(sequences)), n_rows_B)
        # Row i of n rows is n - i tokens before the end of the plan.
        left_N = np.repeat(np.cumsum(n_rows_B), n_rows_B) - np.arange(len(row_of_N))
        slots_N = np.array([sequence.slot for sequence in sequences], dtype=np.int64)[row_of_N]
        tokens: list[int] = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            tokens += [sequence.tokens[-1], *draft]
        return cls(
            sequences=[sequences[row] for row in row_of_N.tolist()],
            drafts=drafts,
            slots_N=slots_N,
            positions_N=table.n_kv[slots_N] - left_N,
            index_N=table.n_sampled[slots_N] - left_N,
            tokens_N=np.array(tokens, dtype=np.int64),
        )

    def drafted_token_pairs(self) -> np.ndarray:
        """Return (row, token) pairs, (2, n): the drafted tokens up to each row of a sequence with a penalty."""
        pairs: list[tuple[int, int]] = []
        row = 0
        for draft in self.drafts:
            if draft and self.sequences[row].is_penalized:
                pairs += [(row + n, token) for n in range(1, len(draft) + 1) for token in draft[:n]]
            row += 1 + len(draft)
        return np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()

    def grammar_masks(self, n_words: int) -> np.ndarray | None:
        """Return the grammar mask for the token that each row draws, (N, W) int32. None without grammars."""
        if all(sequence.grammar is None for sequence in self.sequences):
            return None
        masks_NW = np.full((len(self.sequences), n_words), -1, dtype=np.int32)
        row = 0
        for draft in self.drafts:
            if (grammar := self.sequences[row].grammar) is not None:
                masks_NW[row : row + 1 + len(draft)] = allowed_token_masks_along_draft(grammar, draft)[:, :n_words]
            row += 1 + len(draft)
        return masks_NW


def find_accepted_tokens(
    tokens_BR: np.ndarray, inputs_BR: np.ndarray, stop_ids_BS: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the accepted tokens of a step with TableDrafts.

    An input is -1 for a row without a draft or without room. Returns whether each drafted token and all before it were
    right (B, J), the number of tokens that each sequence gets (B,), and whether the last of them is a stop token (B,).
    NgramSteps counts on the device in the same way, except that it also counts the tokens after a stop token.
    """
    # An input of -1 differs from all tokens, so a row without a draft or without room ends the accepted ones.
    right_BJ = np.logical_and.accumulate(tokens_BR[:, :-1] == inputs_BR[:, 1:], axis=1)
    counts_B = np.where(inputs_BR[:, 0] >= 0, 1 + right_BJ.sum(1), 0)
    is_stop_BR = (stop_ids_BS[:, None] == tokens_BR[:, :, None]).any(2)
    is_stop_BR &= np.arange(tokens_BR.shape[1]) < counts_B[:, None]
    stops_B = is_stop_BR.any(1)
    return right_BJ, np.where(stops_B, is_stop_BR.argmax(1) + 1, counts_B), stops_B


class RowSampler(Protocol):
    """The part of SlotSampler that NgramSteps uses."""

    n_slots: int
    tensors: SamplingSettings

    def flags(self, table: SlotTable, slots_B: np.ndarray, index_B: np.ndarray | None = None) -> SamplingFlags: ...

    def at_rows(self, slots_N: Tensor, flags: SamplingFlags) -> RowSampler: ...


class NgramStepRunner:
    """Runs the decode pass of steps with TableDrafts, as CUDA graphs if possible.

    The number of new tokens of each slot and its last tokens stay on the device, so that the next step can draft before
    the host has read the tokens. `decode` is `Runner._decode`, and `split` is `split_attention` with the arguments that
    are the same in all steps. The rows of a sequence form a prefix group if `group_size` is not 0.
    """

    def __init__(
        self,
        decode: Callable[..., Tensor],
        sampler: RowSampler,
        split: Callable[..., AttentionSplit],
        block_size: int,
        group_size: int,
    ):
        self._decode, self._sampler, self._split = decode, sampler, split
        self._block_size, self._group_size = block_size, group_size
        self._device = sampler.tensors.key.device
        self._table: NgramTable | None = None
        self._gained = torch.zeros(sampler.n_slots, dtype=torch.int64, device=self._device)
        self._last_tokens = torch.zeros(CONTEXT, sampler.n_slots, dtype=torch.int64, device=self._device)
        self._graphs: dict[int, DecodeGraphs] = {}  # by the number of rows of a sequence
        self.captures: GraphCapturer | None = None

    @property
    def graphs(self) -> list[GraphCache[GraphKey]]:
        return [each.graphs for each in self._graphs.values()]

    def use_table(self, table: NgramTable) -> None:
        if table is not self._table:
            self._table = table
            self._graphs.clear()

    def look_up(self, drafts: TableDrafts) -> list[list[int]]:
        """Look up the drafts now, and return them as lists. All tokens of the sequences must have arrived."""
        assert self._table is not None
        given = (drafts.contexts_BW[:, ::-1].T.copy(), drafts.scopes_B, drafts.slots_B, drafts.n_new_B)
        contexts_WB, scopes_B, slots_B, n_new_B = (to_device(each, self._device) for each in given)
        settings = self._sampler.tensors
        found_BJ = draft_tokens(self._table, contexts_WB, scopes_B, slots_B, n_new_B, settings, drafts.n_tokens)
        return [[token for token in draft if token >= 0] for draft in found_BJ.tolist()]

    def launch(self, drafts: TableDrafts, table: SlotTable) -> Tensor:
        """Launch the decode pass of a step. Returns the result of `_draft_and_verify` as (3, B (1 + J))."""
        slots_B, n_rows = drafts.slots_B, drafts.n_rows
        before_B = table.n_prompt[slots_B] + drafts.n_new_B - 1  # positions before the rows of a sequence, at least
        graphs = None if self.captures is None else self._graphs_for(n_rows, self.captures)
        shared_B, groups_GR = np.zeros_like(before_B), None
        if self._group_size:
            shared_B = before_B // self._block_size * self._block_size
            n_groups = len(slots_B) if graphs is None else graphs.captured_size_for(len(slots_B))
            groups_GR = np.full((n_groups, self._group_size), -1, dtype=np.int64)
            groups_GR[: len(slots_B), :n_rows] = np.arange(len(slots_B) * n_rows).reshape(-1, n_rows)
        groups = PrefixGroups(shared_B, groups_GR, shared_B.tolist())
        split = self._split([], max_groups=0, lengths_B=table.n_kv[slots_B], groups=groups)
        if groups_GR is not None:  # few numbers of splits, so few graphs; a split without positions costs little
            split.splits = split.splits[0], 4 if split.splits[1] <= 4 else 16
        inputs = np.empty((6 + CONTEXT, len(slots_B)), dtype=np.int64)
        inputs[:6] = slots_B, drafts.n_new_B, before_B, drafts.limits_B, drafts.follows_B, drafts.scopes_B
        inputs[6:] = drafts.contexts_BW[:, ::-1].T
        flags = self._sampler.flags(table, slots_B, drafts.n_new_B)
        if graphs is not None:
            return graphs.run(inputs, split, flags).flatten(1)
        groups_on_device = None if groups_GR is None else to_device(groups_GR, self._device)
        given = to_device(inputs, self._device), to_device(split.split_lens, self._device), groups_on_device
        most = int(np.minimum(table.n_kv[slots_B], drafts.limits_B).max())
        return self._draft_and_verify(n_rows, *given, split.splits, flags, most).flatten(1)

    def _graphs_for(self, n_rows: int, captures: GraphCapturer) -> DecodeGraphs:
        if n_rows not in self._graphs:
            most = self._sampler.n_slots - 1
            padding, body = (most, *[0] * (5 + CONTEXT)), partial(self._draft_and_verify, n_rows)
            self._graphs[n_rows] = DecodeGraphs(body, draft_capture_sizes(most), padding, captures)
        return self._graphs[n_rows]

    def _draft_and_verify(
        self,
        n_rows: int,
        inputs: Tensor,
        split_lens: Tensor,
        prefix_groups_GR: Tensor | None,
        splits: tuple[int, int],
        flags: SamplingFlags,
        max_len: int | None = None,
    ) -> Tensor:
        """Draft tokens for B sequences, run the model on them, and sample a token for each of R rows.

        `inputs` is (6 + W, B) int64: slot, `n_new_B`, the number of positions before the rows, `limits_B`, `follows_B`,
        `scopes_B`, and the W last tokens, the last one first. Penalties, masks and edits are not supported. Returns (3,
        B, R) float64: token, log-probability and input token, which is -1 for a row without a draft or without room.
        """
        assert self._table is not None
        settings, scratch, device = self._sampler.tensors, self._sampler.n_slots - 1, inputs.device
        slots_B, index_B, before_B, limits_B, follows_B, scopes_B = inputs[:6]
        gained_B = follows_B * self._gained[slots_B]
        index_B = index_B + gained_B
        contexts_WB = torch.where(follows_B > 0, self._last_tokens[:, slots_B], inputs[6:])
        drafts_BJ = draft_tokens(self._table, contexts_WB, scopes_B, slots_B, index_B, settings, n_rows - 1)
        inputs_BR = torch.cat((contexts_WB[0, :, None], drafts_BJ), dim=1)
        number = torch.arange(n_rows, device=device)
        positions_BR = (before_B + gained_B)[:, None] + number
        has_room_BR = positions_BR < limits_B[:, None]
        shared_B = torch.zeros_like(before_B)
        if prefix_groups_GR is not None:
            shared_B = before_B - before_B % self._block_size
        parts: list[Any] = [
            torch.where(has_room_BR, slots_B[:, None], scratch),
            *(
                torch.where(has_room_BR, part, 0)
                for part in (positions_BR, index_B[:, None] + number, shared_B[:, None], inputs_BR.clamp(min=0))
            ),
        ]
        rows = torch.stack(parts).view(5, -1)
        of_rows = self._sampler.at_rows(rows[0], flags)
        out_2N = self._decode(rows, split_lens, prefix_groups_GR, splits, flags, max_len, of_rows=of_rows)
        tokens_BR = out_2N[0].long().view(-1, n_rows)
        is_right_BJ = (tokens_BR[:, :-1] == drafts_BJ) & has_room_BR[:, 1:]
        gained_B = (1 + is_right_BJ.long().cumprod(1).sum(1)) * has_room_BR[:, 0]
        both_BL = torch.cat((contexts_WB.flip(0).T, tokens_BR), dim=1)
        last_BW = both_BL.gather(1, gained_B[:, None] + torch.arange(CONTEXT - 1, -1, -1, device=device))
        self._gained[slots_B] = gained_B
        self._last_tokens[:, slots_B] = last_BW.T
        settings.last_token[slots_B] = last_BW[:, 0]
        return torch.cat((out_2N.view(2, -1, n_rows), inputs_BR.masked_fill(~has_room_BR, -1).double()[None]))
