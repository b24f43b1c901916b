"""Weights and masks of tokens that another policy sampled, as their papers state them, in plain float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Rows = Sequence[np.ndarray]

_EDGE = 1e-4  # of an entropy or a covariance: nearer to a threshold, rounding decides


def corrected(prox: Rows, rollout: Rows, settings: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (weight, whether it is trained) of each token, by rejection_sampling (None: neither bounds nor masks).

    The weight is pi_prox / pi_rollout (2505.24298), or with level=sequence its geometric mean over the row.
    """
    weights, kept = [], []
    for new, old in zip(prox, rollout, strict=True):
        log_r = new - old
        if settings is None or not len(log_r):
            weights.append(np.exp(log_r))
            kept.append(np.ones(len(log_r), bool))
            continue
        by_row = settings.level == "sequence"
        values = _metric(new, old, settings.metric)
        if by_row:
            one = {"sum": np.sum, "mean": np.mean, "max": np.max}[settings.agg](values)
            values = np.full(len(log_r), one)
        values = np.exp(values) if settings.metric == "ratio" else values
        lower = -math.inf if settings.lower is None else settings.lower
        inside = (values >= lower) & (values <= settings.upper)
        is_mean = by_row and settings.metric == "ratio"
        weight = np.full(len(log_r), math.exp(log_r.mean())) if is_mean else np.exp(log_r)
        if settings.action == "clamp":
            weights.append(np.where(inside, weight, np.minimum(np.maximum(weight, lower), settings.upper)))
            kept.append(np.ones(len(log_r), bool))
        else:
            weights.append(np.where(inside, weight, 0.0))
            kept.append(inside)
    return weights, kept


def _metric(new: np.ndarray, old: np.ndarray, name: str) -> np.ndarray:
    """Return what is compared with the bounds. For "ratio" it is the logarithm."""
    log_r = new - old
    if name in ("ratio", "kl_k1"):
        return log_r
    if name == "kl_k2":
        return log_r**2 / 2
    if name == "kl_k3":
        return np.exp(log_r) - log_r - 1
    p, q = (np.minimum(np.exp(each), 1 - 1e-8) for each in (new, old))
    both = [a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))]
    return np.maximum(*both)


def m2_kept(prox: Rows, rollout: Rows, advantages: Rows, threshold: float) -> list[np.ndarray]:
    """M2PO (2510.01161, algorithm 1): leave out the largest log r^2 until the mean of the rest is within the threshold.

    Only tokens count that their update would move further away.
    """
    log_r = np.concatenate([new - old for new, old in zip(prox, rollout, strict=True)])
    further = [at for at, a in enumerate(np.concatenate(list(advantages))) if a * log_r[at] > 0]
    left = sorted(further, key=lambda at: log_r[at] ** 2)
    while left and np.mean(log_r[left] ** 2) > threshold:
        left.pop()
    kept = np.ones(len(log_r), bool)
    kept[[at for at in further if at not in set(left)]] = False
    return np.split(kept, np.cumsum([len(row) for row in prox])[:-1])


def chosen_tokens(
    name: str, settings: Any, logprobs: np.ndarray, advantages: np.ndarray, entropies: np.ndarray
) -> tuple[np.ndarray, range]:
    """Return which tokens of a batch may be treated apart by actor.token_selection, and how many of them may be.

    Tokens of the highest entropy (2506.01939 eq. 5), or by the covariance of log p and A (2505.22617 eq. 10 to 13).
    """
    n = len(logprobs)
    if name == "top_entropy":
        least = np.quantile(entropies, 1 - settings.share)
        surely, perhaps = (int((entropies >= least + edge).sum()) for edge in (_EDGE, -_EDGE))
        return entropies >= least - _EDGE, range(surely, perhaps + 1)
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    n_chosen = max(1, int(settings.share * n))
    if name == "kl_cov":
        return covariance >= np.sort(covariance)[-n_chosen] - _EDGE, range(n_chosen, n_chosen + 1)
    candidates = (covariance > settings.low - _EDGE) & (covariance < settings.high + _EDGE)
    surely = int(((covariance > settings.low + _EDGE) & (covariance < settings.high - _EDGE)).sum())
    return candidates, range(min(n_chosen, surely), min(n_chosen, int(candidates.sum())) + 1)
