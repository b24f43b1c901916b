"""Drafts from repetition: if the last tokens of a sample occurred before, the tokens that followed are the draft.

NgramDrafter fills the table of `kernels/sampling/drafts.py`, from which the device drafts. SampleMemory keeps finished
samples, to enter them again when their scope is sampled again. A scope is a set of samples that resemble each other,
such as the samples of a prompt. All decisions depend on counts only, so all ranks that share a model decide alike.

Shape letters: B sequences, R = 1 + J rows of a sequence in a step with J drafted tokens, W = CONTEXT last tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import torch

from areno.engine.decoder.draft_length import DraftLength, StepCosts
from areno.engine.decoder.draft_verification import TableDrafts
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import SlotTable
from areno.kernels.backend import to_device
from areno.kernels.sampling import CONTEXT, LEVELS, NgramTable, add_texts
from areno.types import GenerationRequest

TABLE_BITS = 21  # 84 MB: 40 bytes for an entry
MEMORY_TOKENS = 1 << 25  # 134 MB
SCOPE_TOKENS = 1 << 14  # largest share of a scope in the memory
_SAMPLE_OVERHEAD = 64  # memory of a sample in addition to its tokens, in tokens
_CHUNK = 64  # prompts are compared in chunks of this many tokens
_PENDING_TOKENS = 1 << 18  # of texts that wait to be entered; the oldest are dropped
_FINISHED_TOKENS = 1 << 22  # of samples that wait for the next step with drafts; the oldest are dropped
_ENTERED_AT_ONCE = 1 << 14  # tokens that are entered before a step
_ENTERED_EVERY = 16  # steps with drafts, after which the new tokens of the sequences are entered
# Samples that are read, and tokens that are entered, during a step before a try.
_PREPARED_SAMPLES, _PREPARED_TOKENS = 16, 1 << 12
_MOST_PREPARATIONS = 64  # steps since the last step with drafts, after which drafts are tried in any case
_MOST_KNOWN = 1 << 16  # requests whose scopes, and chunks of prompts whose hashes are remembered
_PRIOR_STEPS = 8  # steps that each sequence is assumed to have had with the average acceptance, as counts are noisy
_MOST_STEPS = 64  # the counts of a sequence are halved beyond, to follow its text


@dataclass(slots=True)
class _ScopeSamples:
    """The samples of a scope, the oldest first: (number of leading tokens that belong to the prompt, tokens)."""

    samples: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    n_tokens: int = 0


class SampleMemory:
    """Finished samples by scope, as arrays. At most `n_tokens` tokens in all, and `of_scope` in one scope.

    Beyond a limit, the oldest samples are dropped, first in the scope that has waited longest for a new sample. The
    sample that was just added is always kept. A sample counts as its number of tokens plus 64.
    """

    def __init__(self, n_tokens: int, of_scope: int):
        self._most, self._most_of_scope = n_tokens, of_scope
        self._scopes: OrderedDict[int, _ScopeSamples] = OrderedDict()
        self.n_tokens = 0

    def clear(self) -> None:
        self._scopes.clear()
        self.n_tokens = 0

    def add(self, scope: int, before: list[int], tokens: np.ndarray) -> None:
        sample = np.empty(len(before) + len(tokens), dtype=np.int32)
        sample[: len(before)], sample[len(before) :] = before, tokens
        found = self._scopes.setdefault(scope, _ScopeSamples())
        self._scopes.move_to_end(scope)
        found.samples.append((len(before), sample))
        found.n_tokens += len(sample) + _SAMPLE_OVERHEAD
        self.n_tokens += len(sample) + _SAMPLE_OVERHEAD
        while found.n_tokens > self._most_of_scope and len(found.samples) > 1:
            self._drop_oldest(found)
        while self.n_tokens > self._most and (len(self._scopes) > 1 or len(found.samples) > 1):
            oldest = next(iter(self._scopes))
            self._drop_oldest(self._scopes[oldest])
            if not self._scopes[oldest].samples:
                del self._scopes[oldest]

    def _drop_oldest(self, scope: _ScopeSamples) -> None:
        _, sample = scope.samples.popleft()
        scope.n_tokens -= len(sample) + _SAMPLE_OVERHEAD
        self.n_tokens -= len(sample) + _SAMPLE_OVERHEAD

    def samples(self, scope: int) -> list[tuple[list[int], np.ndarray]]:
        """Return (last tokens of the prompt, completion) of each sample of a scope, the oldest first."""
        found = self._scopes.get(scope)
        return [] if found is None else [(each[:n].tolist(), each[n:]) for n, each in found.samples]


@dataclass(frozen=True, slots=True)
class _QueuedText:
    """New tokens of a text that are to be entered in the table, and up to W tokens before them."""

    scope: int
    before: list[int] | np.ndarray
    new: list[int] | np.ndarray


@dataclass(slots=True)
class _RequestRecord:
    request: GenerationRequest
    scope: int
    is_queued: bool = False


class _SlotTexts:
    """The last tokens of the sequences in the batch, one entry for each slot.

    An entry is valid while its `owner` equals that of the slot table. `last` is (slots, W) int64, padded with -1 in
    front. `n_entered` counts the prompt and completion tokens that were entered in the table of n-grams. `n_steps`
    counts steps with drafts, and `n_right` right draft tokens. Both are halved when `n_steps` exceeds `_MOST_STEPS`.
    """

    def __init__(self, slots: SlotTable):
        self._slots, n_slots = slots, len(slots.owner)
        self.last = np.empty((n_slots, CONTEXT), dtype=np.int64)
        self.owner, self.n_new, self.n_entered, self.scope = np.zeros((4, n_slots), dtype=np.int64)
        self.n_steps, self.n_right = np.zeros((2, n_slots))

    def count_accepted(self, slots_B: np.ndarray, n_right_B: np.ndarray) -> None:
        self.n_steps[slots_B] += 1
        self.n_right[slots_B] += n_right_B
        many = slots_B[self.n_steps[slots_B] > _MOST_STEPS]
        self.n_steps[many] *= 0.5
        self.n_right[many] *= 0.5

    def relative_acceptance(self) -> np.ndarray:
        """Return each sequence's number of right tokens per step, relative to the average. Near 1 after few steps."""
        slots_B = np.flatnonzero(self._slots.owner)
        is_valid_B = self.owner[slots_B] == self._slots.owner[slots_B]
        n_steps_B, n_right_B = (np.where(is_valid_B, of[slots_B], 0) for of in (self.n_steps, self.n_right))
        average = n_right_B.sum() / max(1, n_steps_B.sum()) or 1.0
        return (n_right_B / average + _PRIOR_STEPS) / (n_steps_B + _PRIOR_STEPS)


