"""The built-in reward `length`: 1.0 for completions of a certain length, and less the farther one is from it."""

from __future__ import annotations

from typing import Any


def reward_fn(record: Any, min_tokens: int | None, max_tokens: int | None, margin_tokens: int) -> float:
    """Score one RewardRecord: see LengthRewardConfig. Raises ValueError for a record without tokens."""
    n_tokens = len(record.tokens)
    if not n_tokens:
        raise ValueError("the record has no tokens, so its length is not known")
    over = max(0, (min_tokens or 0) - n_tokens, n_tokens - (n_tokens if max_tokens is None else max_tokens))
    return max(0.0, 1.0 - over / margin_tokens) if margin_tokens else float(over == 0)
