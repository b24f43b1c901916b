"""Where the tokens of a row come from, in runs: a list of (source, how many tokens)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import IntEnum

import numpy as np


class Source(IntEnum):
    """What put a token into a row. TEMPLATE are all tokens that are none of the others."""

    TEMPLATE = 0
    SYSTEM = 1
    USER = 2
    TOOL = 3
    SAMPLED = 4


Runs = list[tuple[int, int]]

OF_ROLE = {"system": Source.SYSTEM, "user": Source.USER, "tool": Source.TOOL, "function": Source.TOOL}


def digest_of(tokens: list[int]) -> int:
    """A number of 64 bits for token ids."""
    return int.from_bytes(hashlib.blake2b(np.array(tokens, dtype=np.int64).tobytes(), digest_size=8).digest(), "little")


def runs_of(sources: Iterable[int]) -> Runs:
    """One source for each token, as runs."""
    runs: Runs = []
    for source in sources:
        if runs and runs[-1][0] == source:
            runs[-1] = (source, runs[-1][1] + 1)
        else:
            runs.append((int(source), 1))
    return runs


def expand(runs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Runs as one source for each token, uint8."""
    pairs = np.array(list(runs), dtype=np.int64).reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1]).astype(np.uint8)
