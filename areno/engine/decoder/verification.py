"""Verification of drafts: one decoding pass computes the last token of each sequence and its drafted next tokens.

The batch of such a pass has one row for each of these positions. Each row draws its token with the random number of its
position, as a step without drafts would do. So a drafted token is accepted exactly if the draw of the row before it
gives the same token. The first draw that differs from the draft is itself the next token, and the rows after it are
dropped. Their keys and values lie beyond the end of the sequence, where later tokens overwrite them.

Shape letters: B sequences, N rows, W words of 32 tokens (in TableDrafts, W = CONTEXT last tokens), J drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from areno.engine.decoder.grammar import masks_along
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import SlotTable
from areno.kernels.drafts import NgramTable

# Numbers of drafted tokens of a sequence. With its last token, these are 2, 4 and 8 rows, at most a group of rows that
# share prefixes.
DRAFT_LENGTHS = (1, 3, 7)


@dataclass(frozen=True, slots=True)
class TableDrafts:
    """Drafts that the device looks up in a table of n-grams, at the beginning of the step that verifies them.

    Attributes:
        table: The table.
        n_tokens: Number J of drafted tokens of each sequence.
        slots_B: int64, slots of the B sequences.
        contexts_BW: int64, the last W arrived tokens of each sequence, the last one at the end. -1 before the text
            begins.
        scopes_B: int64, scope of each sequence.
        n_new_B: int64, number of completion tokens of each sequence that have arrived.
        limits_B: int64, for each sequence the first position that has no KV block, or lies beyond its largest length.
        follows_B: bool, whether the sequence gets more tokens from a step with TableDrafts that is in flight. The
            numbers above are then those before that step.
        verified: Called with (these drafts, sampled tokens (B, 1 + J) int64, number of them that each sequence got (B,)
            int64, whether each drafted token and all before it were right (B, J) bool) when the tokens have arrived.
    """

    table: NgramTable
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
        """Number of rows of a sequence in the step: its last token, and the drafted tokens."""
        return 1 + self.n_tokens


Drafts = list[list[int]] | TableDrafts
"""The drafted tokens of each sequence, or where the device finds them."""


class Drafter(Protocol):
    """Proposes the next tokens of sequences. Wrong proposals cost time, but never change a token."""

    def is_due(self, n_running: int) -> bool:
        """Return whether the next step wants drafts, which need all sampled tokens on the host.

        Args:
            n_running: Number of sequences in the batch.
        """
        ...

    def propose(self, sequences: list[Sequence]) -> Drafts:
        """Return a draft for each sequence: the tokens that may follow. Empty for no draft.

        Args:
            sequences: The sequences of the next step, all of whose tokens have arrived. Call `Sequence.settle` before
                reading `Sequence.tokens`.
        """
        ...

    def finished(self, sequence: Sequence) -> None:
        """Learn a completion that has ended.

        Args:
            sequence: The sequence. `Sequence.completion_tokens` returns its tokens.
        """
        ...


def fitting_draft(sequence: Sequence, draft: list[int]) -> list[int]:
    """Return the part of a draft that is worth verifying.

    A draft ends before the first token that ends the sequence or that its grammar does not allow, and leaves room for
    the token that the last row draws.

    Args:
        sequence: The sequence, all of whose tokens have arrived.
        draft: The proposed tokens.
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
    """The rows of a verification: for each sequence a row for its last token, then a row for each drafted token.

    Attributes:
        sequences: The sequence of each row.
        drafts: For each of the B sequences, its drafted tokens.
        slots_N: int64, slot of each row's sequence.
        positions_N: int64, position of each row's input token.
        index_N: int64, index in the completion of the token that each row draws.
        tokens_N: int64, input token of each row.
    """

    sequences: list[Sequence]
    drafts: list[list[int]]
    slots_N: np.ndarray
    positions_N: np.ndarray
    index_N: np.ndarray
    tokens_N: np.ndarray

    @classmethod
    def of(cls, sequences: list[Sequence], drafts: list[list[int]], table: SlotTable) -> DraftedRows:
        """Return the rows of a step whose plan already counts all of them in `table.n_kv` and `table.n_sampled`.

        Args:
            sequences: The sequences of the step.
            drafts: The drafted tokens of each sequence. May be empty.
            table: The numbers of all slots.
        """
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

    def drafted_counts(self) -> np.ndarray:
        """Return the drafted tokens that count for the penalties of later rows, (2, n) int64: row, and drafted token.

        Each row counts the drafted tokens of its sequence up to its own input token.
        """
        pairs: list[tuple[int, int]] = []
        row = 0
        for draft in self.drafts:
            if draft and self.sequences[row].is_penalized:
                pairs += [(row + n, token) for n in range(1, len(draft) + 1) for token in draft[:n]]
            row += 1 + len(draft)
        return np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()

    def masks(self, n_words: int) -> np.ndarray | None:
        """Return the grammar mask of each row, (N, W) int32. None if no sequence has a grammar.

        The mask of a row follows the drafted tokens up to its own input token.

        Args:
            n_words: W, the number of 32-bit words that hold a bit for each token of the vocabulary.
        """
        if all(sequence.grammar is None for sequence in self.sequences):
            return None
        masks_NW = np.full((len(self.sequences), n_words), -1, dtype=np.int32)
        row = 0
        for draft in self.drafts:
            if (grammar := self.sequences[row].grammar) is not None:
                masks_NW[row : row + 1 + len(draft)] = masks_along(grammar, draft)[:, :n_words]
            row += 1 + len(draft)
        return masks_NW
