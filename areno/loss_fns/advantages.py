"""Rewards and advantages, in numpy float64.

Rewards are shaped first (penalty of long completions, bias, scale, clip). Then they become advantages: normalised
within groups or the batch, or estimated with a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from areno.errors import DataError

Level = Literal["batch", "group"] | None


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
    mean_level: Level = "group",
    std_level: Level = "group",
    std_unbiased: bool = False,
    eps: float = 1e-6,
    mean_leave1out: bool = False,
) -> np.ndarray:
    """Compute (R - mean) / (std + eps) of each sample. Mean and std are over its group, over the batch, or left out.

    The defaults are GRPO (arXiv 2402.03300 sec. 4.1.2). std_level None is Dr.GRPO (arXiv 2503.20783). If the known
    rewards of a group or batch are all equal, they carry no signal and the advantage is exactly 0, not a rounding error
    divided by eps.

    Args:
        rewards: (B,) rewards. NaN marks a sample whose reward is unknown (timeout, error). It does not count in any
            mean and gets advantage 0.
        group_ids: (B,) numbers, equal for the samples of one prompt.
        mean_level: "group" or "batch": the samples of the mean. None subtracts no mean.
        std_level: "group" or "batch": the samples of the deviation, which is about their own mean. None does not
            divide.
        std_unbiased: Whether the variance divides by n - 1 instead of n.
        eps: Added to the deviation.
        mean_leave1out: Whether the sample itself is left out of its mean (RLOO, arXiv 2402.14740, with std_level None).
            This multiplies the ordinary advantage by n / (n - 1). The deviation does not change.

    Returns:
        (B,) float64 advantages.

    Raises:
        DataError: The lengths differ, or a reward is infinite.
        ValueError: A level is unknown, or mean_leave1out is set without mean_level.
    """
    rewards_B, groups_B = _checked(rewards, group_ids)
    if mean_leave1out and mean_level is None:
        raise ValueError("mean_leave1out is set, but mean_level is null, so there is no mean; set it to group or batch")

    known_B = ~np.isnan(rewards_B)
    sets = {level: _members(level, known_B, groups_B) for level in (mean_level, std_level)}
    advantages_B = np.where(known_B, rewards_B, 0.0)
    for members_SN in sets[mean_level]:
        n = members_SN.shape[1]
        advantages_B[members_SN] -= rewards_B[members_SN].mean(axis=1, keepdims=True)
        if mean_leave1out:
            advantages_B[members_SN] *= n / max(n - 1, 1)
    for members_SN in sets[std_level]:
        ddof = min(int(std_unbiased), members_SN.shape[1] - 1)  # the deviation of one value is 0
        advantages_B[members_SN] /= rewards_B[members_SN].std(axis=1, ddof=ddof, keepdims=True) + eps
    for level in (mean_level, std_level):
        for members_SN in sets[level]:
            are_equal = (rewards_B[members_SN] == rewards_B[members_SN[:, :1]]).all(axis=1)
            advantages_B[members_SN[are_equal]] = 0.0
    return advantages_B


def _checked(
    rewards: Sequence[float] | np.ndarray, group_ids: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards and group numbers as arrays. Raises DataError if lengths differ or a reward is infinite."""
    rewards_B = np.asarray(rewards, dtype=np.float64)
    groups_B = np.asarray(group_ids)
    if rewards_B.ndim != 1 or rewards_B.shape != groups_B.shape:
        raise DataError(
            f"rewards and group_ids must be lists of equal length, not {rewards_B.size} and {groups_B.size}"
        )
    if np.isinf(rewards_B).any():
        raise DataError(f"the reward of sample {int(np.isinf(rewards_B).argmax())} is infinite; return a finite number")
    return rewards_B, groups_B


def normalize_tokens(
    values: Sequence[np.ndarray],
    group_ids: Sequence[int] | np.ndarray,
    mean_level: Level = "batch",
    std_level: Level = "batch",
    std_unbiased: bool = False,
    eps: float = 1e-6,
    mean_leave1out: bool = False,
) -> list[np.ndarray]:
    """Compute (x - mean) / (std + eps) of each token, over all tokens of the batch or of the rows of a group.

    This whitens the advantages of PPO, and is the global normalisation of REINFORCE++ (arXiv 2501.03262). If all values
    of a group or batch are equal, the results are exactly 0.

    Args:
        values: A (T_i,) array for each row, of its trained tokens.
        group_ids: A number for each row, equal for the rows of one prompt.
        mean_level: "group" or "batch": the tokens of the mean. None subtracts no mean.
        std_level: "group" or "batch": the tokens of the deviation. None does not divide.
        std_unbiased: Whether the variance divides by n - 1 instead of n.
        eps: Added to the deviation.
        mean_leave1out: Whether the token itself is left out of its mean.

    Returns:
        A (T_i,) float64 array for each row.

    Raises:
        DataError: The numbers of rows differ, or a value is not finite.
    """
    lengths = [len(row) for row in values]
    if len(lengths) != len(group_ids):
        raise DataError(f"{len(lengths)} rows of values and {len(group_ids)} group_ids; give one for each row")
    flat = np.concatenate([np.zeros(0), *values])
    if not np.isfinite(flat).all():
        raise DataError("a value to be normalised is not finite; rewards and critic values must be finite numbers")
    groups = np.repeat(np.asarray(group_ids), lengths)
    flat = group_advantages(flat, groups, mean_level, std_level, std_unbiased, eps, mean_leave1out)
    return np.split(flat, np.cumsum(lengths)[:-1]) if lengths else []


