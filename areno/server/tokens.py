"""Where the tokens of a row come from, in runs: a list of (source, how many tokens)."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
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
_AT_ONCE = 1 << 16  # tokens

OF_ROLE = {"system": Source.SYSTEM, "user": Source.USER, "tool": Source.TOOL, "function": Source.TOOL}


def digest_of(tokens: list[int]) -> int:
    """Return a number of 64 bits for token ids."""
    hashed = hashlib.blake2b(digest_size=8)
    for at in range(0, len(tokens), _AT_ONCE):  # other threads can run between
        hashed.update(np.array(tokens[at : at + _AT_ONCE], dtype=np.int64).tobytes())
    return int.from_bytes(hashed.digest(), "little")


def runs_at(
    places: Iterable[tuple[int, int, int]], n_tokens: int, span_of: Callable[[int], tuple[int, int]], start: int = 0
) -> Runs:
    """Return the sources of the tokens of a text.

    Args:
        places: (start, end, source) of words in the text, in order.
        n_tokens: Of the text, from character `start` on.
        span_of: From the number of a token to its characters, counted from `start`.
        start: Where the tokens begin.
    """
    runs: list[tuple[int, int]] = []
    at = 0
    for begin, end, source in places:
        first = bisect_right(range(n_tokens), begin - start, lo=at, key=lambda token: span_of(token)[1])
        last = bisect_left(range(n_tokens), end - start, lo=first, key=lambda token: span_of(token)[0])
        runs += [(int(Source.TEMPLATE), first - at), (source, last - first)]
        at = last
    return joined([*runs, (int(Source.TEMPLATE), n_tokens - at)])


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return runs of which none is empty and no two neighbours have the same source."""
    found: Runs = []
    for source, n in runs:
        if found and found[-1][0] == source:
            found[-1] = (source, found[-1][1] + n)
        elif n:
            found.append((source, n))
    return found


def expand(runs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Runs as one source for each token, uint8."""
    pairs = np.array(list(runs), dtype=np.int64).reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1]).astype(np.uint8)
