"""Attention sinks (gpt-oss): each query head has a learned score that takes part in the softmax and has no value.

If lse is the log-sum-exp of a query's scaled scores, the sink s of the head multiplies the output by sigmoid(lse - s),
and the log-sum-exp becomes log(exp(lse) + exp(s)). The backward pass of flash attention is exact if it is given this
output and this log-sum-exp. So kernels without sinks compute the gradients, too.

Shape letters: N query tokens, L queries and M keys of one of B rows, H query heads, K key heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_MORE = 8  # elements of a head in `sdpa_with_sinks`; kernels need a multiple of 8


def sdpa_with_sinks(q_BHLD: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, mask: Tensor, sinks: Tensor, **how: Any) -> Tensor:
    """Do F.scaled_dot_product_attention with a boolean mask and with sinks, which have the shape of (H, L) or (H, 1).

    Heads get more elements. In the first one, queries have their sink, keys have 0, and one more key, whose value is 0,
    has 1 there and 0 elsewhere. The gradient of the sinks follows.
    """
    dim = q_BHLD.shape[-1]
    of_sinks = F.pad((sinks.to(q_BHLD.dtype) * dim**0.5).unsqueeze(-1), (0, _MORE - 1))
    q = torch.cat((q_BHLD, of_sinks.expand(*q_BHLD.shape[:-1], _MORE)), dim=-1)
    k, v = (F.pad(x, (0, _MORE, 0, 1)) for x in (k_BKMD, v_BKMD))
    k[..., -1, dim] = 1.0
    mask = F.pad(mask, (0, 1), value=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=dim**-0.5, **how)[..., :dim]


def add_sinks(out_NHD: Tensor, log_sum_HN: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, changed in place, and the log-sum-exp with sinks, given those without. Outside autograd."""
    sinks_H1 = sinks_H.to(log_sum_HN.dtype).unsqueeze(1)
    out_NHD.mul_(torch.sigmoid(log_sum_HN - sinks_H1).t().unsqueeze(-1))
    return out_NHD, torch.logaddexp(log_sum_HN, sinks_H1)


def sinks_gradient(grad_NHD: Tensor, out_NHD: Tensor, log_sum_HN: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks. Output and log-sum-exp are those with sinks."""
    weights_HN = torch.exp(sinks_H.to(log_sum_HN.dtype).unsqueeze(1) - log_sum_HN)
    return -(weights_HN * (grad_NHD.to(log_sum_HN.dtype) * out_NHD).sum(-1).t()).sum(1)