def gae(
    rewards_T: Sequence[float] | np.ndarray, values_T: Sequence[float] | np.ndarray, discount: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute generalised advantage estimates (arXiv 1506.02438 eq. 16) over the trained tokens of one row.

    delta_t = r_t + discount V_t+1 - V_t, and A_t = delta_t + discount gae_lambda A_t+1. The value after the last token
    is 0. Tokens that are not trained, such as a tool's answer, are not in the arrays, so the recursion skips them.

    Args:
        rewards_T: (T,) rewards, one for each token.
        values_T: (T,) values of the critic before each token.
        discount: Factor on later rewards, for each token.
        gae_lambda: 0 relies on the critic, 1 on the rewards.

    Returns:
        (advantages, returns), (T,) float64 each. The returns A + V are the critic's targets.

    Raises:
        DataError: The lengths differ.
    """
    rewards, values = np.asarray(rewards_T, dtype=np.float64), np.asarray(values_T, dtype=np.float64)
    if rewards.ndim != 1 or rewards.shape != values.shape:
        raise DataError(f"rewards and values must be lists of equal length, not {rewards.size} and {values.size}")
    deltas = rewards + discount * np.append(values[1:], 0.0)[: values.size] - values
    advantages = np.empty_like(deltas)
    advantage, decay = 0.0, discount * gae_lambda
    for t, delta in zip(range(len(deltas) - 1, -1, -1), deltas[::-1].tolist(), strict=True):
        advantage = delta + decay * advantage
        advantages[t] = advantage
    return advantages, advantages + values


def explained_variance(values: Sequence[float] | np.ndarray, returns: Sequence[float] | np.ndarray) -> float:
    """Compute 1 - Var(returns - values) / Var(returns) over tokens.

    Args:
        values: (T,) values of the critic.
        returns: (T,) targets of the critic.

    Returns:
        1 for a perfect critic, 0 for a critic that knows nothing, and less for a critic that is worse than a constant.
        0 if the returns do not vary.
    """
    returns_T, values_T = np.asarray(returns, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if returns_T.size == 0 or np.all(returns_T == returns_T[0]):
        return 0.0
    return float(1.0 - np.var(returns_T - values_T) / np.var(returns_T))


def _members(level: Level, known_B: np.ndarray, groups_B: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the entries that are normalised together: (S, N) for S sets of N known entries."""
    known = np.flatnonzero(known_B)
    if level is None or not known.size:
        return []
    if level == "batch":
        return [known[None, :]]
    if level != "group":
        raise ValueError(f"mean_level and std_level are group, batch or null, not {level!r}")
    order = known[np.argsort(groups_B[known], kind="stable")]
    _, starts, sizes = np.unique(groups_B[order], return_index=True, return_counts=True)
    return [order[starts[sizes == n][:, None] + np.arange(n)] for n in np.unique(sizes)]


def overlong_penalty(
    lengths: Sequence[int] | np.ndarray, max_new_tokens: int, overlong_tokens: int, factor: float = 1.0
) -> np.ndarray:
    """Compute DAPO's soft penalty of completions near the length limit (arXiv 2503.14476 eq. 13), to add to rewards.

    Args:
        lengths: (B,) lengths of the completions in tokens.
        max_new_tokens: The length limit in tokens.
        overlong_tokens: The number of tokens before the limit over which the penalty grows.
        factor: The penalty at the limit.

    Returns:
        (B,) float64: 0 up to max_new_tokens - overlong_tokens, then falling linearly to -factor at max_new_tokens.

    Raises:
        ValueError: overlong_tokens is not between 1 and max_new_tokens.
    """
    if not 0 < overlong_tokens <= max_new_tokens:
        raise ValueError(f"overlong_tokens is {overlong_tokens}; expected 1 to max_new_tokens={max_new_tokens}")
    over_B = np.asarray(lengths, dtype=np.float64) - (max_new_tokens - overlong_tokens)
    return 0.0 - factor * np.clip(over_B / overlong_tokens, 0.0, 1.0)


def shape_rewards(
    rewards: Sequence[float] | np.ndarray, bias: float = 0.0, scaling: float = 1.0, clip: float | None = None
) -> np.ndarray:
    """Compute (R + bias) * scaling, clipped to [-clip, clip].

    Args:
        rewards: (B,) rewards. An unknown reward is NaN and stays NaN.
        bias: Added to each reward.
        scaling: Factor on each reward.
        clip: Largest absolute value. None: no limit.

    Returns:
        (B,) float64 rewards.
    """
    shaped_B = (np.asarray(rewards, dtype=np.float64) + bias) * scaling
    return shaped_B if clip is None else np.clip(shaped_B, -clip, clip)
