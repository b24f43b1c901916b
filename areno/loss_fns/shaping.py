"""What is added to, taken off or done to a reward before it becomes an advantage. numpy float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areno.loss_fns.correction import MAX_LOG_RATIO


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
    return -factor * np.clip(over_B / overlong_tokens, 0.0, 1.0)


def shape_rewards(
    rewards: Sequence[float] | np.ndarray, bias: float = 0.0, scaling: float = 1.0, clip: float | None = None
) -> np.ndarray:
    """(R + bias) * scaling, cut to [-clip, clip] where clip is given. (B,) float64; an unknown reward stays NaN."""
    shaped_B = (np.asarray(rewards, dtype=np.float64) + bias) * scaling
    return shaped_B if clip is None else np.clip(shaped_B, -clip, clip)


def kl_penalty(
    logprobs: Sequence[float] | np.ndarray, ref_logprobs: Sequence[float] | np.ndarray, estimator: str
) -> np.ndarray:
    """KL(policy || reference) at each token by k1, k2 or k3 (`areno.loss_fns.kl`), to be taken off its reward.

    With k1, rewards less coefficient times this sum up to the reward less coefficient times the log ratio of the whole
    row, whose mean is the KL of the sequences (arXiv 1909.08593 eq. 2): the unbiased choice here. (T,) float64.
    """
    log_r = np.asarray(ref_logprobs, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64)
    log_r = np.clip(log_r, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return np.square(log_r) / 2.0
    if estimator == "k3":
        return np.exp(log_r) - log_r - 1.0
    raise ValueError(f"kl_estimator is {estimator!r}; expected k1, k2 or k3")
