"""Compute rewards and advantages, in numpy float64.

Rewards are shaped first: penalty for long completions, bias, scale and clip. Advantages are then the rewards normalised
within groups or over the batch, or GAE estimates from the values of a critic, for samples or for the turns of agents.
Algorithms that train on pairs of samples have no advantages: rewards choose the pairs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from areno.errors import DataError

Level = Literal["batch", "group"] | None
Pair = tuple[int, int]
"""Indices of the chosen and of the rejected sample."""


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
    mean_level: Level = "group",
    std_level: Level = "group",
    std_unbiased: bool = False,
    eps: float = 1e-6,
    mean_leave1out: bool = False,
) -> np.ndarray:
    """Normalise each reward R to (R - mean) / (std + eps), over the sample's group or over the batch, (B,) float64.

    The defaults are GRPO (arXiv 2402.03300 sec. 4.1.2). std_level None is Dr.GRPO (arXiv 2503.20783). If the known
    rewards of a group or batch are all equal, they carry no signal and the advantage is exactly 0, not a rounding error
    divided by eps.

    Args:
        rewards: (B,) rewards. NaN marks a sample whose reward is unknown (timeout, error). It does not count in any
            mean and gets advantage 0.
        group_ids: (B,) group ids. The samples of one prompt have the same id.
        mean_level: Samples over which the mean is taken. None subtracts no mean.
        std_level: Samples over which the standard deviation is taken, about their own mean. None does not divide.
        std_unbiased: Whether the variance is the sum of squares divided by n - 1 instead of n.
        mean_leave1out: Whether the sample itself is left out of its mean (RLOO, arXiv 2402.14740, with std_level None).
            This multiplies the ordinary advantage by n / (n - 1). The standard deviation does not change.
    """
    rewards_B, groups_B = _check_rewards(rewards, group_ids)
    if mean_leave1out and mean_level is None:
        raise ValueError("mean_leave1out is set, but mean_level is null, so there is no mean; set it to group or batch")

    known_B = ~np.isnan(rewards_B)
    sets = {level: _normalization_groups(level, known_B, groups_B) for level in (mean_level, std_level)}
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


def _check_rewards(
    rewards: Sequence[float] | np.ndarray, group_ids: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
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
    """Normalise token values x to (x - mean) / (std + eps), over the tokens of the batch or of a group of rows.

    PPO uses this to whiten its advantages. The defaults are the global normalisation of REINFORCE++ (arXiv 2501.03262).
    If all values of a group or batch are equal, the results are exactly 0. `values` and the result have a (T_i,) array
    for the trained tokens of each row. The settings are those of `group_advantages`, with tokens in place of samples.
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

    delta_t = r_t + discount V_(t+1) - V_t, and A_t = delta_t + discount gae_lambda A_(t+1). V_t is the value before
    token t, and the value after the last token is 0. Tokens that are not trained, such as a tool's answer, are not in
    the arrays, so t + 1 is the next trained token. With lambda 0, the advantages are the one-step errors of the critic.
    With lambda 1, they are the discounted sum of rewards minus the value.

    Returns:
        (advantages, returns), (T,) float64 each. The returns A + V are the critic's targets.
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


def turn_rewards(reward: float, given: Sequence[float] | np.ndarray, scaling: float = 1.0) -> np.ndarray:
    """Divide the reward of a sample over its turns, (K,) float64: those given, scaled, and all else in the last turn.

    The rewards of the turns add up to `reward`, which is that of the sample after bias, scaling, penalties and clip.
    """
    rewards_K = scaling * np.asarray(given, dtype=np.float64)
    rewards_K[-1] = reward - math.fsum(rewards_K[:-1])
    return rewards_K


def turn_returns(rewards: Sequence[float] | np.ndarray, discount: float = 1.0) -> np.ndarray:
    """Compute the return of each turn of a sample, R_k = sum over j >= k of discount^(j - k) r_j, (K,) float64."""
    returns_K = np.array(rewards, dtype=np.float64)
    for k in range(len(returns_K) - 2, -1, -1):
        returns_K[k] += discount * returns_K[k + 1]
    return returns_K


def turn_advantages(
    rewards: Sequence[Sequence[float] | np.ndarray],
    group_ids: Sequence[int] | np.ndarray,
    discount: float = 1.0,
    same_turn: bool = False,
    norm: Mapping[str, Any] | None = None,
) -> list[np.ndarray]:
    """Compute the advantage of each turn, its return normalised over turns, a (K_i,) float64 array for each sample.

    Args:
        rewards: For each sample, the rewards of its turns.
        group_ids: (B,) group ids. The samples of one prompt have the same id.
        discount: Discount factor per turn, see `turn_returns`.
        same_turn: Whether a group is turn k of the samples of a prompt, for each k (the baseline for each turn), and
            not all turns of these samples. A turn that only one sample has gets the advantage 0.
        norm: The settings of `group_advantages`, with turns in place of samples. None: the advantage is the return.
    """
    lengths = [len(of_sample) for of_sample in rewards]
    flat = np.concatenate([np.zeros(0), *(turn_returns(of_sample, discount) for of_sample in rewards)])
    if norm is not None:
        groups = np.repeat(np.asarray(group_ids), lengths)
        if same_turn:
            places = np.concatenate([np.arange(n) for n in lengths])
            groups = np.unique(np.stack([groups, places]), axis=1, return_inverse=True)[1].reshape(-1)
        flat = group_advantages(flat, groups, **norm)
    return np.split(flat, np.cumsum(lengths)[:-1]) if lengths else []