class NgramDrafter:
    """Drafts from the table of n-grams. Wrong drafts cost time, but never change a token.

    Before a step with drafts, the table gets the finished samples of all scopes, and the prompts of the running
    sequences. It also gets earlier samples in the scopes of the running sequences, if other texts may have replaced
    them. Every 16 such steps, it gets the new tokens of the running sequences. If it is not known whether drafts
    save time, one step tries drafts. With `prepares`, the default on a GPU, finished samples and prompts are entered in
    parts before this trial, while the device computes steps without drafts.

    With `remembers`, samples of earlier rollouts are drafted from, too. A resumed run does not have these samples, so
    its drafts differ from those of an uninterrupted run. Drafts change the number of rows of matrix products, which can
    change the last bits of results.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        remembers: bool = True,
        table_bits: int = TABLE_BITS,
        memory_tokens: int = MEMORY_TOKENS,
        prepares: bool | None = None,
    ):
        self.table, self.memory = NgramTable.empty(table_bits, device), SampleMemory(memory_tokens, SCOPE_TOKENS)
        self.length = DraftLength(StepCosts(fixed=0, verification=0, most_rows=0))
        self._device, self._remembers = device, remembers
        self._prepares = device.type != "cpu" if prepares is None else prepares
        self._requests: dict[int, _RequestRecord] = {}  # by request id, so that prompts are hashed once
        # Scope -> number of tokens that had been entered in the table when the samples of the scope were.
        self._loaded: dict[int, int] = {}
        self._chunks = set[int]()  # hashes of prompts that were entered, each up to the end of a chunk
        self._pending = deque[_QueuedText]()
        self._n_pending = self._n_steps = self._n_entered = 0
        # Finished samples: (request, completion, number of its tokens in the table). A rollout that never drafts spends
        # no more time on them.
        self._finished = deque[tuple[GenerationRequest, np.ndarray, int]]()
        self._n_finished = 0
        self._texts: _SlotTexts | None = None
        self._n_tokens = self._n_proposed = 0
        self._is_prepared, self._n_preparations = False, 0

    def begin_rollout(self, costs: StepCosts) -> None:
        """Begin a rollout, and forget the unfinished samples of the previous rollout."""
        for known in (self._requests, self._chunks):
            known.clear()
        self._texts, self._n_steps = None, 0
        self._is_prepared = False
        if not self._remembers:
            self._n_preparations = 0
            self.table.clear()
            self.memory.clear()
            self._loaded.clear()
            self._finished.clear()
            self._pending.clear()
            self._n_pending = self._n_finished = 0
        self.length.begin_rollout(costs, kept=0.5 if self._remembers else 0.0)

    def should_draft(self, n_running: int) -> bool:
        is_prepared, self._is_prepared = self._is_prepared or not self._prepares, False
        relative_acceptance_B = np.ones(1) if self._texts is None else self._texts.relative_acceptance()
        self._n_tokens = self.length.next_length(n_running, relative_acceptance_B, is_prepared=is_prepared)
        if self._n_tokens == 0:
            self._n_steps = 0  # the first step after a pause enters all texts
        else:
            self._n_preparations = 0
        return self._n_tokens > 0

    def prepare_table(self, sequences: list[Sequence]) -> None:
        """If `length.awaits_texts`, enter some of the texts that must be in the table before drafts are tried."""
        if not self.length.awaits_texts or not sequences:
            return
        slots, slots_B = _table_and_slots(sequences)
        budget = _PREPARED_SAMPLES - self._remember_finished(_PREPARED_SAMPLES)
        n_new = self._begin_texts(sequences, slots, slots_B, budget)
        self._enter_queued_texts(_PREPARED_TOKENS)
        # New samples may arrive faster than their texts are entered, and rollouts may be short, so the number of steps
        # is limited over all rollouts.
        self._n_preparations += 1
        is_done = n_new < budget and not self._pending
        self._is_prepared = is_done or self._n_preparations >= _MOST_PREPARATIONS

    def learn_finished(self, sequences: list[Sequence]) -> None:
        """Store the completions of finished sequences for later drafts. The sequences must still be in the batch."""
        slots, slots_B = _table_and_slots(sequences)
        n_known_B = np.zeros(len(sequences), dtype=np.int64)
        if (texts := self._texts) is not None:
            is_known_B = texts.owner[slots_B] == slots.owner[slots_B]
            n_known_B = np.where(is_known_B, texts.n_entered[slots_B] - slots.n_prompt[slots_B], 0)
        for sequence, n_known in zip(sequences, n_known_B.tolist(), strict=True):
            self._finished.append((sequence.request, tokens := sequence.completion_tokens(), n_known))
            self._n_finished += len(tokens)
        while self._n_finished > _FINISHED_TOKENS:
            self._n_finished -= len(self._finished.popleft()[1])

    def _remember_finished(self, most: int | None = None) -> int:
        """Move up to `most` finished samples to the memory, and queue their tokens. Return how many were moved."""
        n_taken = len(self._finished) if most is None else min(most, len(self._finished))
        for _ in range(n_taken):
            request, tokens, n_known = self._finished.popleft()
            self._n_finished -= len(tokens)
            if len(tokens) > n_known:
                scope, prompt_end = self._request_record(request).scope, request.prompt[-CONTEXT:]
                self.memory.add(scope, prompt_end, tokens)
                self._queue_scope(scope, but_newest=True)
                before = [*prompt_end, *tokens[max(0, n_known - CONTEXT) : n_known].tolist()]
                self._queue_text(_QueuedText(scope, before[-CONTEXT:], tokens[n_known:]))
        return n_taken

    def propose(self, sequences: list[Sequence]) -> TableDrafts:
        """Return drafts. All tokens have arrived, except those of a step with TableDrafts in flight."""
        slots, slots_B = _table_and_slots(sequences)
        texts, self._n_proposed = self._slot_texts(slots), self._n_tokens
        self._remember_finished()
        self._begin_texts(sequences, slots, slots_B)
        self._read_last_tokens(texts, sequences, slots, slots_B)
        if is_turn := self._n_steps % _ENTERED_EVERY == 0:
            self._queue_running(texts, sequences, slots, slots_B)
        self._n_steps += 1
        if is_turn or self._n_pending > _ENTERED_AT_ONCE:  # an entry has a fixed cost on the host
            self._enter_queued_texts(_ENTERED_AT_ONCE)
        return TableDrafts(
            n_tokens=self._n_tokens,
            slots_B=slots_B,
            contexts_BW=texts.last[slots_B],
            scopes_B=texts.scope[slots_B],
            n_new_B=slots.n_new[slots_B],
            limits_B=slots.capacity[slots_B],
            follows_B=np.zeros(len(slots_B), dtype=bool),
            verified=self._update_verified,
        )

    def _update_verified(
        self, drafts: TableDrafts, tokens_BR: np.ndarray, n_new_B: np.ndarray, right_BJ: np.ndarray
    ) -> None:
        """Update the contexts of the slots, and the counts of right tokens. Called as `TableDrafts.verified`."""
        texts, slots_B = self._texts, drafts.slots_B
        if texts is None:  # another rollout has begun since
            return
        both = np.concatenate((texts.last[slots_B], tokens_BR), axis=1)
        texts.last[slots_B] = both[np.arange(len(both))[:, None], n_new_B[:, None] + np.arange(CONTEXT)]
        texts.n_new[slots_B] += n_new_B
        # A draft of a sequence at its limit counts as wrong. Few sequences are.
        rows = np.flatnonzero(n_new_B)
        self._count_accepted(slots_B[rows], right_BJ[rows].sum(1), drafts.n_tokens)

    def count_verified(self, found: list[tuple[Sequence, int]]) -> None:
        """Count `found`, each sequence's number of right tokens. Tokens that were cut off a draft count as wrong."""
        if found and self._texts is not None:
            _, slots_B = _table_and_slots([sequence for sequence, _ in found])
            self._count_accepted(slots_B, np.array([n_right for _, n_right in found]), self._n_proposed)

    def _count_accepted(self, slots_B: np.ndarray, n_right_B: np.ndarray, n_drafted: int) -> None:
        assert self._texts is not None
        self._texts.count_accepted(slots_B, n_right_B)
        n_reached = (n_right_B[:, None] >= np.arange(n_drafted + 1)).sum(0)
        self.length.count_accepted_by_position(n_reached[:-1], n_reached[1:])

    def _slot_texts(self, slots: SlotTable) -> _SlotTexts:
        if self._texts is None:
            self._texts = _SlotTexts(slots)
        return self._texts

    def _begin_texts(
        self, sequences: list[Sequence], slots: SlotTable, slots_B: np.ndarray, most: int | None = None
    ) -> int:
        """Queue the texts of up to `most` sequences that are new in the batch. Return how many are new."""
        texts = self._slot_texts(slots)
        new = np.flatnonzero(texts.owner[slots_B] != slots.owner[slots_B]).tolist()
        for row in new[:most]:
            request, slot = sequences[row].request, sequences[row].slot
            record = self._request_record(request)
            self._queue_scope(record.scope)
            if not record.is_queued:
                self._queue_prompt(record.scope, request.prompt)
                record.is_queued = True
            texts.owner[slot], texts.scope[slot] = slots.owner[slot], record.scope
            texts.n_new[slot], texts.n_entered[slot] = -1, sequences[row].n_prompt
            texts.n_steps[slot] = texts.n_right[slot] = 0
        return len(new)

    @staticmethod
    def _read_last_tokens(texts: _SlotTexts, sequences: list[Sequence], slots: SlotTable, slots_B: np.ndarray) -> None:
        """Read the last tokens of new sequences, and of those that got tokens in steps without TableDrafts."""
        n_staged_B, is_old_B = slots.n_staged[slots_B], texts.n_new[slots_B] != slots.n_new[slots_B]
        many = np.flatnonzero(is_old_B & (n_staged_B >= CONTEXT))
        columns = n_staged_B[many, None] + np.arange(-CONTEXT, 0)
        texts.last[slots_B[many]] = slots.tokens[slots_B[many, None], columns]
        for row in np.flatnonzero(is_old_B & (n_staged_B < CONTEXT)).tolist():
            sequence = sequences[row]
            last = sequence.tokens_from(max(0, sequence.n_prompt + int(slots.n_new[sequence.slot]) - CONTEXT))
            texts.last[sequence.slot, : CONTEXT - len(last)] = -1
            texts.last[sequence.slot, CONTEXT - len(last) :] = last
        texts.n_new[slots_B] = slots.n_new[slots_B]

    def _queue_scope(self, scope: int, *, but_newest: bool = False) -> None:
        """Queue the remembered samples of a scope, unless the table still has most of them."""
        n_before, room = self._loaded.get(scope), len(self.table.counts) // (2 * len(LEVELS))
        if n_before is None or self._n_entered - n_before > room:
            for before, tokens in self.memory.samples(scope)[: -1 if but_newest else None]:
                self._queue_text(_QueuedText(scope, before, tokens))
        if len(self._loaded) > room:
            self._loaded.clear()
        self._loaded[scope] = self._n_entered

    def _request_record(self, request: GenerationRequest) -> _RequestRecord:
        """Return the record of a request. Unless `draft_scope` is set, it is kept, so the prompt is hashed once."""
        if request.draft_scope is not None:
            return _RequestRecord(request, request.draft_scope)
        found = self._requests.get(request.request_id)
        if found is None or found.request is not request:
            if len(self._requests) > _MOST_KNOWN:
                self._requests.clear()
            found = self._requests[request.request_id] = _RequestRecord(request, hash(tuple(request.prompt)))
        return found

    def _queue_prompt(self, scope: int, prompt: list[int]) -> None:
        """Queue a prompt without the chunks that begin an earlier prompt of the scope, as in a conversation."""
        if len(self._chunks) > _MOST_KNOWN:
            self._chunks.clear()
        tokens, digest, n_known, is_known = np.array(prompt, dtype=np.int64), scope, 0, True
        for start in range(0, len(prompt), _CHUNK):
            digest = hash((digest, tokens[start : start + _CHUNK].tobytes()))
            is_known = is_known and digest in self._chunks
            if is_known:
                n_known = start + _CHUNK
            self._chunks.add(digest)
        if n_known < len(prompt):
            self._queue_text(_QueuedText(scope, prompt[max(0, n_known - CONTEXT) : n_known], prompt[n_known:]))

    def _queue_running(
        self, texts: _SlotTexts, sequences: list[Sequence], slots: SlotTable, slots_B: np.ndarray
    ) -> None:
        starts_B = texts.n_entered[slots_B]
        n_tokens_B = slots.n_prompt[slots_B] + slots.n_new[slots_B]
        for row in np.flatnonzero(starts_B < n_tokens_B).tolist():
            n_before = min(CONTEXT, int(starts_B[row]))
            tokens = sequences[row].tokens_from(int(starts_B[row]) - n_before)
            self._queue_text(_QueuedText(int(texts.scope[slots_B[row]]), tokens[:n_before], tokens[n_before:]))
        texts.n_entered[slots_B] = n_tokens_B

    def _queue_text(self, text: _QueuedText) -> None:
        self._pending.append(text)
        self._n_pending += len(text.new)
        while self._n_pending > _PENDING_TOKENS and len(self._pending) > 1:
            self._n_pending -= len(self._pending.popleft().new)

    def _enter_queued_texts(self, budget: int) -> None:
        """Enter whole texts from the queue in the table, the oldest first, until `budget` tokens are reached."""
        chosen = list[_QueuedText]()
        while self._pending and budget > 0:
            chosen.append(self._pending.popleft())
            budget -= len(chosen[-1].new)
            self._n_pending -= len(chosen[-1].new)
            self._n_entered += len(chosen[-1].new)
        if chosen:
            add_texts(self.table, to_device(_pack_texts(chosen), self._device))


def _table_and_slots(sequences: list[Sequence]) -> tuple[SlotTable, np.ndarray]:
    table = sequences[0].table
    assert table is not None
    return table, np.array([sequence.slot for sequence in sequences], dtype=np.int64)


def _pack_texts(texts: list[_QueuedText]) -> np.ndarray:
    """Join texts into the array that `add_texts` takes, (4, N) int64 for N tokens."""
    parts = [part for text in texts for part in (text.before, text.new)]
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    n_before, n_all = sizes[::2], sizes.reshape(-1, 2).sum(1)
    packed = np.empty((4, int(n_all.sum())), dtype=np.int64)
    packed[0] = np.concatenate(parts)
    starts = np.cumsum(n_all) - n_all
    packed[1] = np.arange(packed.shape[1]) - np.repeat(starts, n_all)
    packed[2] = np.repeat(np.array([text.scope for text in texts], dtype=np.int64), n_all)
    packed[3] = packed[1] >= np.repeat(n_before, n_all)
    return packed
