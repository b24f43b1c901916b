"""Sources of the tokens in a training row, stored as runs: (source, number of consecutive tokens with this source)."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np


class TokenSource(IntEnum):
    TEMPLATE = 0  # also the source of all tokens that no other value names
    SYSTEM = 1
    USER = 2
    TOOL = 3
    SAMPLED = 4


Runs = list[tuple[int, int]]  # (source, number of tokens)
_AT_ONCE = 1 << 16  # tokens

SOURCE_OF_ROLE = {
    "system": TokenSource.SYSTEM,
    "user": TokenSource.USER,
    "tool": TokenSource.TOOL,
    "function": TokenSource.TOOL,
}


def token_digest(tokens: list[int]) -> int:
    hashed = hashlib.blake2b(digest_size=8)
    for at in range(0, len(tokens), _AT_ONCE):  # in pieces, so that other threads can run in between
        hashed.update(np.array(tokens[at : at + _AT_ONCE], dtype=np.int64).tobytes())
    return int.from_bytes(hashed.digest(), "little")


def source_runs(
    content_spans: Iterable[tuple[int, int, int]],
    n_tokens: int,
    span_of: Callable[[int], tuple[int, int]],
    start: int = 0,
) -> Runs:
    """Return the sources of the `n_tokens` tokens from character `start` on.

    `span_of` returns the first and last character of a token, counted from `start`. `content_spans` are (start, end,
    source) of the messages' contents in order, in characters. Tokens outside of them have the source TEMPLATE.
    """
    runs: list[tuple[int, int]] = []
    at = 0
    for begin, end, source in content_spans:
        first = bisect_right(range(n_tokens), begin - start, lo=at, key=lambda token: span_of(token)[1])
        last = bisect_left(range(n_tokens), end - start, lo=first, key=lambda token: span_of(token)[0])
        runs += [(int(TokenSource.TEMPLATE), first - at), (source, last - first)]
        at = last
    return merge_runs([*runs, (int(TokenSource.TEMPLATE), n_tokens - at)])


def merge_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    found: Runs = []
    for source, n in runs:
        if found and found[-1][0] == source:
            found[-1] = (source, found[-1][1] + n)
        elif n:
            found.append((source, n))
    return found


def expand_runs(runs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return one source for each token, uint8 [n_tokens]."""
    pairs = np.array(list(runs), dtype=np.int64).reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1]).astype(np.uint8)
