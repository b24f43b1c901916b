"""The importance ratio between the trained policy and the one that sampled, and its clipped surrogate.

Serves token ratios (GRPO, PPO) and sequence ratios (GSPO) alike: everything here is elementwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """The log ratio cut at +-20, where its gradient becomes 0.

    exp(20) = 5e8 is far beyond every clip range, so no ratio that can matter changes; without the cut, exp overflows to
    inf in float32 at 88, and inf times a zero advantage, or times the zero gradient of a clipped branch, is NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_eps: float, clip_eps_higher: float | None, c_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_eps, 1 + clip_eps_higher) A), to be minimised (arXiv 1707.06347 eq. 7).

    clip_eps_higher: upper range where it differs (clip-higher, arXiv 2503.14476). c_clip: for A < 0 the loss is at most
    -c A (dual clip, arXiv 1912.09729 eq. 5), which bounds the push against tokens whose ratio has run away.
    Also returns what was cut, as masks of 0 and 1: clip_frac_low, clip_frac_high and, with c_clip, clip_frac_dual.
    """
    low, high = 1.0 - clip_eps, 1.0 + (clip_eps if clip_eps_higher is None else clip_eps_higher)
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
