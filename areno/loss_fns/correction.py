"""Corrections for rows that another policy sampled than the one about to be trained. numpy float64.

Behaviour policy: sampled the rows (a stale one, or the same weights under other kernels). Proximal policy: the one
before this update, whose log-probabilities the training forward pass gives. r = proximal / behaviour probability of a
token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from areno.errors import DataError

MAX_LOG_RATIO = 20.0  # no ratio is taken beyond exp(20) = 5e8: far from all that matters, and finite in float32

Rows = Sequence[np.ndarray] | Sequence[Sequence[float]]


def behave_weights(
    prox: Rows,
    behave: Rows,
    *,
    level: Literal["token", "sequence"] = "token",
    action: Literal["mask", "clamp"] = "clamp",
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio",
    agg: Literal["sum", "mean", "max"] = "mean",
    upper: float = math.inf,
    lower: float | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Importance weight of each token and whether to train on it. The defaults bound nothing: the weight is r.

    prox, behave: log-probabilities, a (T_i,) array for each row, of its trained tokens. Returns (weights, keep): (T_i,)
    float64 and bool arrays.

    metric: what is judged. ratio: r; kl_k1: log r; kl_k2: (log r)^2 / 2; kl_k3: r - log r - 1.
    level: "token" judges each token; "sequence" judges the row by `agg` of its tokens, for a ratio in log space (mean
    is the geometric mean, sum the ratio of the whole row), for the others plainly; max is the largest token's.
    The weight is the token's r; at level sequence with metric ratio, all tokens of a row have its geometric mean.
    action: "mask" keeps what has lower <= metric <= upper; the weight of the rest is 0. Leave those tokens out of the
    training mask as well, so that means do not count them. "clamp" keeps everything and cuts the weight to
    [lower, upper]: truncated importance sampling. It bounds a weight, so it needs metric ratio and, at level sequence,
    agg mean: ValueError otherwise.
    """
    for name, value, choices in (
        ("level", level, ("token", "sequence")),
        ("action", action, ("mask", "clamp")),
        ("metric", metric, ("ratio", "kl_k1", "kl_k2", "kl_k3")),
        ("agg", agg, ("sum", "mean", "max")),
    ):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; expected {', '.join(choices)}")
    if action == "clamp" and metric != "ratio":
        raise ValueError(f"action clamp bounds a ratio, but metric is {metric}; use metric ratio or action mask")
    if action == "clamp" and level == "sequence" and agg != "mean":
        raise ValueError(f"action clamp bounds the row's geometric mean, but agg is {agg}; use agg mean or action mask")

    weights, keep = [], []
    for log_r_T in _log_ratios(prox, behave):
        whole_row = level == "sequence" and log_r_T.size > 0
        judged = _judged(log_r_T, metric, agg) if whole_row else _metric(log_r_T, metric)
        log_weights_T = np.full_like(log_r_T, log_r_T.mean()) if whole_row and metric == "ratio" else log_r_T
        weights_T = np.exp(np.clip(log_weights_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        keep_T = np.ones(log_r_T.shape, dtype=bool)
        if action == "clamp":
            weights_T = np.clip(weights_T, lower, upper)
        else:
            keep_T &= (-math.inf if lower is None else lower) <= judged
            keep_T &= judged <= upper
            weights_T = np.where(keep_T, weights_T, 0.0)
        weights.append(weights_T)
        keep.append(keep_T)
    return weights, keep


def m2_keep(prox: Rows, behave: Rows, advantages: Rows, threshold: float) -> list[np.ndarray]:
    """Which tokens M2PO trains on (arXiv 2510.01161, Algorithm 1): a (T_i,) bool array for each row.

    Candidates for masking are the tokens that a trust region would hold back, whose update moves the ratio further from
    1: A > 0 with r > 1, or A < 0 with r < 1. Of these, the ones with the largest (log r)^2 are masked until the mean of
    (log r)^2 over the candidates that remain is at most `threshold` (the paper's 0.04). All other tokens are kept.

    The mean is over the whole batch, so give all rows of an optimizer step at once. The paper's loss keeps dividing by
    all tokens: give masked ones weight 0 instead of taking them out of the training mask.
    """
    if threshold <= 0:
        raise ValueError(f"m2_threshold is {threshold}; expected a positive number, such as 0.04")
    log_rs = _log_ratios(prox, behave)
    lengths = [log_r_T.size for log_r_T in log_rs]
    if [len(row) for row in advantages] != lengths:
        raise DataError("advantages must have as many entries in each row as the log-probabilities")
    log_r = np.concatenate([np.zeros(0), *log_rs])
    candidates = np.flatnonzero(np.sign(np.concatenate([np.zeros(0), *advantages])) * log_r > 0)
    second = np.square(log_r[candidates])
    order = np.argsort(second, kind="stable")
    means = np.cumsum(second[order]) / np.arange(1, second.size + 1)  # of the so many smallest; it never falls
    keep = np.ones(log_r.shape, dtype=bool)
    keep[candidates[order[np.searchsorted(means, threshold, side="right") :]]] = False
    return np.split(keep, np.cumsum(lengths)[:-1]) if lengths else []


def _log_ratios(prox: Rows, behave: Rows) -> list[np.ndarray]:
    """log r of each row, float64. DataError where the two differ in shape or a token has no finite ratio."""
    if len(prox) != len(behave):
        raise DataError(f"there are {len(prox)} rows of proximal and {len(behave)} of behaviour log-probabilities")
    out = []
    for index, (prox_T, behave_T) in enumerate(zip(prox, behave, strict=True)):
        new_T, old_T = np.asarray(prox_T, dtype=np.float64), np.asarray(behave_T, dtype=np.float64)
        if new_T.ndim != 1 or new_T.shape != old_T.shape:
            raise DataError(
                f"row {index}: {new_T.size} proximal and {old_T.size} behaviour log-probabilities; give both for every "
                "trained token"
            )
        if not np.isfinite(new_T - old_T).all():
            raise DataError(f"row {index}: a log-probability is not finite")
        out.append(new_T - old_T)
    return out


def _metric(log_r_T: np.ndarray, metric: str) -> np.ndarray:
    """What is judged, for each token."""
    if metric == "kl_k1":
        return log_r_T
    if metric == "kl_k2":
        return np.square(log_r_T) / 2.0
    r_T = np.exp(np.clip(log_r_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return r_T if metric == "ratio" else r_T - log_r_T - 1.0


def _judged(log_r_T: np.ndarray, metric: str, agg: str) -> float:
    """What is judged, for the row as a whole."""
    combine = {"sum": np.sum, "mean": np.mean, "max": np.max}[agg]
    if metric != "ratio":
        return float(combine(_metric(log_r_T, metric)))
    return math.exp(min(float(combine(log_r_T)), MAX_LOG_RATIO))
