"""What a policy loss makes of the importance ratio: PPO's clip, CISPO's clipped weight, SAPO's soft gate.

Everything here is elementwise, so it serves token ratios and sequence ratios alike. A surrogate is to be minimised.
Each function also returns statistics of the same shape, for the caller to average: where it cut, how far its gate shut.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
