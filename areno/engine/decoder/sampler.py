"""Sampling with the settings of each sequence in the batch.

SlotSampler keeps the settings on the device, one entry for each slot, and calls the kernels of `kernels/sampling`.
LogitEdits applies the settings that few requests use: bias, presence penalty, min-p, top and raw log-probabilities.
These run in torch, only on the rows of such requests, and outside of CUDA graphs. Tokens are drawn from the edited
logits, while the returned log-probabilities are those of the unedited policy.

Shape letters: B rows of the batch, R rows among them with edits, V vocabulary, S slots, W words of 32 tokens. `slots_B`
is the slot of each row, `index_B` the index of the sampled token in its completion, and `flags` the operations that at
least one row needs. Functions that sample return (2, B) float64: tokens and log-probabilities.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.engine.decoder.draft_verification import Drafts
from areno.engine.decoder.grammar import allowed_token_masks
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import SlotTable
from areno.kernels.backend import HostCopy
from areno.kernels.logprobs import sampled_logprobs
from areno.kernels.sampling import DecodableIds, SamplingFlags, SamplingSettings, sample_slots
from areno.kernels.sampling.reference import COLUMNS, apply_masks, mask_banned_tokens, policy_logprobs
from areno.layers.parallel import ParallelGroup
from areno.types import TOKEN_SCORE, TokenScores

_OF_REQUEST = {name: column.of_request for name, column in COLUMNS.items() if column.of_request is not None}
_ROWS = ("slot", "key", "min_new", *_OF_REQUEST)


class SlotSampler:
    """Sampling settings on the device, one entry for each slot of the batch, and a last one for padding rows.

    Settings are written when a sequence gets its slot, so a decoding step sends only slot numbers. A temperature of 0
    means greedy sampling, with log-probabilities at temperature 1. `masks_SW` is int32 with one bit for each token, set
    if the slot may sample it. It is None until a grammar is used.
    """

    def __init__(self, n_slots: int, vocab_size: int, device: torch.device, texts: Iterable[tuple[int, int]] = ()):
        self.tensors = SamplingSettings(
            **{
                name: torch.full((n_slots,), column.unused, dtype=column.dtype, device=device)
                for name, column in COLUMNS.items()
            },
            banned=torch.full((n_slots, 0), -1, dtype=torch.int64, device=device),
            counts=None,
            texts=DecodableIds.from_ranges(texts, vocab_size, device),
        )
        self.n_slots, self.vocab_size = n_slots, vocab_size
        self.masks_SW: Tensor | None = None
        self._masked_slots: set[int] = set()  # slots whose masks have cleared bits

    def at_rows(
        self, slots_N: Tensor, flags: SamplingFlags, counts: Tensor | None = None, masks_NW: Tensor | None = None
    ) -> SlotSampler:
        """Return a sampler in which each of N rows has its own slot, so that rows of one sequence can differ.

        Slot i of the result has the settings of row i. Its last slot, for padding rows, is a copy of this sampler's
        last slot. Drawing with the result changes nothing in this sampler. `counts` (2, n) are (row, token) pairs to
        add to the penalty counts. Without `counts`, penalty counts are left out, and without `flags.n_banned`, banned
        tokens are left out. A CUDA graph must not read these two tensors, because they may be replaced.
        """
        of, slots = self.tensors, F.pad(slots_N, (0, 1), value=self.n_slots - 1)
        rows = copy.copy(self)
        rows.n_slots = len(slots)
        rows.masks_SW = None if masks_NW is None else F.pad(masks_NW, (0, 0, 0, 1), value=-1)
        counted = None
        if counts is not None and of.counts is not None:
            counted = of.counts[slots]
            counted.index_put_((counts[0], counts[1]), counted.new_ones(()), accumulate=True)
        rows.tensors = replace(
            of,
            **{name: vars(of)[name][slots] for name in COLUMNS},
            banned=of.banned[slots] if flags.n_banned else of.banned.new_empty(len(slots), 0),
            counts=counted,
        )
        return rows

    def apply_verified(self, slots: Tensor, tokens: Tensor, counted: Tensor) -> None:
        """After a verification, set the last tokens of `slots`, and add (slot, token) pairs to the penalty counts."""
        self.tensors.last_token[slots] = tokens
        if self.tensors.counts is not None and counted.shape[1]:
            self.tensors.counts.index_put_((counted[0], counted[1]), self.tensors.counts.new_ones(()), accumulate=True)

    def flags(self, table: SlotTable, slots_B: np.ndarray, index_B: np.ndarray | None = None) -> SamplingFlags:
        """Return the sampling operations that at least one of these slots needs, such as top-k or a penalty."""
        index_B = table.n_sampled[slots_B] - 1 if index_B is None else index_B
        may_stop_B = index_B >= table.min_new[slots_B]
        return SamplingFlags(
            filtered=bool(table.is_filtered[slots_B].any()),
            n_banned=0 if may_stop_B.all() else self.tensors.banned.shape[1],
            penalized=bool(table.is_penalized[slots_B].any()),
            masked=bool(table.has_grammar[slots_B].any()),
        )

    @staticmethod
    def pack_settings(sequences: list[Sequence]) -> np.ndarray:
        """Return the settings of sequences that have a new slot, (rows, len(sequences)) int64, for `assign_settings`.

        The first rows are the settings in `_ROWS`, the others are banned tokens. The number of banned tokens is 0 or a
        power of two, so that few kernel variants are compiled. Floats are stored as the bits of a float64.
        """
        # Samples of a request have the same settings, so the first of neighbours stands for all.
        firsts = [at for at, each in enumerate(sequences) if not at or each.request is not sequences[at - 1].request]
        n_banned = max((len(sequences[at].stop_ids) for at in firsts if sequences[at].min_new > 0), default=0)
        n_banned = 1 << (n_banned - 1).bit_length() if n_banned else 0
        packed = np.full((len(_ROWS) + n_banned, len(sequences)), -1, dtype=np.int64)
        rows, banned_KN = dict(zip(_ROWS, packed, strict=False)), packed[len(_ROWS) :]
        rows["slot"][:] = [sequence.slot for sequence in sequences]
        rows["key"][:] = [sequence.key for sequence in sequences]
        of_request = [
            (rows[name].view(np.float64) if COLUMNS[name].dtype.is_floating_point else rows[name], value_of)
            for name, value_of in _OF_REQUEST.items()
        ]
        for start, end in itertools.pairwise([*firsts, len(sequences)]):
            sequence, columns = sequences[start], slice(start, end)
            rows["min_new"][columns] = sequence.min_new
            for row, value_of in of_request:
                row[columns] = value_of(sequence.request.params)
            if sequence.min_new > 0:
                banned_KN[: len(sequence.stop_ids), columns] = np.array(sorted(sequence.stop_ids))[:, None]
        return packed

    def assign_settings(self, packed: Tensor) -> None:
        rows, tensors, banned_KN = dict(zip(_ROWS, packed, strict=False)), self.tensors, packed[len(_ROWS) :]
        slots = rows.pop("slot")
        for name, row in rows.items():
            dtype = COLUMNS[name].dtype
            vars(tensors)[name][slots] = (row.view(torch.float64) if dtype.is_floating_point else row).to(dtype)
        if (more := len(banned_KN) - tensors.banned.shape[1]) > 0:
            tensors.banned = F.pad(tensors.banned, (0, more), value=-1)
        missing = tensors.banned.shape[1] - len(banned_KN)
        tensors.banned[slots] = F.pad(banned_KN, (0, 0, 0, missing), value=-1).T

    @staticmethod
    def pack_counts(sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the slots of the sequences with a penalty, and their completions as (2, n) int64: slot, token.

        A sequence that was preempted already has completion tokens when it gets a new slot.
        """
        penalized = [sequence for sequence in sequences if sequence.is_penalized]
        if not penalized:
            return None
        pairs = [(sequence.slot, token) for sequence in penalized for token in sequence.tokens[sequence.n_prompt :]]
        slots = np.array([sequence.slot for sequence in penalized], dtype=np.int64)
        return slots, np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()

    def assign_counts(self, slots: Tensor, pairs_2N: Tensor) -> None:
        """Set the penalty counts of `slots` to the (slot, token) pairs that `pack_counts` returned."""
        if self.tensors.counts is None:
            self.tensors.counts = torch.zeros((self.n_slots, self.vocab_size), dtype=torch.int32, device=slots.device)
        counts = self.tensors.counts
        counts.index_fill_(0, slots, 0)  # an assignment of 0 copies it from the host, and waits
        counts.index_put_((pairs_2N[0], pairs_2N[1]), counts.new_ones(()), accumulate=True)

    @property
    def n_mask_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def has_masks(self) -> bool:
        return bool(self._masked_slots)

    def pack_masks(self, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the slots and grammar masks (n, W) that must be written before a batch is sampled.

        A sequence without a grammar whose slot still has an old mask gets a mask with all bits set. All sampled tokens
        of a sequence with a grammar must have arrived on the host.
        """
        with_grammar = [sequence for sequence in sequences if sequence.grammar is not None]
        freed = [each for each in sequences if each.grammar is None and each.slot in self._masked_slots]
        if not with_grammar and not freed:
            return None
        slots = np.array([sequence.slot for sequence in with_grammar + freed], dtype=np.int64)
        masks_KW = np.full((len(slots), self.n_mask_words), -1, dtype=np.int32)
        if with_grammar:
            found = allowed_token_masks([sequence.grammar for sequence in with_grammar if sequence.grammar is not None])
            masks_KW[: len(with_grammar)] = found[:, : masks_KW.shape[1]]
        self._masked_slots.difference_update(sequence.slot for sequence in freed)
        self._masked_slots.update(sequence.slot for sequence in with_grammar)
        return slots, masks_KW

    def assign_masks(self, slots: Tensor, masks_KW: Tensor) -> None:
        if self.masks_SW is None:
            shape = (self.n_slots, masks_KW.shape[1])
            self.masks_SW = torch.full(shape, -1, dtype=torch.int32, device=slots.device)
        self.masks_SW[slots] = masks_KW

    def sample(self, logits_BV: Tensor, slots_B: Tensor, index_B: Tensor, flags: SamplingFlags) -> Tensor:
        """Sample from logits of the whole vocabulary, which may be overwritten.

        Top-k, top-p and grammar masks restrict the draw, but do not change the returned log-probability.
        """
        if not flags.masked:
            return sample_slots(logits_BV, slots_B, index_B, self.tensors, flags)
        assert self.masks_SW is not None
        masked_BV = apply_masks(logits_BV, self.masks_SW, slots_B)
        tokens_B, logprobs_B = sample_slots(masked_BV, slots_B, index_B, self.tensors, flags)
        policy_B = policy_logprobs(logits_BV, self.tensors.temperature[slots_B], tokens_B.long())
        is_masked_B = (self.masks_SW[slots_B] != -1).any(-1)
        return torch.stack((tokens_B, torch.where(is_masked_B, policy_B, logprobs_B)))

    def sample_hidden(self, hidden_BD: Tensor, weight_VD: Tensor, slots_B: Tensor, index_B: Tensor) -> Tensor:
        from areno.kernels.sampling.triton_head import sample_hidden

        return sample_hidden(hidden_BD, weight_VD, slots_B, index_B, self.tensors)

    def sample_columns(
        self, tp: ParallelGroup, columns_BV: Tensor, slots_B: Tensor, index_B: Tensor, flags: SamplingFlags
    ) -> Tensor:
        """Sample from logits whose columns are split over tensor-parallel ranks. All ranks get the same tokens."""
        from areno.kernels.sampling.triton import sample_columns

        out_2B = sample_columns(
            columns_BV, self.vocab_size, slots_B, index_B, self.tensors, flags, tp.rank, tp.all_gather_stacked
        )
        self.tensors.last_token[slots_B] = out_2B[0].long()
        return out_2B

    def logprobs(self, local_BV: Tensor, tokens_B: Tensor, slots_B: Tensor, tp: ParallelGroup, first: int) -> Tensor:
        """Return log-probabilities (B,) from the training kernel. `first` is the token id of this rank's column 0."""
        reduce = tp.all_reduce if tp.size > 1 else None
        return sampled_logprobs(local_BV, tokens_B, self.tensors.temperature[slots_B], first=first, all_reduce=reduce)

    def record_tokens(self, tokens_B: Tensor, slots_B: Tensor, drawn_on_this_rank: slice, flags: SamplingFlags) -> None:
        """Store the tokens of all rows, and count them for penalties. Rows `drawn_on_this_rank` are already counted."""
        self.tensors.last_token[slots_B] = tokens_B
        if flags.penalized:
            assert self.tensors.counts is not None
            drawn_on_other_ranks_B = torch.ones_like(slots_B, dtype=torch.int32)
            drawn_on_other_ranks_B[drawn_on_this_rank] = 0
            self.tensors.counts.index_put_((slots_B, tokens_B), drawn_on_other_ranks_B, accumulate=True)


@dataclass(slots=True)
class LogitEdits:
    """Settings that edit the logits of some rows in a batch, as tensors on the device."""

    rows_R: Tensor  # batch indices
    bias: tuple[Tensor, Tensor, Tensor] | None  # index among the R rows, token id, value
    presence_R: Tensor
    frequency_R: Tensor
    min_p_R: Tensor  # 0 for greedy rows
    n_top: int  # most likely tokens that any row requests
    temperature_R: Tensor | None = None  # of requested log-probabilities; None for those of the slots
    records_R: Tensor | None = None  # bool, rows whose logits are as they were, and whose distribution is recorded

    @classmethod
    def for_batch(cls, sequences: list[Sequence], upload: Callable[[np.ndarray], Tensor]) -> LogitEdits | None:
        rows = [row for row, sequence in enumerate(sequences) if sequence.needs_edits]
        if not rows:
            return None
        chosen = [sequences[row] for row in rows]
        params = [sequence.request.params for sequence in chosen]
        biases = [(r, token, value) for r, s in enumerate(chosen) for token, value in s.request.logit_bias.items()]
        floats = [(p.presence_penalty, p.frequency_penalty, 0.0 if p.is_greedy else p.min_p) for p in params]
        presence_R, frequency_R, min_p_R = upload(np.array(floats, dtype=np.float32).T.copy()).unbind()
        bias = None
        if biases:
            at = upload(np.array([entry[:2] for entry in biases], dtype=np.int64).T.copy())
            bias = (at[0], at[1], upload(np.array([entry[2] for entry in biases], dtype=np.float32)))
        requests = [sequence.request for sequence in chosen]
        n_top, scored = max(request.top_logprobs for request in requests), None
        if any(request.raw_logprobs for request in requests):
            scored = upload(np.array([request.scored_temperature for request in requests], dtype=np.float32))
        records = np.array([one.params.top_logprobs > 0 and not one.edits_logits for one in requests])
        records_R = upload(records) if records.any() else None
        at_rows = upload(np.array(rows, dtype=np.int64))
        return cls(at_rows, bias, presence_R, frequency_R, min_p_R, n_top, scored, records_R)

    def apply(
        self, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, sampler: SlotSampler, flags: SamplingFlags
    ) -> Tensor:
        """Return a copy of the logits with bias, presence penalty and min-p applied.

        Min-p sets a token's logit to -inf if the token's probability is too small relative to the most likely token. To
        find the most likely token, the method also considers frequency penalties, banned tokens, grammar masks and ids
        without a text. It does not apply them to the result, because the sampler applies them later.
        """
        edited_RV, settings = logits_RV.clone(), sampler.tensors
        if self.bias is not None:
            rows, tokens, values = self.bias
            edited_RV.index_put_((rows, tokens), values, accumulate=True)
        drawn_RV = edited_RV
        if settings.counts is not None:
            counts_RV = settings.counts[slots_R]
            edited_RV -= self.presence_R[:, None] * (counts_RV > 0)
            drawn_RV = edited_RV - self.frequency_R[:, None] * counts_RV
        if flags.n_banned:
            drawn_RV = mask_banned_tokens(drawn_RV, slots_R, positions_R, settings)
        if sampler.masks_SW is not None:
            drawn_RV = apply_masks(drawn_RV, sampler.masks_SW, slots_R)
        if settings.texts is not None:
            drawn_RV = drawn_RV.index_fill(1, settings.texts.absent_N, -torch.inf)
        # min-p is relative to the most likely token that can be drawn; log(0) keeps all tokens.
        drawn_RV = drawn_RV / settings.temperature[slots_R, None]
        least_R = drawn_RV.max(dim=-1).values + self.min_p_R.log()
        return edited_RV.masked_fill_(drawn_RV < least_R[:, None], -torch.inf)


def sample_edited(
    logits_BV: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    sampler: SlotSampler,
    flags: SamplingFlags,
    edits: LogitEdits,
) -> Tensor:
    """Sample a token for each row of a batch in which some rows need edited logits.

    Returns (3 + 2 * n_top, B) float64: tokens, log-probabilities, log-probabilities at `edits.temperature_R`, then the
    ids and the log-probabilities of the n_top most likely tokens at this temperature. Log-probabilities are computed
    from unedited logits. For batch rows without edits, all results but the first two are -1.
    """
    rows_R, slots_R = edits.rows_R, slots_B[edits.rows_R]
    policy_RV = logits_BV[rows_R]
    edited_RV = edits.apply(policy_RV, slots_R, positions_B[rows_R], sampler, flags)
    edited_BV = logits_BV.index_copy(0, rows_R, edited_RV)
    out_2B = sampler.sample(edited_BV, slots_B, positions_B, flags)
    logprobs_RV = (policy_RV / sampler.tensors.temperature[slots_R, None]).double().log_softmax(-1)
    tokens_R = out_2B[0, rows_R].long()
    own_R = logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1)
    if edits.records_R is not None:  # these train, with the log-probabilities of rows without edits
        own_R = out_2B[1, rows_R].where(edits.records_R, own_R)
    out_2B[1, rows_R] = own_R
    if edits.temperature_R is not None:
        logprobs_RV = (policy_RV / edits.temperature_R[:, None]).double().log_softmax(-1)
    n_top = min(edits.n_top, logprobs_RV.shape[1])
    scores_KB = out_2B.new_full((1 + 2 * n_top, out_2B.shape[1]), -1)
    scores_KB[0, rows_R] = logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1)
    if n_top:
        values_RK, ids_RK = logprobs_RV.topk(n_top, dim=-1)
        scores_KB[1:, rows_R] = torch.cat((ids_RK.T.double(), values_RK.T))
    return torch.cat([out_2B, scores_KB])


