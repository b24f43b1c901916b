"""Weights and masks for rows that were not sampled by the policy in training, in numpy float64.

The behaviour policy is the policy that sampled the rows: a stale policy, or the current weights run by the kernels of
the rollout. The proximal policy is the policy before this update, whose log-probabilities come from a forward pass of
the train backend. r is the importance ratio of a token: its probability under the proximal policy divided by its
probability under the behaviour policy.
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

    The weight of a token is the ratio r of its probabilities, prox / behave. At level "sequence" with metric "ratio",
    the weight of every token of a row is the geometric mean of r over the row. With the default settings no weight is
    bounded and every token is kept.

    Args:
        prox: Log-probabilities under the proximal policy (the policy before the update), a (T_i,) array for the trained
            tokens of each row.
        behave: Log-probabilities under the policy that sampled the rows, in the same form as `prox`.
        level: Whether `metric` is compared with the bounds for each "token" or for each row ("sequence").
        action: Treatment of tokens or rows whose metric is outside of [lower, upper]. "mask" gives them weight 0 and
            keep False. The caller must also remove them from the training mask, so that means do not count them.
            "clamp" keeps every token and clips the weight to [lower, upper] (truncated importance sampling).
        metric: The number that is compared with the bounds. "ratio": r. "kl_k1": log r. "kl_k2": (log r)^2 / 2.
            "kl_k3": r - log r - 1. "binary_kl": the larger of KL(prox, behave) and KL(behave, prox) for two outcomes,
            this token and any other token.
        agg: How the metric of a row is computed from its tokens at level "sequence". Ratios are combined in log space:
            "mean" is the geometric mean, "sum" the product and "max" the largest ratio. The other metrics are summed,
            averaged or maximised directly.
        upper: Largest accepted metric.
        lower: Smallest accepted metric. None sets no lower bound.

    Returns:
        (weights, keep): two lists with an array for each row, (T_i,) float64 weights and (T_i,) bool, True for tokens
        to train on.

    Raises:
        ValueError: A choice is unknown, or action is "clamp" while metric is not "ratio".
        DataError: The log-probabilities differ in shape or are not finite.
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
        values_T = _metric(log_r_T, np.asarray(behave_T, dtype=np.float64), metric)
        if level == "sequence" and log_r_T.size:
            values_T = np.full_like(log_r_T, _of_row(log_r_T if metric == "ratio" else values_T, metric, agg))
        accepted_T = (bounds[0] <= values_T) & (values_T <= bounds[1])
        bounded_T = np.clip(weights_T, *bounds) if action == "clamp" else np.zeros_like(weights_T)
        weights.append(np.where(accepted_T, weights_T, bounded_T))
        keep.append(accepted_T | (action == "clamp"))
    return weights, keep


def m2_keep(prox: Rows, behave: Rows, advantages: Rows, threshold: float) -> list[np.ndarray]:
    """Choose the tokens that M2PO trains on (arXiv 2510.01161, Algorithm 1).

    r is the ratio of a token's probabilities, prox / behave. A token is a candidate for masking if its update would
    move r further away from 1, because its advantage A > 0 with r > 1, or A < 0 with r < 1. The candidates with the
    largest (log r)^2 are masked until the mean of (log r)^2 over the remaining candidates is at most `threshold`. All
    other tokens are kept. The mean is over the whole batch, so give all rows of an optimizer step at once. The paper's
    loss still divides by all tokens, so give masked tokens weight 0, and leave them in the training mask.

    Args:
        prox: Log-probabilities under the proximal policy (the policy before the update), a (T_i,) array for the trained
            tokens of each row.
        behave: Log-probabilities under the policy that sampled the rows, in the same form as `prox`.
        advantages: Advantages of the trained tokens, a (T_i,) array for each row.
        threshold: Largest mean of (log r)^2. The paper uses 0.04.

    Returns:
        For each row, a (T_i,) bool array that is True for tokens to train on.

    Raises:
        ValueError: The threshold is not positive.
        DataError: The arrays differ in shape, or a log-probability is not finite.
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
    """Return the differences prox - behave of each row's log-probabilities, as float64 arrays (log ratios).

    Raises DataError if shapes differ or a log-probability is not finite.
    """
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
    """Return exp(log_r_T), the ratio of each token. If `by_row`, each token gets the geometric mean of its row."""
    log_weights_T = np.full_like(log_r_T, log_r_T.mean()) if by_row and log_r_T.size else log_r_T
    return np.exp(np.clip(log_weights_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _metric(log_r_T: np.ndarray, behave_T: np.ndarray, metric: Metric) -> np.ndarray:
    """Return the values of `metric` for each token, (T,) float64.

    `log_r_T` are the log ratios to the policy that sampled the tokens, and `behave_T` its log-probabilities.
    """
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
    """Return KL(p, q) at each token, for the two outcomes "this token" and "any other token".

    `log_p_T` and `log_q_T` are the token's log-probabilities under p and q.
    """
    nearly_one = -1e-8  # with a probability of 1, the other event would have log-probability -inf
    log_p_T, log_q_T = np.minimum(log_p_T, nearly_one), np.minimum(log_q_T, nearly_one)
    p_T, other_p_T, other_q_T = np.exp(log_p_T), -np.expm1(log_p_T), -np.expm1(log_q_T)
    return p_T * (log_p_T - log_q_T) + other_p_T * (np.log(other_p_T) - np.log(other_q_T))


def _of_row(values_T: np.ndarray, metric: Metric, agg: str) -> float:
    """Combine the tokens of a row to one metric by `agg`: "sum", "mean" or "max".

    `values_T` are log ratios if `metric` is "ratio", and the result is then a ratio. For another metric, `values_T` are
    its values.
    """
    value = float({"sum": np.sum, "mean": np.mean, "max": np.max}[agg](values_T))
    return math.exp(min(value, MAX_LOG_RATIO)) if metric == "ratio" else value
