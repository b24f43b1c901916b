"""Drafts from repetition: the tokens that followed the last tokens of a sample when they occurred before.

DraftIndex finds the longest suffix of a text (8, 5 or 3 tokens) that occurs earlier in the same text or in other texts
of its scope. A scope is a set of samples that share drafts, such as the samples of a prompt. SampleMemory keeps
finished samples until their scope is sampled again. SuffixDrafter keeps both up to date, and decides how many tokens to
propose. All decisions depend on counts only, so all ranks that share a model decide alike. The idea is from
SuffixDecoding (arXiv 2411.04975) and DAS (arXiv 2511.13841), with hash tables in place of suffix trees. No tensors.

Shape letters: R texts, N tokens, L lengths of suffixes, J drafted tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.engine.decoder.sequence import Sequence
from areno.types import GenerationRequest

LENGTHS = (3, 5, 8)  # tokens of a suffix
SHORTEST, LONGEST = LENGTHS[0], LENGTHS[-1]
SEGMENT = 256  # tokens that the index stores together
BREAK = -1  # stored between samples that share a text
MOST = 8  # largest number of drafted tokens of a sequence in a step
MAX_SEQUENCES = 256  # larger batches do not draft: their time grows in proportion to the number of rows
INDEX_TOKENS = 1 << 21  # 60 MB: 4 bytes for a token, and 24 for its places in the tables
MEMORY_TOKENS = 1 << 25  # 134 MB
SCOPE_TOKENS = 1 << 14  # largest share of a scope in the memory
_SAMPLE_OVERHEAD = 64  # memory of a sample in addition to its tokens, in tokens
_LENGTHS = np.array(LENGTHS)
_BACK = np.arange(LONGEST)  # distances from the last token of a suffix
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=LONGEST).astype(np.uint64) * np.uint64(2) + np.uint64(1)
_CHUNK = 64  # prompts are compared in chunks of this many tokens
_INDEXED_AT_ONCE = 16_384  # tokens of finished samples that are indexed in a step
_PROBED = 16  # sequences that are looked at first in a larger batch, to see whether drafts would pay
_LEAST_GAIN = 1.03  # least expected speed with drafts, relative to the speed without
_SHORT_PAUSE, _LONGEST_PAUSE = 8, 128  # steps
_KEPT = 0.75  # part of the counts of right and wrong tokens that is kept when the bound refuses a search


@dataclass(slots=True)
class Text:
    """A growing text in a DraftIndex.

    Attributes:
        scope: Number of the scope. A text is only compared with texts of the same scope.
        segment: Segment that holds the end of the text.
        serial: Serial number of the segment when the text began to use it. If the segment has another serial number,
            it has been overwritten.
    """

    scope: int
    segment: int
    serial: int


class DraftIndex:
    """Finds earlier occurrences of the last tokens of a text.

    Texts are stored in segments. The oldest segment is overwritten when all are used. For each length of a suffix, a
    hash table without chains maps the hash of that many tokens to the place after their last occurrence. A place is
    checked against the stored tokens, so a collision of hashes can hide an occurrence but not invent one.

    In a growing text, an occurrence is entered when 8 tokens follow it. The samples of a prompt are decoded side by
    side. Without this rule, the last occurrence would often be near the end of such a sample and give a draft of one or
    two tokens, where a finished sample would give 8.

    Args:
        n_tokens: Number of tokens that are stored, rounded up to whole segments.
    """

    def __init__(self, n_tokens: int):
        n_segments = max(2, -(-n_tokens // SEGMENT))
        self.n_segments = n_segments
        self._tokens = np.zeros(n_segments * SEGMENT, dtype=np.int32)
        self._length, self._serial, self._n_noted = (np.zeros(n_segments, dtype=np.int64) for _ in range(3))
        self._scope = np.zeros(n_segments, dtype=np.int64)
        n_bits = (n_segments * SEGMENT - 1).bit_length() + 1  # half empty, so that few occurrences are hidden
        self._shift = np.uint64(64 - n_bits)
        # Entries are place + 1, so an empty table is all zeros, and the system provides its memory only when written.
        self._tables = np.zeros((len(_LENGTHS), 1 << n_bits), dtype=np.int32)
        self._n_opened = 0

    @property
    def n_bytes(self) -> int:
        """Size of the index in bytes, when it is full."""
        return self._tokens.nbytes + self._tables.nbytes + 4 * self._length.nbytes

    def clear(self) -> None:
        """Drop all texts."""
        if self._n_opened:
            self._tables.fill(0)
            self._length.fill(0)
            self._serial.fill(0)
            self._n_opened = 0

    def open(self, scope: int, before: list[int]) -> Text:
        """Begin a text.

        Args:
            scope: Number of the scope, an int64.
            before: Tokens before the text, such as the prompt. At most the last 8 tokens are kept.
        """
        segment = self._n_opened % self.n_segments
        self._n_opened += 1
        before = before[-LONGEST:]
        start = segment * SEGMENT
        self._tokens[start : start + len(before)] = before
        self._length[segment] = self._n_noted[segment] = len(before)
        self._scope[segment], self._serial[segment] = scope, self._n_opened
        return Text(scope, segment, self._n_opened)

    def is_stored(self, text: Text) -> bool:
        """Return whether the end of a text has not been overwritten."""
        return bool(self._serial[text.segment] == text.serial)

    def extend(self, texts: list[Text], tokens: list[list[int]], *, ends: bool = False) -> None:
        """Append tokens to texts.

        Args:
            texts: The texts, each at most once.
            tokens: The tokens for each text. May be empty. BREAK separates parts of a text.
            ends: Whether the texts end with these tokens.
        """
        while texts:
            segments_R = np.array([text.segment for text in texts], dtype=np.int64)
            room = (SEGMENT - self._length[segments_R]).tolist()
            now = [new[:n] for new, n in zip(tokens, room, strict=True)]
            self._append(segments_R, now, ends)
            rest = [(text, new[n:]) for text, new, n in zip(texts, tokens, room, strict=True) if len(new) > n]
            for text, _ in rest:  # continue in another segment, which begins with the last tokens of this one
                end = (text.segment + 1) * SEGMENT
                other = self.open(text.scope, self._tokens[end - LONGEST : end].tolist())
                text.segment, text.serial = other.segment, other.serial
            texts, tokens = [text for text, _ in rest], [new for _, new in rest]

    def _append(self, segments_R: np.ndarray, tokens: list[list[int]], ends: bool) -> None:
        """Append tokens to segments that have room for them, and enter their suffixes in the tables."""
        length_R = self._length[segments_R]
        end_R = length_R + np.array([len(new) for new in tokens], dtype=np.int64)
        row_N, offset_N = _ranges(length_R, end_R)
        self._tokens[segments_R[row_N] * SEGMENT + offset_N] = [token for new in tokens for token in new]
        self._length[segments_R] = end_R
        noted_R = self._n_noted[segments_R]
        until_R = np.where((end_R == SEGMENT) | ends, end_R, np.maximum(noted_R, end_R - MOST + 1))
        self._n_noted[segments_R] = until_R
        row_N, offset_N = _ranges(noted_R, until_R)
        places_N = segments_R[row_N] * SEGMENT + offset_N
        slots_LN, _ = self._hashed(places_N, offset_N, self._scope[segments_R][row_N])
        for table, slots_N, length in zip(self._tables, slots_LN, LENGTHS, strict=True):
            is_long_N = offset_N >= length
            table[slots_N[is_long_N]] = places_N[is_long_N] + 1

    def _hashed(self, places_N: np.ndarray, offset_N: np.ndarray, scope_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the table slots (L, N) of the suffixes before places, and their tokens from last to first (N, 8).

        Tokens before the beginning of the segment are -1.
        """
        before_N8 = self._tokens[np.maximum(places_N[:, None] - 1 - _BACK, 0)].astype(np.int64)
        before_N8[offset_N[:, None] <= _BACK] = -1
        # A multilinear hash: the sum of the first n products is that of the n last tokens.
        sums_N8 = np.cumsum((before_N8 + 1).view(np.uint64) * _FACTORS, axis=1)
        hash_LN = (sums_N8[:, _LENGTHS - 1] ^ scope_N.view(np.uint64)[:, None]).T * _FACTORS[0]
        return (hash_LN >> self._shift).view(np.int64), before_N8

    def find(self, texts: list[Text]) -> tuple[np.ndarray, np.ndarray]:
        """Find the longest suffix of each text that occurs earlier in its scope and is followed by a token.

        Args:
            texts: The texts, whose ends are stored.

        Returns:
            The length of the suffix, (R,) int64, 0 if none of at least 3 tokens was found, and the place after its last
            occurrence, for `following`.
        """
        segments_R = np.array([text.segment for text in texts], dtype=np.int64)
        length_R, scope_R = self._length[segments_R], self._scope[segments_R]
        slots_LR, suffix_R8 = self._hashed(segments_R * SEGMENT + length_R, length_R, scope_R)
        places_LR = np.take_along_axis(self._tables, slots_LR, 1).astype(np.int64) - 1
        found_LR, offset_LR = places_LR // SEGMENT, places_LR % SEGMENT
        is_match_LR = (places_LR >= 0) & (offset_LR < self._length[found_LR]) & (self._scope[found_LR] == scope_R)
        is_match_LR &= (offset_LR >= _LENGTHS[:, None]) & (length_R >= _LENGTHS[:, None])
        stored_LR8 = self._tokens[np.maximum(places_LR[:, :, None] - 1 - _BACK, 0)]
        is_same_LR8 = (stored_LR8 == suffix_R8) | (_LENGTHS[:, None, None] <= _BACK)
        is_match_LR &= is_same_LR8.all(-1)
        best_R = len(_LENGTHS) - 1 - is_match_LR[::-1].argmax(0)
        is_found_R = is_match_LR.any(0)
        return np.where(is_found_R, _LENGTHS[best_R], 0), places_LR[best_R, np.arange(len(texts))]

    def following(self, places_R: np.ndarray) -> list[list[int]]:
        """Return up to 8 tokens from each place on, up to the next BREAK or the end of the segment.

        Args:
            places_R: (R,) int64, places from `find`.
        """
        n_R = np.minimum(MOST, self._length[places_R // SEGMENT] - places_R % SEGMENT).tolist()
        tokens_RJ = self._tokens[np.minimum(places_R[:, None] + np.arange(MOST), len(self._tokens) - 1)].tolist()
        drafts = [tokens[:n] for tokens, n in zip(tokens_RJ, n_R, strict=True)]
        return [draft[: draft.index(BREAK)] if BREAK in draft else draft for draft in drafts]


def _ranges(start_R: np.ndarray, end_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated ranges from `start_R` up to `end_R`, as two arrays: the row and the number of each."""
    counts_R = end_R - start_R
    row_N = np.repeat(np.arange(len(counts_R)), counts_R)
    return row_N, np.arange(len(row_N)) + (start_R - np.cumsum(counts_R) + counts_R)[row_N]


@dataclass(slots=True)
class _Scope:
    """The samples of a scope, the oldest first: (number of leading tokens that belong to the prompt, tokens)."""

    samples: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    n_tokens: int = 0


class SampleMemory:
    """Finished samples by scope, as arrays.

    If there are too many tokens, the oldest samples are dropped, first in the scope to which no sample was added for
    the longest time. In all sizes, a sample counts its tokens plus 64.

    Args:
        n_tokens: Largest size of all samples.
        of_scope: Largest size of the samples of a scope. The newest sample is kept even if it is larger.

    Attributes:
        n_tokens: Current size of all samples.
    """

    def __init__(self, n_tokens: int, of_scope: int):
        self._most, self._most_of_scope = n_tokens, of_scope
        self._scopes: OrderedDict[int, _Scope] = OrderedDict()
        self.n_tokens = 0

    def clear(self) -> None:
        """Drop all samples."""
        self._scopes.clear()
        self.n_tokens = 0

    def add(self, scope: int, before: list[int], tokens: np.ndarray) -> None:
        """Keep a sample.

        Args:
            scope: Number of the scope.
            before: The last tokens of the prompt.
            tokens: Token ids of the completion.
        """
        sample = np.empty(len(before) + len(tokens), dtype=np.int32)
        sample[: len(before)], sample[len(before) :] = before, tokens
        found = self._scopes.setdefault(scope, _Scope())
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

    def _drop_oldest(self, scope: _Scope) -> None:
        _, sample = scope.samples.popleft()
        scope.n_tokens -= len(sample) + _SAMPLE_OVERHEAD
        self.n_tokens -= len(sample) + _SAMPLE_OVERHEAD

    def of(self, scope: int) -> list[tuple[list[int], np.ndarray]]:
        """Return (last tokens of the prompt, completion) of each sample of a scope, the oldest first."""
        found = self._scopes.get(scope)
        return [] if found is None else [(each[:n].tolist(), each[n:]) for n, each in found.samples]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a decoding step, as multiples of the time that one more row takes on the device.

    Attributes:
        fixed: Time of a step without rows, mostly for reading the weights.
        verification: Time that a step with drafts takes beyond that of a step with the same number of rows.
        most_rows: Largest number of rows of a step with drafts.
        host: Time of the host for each sequence of a step with drafts, during which the device waits.
    """

    fixed: float
    verification: float
    most_rows: int
    host: float = 0.0

    def plain_rate(self, n_rows: int) -> float:
        """Return how many tokens a step without drafts samples in the time of one more row.

        Args:
            n_rows: Number of sequences.
        """
        return n_rows / (self.fixed + n_rows)

    def time(self, n_rows: int, n_drafted: Any) -> Any:
        """Return the time of a step with drafts, as a multiple of the time of one more row.

        Args:
            n_rows: Number of sequences.
            n_drafted: Number of drafted tokens of all sequences together, or an array of such numbers.
        """
        return self.fixed + self.verification + (1 + self.host) * n_rows + n_drafted


def step_costs(n_params: int, n_rows: int, *, on_cuda: bool, use_graphs: bool) -> StepCosts:
    """Return rough costs of a decoding step for a model.

    Rough costs suffice: if drafts are often right, the gain is large, and if not, few tokens are drafted.

    Args:
        n_params: Number of parameters of the model.
        n_rows: Largest number of rows of a step with drafts.
        on_cuda: Whether the model is on a GPU, where the host cannot launch a step with drafts ahead.
        use_graphs: Whether steps run as CUDA graphs. Without them, launching a step takes longer than reading weights.
    """
    if not on_cuda:
        row_ms = 0.12 + 1e-7 * n_params
        return StepCosts(fixed=(5 + 4e-7 * n_params) / row_ms, verification=0.5 / row_ms, most_rows=n_rows)
    row_us = 0.7 + 4e-9 * n_params  # sampling and attention, and two operations for each parameter
    # Measured on an H100 with 0.6B: 1.1 ms without drafts for 1 to 60 rows, 2.6 ms with drafts.
    return StepCosts(
        fixed=max(240, (1000 if use_graphs else 3000) / row_us),
        verification=1400 / row_us,
        most_rows=n_rows,
        host=12 / row_us,
    )


@dataclass(slots=True)
class _Row:
    """A running sample: its text, how many of its tokens are indexed, and the last draft that can be checked."""

    text: Text
    n_indexed: int
    length: int = 0  # of the suffix that the draft follows
    draft: list[int] | None = None
    drafted_at: int = 0  # number of tokens before the draft


class SuffixDrafter:
    """Proposes drafts from a DraftIndex. A model of costs decides how many tokens pay.

    The share of right tokens is measured for each length of the suffix, on drafts that were verified and on drafts that
    were not. If drafts would not pay, the drafter pauses, at first for 8 steps and finally for 128, or until the batch
    has shrunk to half. After a pause, 16 sequences of a large batch are looked up at first. No sequence is looked up
    if even the most reliable suffix length is too often wrong to pay. So a batch that does not draft loses next to no
    time.

    Args:
        remembers: Whether samples of earlier rollouts are kept. If not, a rollout makes the same drafts whether or not
            the run was resumed before it. This matters because the number of rows of a matrix product, which drafts
            change, can affect the last bits of its results.
        index_tokens: Size of the index in tokens.
        memory_tokens: Size of the memory of finished samples in tokens.

    Attributes:
        index: The texts of the running samples and of their scopes.
        memory: Finished samples.
    """

    def __init__(self, *, remembers: bool = True, index_tokens: int = INDEX_TOKENS, memory_tokens: int = MEMORY_TOKENS):
        self.index, self.memory = DraftIndex(index_tokens), SampleMemory(memory_tokens, SCOPE_TOKENS)
        self._remembers = remembers
        self._costs: StepCosts
        self._rows: dict[Sequence, _Row] = {}
        self._scope_of: dict[int, tuple[GenerationRequest, int]] = {}  # by request id, so that prompts are hashed once
        self._loaded: dict[int, Text] = {}  # scope -> text with its finished samples, one after the other
        self._chunks: dict[int, Text] = {}  # hash of a prompt up to the end of a chunk -> text that contains it
        # (text, scope, tokens before, rest of a finished sample). Without a text, the sample is added to the scope's.
        self._pending: deque[tuple[Text | None, int, list[int], np.ndarray]] = deque()
        self._tried, self._right = (np.zeros(LONGEST + 1) for _ in range(2))
        self._is_on = False
        self._pause = self._waits = self._paused_at = self._n_rollouts = 0

    def begin(self, costs: StepCosts) -> None:
        """Begin a rollout, and forget unfinished samples of the last one.

        Args:
            costs: Time of a step.
        """
        self._costs = costs
        for known in (self._rows, self._scope_of):
            known.clear()
        if not self._remembers:
            self.index.clear()
            self.memory.clear()
            for known in (self._loaded, self._chunks, self._pending):
                known.clear()
            self._n_rollouts = self._pause = 0
        kept = 0.5 if self._remembers else 0.0
        self._tried *= kept
        self._right *= kept
        self._n_rollouts += 1
        self._is_on, self._pause, self._waits, self._paused_at = False, self._pause // 4, 0, 0

    def is_due(self, n_running: int) -> bool:
        """Return whether the next step may draft. False in a pause, for a large batch, and if drafts cannot pay.

        Args:
            n_running: Number of sequences in the batch.
        """
        if not 0 < n_running <= MAX_SEQUENCES:
            return False
        if 2 * n_running <= self._paused_at:
            self._waits = self._pause = self._paused_at = 0
        self._waits -= 1
        if self._waits >= 0:
            return False
        if not self._may_pay(n_running):
            self._wait(n_running, longer=True)
            self._tried *= _KEPT  # so that drafts are tried again after a while
            self._right *= _KEPT
            return False
        return True

    def _may_pay(self, n_rows: int) -> bool:
        """Return whether drafts could be faster than none, without a search for drafts.

        Their speed is bounded as if each row had a draft of the best length, whose tokens are right as often as those
        of the most reliable suffix length. This share is overestimated if few tokens were tried.
        """
        right_L = self._right_shares() + 0.5 / np.sqrt(self._tried + 1)
        right = min(1.0, float(right_L[_LENGTHS].max()))
        n_most = max(1, min(MOST, self._costs.most_rows // n_rows - 1))
        n_tokens_J = n_rows * (1 + np.cumsum(np.cumprod(np.full(n_most, right))))
        time_J = self._costs.time(n_rows, n_rows * (1 + np.arange(n_most)))
        return bool((n_tokens_J / time_J).max() > self._costs.plain_rate(n_rows) * _LEAST_GAIN)

    def _right_shares(self) -> np.ndarray:
        """Return the share of right tokens for each length of a suffix. 0.5 for a length without a try."""
        return (self._right + 2) / (self._tried + 4)

    def finished(self, sequence: Sequence) -> None:
        """Keep a completion for the index.

        Args:
            sequence: The sequence, all of whose tokens have arrived.
        """
        row, tokens = self._rows.pop(sequence, None), sequence.completion_tokens()
        if not len(tokens):
            return
        scope, before = self._scope(sequence.request), sequence.request.prompt[-LONGEST:]
        self.memory.add(scope, before, tokens)
        if row is not None:
            n_known = row.n_indexed - sequence.n_prompt
            known = [*before, *tokens[max(0, n_known - LONGEST) : n_known].tolist()][-LONGEST:]
            self._pending.append((row.text, scope, known, tokens[n_known:]))
        elif scope in self._loaded:
            self._pending.append((None, scope, before, tokens))
        if len(self._pending) > self.index.n_segments:
            self._pending.popleft()

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Return a draft for each sequence, or empty drafts if none would pay.

        Args:
            sequences: The sequences of the next step, all of whose tokens have arrived.
        """
        n_rows, none = len(sequences), [[] for _ in sequences]
        if not self._is_on and n_rows > 2 * _PROBED:
            # Neighbours, and the same sequences after each pause, so that few scopes are indexed.
            start = self._n_rollouts * _PROBED % (n_rows - _PROBED + 1)
            if self._worthwhile(*self._drafts_of(sequences[start : start + _PROBED])[1:], n_rows) is None:
                self._wait(n_rows, longer=not self._pending)  # more drafts are found when all samples are indexed
                return none
        drafts, lengths_R, available_R = self._drafts_of(sequences)
        counts_R = self._worthwhile(lengths_R, available_R, n_rows)
        if counts_R is None:
            self._wait(n_rows, longer=not self._pending)
            return none
        self._is_on, self._waits, self._pause, self._paused_at = True, 0, 0, 0
        return [draft[:n] for draft, n in zip(drafts, counts_R.tolist(), strict=True)]

    def _wait(self, n_rows: int, *, longer: bool) -> None:
        """Begin a pause, twice as long as the last one if `longer` is True."""
        if longer:
            self._pause = min(max(_SHORT_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._is_on, self._waits, self._paused_at = False, self._pause, n_rows

    def _drafts_of(self, sequences: list[Sequence]) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
        """Return the longest draft for each sequence, the lengths of the suffixes (R,), and of the drafts (R,)."""
        for sequence in sequences:
            sequence.settle()
        if len(self._rows) > 2 * MAX_SEQUENCES:  # some of these sequences were aborted
            self._rows = {each: row for each, row in self._rows.items() if each.finish_reason is None}
        rows = [self._rows.get(sequence) or self._begin(sequence) for sequence in sequences]
        self._index_pending()
        self._index_new(rows, sequences)
        lengths_R, places_R = self.index.find([row.text for row in rows])
        drafts: list[list[int]] = [[] for _ in rows]
        found = np.flatnonzero(lengths_R)
        followed = self.index.following(places_R[found])
        for index, length, draft in zip(found.tolist(), lengths_R[found].tolist(), followed, strict=True):
            row, drafts[index] = rows[index], draft
            row.length, row.draft, row.drafted_at = length, draft, row.n_indexed
        return drafts, lengths_R, np.array([len(draft) for draft in drafts])

    def _worthwhile(self, lengths_R: np.ndarray, available_R: np.ndarray, n_rows: int) -> np.ndarray | None:
        """Return how many tokens to draft for each of some sequences, (R,) int64. None if drafts do not pay.

        A drafted token pays if the probability that it is right, per time of its row, is larger than the expected
        number of tokens of the step per time. The sequences are a sample of all `n_rows` sequences of the step.
        """
        costs, weight = self._costs, n_rows / len(lengths_R)
        right_RJ = np.cumprod(np.repeat(self._right_shares()[lengths_R][:, None], MOST, 1), axis=1)
        right_RJ[np.arange(MOST) >= np.minimum(available_R, costs.most_rows // n_rows - 1)[:, None]] = 0
        plain = rate = costs.plain_rate(n_rows)
        counts_R = np.zeros(len(lengths_R), dtype=np.int64)
        for _ in range(3):
            is_drafted_RJ = right_RJ > max(rate, plain)
            counts_R = is_drafted_RJ.sum(1)
            rate = (n_rows + weight * right_RJ[is_drafted_RJ].sum()) / costs.time(n_rows, weight * counts_R.sum())
        return counts_R if rate > plain * _LEAST_GAIN else None

    def _scope(self, request: GenerationRequest) -> int:
        """Return the scope of a request: `draft_scope` if given, otherwise a hash of its prompt."""
        if request.draft_scope is not None:
            return request.draft_scope
        found = self._scope_of.get(request.request_id)
        if found is None or found[0] is not request:
            if len(self._scope_of) > self.index.n_segments:
                self._scope_of.clear()
            found = self._scope_of[request.request_id] = request, hash(tuple(request.prompt))
        return found[1]

    def _begin(self, sequence: Sequence) -> _Row:
        """Return the row of a new sequence, and index its scope and its prompt unless the index has them."""
        prompt, scope = sequence.request.prompt, self._scope(sequence.request)
        known = self._loaded.get(scope)
        if known is None or not self.index.is_stored(known):
            _drop_overwritten(self._loaded, self.index)
            self._loaded[scope] = self.index.open(scope, [])
            self._pending.extend((None, scope, before, tokens) for before, tokens in self.memory.of(scope))
        self._index_prompt(scope, prompt)
        row = self._rows[sequence] = _Row(self.index.open(scope, prompt), len(prompt))
        return row

    def _index_prompt(self, scope: int, prompt: list[int]) -> None:
        """Index the tokens of a prompt, except leading chunks that are equal to those of another prompt of the scope.

        So each token of a conversation is indexed once, although each prompt repeats the previous one.
        """
        tokens, digest = np.array(prompt, dtype=np.int64), scope
        digests, n_known = list[int](), 0
        for start in range(0, len(prompt), _CHUNK):
            digest = hash((digest, tokens[start : start + _CHUNK].tobytes()))
            known = self._chunks.get(digest)
            if not digests and known is not None and self.index.is_stored(known):
                n_known = start + _CHUNK
            else:
                digests.append(digest)
        if digests:
            _drop_overwritten(self._chunks, self.index)
            text = self.index.open(scope, prompt[max(0, n_known - LONGEST) : n_known])
            self.index.extend([text], [prompt[n_known:]], ends=True)
            self._chunks |= dict.fromkeys(digests, text)

    def _index_new(self, rows: list[_Row], sequences: list[Sequence]) -> None:
        """Index the tokens that sequences got since the last call, and count which drafts were right."""
        new: list[list[int]] = []
        for row, sequence in zip(rows, sequences, strict=True):
            tokens = sequence.tokens
            if row.draft is not None:
                self._count(row, tokens[row.drafted_at : row.drafted_at + len(row.draft)])
            if not self.index.is_stored(row.text):
                row.text = self.index.open(row.text.scope, tokens[max(0, row.n_indexed - LONGEST) : row.n_indexed])
            new.append(tokens[row.n_indexed :])
            row.n_indexed = len(tokens)
        self.index.extend([row.text for row in rows], new)

    def _count(self, row: _Row, sampled: list[int]) -> None:
        """Count how many tokens of a row's draft were right, given the tokens that were sampled in their place."""
        assert row.draft is not None
        n_right = n_tried = len(sampled)
        if row.draft[:n_tried] != sampled:
            n_right = next(
                n for n, (drafted, token) in enumerate(zip(row.draft, sampled, strict=False)) if drafted != token
            )
            n_tried = n_right + 1
        self._tried[row.length] += n_tried
        self._right[row.length] += n_right
        if self._tried[row.length] > 512:  # follow a policy that changes
            self._tried[row.length] *= 0.5
            self._right[row.length] *= 0.5
        row.draft = None

    def _index_pending(self) -> None:
        """Index finished samples, at most `_INDEXED_AT_ONCE` tokens and the rest of a sample."""
        budget, texts, tokens = _INDEXED_AT_ONCE, list[Text](), list[list[int]]()
        of_scopes: dict[int, list[int]] = {}
        while self._pending and budget > 0:
            text, scope, before, new = self._pending.popleft()
            budget -= len(new)
            if text is not None and self.index.is_stored(text):
                texts.append(text)
                tokens.append(new.tolist())
            else:
                of_scopes.setdefault(scope, []).extend([*before, *new.tolist(), BREAK])
        for scope, samples in of_scopes.items():
            found = self._loaded.get(scope)
            if found is None or not self.index.is_stored(found):
                found = self._loaded[scope] = self.index.open(scope, [])
            texts.append(found)
            tokens.append(samples)
        self.index.extend(texts, tokens, ends=True)


def _drop_overwritten(texts: dict[int, Text], index: DraftIndex) -> None:
    """Remove texts that the index has overwritten, if there are many texts."""
    if len(texts) > 8 * index.n_segments:  # at least half of them are overwritten
        for key in [key for key, text in texts.items() if not index.is_stored(text)]:
            del texts[key]