def token_and_top_logprobs(scaled_KV: Tensor, tokens: list[int], n_top: int) -> list[tuple[float, TokenScores]]:
    """Return (log-probability of the token, most likely tokens) at each position."""
    logprobs_KV = scaled_KV.double().log_softmax(-1)
    chosen = torch.tensor(tokens, device=scaled_KV.device)[:, None]
    values_KT, ids_KT = logprobs_KV.topk(min(n_top, logprobs_KV.shape[1]), dim=-1)
    found = torch.cat([ids_KT.T.double(), values_KT.T]).cpu().numpy()
    logprobs = logprobs_KV.gather(1, chosen).squeeze(1).tolist()
    return list(zip(logprobs, token_scores(found, len(tokens)).tolist(), strict=True))


def token_scores(top: np.ndarray, n: int) -> np.ndarray:
    """Return TOKEN_SCORE of K tokens at each of n positions, (n, K), from K rows of ids and K of log-probabilities."""
    found_NK = np.empty((n, len(top) // 2), TOKEN_SCORE)
    found_NK["token"], found_NK["logprob"] = (each.T for each in np.split(top, 2))
    return found_NK


@dataclass(slots=True)
class PendingTokens:
    """The sampled tokens of one forward pass, while they are copied to the host.

    `owners_B` are the owners of the slots at the launch. `copy` has the result of `sample` or `sample_edited`, or, with
    TableDrafts, of `NgramStepRunner.launch`. If `drafts` are lists, this result has a column for each row of
    DraftedRows.
    """

    sequences: list[Sequence]
    slots_B: np.ndarray
    owners_B: np.ndarray
    copy: HostCopy
    drafts: Drafts | None = None

    def wait_for_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copy, and return the sampled tokens and their log-probabilities, (B,) each."""
        sampled = self.copy.result()
        return sampled[0].astype(np.int64), sampled[1]

    def wait_for_rows(self, n_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Wait for a pass with TableDrafts. Returns tokens, log-probabilities and input tokens, (B, R) each."""
        tokens_N, logprobs_N = self.wait_for_tokens()
        inputs_N = self.copy.result()[2].astype(np.int64)
        return tokens_N.reshape(-1, n_rows), logprobs_N.reshape(-1, n_rows), inputs_N.reshape(-1, n_rows)

    def wait_for_top_scores(self) -> np.ndarray:
        """Wait, and return the most likely tokens of each row, (B, n_top). They count if the request asks for them."""
        sampled = self.copy.result()
        return token_scores(sampled[3:], sampled.shape[1])

    def wait_for_raw_logprobs(self) -> list[float]:
        """Wait, and return each row's log-probability at temperature 1, if its request sets `raw_logprobs`."""
        sampled = self.copy.result()
        return sampled[2 if len(sampled) > 2 else 1].tolist()
