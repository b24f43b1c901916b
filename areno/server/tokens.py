"""The origin of each token in a training row.

The origin of a token is called its source, such as "part of a user message". A run is a stretch of consecutive
tokens with the same source, stored as (source, number of tokens). `source_runs` derives the runs from the places of
messages in a rendered prompt, and `expand_runs` turns runs into an array with one source for each token.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np


class Source(IntEnum):
    """Origin of a token in a row.

    Attributes:
        TEMPLATE: Written by the chat template, or of any origin not listed here.
        SYSTEM: Part of a system message.
        USER: Part of a user message.
        TOOL: Part of a tool's result.
        SAMPLED: Sampled by the model.
    """

    TEMPLATE = 0
    SYSTEM = 1
    USER = 2
    TOOL = 3
    SAMPLED = 4


Runs = list[tuple[int, int]]
"""(source, number of tokens) of consecutive tokens."""
_AT_ONCE = 1 << 16  # tokens

SOURCE_OF_ROLE = {"system": Source.SYSTEM, "user": Source.USER, "tool": Source.TOOL, "function": Source.TOOL}


def digest_of(tokens: list[int]) -> int:
    """Return a 64-bit hash of token ids.

    Args:
        tokens: Token ids.
    """
    hashed = hashlib.blake2b(digest_size=8)
    for at in range(0, len(tokens), _AT_ONCE):  # in pieces, so that other threads can run in between
        hashed.update(np.array(tokens[at : at + _AT_ONCE], dtype=np.int64).tobytes())
    return int.from_bytes(hashed.digest(), "little")


def source_runs(
    places: Iterable[tuple[int, int, int]], n_tokens: int, span_of: Callable[[int], tuple[int, int]], start: int = 0
) -> Runs:
    """Return the source (origin) of each token in a text, as runs.

    A run is a tuple (source, number of tokens) for a stretch of consecutive tokens with the same source. Tokens outside
    of the messages in `places` have the source TEMPLATE.

    Args:
        places: (start, end, source) of each message's content in the text, in order. Start and end are character
            indices.
        n_tokens: Number of tokens in the text from character `start` on.
        span_of: Function from the index of a token to its (start, end) in characters, counted from `start`.
        start: Index of the character at which the tokens begin.

    Returns:
        The runs, which cover all `n_tokens` tokens.
    """
    runs: list[tuple[int, int]] = []
    at = 0
    for begin, end, source in places:
        first = bisect_right(range(n_tokens), begin - start, lo=at, key=lambda token: span_of(token)[1])
        last = bisect_left(range(n_tokens), end - start, lo=first, key=lambda token: span_of(token)[0])
        runs += [(int(Source.TEMPLATE), first - at), (source, last - first)]
        at = last
    return merge_runs([*runs, (int(Source.TEMPLATE), n_tokens - at)])


def merge_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """Merge neighbouring runs with the same source, and drop empty runs.

    Args:
        runs: A tuple (source, number of tokens) for each run, which is a stretch of consecutive tokens.

    Returns:
        Runs for the same tokens, in which neighbours have different sources.
    """
    found: Runs = []
    for source, n in runs:
        if found and found[-1][0] == source:
            found[-1] = (source, found[-1][1] + n)
        elif n:
            found.append((source, n))
    return found


def expand_runs(runs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Expand runs to one source for each token.

    Args:
        runs: A tuple (source, number of tokens) for each run, which is a stretch of consecutive tokens.

    Returns:
        Sources of the tokens, an array of uint8, shape [n_tokens].
    """
    pairs = np.array(list(runs), dtype=np.int64).reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1]).astype(np.uint8)