def turn_gae(
    rewards: Sequence[float] | np.ndarray,
    values: Sequence[float] | np.ndarray,
    turns: Sequence[int] | np.ndarray,
    discount: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute `gae` over the turns of a sample. V_k is the value before the first trained token of turn k.

    The reward of a turn without trained tokens counts in the turn before it, or in the first one.

    Args:
        rewards: (K,) rewards of the turns.
        values: (T,) values before the trained tokens.
        turns: (T,) turn of each trained token.

    Returns:
        (advantages, returns), (T,) float64 each: all tokens of turn k have A_k, and A_k + V_k as the critic's target.
    """
    there, first, place_T = np.unique(np.asarray(turns, dtype=np.int64), return_index=True, return_inverse=True)
    if not there.size:
        return np.zeros(0), np.zeros(0)
    rewards_P = np.zeros(there.size)
    np.add.at(rewards_P, np.maximum(np.searchsorted(there, np.arange(len(rewards)), "right") - 1, 0), rewards)
    advantages_P, returns_P = gae(rewards_P, np.asarray(values, dtype=np.float64)[first], discount, gae_lambda)
    return advantages_P[place_T], returns_P[place_T]


def explained_variance(values: Sequence[float] | np.ndarray, returns: Sequence[float] | np.ndarray) -> float:
    """Compute the share of the returns' variance that the critic explains: 1 - Var(returns - values) / Var(returns).

    It is 0 for a critic that predicts a constant, negative for a worse one, and 0 if all returns are equal.
    """
    returns_T, values_T = np.asarray(returns, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if returns_T.size == 0 or np.all(returns_T == returns_T[0]):
        return 0.0
    return float(1.0 - np.var(returns_T - values_T) / np.var(returns_T))


def _normalization_groups(level: Level, known_B: np.ndarray, groups_B: np.ndarray) -> list[np.ndarray]:
    """Return the samples that are normalised together, as index arrays. Samples without a known value are left out.

    The arrays have the shape (n_sets, size). Sets of the same size are in the same array.
    """
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
    """Compute DAPO's soft penalty for completions near the length limit (arXiv 2503.14476 eq. 13), to add to rewards.

    It is 0 up to max_new_tokens - overlong_tokens, then falls linearly to -factor at max_new_tokens. `lengths` and the
    result have the shape (B,).
    """
    if not 0 < overlong_tokens <= max_new_tokens:
        raise ValueError(f"overlong_tokens is {overlong_tokens}; expected 1 to max_new_tokens={max_new_tokens}")
    over_B = np.asarray(lengths, dtype=np.float64) - (max_new_tokens - overlong_tokens)
    return 0.0 - factor * np.clip(over_B / overlong_tokens, 0.0, 1.0)


def shape_rewards(
    rewards: Sequence[float] | np.ndarray, bias: float = 0.0, scaling: float = 1.0, clip: float | None = None
) -> np.ndarray:
    """Compute (R + bias) * scaling, clipped to [-clip, clip], for (B,) rewards. NaN, an unknown reward, stays NaN."""
    shaped_B = (np.asarray(rewards, dtype=np.float64) + bias) * scaling
    return shaped_B if clip is None else np.clip(shaped_B, -clip, clip)


def choose_pairs(rewards: Sequence[float], groups: Sequence[int], most: int) -> tuple[list[Pair], int]:
    """In each group, pair the best sample with the worst, the second best with the second worst, and so on.

    Samples with equal rewards are ordered as they are given. Two samples with equal rewards are no pair. Samples whose
    reward is unknown, NaN, are left out.

    Args:
        most: Largest number of pairs of a group. A group of n samples has at most n // 2.

    Returns:
        (pairs, tied): the pairs, sorted by group, and the number of pairs that are left out because their rewards are
        equal.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isnan(reward):
            members[group].append(index)
    found: list[Pair] = []
    tied = 0
    for group in sorted(members):
        best_first = sorted(members[group], key=lambda index: -rewards[index])  # a stable sort
        pairs = [(best_first[k], best_first[-1 - k]) for k in range(min(most, len(best_first) // 2))]
        differ = [(chosen, rejected) for chosen, rejected in pairs if rewards[chosen] > rewards[rejected]]
        found += differ
        tied += len(pairs) - len(differ)
    return found, tied
