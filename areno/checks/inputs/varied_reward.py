"""Rewards that differ for nearly any two completions, so that a short run on a random model has gradients.

This module imports little, because each reward process imports it anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areno.types import RewardRecord


def reward_fn(record):
    return zlib.crc32(record.completion.encode()) / 2**32


def stand_in_reward(
    record: RewardRecord, parts: Sequence[str] = (), has_equal: bool = False
) -> float | dict[str, float]:
    """Return a reward, with parts that do not add up to it, that differs between any two completions.

    With `has_equal`, the completions of every second prompt, on average, have equal rewards.
    """
    names = ("reward", *parts)
    found = {name: reward_of_tokens(record.prompt_tokens, record.tokens, name, has_equal) for name in names}
    return found if parts else found["reward"]


def reward_of_tokens(
    prompt: Sequence[int], completion: Sequence[int], part: str = "reward", has_equal: bool = False
) -> float:
    if has_equal and zlib.crc32(f"{list(map(int, prompt))}".encode()) % 2:
        return 0.5
    text = f"{list(map(int, prompt))} {list(map(int, completion))} {part}"
    return zlib.crc32(text.encode()) % 1009 / 1009
