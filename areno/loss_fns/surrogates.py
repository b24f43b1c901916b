"""The importance ratio between the trained policy and the one it is held against, in logarithms.

What a policy loss makes of the importance ratio: PPO's clip, CISPO's clipped weight, SAPO's soft gate.

Everything here is elementwise, so it serves token ratios and sequence ratios alike. A surrogate is to be minimised.
Each function also returns statistics of the same shape, for the caller to average: where it cut, how far its gate shut.
"""

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


Surrogate = Literal["clip", "cispo", "sapo"]


def clip_range(clip_eps: float, clip_eps_higher: float | None) -> tuple[float, float]:
    """1 - clip_eps and 1 + clip_eps_higher, which is clip_eps unless it is given (clip-higher, arXiv 2503.14476)."""
    return 1.0 - clip_eps, 1.0 + (clip_eps if clip_eps_higher is None else clip_eps_higher)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_eps: float, clip_eps_higher: float | None, c_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_eps, 1 + clip_eps_higher) A) (PPO, arXiv 1707.06347 eq. 7).

    c_clip: for A < 0 the loss is at most -c A (dual clip, arXiv 1912.09729 eq. 5), which bounds the push against tokens
    whose ratio has run away. Statistics: clip_frac_low, clip_frac_high and, with c_clip, clip_frac_dual, each 1 where
    that bound took the gradient away.
    """
    low, high = clip_range(clip_eps, clip_eps_higher)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    cut = {
        "clip_frac_low": ((ratio < low) & (advantages < 0)).to(ratio.dtype),
        "clip_frac_high": ((ratio > high) & (advantages > 0)).to(ratio.dtype),
    }
    if c_clip is not None:
        bound = -c_clip * advantages
        cut["clip_frac_dual"] = ((loss > bound) & (advantages < 0)).to(ratio.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, cut


def cispo_surrogate(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, clip_eps: float, clip_eps_higher: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r, 1 - clip_eps, 1 + clip_eps_higher)) A log pi, sg stopping the gradient (CISPO, 2506.13585 eq. 4-5).

    The clip bounds the weight of a token's gradient; no token loses its gradient. The paper leaves the lower bound out,
    which is clip_eps = 1. Statistics: clip_frac_low and clip_frac_high, 1 where the weight was cut, for A of any sign.
    """
    low, high = clip_range(clip_eps, clip_eps_higher)
    ratio = ratio.detach()
    cut = {"clip_frac_low": (ratio < low).to(ratio.dtype), "clip_frac_high": (ratio > high).to(ratio.dtype)}
    return -ratio.clamp(low, high) * advantages * logprobs, cut


def sapo_surrogate(
    ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)), tau_pos where A > 0 and tau_neg elsewhere (SAPO, 2511.20347).

    f'(1) = 1: at the sampling policy the gradient is the plain one, and it fades as r leaves 1 in either direction.
    Statistic: sapo_gate = f'(r) in (0, 1], the share of the gradient that passes.
    """
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    soft = torch.sigmoid(tau * (ratio - 1.0))
    gate = (4.0 * soft * (1.0 - soft)).detach()
    return -4.0 / tau * soft * advantages, {"sapo_gate": gate}
