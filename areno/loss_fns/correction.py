"""Weights and masks for rows that were not sampled by the policy in training, in numpy float64.

The behaviour policy is the policy that sampled the rows: a stale policy, or the current weights run by the kernels of
the rollout. The proximal policy is the policy before this update, whose log-probabilities come from a forward pass of
the train backend. r is the importance ratio of a token: its probability under the proximal policy divided by its
probability under the behaviour policy. `prox` and `behave` are log-probabilities under the two policies, a (T_i,) array
for the trained tokens of each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from areno.errors import DataError
from areno.loss_fns.surrogates import MAX_LOG_RATIO

Metric = Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]
Rows = Sequence[np.ndarray] | Sequence[Sequence[float]]


def behave_weights(
    prox: Rows,
    behave: Rows,
    *,
    level: Literal["token", "sequence"] = "token",
    action: Literal["mask", "clamp"] = "clamp",
    metric: Metric = "ratio",
    agg: Literal["sum", "mean", "max"] = "mean",
    upper: float = math.inf,
    lower: float | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute the importance weight of each token, and choose the tokens to train on.

    The weight of a token is r. At level "sequence" with metric "ratio", the weight of every token of a row is the
    geometric mean of r over the row. With the default settings no weight is bounded and every token is kept.

    Args:
        prox: Log-probabilities before the update, (T_i,) for each row.
        behave: Log-probabilities of the policy that sampled the rows, (T_i,) for each row.
        level: Whether `metric` is compared with the bounds for each "token" or for each row ("sequence").
        action: Treatment of tokens or rows whose metric is outside of [lower, upper]. "mask" gives them weight 0 and
            keep False. The caller must also remove them from the training mask, so that means do not count them.
            "clamp" keeps every token and clips the weight to [lower, upper] (truncated importance sampling), with
            metric "ratio" only.
        metric: The number that is compared with the bounds. "ratio": r. "kl_k1": log r. "kl_k2": (log r)^2 / 2.
            "kl_k3": r - log r - 1. "binary_kl": the larger of KL(prox, behave) and KL(behave, prox) for two outcomes,
            this token and any other token.
        agg: How the metric of a row is computed from its tokens at level "sequence". Ratios are combined in log space:
            "mean" is the geometric mean, "sum" the product and "max" the largest ratio. The other metrics are summed,
            averaged or maximised directly.

    Returns:
        (weights, keep): (T_i,) float64 and (T_i,) bool for each row. keep is True for tokens to train on.
    """
    for name, value, choices in (
        ("level", level, ("token", "sequence")),
        ("action", action, ("mask", "clamp")),
        ("metric", metric, get_args(Metric)),
        ("agg", agg, ("sum", "mean", "max")),
    ):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; expected {', '.join(choices)}")
    if action == "clamp" and metric != "ratio":
        raise ValueError(f"action clamp bounds a ratio, but metric is {metric}; use metric ratio or action mask")

    bounds = (-math.inf if lower is None else lower, upper)
    weights, keep = [], []
    for log_r_T, behave_T in zip(_log_ratios(prox, behave), behave, strict=True):
        weights_T = _weights(log_r_T, by_row=level == "sequence" and metric == "ratio")
        values_T = _divergence_metric(log_r_T, np.asarray(behave_T, dtype=np.float64), metric)
        if level == "sequence" and log_r_T.size:
            values_T = np.full_like(log_r_T, _aggregate_row(log_r_T if metric == "ratio" else values_T, metric, agg))
        accepted_T = (bounds[0] <= values_T) & (values_T <= bounds[1])
        bounded_T = np.clip(weights_T, *bounds) if action == "clamp" else np.zeros_like(weights_T)
        weights.append(np.where(accepted_T, weights_T, bounded_T))
        keep.append(accepted_T | (action == "clamp"))
    return weights, keep


def m2_keep(prox: Rows, behave: Rows, advantages: Rows, threshold: float) -> list[np.ndarray]:
    """Choose the tokens that M2PO trains on (arXiv 2510.01161, Algorithm 1), as a (T_i,) bool array for each row.

    A token with advantage A is a candidate for masking if its update would move r further away from 1: if A > 0 and r >
    1, or A < 0 and r < 1. The candidates with the largest (log r)^2 are masked until the mean of (log r)^2 over the
    remaining candidates is at most `threshold` (0.04 in the paper). All other tokens are kept. The mean is over the
    whole batch, so give all rows of an optimizer step at once. The paper's loss still divides by all tokens, so give
    masked tokens weight 0, and leave them in the training mask.
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
    means = np.cumsum(second[order]) / np.arange(1, second.size + 1)  # of the n smallest; ascending in n
    keep = np.ones(log_r.shape, dtype=bool)
    keep[candidates[order[np.searchsorted(means, threshold, side="right") :]]] = False
    return np.split(keep, np.cumsum(lengths)[:-1]) if lengths else []


def _log_ratios(prox: Rows, behave: Rows) -> list[np.ndarray]:
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


def _weights(log_r_T: np.ndarray, by_row: bool) -> np.ndarray:
    """Return r of each token or, if `by_row`, the geometric mean of r over the row."""
    log_weights_T = np.full_like(log_r_T, log_r_T.mean()) if by_row and log_r_T.size else log_r_T
    return np.exp(np.clip(log_weights_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _divergence_metric(log_r_T: np.ndarray, behave_T: np.ndarray, metric: Metric) -> np.ndarray:
    if metric == "kl_k1":
        return log_r_T
    if metric == "kl_k2":
        return np.square(log_r_T) / 2.0
    if metric == "binary_kl":
        prox_T = behave_T + log_r_T
        return np.maximum(_binary_kl(prox_T, behave_T), _binary_kl(behave_T, prox_T))
    r_T = np.exp(np.clip(log_r_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return r_T if metric == "ratio" else r_T - log_r_T - 1.0


def _binary_kl(log_p_T: np.ndarray, log_q_T: np.ndarray) -> np.ndarray:
    """Return KL(p, q) at each token, for the two outcomes "this token" and "any other token"."""
    nearly_one = -1e-8  # with a probability of 1, the other event would have log-probability -inf
    log_p_T, log_q_T = np.minimum(log_p_T, nearly_one), np.minimum(log_q_T, nearly_one)
    p_T, other_p_T, other_q_T = np.exp(log_p_T), -np.expm1(log_p_T), -np.expm1(log_q_T)
    return p_T * (log_p_T - log_q_T) + other_p_T * (np.log(other_p_T) - np.log(other_q_T))


def _aggregate_row(values_T: np.ndarray, metric: Metric, agg: str) -> float:
    """Combine the metrics of a row's tokens. For "ratio", these are log ratios, and the result is a ratio."""
    value = float({"sum": np.sum, "mean": np.mean, "max": np.max}[agg](values_T))
    return math.exp(min(value, MAX_LOG_RATIO)) if metric == "ratio" else value
