"""Rewards of a batch of samples to one advantage each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from areno.errors import DataError


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
    mean_level: Literal["batch", "group"] | None = "group",
    std_level: Literal["batch", "group"] | None = "group",
    std_unbiased: bool = False,
    eps: float = 1e-6,
) -> np.ndarray:
    """(R - mean) / (std + eps), mean and std over the sample's group, over the batch, or left out (None).

    Defaults are GRPO (arXiv 2402.03300 sec. 4.1.2); std_level None is Dr.GRPO (arXiv 2503.20783). The deviation is
    that of the rewards about their own mean at `std_level`; the variance divides by n, or n - 1 when `std_unbiased`.

    rewards: (B,); NaN marks a sample whose reward is unknown (timeout, error): it stays out of every mean and gets
    advantage 0. group_ids: (B,), equal for the samples of one prompt. Returns (B,) float64.

    Where the rewards that are normalised over are all equal, or only one is known, they carry no signal and the
    advantage is exactly 0, not a rounding error divided by eps.
    """
    rewards_B = np.asarray(rewards, dtype=np.float64)
    groups_B = np.asarray(group_ids)
    if rewards_B.ndim != 1 or rewards_B.shape != groups_B.shape:
        raise DataError(
            f"rewards and group_ids must be lists of equal length, not {rewards_B.size} and {groups_B.size}"
        )
    if np.isinf(rewards_B).any():
        raise DataError(f"the reward of sample {int(np.isinf(rewards_B).argmax())} is infinite; return a finite number")

    known_B = ~np.isnan(rewards_B)
    sets = {
        None: [],
        "batch": [np.flatnonzero(known_B)],
        "group": [np.flatnonzero(known_B & (groups_B == group)) for group in np.unique(groups_B)],
    }
    advantages_B = np.where(known_B, rewards_B, 0.0)
    for members in sets[mean_level]:
        if members.size:
            advantages_B[members] -= rewards_B[members].mean()
    for members in sets[std_level]:
        if members.size:
            advantages_B[members] /= _std(rewards_B[members], std_unbiased) + eps
    for level in (mean_level, std_level):
        for members in sets[level]:
            if members.size and np.all(rewards_B[members] == rewards_B[members[0]]):
                advantages_B[members] = 0.0
    return advantages_B


def _std(x: np.ndarray, unbiased: bool) -> float:
    """In two passes, mean and then deviations, so that a large offset does not cancel the digits. One value has 0."""
    return float(np.sqrt(np.square(x - x.mean()).sum() / max(x.size - int(unbiased), 1)))
