"""Estimators of the KL divergence between the policy and a reference, from the log-probabilities of sampled tokens.

With r = reference / policy and tokens drawn from the policy (Schulman, "Approximating KL divergence", 2020):

    k1 = -log r              unbiased, high variance, can be negative
    k2 = (log r)^2 / 2       biased, low variance
    k3 = r - log r - 1       unbiased, low variance, never negative (also arXiv 2402.03300 eq. 4)

An unbiased estimate need not have an unbiased gradient. Differentiated as a term of the loss, on samples of the policy,
k1's gradient is that of log pi, whose mean is 0: it adds noise and no pull towards the reference. k2's gradient is
unbiased: its mean is that of KL(policy || reference). k3's gradient is biased: its mean is that of the other direction,
KL(reference || policy); near the reference the two agree. Taken off the reward instead (`shaping.kl_penalty`), the
value is what counts, and k1 is the unbiased choice.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from areno.loss_fns.ratio import bounded

KLEstimator = Literal["k1", "k2", "k3"]


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) at each token, for tokens drawn from the policy; differentiable in `logprobs`.

    log r is bounded to +-20, beyond which the gradient is 0.
    """
    log_r = bounded(ref_logprobs - logprobs)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2.0
    if estimator == "k3":
        return torch.exp(log_r) - log_r - 1.0
    raise ValueError(f"kl_estimator is {estimator!r}; expected k1, k2 or k3")
