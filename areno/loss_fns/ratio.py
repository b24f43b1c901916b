"""The importance ratio between the trained policy and the one it is held against, in logarithms."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from areno.loss_fns.correction import MAX_LOG_RATIO
from areno.loss_fns.pack import DataPack

ImportanceLevel = Literal["token", "sequence"]
ProxMethod = Literal["recompute", "loglinear"]


def bounded(log_ratio: Tensor) -> Tensor:
    """The log ratio cut at +-20, where its gradient becomes 0.

    exp(20) = 5e8 is far beyond every clip range, so no ratio that can matter changes; without the cut, exp overflows to
    inf in float32 at 88, and inf times a zero advantage, or times the zero gradient of a clipped branch, is NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_log_ratio(pack: DataPack, logprobs_T: Tensor, prox_logp_method: ProxMethod) -> tuple[Tensor, Tensor | None]:
    """Log ratio of each trained token (T,), differentiable and not bounded, and the factor on its policy loss (T,).

    recompute: the ratio to `pack.old_logprobs`, and `pack.weights`; None is 1 everywhere.
    loglinear: the decoupled objective (arXiv 2505.24298) without a forward pass for the proximal policy. Where
    `pack.old_logprobs` is given, as in the first update of a batch, the proximal policy is that. Elsewhere its
    log-probability is interpolated between the policy that sampled and the one in training (A-3PO, arXiv 2512.06547):
    prox = rollout + alpha (logprobs - rollout), alpha = staleness / (staleness + 1), without gradient. The ratio is
    that to prox, and exp(prox - rollout) joins the factor. A row that is not stale has alpha 0: the ratio to the
    rollout, the factor 1.
    """
    weights_T = None if pack.weights is None else pack.trained(pack.weights)
    if prox_logp_method == "recompute":
        return logprobs_T - pack.trained(pack.need("old_logprobs")), weights_T
    if prox_logp_method != "loglinear":
        raise ValueError(f"prox_logp_method is {prox_logp_method!r}; expected recompute or loglinear")
    rollout_T = pack.trained(pack.need("rollout_logprobs"))
    if pack.old_logprobs is not None:
        prox_T = pack.trained(pack.old_logprobs)
        log_ratio_T, factor_T = logprobs_T - prox_T, torch.exp(bounded(prox_T - rollout_T))
        return log_ratio_T, factor_T if weights_T is None else factor_T * weights_T
    moved_T = (logprobs_T - rollout_T).detach()
    staleness_T = pack.of_rows(pack.need("staleness")).to(moved_T.dtype)
    alpha_T = staleness_T / (staleness_T + 1.0)
    factor_T = torch.exp(alpha_T * bounded(moved_T))
    # Written as a sum, so that policies infinitely far apart stay infinitely far apart: inf - alpha * inf is NaN.
    log_ratio_T = (1.0 - alpha_T) * moved_T + (logprobs_T - logprobs_T.detach())
    return log_ratio_T, factor_T if weights_T is None else factor_T * weights_T


def sequence_log_ratio(pack: DataPack, log_ratio_T: Tensor, logprobs_T: Tensor) -> Tensor:
    """(T,): every token has its row's mean log ratio, and the gradient of its own log-probability.

    GSPO-token: s_it = sg(s_i) pi_t / sg(pi_t) with sg stopping the gradient (arXiv 2507.18071 eq. 14). With equal
    advantages in a row, value and gradient are those of GSPO.
    """
    return pack.of_rows(pack.mean_rows(log_ratio_T.detach())) + (logprobs_T - logprobs_T.detach())
