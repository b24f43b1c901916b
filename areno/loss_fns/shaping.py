"""What is added to, taken off or done to a reward before it becomes an advantage. numpy float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def overlong_penalty(
    lengths: Sequence[int] | np.ndarray, max_new_tokens: int, overlong_tokens: int, factor: float = 1.0
) -> np.ndarray:
    """DAPO's soft punishment of completions near the limit (arXiv 2503.14476 eq. 13), times factor; add it to rewards.

    0 up to max_new_tokens - overlong_tokens tokens, then falling linearly to -factor at max_new_tokens, and -factor
    beyond. lengths: (B,) tokens of each completion. Returns (B,) float64.
    """
    if not 0 < overlong_tokens <= max_new_tokens:
        raise ValueError(f"overlong_tokens is {overlong_tokens}; expected 1 to max_new_tokens={max_new_tokens}")
    over_B = np.asarray(lengths, dtype=np.float64) - (max_new_tokens - overlong_tokens)
    return 0.0 - factor * np.clip(over_B / overlong_tokens, 0.0, 1.0)


def shape_rewards(
    rewards: Sequence[float] | np.ndarray, bias: float = 0.0, scaling: float = 1.0, clip: float | None = None
) -> np.ndarray:
    """(R + bias) * scaling, cut to [-clip, clip] where clip is given. (B,) float64; an unknown reward stays NaN."""
    shaped_B = (np.asarray(rewards, dtype=np.float64) + bias) * scaling
    return shaped_B if clip is None else np.clip(shaped_B, -clip, clip)
