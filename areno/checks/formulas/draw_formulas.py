"""The distribution from which a token is drawn, in float64, by the settings of sampling as their papers state them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_EDGE = 1e-4  # of a log-probability or of a mass: nearer to the edge of a set, rounding decides


def drawn_logits(logits: Tensor, completion: Sequence[int], settings: Any, end_ids: Sequence[int] = ()) -> Tensor:
    """Return the logits from which the tokens of a completion are drawn, divided by the temperature, (T, V).

    `logits` are those of the policy, (T, V). Presence and frequency penalties count the tokens before each, and the
    first `min_new_tokens` are none of `end_ids`.
    """
    found, counts = logits.clone(), torch.zeros(logits.shape[1], dtype=logits.dtype)
    is_penalised = settings.frequency_penalty or settings.presence_penalty
    for place, token in enumerate(completion if is_penalised else ()):
        found[place] -= settings.frequency_penalty * counts + settings.presence_penalty * (counts > 0)
        counts[token] += 1
    found[: settings.min_new_tokens, list(end_ids)] = -torch.inf
    return found / settings.logprob_temperature


def allowed(log_p: Tensor, settings: Any, edge: float = 0.0) -> Tensor:
    """Return the tokens that min_p (2407.01082), then top_k, then top_p (1904.09751) keep, (T, V) bool.

    A positive `edge` also keeps tokens that lie outside by no more.
    """
    best = log_p.max(-1, keepdim=True).values
    if settings.is_greedy:
        return log_p >= best - edge
    keep = torch.ones_like(log_p, dtype=torch.bool)
    if settings.min_p:
        keep &= log_p >= best + math.log(settings.min_p) - edge
    left = log_p.masked_fill(~keep, -torch.inf)
    if 0 < settings.top_k < log_p.shape[1]:
        least = left.topk(settings.top_k).values[:, -1:]
        keep &= log_p >= least - edge
        left = log_p.masked_fill(~keep, -torch.inf)
    if settings.top_p < 1:
        ordered, order = left.softmax(-1).sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        keep &= torch.zeros_like(keep).scatter(-1, order, before < settings.top_p + edge)
    return keep


def outside(log_p: Tensor, tokens: Tensor, settings: Any) -> Tensor:
    """Return which tokens (T,) are surely not among the allowed ones."""
    return ~allowed(log_p, settings, _EDGE).gather(-1, tokens[:, None])[:, 0]


def truncated(log_p: Tensor, settings: Any) -> Tensor:
    """Return the log-probabilities of the allowed tokens among themselves, -inf for the others."""
    return log_p.masked_fill(~allowed(log_p, settings), -torch.inf).log_softmax(-1)
