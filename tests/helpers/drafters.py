"""Drafters for tests: always right, always wrong, or both at random."""

from __future__ import annotations

import random
from collections.abc import Mapping

from areno.engine.decoder.sequence import Sequence

Completions = Mapping[tuple[int, int], list[int]]  # by request id and sample


class KnownDrafter:
    """Knows the completions beforehand, and proposes up to `most` tokens of them, of which some are made wrong.

    wrong: Probability that a proposed token is another one.
    """

    table = None

    def __init__(self, completions: Completions, vocab_size: int, wrong: float = 0.0, most: int = 5, seed: int = 0):
        self.completions, self.vocab_size, self.wrong, self.most = completions, vocab_size, wrong, most
        self.rng = random.Random(seed)
        self.n_rows = self.n_finished = 0

    def should_draft(self, n_running: int) -> bool:
        return self.wrong in (0, 1) or self.rng.random() < 0.8

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for sequence in sequences:
            n = self.most if self.wrong in (0, 1) else self.rng.randrange(self.most + 1)
            rest = self.completions[sequence.request.request_id, sequence.sample][sequence.n_new :]
            drafts.append([self._perhaps_wrong(token) for token in [*rest, 5, 6, 7, 8][:n]])
        self.n_rows += sum(map(len, drafts))
        return drafts

    def _perhaps_wrong(self, token: int) -> int:
        return (
            (token + self.rng.randrange(1, self.vocab_size)) % self.vocab_size
            if self.rng.random() < self.wrong
            else token
        )

    def prepare_table(self, sequences: list[Sequence]) -> None:
        pass

    def count_verified(self, found: list[tuple[Sequence, int]]) -> None:
        pass

    def learn_finished(self, sequences: list[Sequence]) -> None:
        self.n_finished += len(sequences)
