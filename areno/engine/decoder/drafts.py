"""Drafts from repetition: the tokens that followed the last tokens of a sample when they occurred before.

DraftIndex finds the longest suffix of a text (3 to 8 tokens) that occurs earlier in the same text or in other texts of
the same prompt, from this rollout or earlier ones. SuffixDrafter keeps the index up to date, and decides how many
tokens to propose. All decisions depend on counts only, so all ranks that share a model decide alike. The idea is from
SuffixDecoding (arXiv 2411.04975) and DAS (arXiv 2511.13841), with hash tables in place of suffix trees. No tensors.

Shape letters: R texts, N tokens, L lengths of suffixes, J drafted tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from areno.engine.decoder.sequence import Sequence

SHORTEST, LONGEST = 3, 8  # tokens of a suffix
SEGMENT = 256  # tokens of a text that are stored together
MOST = 8  # drafted tokens of a sequence in a step
MAX_SEQUENCES = 256  # with more, a step computes so much that more rows take as much longer
_LENGTHS = np.arange(SHORTEST, LONGEST + 1)
_BACK = np.arange(LONGEST)  # how many tokens before the last one of a suffix
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=LONGEST).astype(np.uint64) * np.uint64(2) + np.uint64(1)
_INDEXED_AT_ONCE = 4096  # tokens of finished samples, in a step
_LEAST_GAIN = 1.03  # of the expected speed, or a step does without drafts
_LONGEST_PAUSE = 64  # steps


@dataclass(slots=True)
class Text:
    """A growing text in a DraftIndex.

    Attributes:
        scope: Number of the prompt. A text is only compared with texts of the same scope.
        segment: Segment that holds the end of the text.
        serial: Serial number of the segment. If the segment has another one by now, it holds another text.
    """

    scope: int
    segment: int
    serial: int


class DraftIndex:
    """Finds earlier occurrences of the last tokens of a text.

    Texts are stored in segments. The oldest segment is overwritten when all are used. For each length of a suffix, a
    hash table without chains maps the hash of that many tokens to the place after their last occurrence. A place is
    checked against the stored tokens, so a collision of hashes can hide an occurrence but not invent one.

    Args:
        n_tokens: Number of tokens that are stored, rounded up to whole segments.
    """

    def __init__(self, n_tokens: int):
        n_segments = max(2, -(-n_tokens // SEGMENT))
        self._tokens = np.full(n_segments * SEGMENT, -1, dtype=np.int64)
        self._length, self._serial = (np.zeros(n_segments, dtype=np.int64) for _ in range(2))
        self._scope = np.zeros(n_segments, dtype=np.int64)
        n_bits = (n_segments * SEGMENT - 1).bit_length() + 1  # half empty, so that few occurrences are hidden
        self._shift = np.uint64(64 - n_bits)
        self._tables = np.full((len(_LENGTHS), 1 << n_bits), -1, dtype=np.int32)
        self._n_opened = 0

    def clear(self) -> None:
        """Drop all texts."""
        self._tables.fill(-1)
        self._length.fill(0)
        self._serial.fill(0)
        self._n_opened = 0

    def open(self, scope: int, before: list[int]) -> Text:
        """Begin a text.

        Args:
            scope: Number of the prompt, an int64.
            before: Tokens before the text, such as the prompt. At most the last 8 tokens are kept.
        """
        segment = self._n_opened % len(self._length)
        self._n_opened += 1
        before = before[-LONGEST:]
        start = segment * SEGMENT
        self._tokens[start : start + len(before)] = before
        self._length[segment], self._scope[segment], self._serial[segment] = len(before), scope, self._n_opened
        return Text(scope, segment, self._n_opened)

    def is_stored(self, text: Text) -> bool:
        """Return whether the end of a text has not been overwritten."""
        return bool(self._serial[text.segment] == text.serial)

    def extend(self, texts: list[Text], tokens: list[list[int]]) -> None:
        """Append tokens to texts.

        Args:
            texts: The texts, each at most once.
            tokens: The tokens for each text. May be empty.
        """
        while texts:
            segments_R = np.array([text.segment for text in texts], dtype=np.int64)
            room = (SEGMENT - self._length[segments_R]).tolist()
            now = [new[:n] for new, n in zip(tokens, room, strict=True)]
            self._append(segments_R, now)
            rest = [(text, new[n:]) for text, new, n in zip(texts, tokens, room, strict=True) if len(new) > n]
            for text, _ in rest:  # go on in another segment, which begins with the last tokens of this one
                end = (text.segment + 1) * SEGMENT
                other = self.open(text.scope, self._tokens[end - LONGEST : end].tolist())
                text.segment, text.serial = other.segment, other.serial
            texts, tokens = [text for text, _ in rest], [new for _, new in rest]

    def _append(self, segments_R: np.ndarray, tokens: list[list[int]]) -> None:
        """Append tokens to segments that have room for them, and note after which suffixes they occur."""
        counts_R = np.array([len(new) for new in tokens], dtype=np.int64)
        if not counts_R.any():
            return
        row_N = np.repeat(np.arange(len(tokens)), counts_R)
        offset_N = np.arange(len(row_N)) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        offset_N += self._length[segments_R][row_N]
        places_N = segments_R[row_N] * SEGMENT + offset_N
        self._tokens[places_N] = [token for new in tokens for token in new]
        self._length[segments_R] += counts_R
        slots_LN, _ = self._hashed(places_N, offset_N, self._scope[segments_R][row_N])
        is_long_LN = offset_N >= _LENGTHS[:, None]
        levels, rows = is_long_LN.nonzero()
        self._tables[levels, slots_LN[levels, rows]] = places_N[rows]

    def _hashed(self, places_N: np.ndarray, offset_N: np.ndarray, scope_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the table slots (L, N) of the suffixes before some places, and their tokens from last to first (N, 8).

        Tokens before the begin of the segment are -1.
        """
        before_N8 = self._tokens[np.maximum(places_N[:, None] - 1 - _BACK, 0)]
        before_N8[offset_N[:, None] <= _BACK] = -1
        # A multilinear hash: the sum of the first n products is that of the n last tokens.
        sums_N8 = np.cumsum((before_N8 + 1).view(np.uint64) * _FACTORS, axis=1)
        hash_LN = (sums_N8[:, SHORTEST - 1 :] ^ scope_N.view(np.uint64)[:, None]).T * _FACTORS[0]
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
        places_LR = np.take_along_axis(self._tables, slots_LR, 1).astype(np.int64)
        found_LR, offset_LR = places_LR // SEGMENT, places_LR % SEGMENT
        is_match_LR = (places_LR >= 0) & (offset_LR < self._length[found_LR]) & (self._scope[found_LR] == scope_R)
        is_match_LR &= (offset_LR >= _LENGTHS[:, None]) & (length_R >= _LENGTHS[:, None])
        stored_LR8 = self._tokens[np.maximum(places_LR[:, :, None] - 1 - _BACK, 0)]
        is_same_LR8 = (stored_LR8 == suffix_R8) | (_LENGTHS[:, None, None] <= _BACK)
        is_match_LR &= is_same_LR8.all(-1)
        best_R = len(_LENGTHS) - 1 - is_match_LR[::-1].argmax(0)
        is_found_R = is_match_LR.any(0)
        return np.where(is_found_R, _LENGTHS[best_R], 0), places_LR[best_R, np.arange(len(texts))]

    def following(self, place: int, text: Text) -> list[int]:
        """Return up to 8 tokens from a place on, as far as their segment has them.

        If the place is so near the end of `text` that the text repeats itself, the repetition is continued.

        Args:
            place: A place from `find`.
            text: The text whose suffix was found before the place.
        """
        segment = place // SEGMENT
        end = min(place + MOST, segment * SEGMENT + int(self._length[segment]))
        tokens = self._tokens[place:end].tolist()
        return (tokens * MOST)[:MOST] if segment == text.segment else tokens


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Time of a decoding step. The unit is the time that one more row adds.

    Attributes:
        fixed: Time of a step without rows, which mostly reads the weights.
        verification: Time that a step with drafts takes beyond that of a step with the same number of rows.
        most_rows: Largest number of rows of a step with drafts.
    """

    fixed: float
    verification: float
    most_rows: int


def step_costs(n_params: int, n_rows: int, *, on_cuda: bool, use_graphs: bool) -> StepCosts:
    """Return the costs of a decoding step for a model.

    They are rough. Where drafts are often right, they pay by far, and elsewhere few are made.

    Args:
        n_params: Number of parameters of the model.
        n_rows: Largest number of rows of a step with drafts.
        on_cuda: Whether the model is on a GPU, where the host cannot launch a step with drafts ahead.
        use_graphs: Whether steps run as CUDA graphs. Without them, launching a step takes longer than reading weights.
    """
    if on_cuda:
        return StepCosts(fixed=240 if use_graphs else 1000, verification=80, most_rows=n_rows)
    return StepCosts(fixed=max(4, 100_000_000 // max(1, n_params)), verification=2, most_rows=n_rows)


@dataclass(slots=True)
class _Row:
    """A running sample: its text, how many of its tokens are indexed, and the last draft that can be checked."""

    text: Text
    n_indexed: int
    length: int = 0  # of the suffix that the draft follows
    draft: list[int] | None = None
    drafted_at: int = 0  # number of tokens before the draft


class SuffixDrafter:
    """Proposes drafts from a DraftIndex, as many tokens as pay according to a model of costs.

    How likely a drafted token is right is measured for each length of the suffix, on drafts that were verified and on
    drafts that were not. If drafts would not pay, the drafter pauses, at first for 2 steps and finally for 64.

    Args:
        remembers: Whether the index keeps samples of earlier rollouts. If not, the drafts of a rollout do not depend on
            whether the run was resumed before it. Drafts change no token, but the number of rows in a matrix product,
            and so the last bits of its results.
    """

    def __init__(self, *, remembers: bool = True):
        self._n_tokens = 1 << (20 if remembers else 16)
        self.index, self._remembers = DraftIndex(self._n_tokens), remembers
        self._costs: StepCosts
        self._rows: dict[Sequence, _Row] = {}
        self._ended: deque[Sequence] = deque()
        self._n_ended_tokens = 0
        self._prompts: dict[int, Text] = {}
        self._tried, self._right = (np.zeros(LONGEST + 1) for _ in range(2))
        self._pause = self._waits = 0

    def begin(self, costs: StepCosts) -> None:
        """Begin a rollout. Samples of the last one that have not finished are forgotten.

        Args:
            costs: Time of a step.
        """
        self._costs = costs
        self._rows.clear()
        if not self._remembers:
            self.index.clear()
            self._ended.clear()
            self._prompts.clear()
            self._n_ended_tokens = 0
        kept = 0.5 if self._remembers else 0.0
        self._tried *= kept
        self._right *= kept
        self._pause = self._waits = 0

    def is_due(self, n_running: int) -> bool:
        """Return whether the next step may draft. False in a pause, and if the batch is too large.

        Args:
            n_running: Number of sequences in the batch.
        """
        if not 0 < n_running <= MAX_SEQUENCES:
            return False
        self._waits -= 1
        return self._waits < 0

    def finished(self, sequence: Sequence) -> None:
        """Keep a completion for the index.

        Args:
            sequence: The sequence, all of whose tokens are in `tokens`.
        """
        self._ended.append(sequence)
        self._n_ended_tokens += len(sequence.tokens)
        while self._n_ended_tokens > self._n_tokens:
            dropped = self._ended.popleft()
            self._n_ended_tokens -= len(dropped.tokens)
            self._rows.pop(dropped, None)

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Return a draft for each sequence, or empty drafts if none would pay.

        Args:
            sequences: The sequences of the next step. All their tokens are in `tokens`.
        """
        self._index_ended()
        rows = [self._rows.get(sequence) or self._begin(sequence) for sequence in sequences]
        self._index_new(rows, sequences)
        lengths_R, places_R = self.index.find([row.text for row in rows])
        drafts: list[list[int]] = [[] for _ in rows]
        for index in np.flatnonzero(lengths_R).tolist():
            row, draft = rows[index], self.index.following(int(places_R[index]), rows[index].text)
            row.length, row.draft, row.drafted_at = int(lengths_R[index]), draft, row.n_indexed
            drafts[index] = draft
        counts_R = self._worthwhile(lengths_R, np.array([len(draft) for draft in drafts]))
        if counts_R is None:
            self._waits = self._pause = min(max(2, 2 * self._pause), _LONGEST_PAUSE)
            return [[] for _ in rows]
        self._waits = self._pause = 0
        return [draft[:n] for draft, n in zip(drafts, counts_R.tolist(), strict=True)]

    def _worthwhile(self, lengths_R: np.ndarray, available_R: np.ndarray) -> np.ndarray | None:
        """Return how many tokens to draft for each sequence, (R,) int64. None if drafts do not pay.

        A drafted token pays if it adds more expected tokens for its row's time than the step has in that time.
        """
        n_rows, costs = len(lengths_R), self._costs
        right_L = (self._right + 2) / (self._tried + 4)  # without a try: as likely right as wrong
        right_RJ = np.cumprod(np.repeat(right_L[lengths_R][:, None], MOST, 1), axis=1)
        right_RJ[np.arange(MOST) >= np.minimum(available_R, costs.most_rows // n_rows - 1)[:, None]] = 0
        plain = rate = n_rows / (costs.fixed + n_rows)
        counts_R = np.zeros(n_rows, dtype=np.int64)
        for _ in range(3):
            is_drafted_RJ = right_RJ > max(rate, plain)
            counts_R = is_drafted_RJ.sum(1)
            time = costs.fixed + costs.verification + n_rows + counts_R.sum()
            rate = (n_rows + right_RJ[is_drafted_RJ].sum()) / time
        return counts_R if rate > plain * _LEAST_GAIN else None

    def _begin(self, sequence: Sequence) -> _Row:
        """Return the row of a sequence that was not seen before. Its prompt is indexed unless the index has it."""
        prompt = sequence.request.prompt
        scope = hash(tuple(prompt))
        known = self._prompts.get(scope)
        if known is None or not self.index.is_stored(known):
            if len(self._prompts) > self._n_tokens // SEGMENT:
                self._prompts = {scope: text for scope, text in self._prompts.items() if self.index.is_stored(text)}
            known = self._prompts[scope] = self.index.open(scope, [])
            self.index.extend([known], [prompt])
        row = self._rows[sequence] = _Row(self.index.open(scope, prompt), len(prompt))
        return row

    def _index_new(self, rows: list[_Row], sequences: list[Sequence]) -> None:
        """Index the tokens that sequences got since their last call, and count which drafts were right."""
        new: list[list[int]] = []
        for row, sequence in zip(rows, sequences, strict=True):
            tokens = sequence.tokens
            if row.draft is not None:
                self._count(row, tokens[row.drafted_at : row.drafted_at + len(row.draft)])
            if not self.index.is_stored(row.text):
                row.text = self.index.open(row.text.scope, tokens[: row.n_indexed])
            new.append(tokens[row.n_indexed :])
            row.n_indexed = len(tokens)
        self.index.extend([row.text for row in rows], new)

    def _count(self, row: _Row, sampled: list[int]) -> None:
        """Count how many tokens of a row's draft were right, given the tokens that were sampled in their place."""
        assert row.draft is not None
        n_right = 0
        for drafted, token in zip(row.draft, sampled, strict=False):
            if drafted != token:
                break
            n_right += 1
        self._tried[row.length] += n_right + (n_right < min(len(row.draft), len(sampled)))
        self._right[row.length] += n_right
        if self._tried[row.length] > 512:  # follow a policy that changes
            self._tried[row.length] *= 0.5
            self._right[row.length] *= 0.5
        row.draft = None

    def _index_ended(self) -> None:
        """Index samples that have ended, for one step as many as take little time."""
        budget = _INDEXED_AT_ONCE
        while self._ended and budget > 0:
            sequence = self._ended.popleft()
            self._n_ended_tokens -= len(sequence.tokens)
            row = self._rows.get(sequence) or self._begin(sequence)
            budget -= len(sequence.tokens) - row.n_indexed
            self._index_new([row], [sequence])
            del self._rows[sequence]
