"""Rows that share prefixes: groups of samples, trees of turns, and rows that are equal or end inside a prefix."""

from __future__ import annotations

import random

import numpy as np
import torch

from areno.engine.train.packing import LocalTokens, pack_tokens
from areno.layers.parallel import ParallelGroup
from areno.types import TrainSequence

Rows = list[np.ndarray]


def tokens(n: int, vocab: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab) for _ in range(n)]


def group(prompt: int, answers: list[int], vocab: int, seed: int = 0) -> Rows:
    """A prompt with answers of these lengths."""
    rng = random.Random(seed)
    start = tokens(prompt, vocab, rng)
    return [np.array(start + tokens(n, vocab, rng)) for n in answers]


def tree(depth: int, vocab: int, seed: int = 0, turn: int = 5) -> Rows:
    """A row for each leaf of a tree of turns with two or three children, and for some inner turns."""
    rng = random.Random(seed)

    def below(start: list[int], levels: int) -> Rows:
        if not levels:
            return [np.array(start)]
        found = [np.array(start)] if start and rng.random() < 0.3 else []
        for _ in range(rng.choice((2, 3))):
            found += below(start + tokens(rng.randint(turn - 2, turn + 2), vocab, rng), levels - 1)
        return found

    return below([], depth)


def cases(vocab: int) -> dict[str, Rows]:
    """Kinds of rows, by name."""
    mixed = [*group(9, [4, 1, 7], vocab, 1), *tree(3, vocab, 2), *group(6, [5], vocab, 3)]
    random.Random(4).shuffle(mixed)
    return {
        "group of 1": group(8, [6], vocab),
        "group of 3": group(11, [4, 1, 7], vocab),
        "group of 8, empty answers": group(7, [3, 0, 5, 1, 0, 9, 2, 2], vocab),
        "equal rows": [*group(5, [4, 4], vocab)] * 2,
        "four levels": tree(4, vocab),
        "mixed": mixed,
    }


def packed(rows: Rows, share: bool, context: ParallelGroup = ParallelGroup(), backend: str = "sdpa") -> LocalTokens:  # noqa: B008
    return LocalTokens.for_rank(pack_tokens(rows, torch.device("cpu"), share=share), context, backend)


def hidden_of_rows(model: torch.nn.Module, rows: Rows, share: bool, backend: str = "sdpa") -> torch.Tensor:
    """The hidden state of each token of the rows."""
    local = packed(rows, share, backend=backend)
    hidden_ND = model(local.tokens_n, local.positions_n, local.attend)
    shared = local.packed.shared
    return hidden_ND if shared is None else hidden_ND.index_select(0, shared.indices_U)


def n_nodes(rows: Rows) -> int:
    """The number of different beginnings of the rows."""
    return len({tuple(row[: n + 1].tolist()) for row in rows for n in range(len(row))})


def train_rows(rows: Rows, seed: int = 0, prompt: int = 2, staleness: int = 0) -> list[TrainSequence]:
    """Rows to train on, with numbers that differ between rows also where their tokens are the same."""
    rng = random.Random(seed)
    found = []
    for row in rows:
        n = len(row)
        mask = [place < prompt or rng.random() < 0.2 for place in range(n)]
        found.append(
            TrainSequence(
                tokens=row.tolist(),
                prompt_mask=mask,
                logprobs=[0.0 if masked else -rng.uniform(1, 5) for masked in mask],
                advantages=[rng.gauss(0, 1)] * n,
                ref_logprobs=[-rng.uniform(1, 5) for _ in mask],
                values=[rng.gauss(0, 1) for _ in mask],
                returns=[rng.gauss(0, 1) for _ in mask],
                staleness=staleness,
            )
        )
    return found
