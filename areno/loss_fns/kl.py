"""Estimators of the KL divergence between the policy and a reference, from the log-probabilities of sampled tokens.

With r = reference / policy and tokens drawn from the policy (Schulman, "Approximating KL divergence", 2020):

    k1 = -log r              unbiased, high variance, can be negative
    k2 = (log r)^2 / 2       biased, low variance
    k3 = r - log r - 1       unbiased, low variance, never negative (also arXiv 2402.03300 eq. 4)

An unbiased estimate need not have an unbiased gradient. If the estimate is a term of the loss, on tokens sampled from
the policy:

    k1's gradient is that of log pi. Its mean is 0, so it adds noise and no pull towards the reference.
    k2's gradient is unbiased: its mean is the gradient of KL(policy || reference).
    k3's gradient is biased: its mean is the gradient of KL(reference || policy). Near the reference the two agree.

If the KL is subtracted from the reward (`kl_array`), only the value counts, and k1 is the unbiased choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from areno.loss_fns.surrogates import MAX_LOG_RATIO, clamp_log_ratio

KLEstimator = Literal["k1", "k2", "k3"]


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each token, for tokens drawn from the policy.

    The log ratio ref_logprobs - logprobs is clamped to [-20, 20], and the gradient is 0 outside of that range.
    """
    return _estimate(clamp_log_ratio(ref_logprobs - logprobs), torch.exp, estimator)


def kl_array(
    logprobs: Sequence[float] | np.ndarray, ref_logprobs: Sequence[float] | np.ndarray, estimator: KLEstimator
) -> np.ndarray:
    """Estimate KL(policy || reference) at each token in numpy float64, for a KL penalty in the rewards.

    With k1, the sum over the tokens of a row is log(policy / reference) of the whole row. The mean of these sums over
    rows estimates the KL between the distributions of sequences (arXiv 1909.08593 eq. 2). Log ratios are clamped to
    [-20, 20].
    """
    log_r = np.asarray(ref_logprobs, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64)
    return _estimate(np.clip(log_r, -MAX_LOG_RATIO, MAX_LOG_RATIO), np.exp, estimator)


def _estimate(log_r: Any, exp: Callable[[Any], Any], estimator: str) -> Any:
    """Compute the KL estimator. `log_r` is a tensor or an array of clamped log ratios, log(reference / policy)."""
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r * log_r / 2.0
    if estimator == "k3":
        return exp(log_r) - log_r - 1.0
    raise ValueError(f"kl_estimator is {estimator!r}; expected k1, k2 or k3")
