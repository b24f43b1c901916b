"""Mixture of experts in plain torch, as a loop over the experts of this rank.

The host reads the group sizes, so on CUDA these functions wait for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.matmul import add_matmul, pad_rows


def _expert_row_ranges(ends_E: Tensor) -> list[tuple[int, int]]:
    """Return (first row, row after the last) for each expert."""
    ends = ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def choose_experts(
    logits_NX: Tensor, top_k: int, normalised: bool, bias_X: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    ranked_NX = logits_NX if bias_X is None else logits_NX.sigmoid() + bias_X
    chosen_Nk = ranked_NX.topk(top_k, dim=-1).indices
    return chosen_Nk, expert_weights(logits_NX, chosen_Nk, normalised, bias_X is not None, scale)


def router_scores(logits_NX: Tensor, sigmoid: bool) -> Tensor:
    return logits_NX.sigmoid() if sigmoid else logits_NX.softmax(-1)


def probabilities(logits_NX: Tensor, sigmoid: bool) -> Tensor:
    """Return the scores as shares of their sum, for statistics and the load-balancing loss."""
    scores_NX = router_scores(logits_NX, sigmoid)
    return scores_NX / scores_NX.sum(-1, keepdim=True) if sigmoid else scores_NX


def expert_weights(
    logits_NX: Tensor, chosen_Nk: Tensor, normalised: bool, sigmoid: bool = False, scale: float = 1.0
) -> Tensor:
    weights_Nk = router_scores(logits_NX, sigmoid).gather(1, chosen_Nk)
    return (normalise(weights_Nk) if normalised else weights_Nk) * scale


def expert_load(
    logits_NX: Tensor,
    chosen_Nk: Tensor,
    own_Nk: Tensor | None,
    sigmoid: bool,
    n_tokens: int,
    counts_N: Tensor | None = None,
) -> Tensor:
    probs_NX, chosen_Nk = probabilities(logits_NX[:n_tokens], sigmoid).double(), chosen_Nk[:n_tokens]
    times_N = probs_NX.new_ones(n_tokens) if counts_N is None else counts_N.double()
    changed_N = torch.zeros_like(times_N)
    if own_Nk is not None:
        changed_N = (chosen_Nk.unsqueeze(-1) != own_Nk[:n_tokens].unsqueeze(-2)).all(-1).sum(-1).double()
    chosen_X = probs_NX.new_zeros(probs_NX.shape[1])
    chosen_X.scatter_add_(0, chosen_Nk.flatten(), times_N.repeat_interleave(chosen_Nk.shape[1]))
    sums = (times_N @ torch.special.entr(probs_NX).sum(-1), times_N @ changed_N)
    return torch.cat((chosen_X, times_N @ probs_NX, torch.stack(sums))).unsqueeze(0)


def normalise(weights_Nk: Tensor) -> Tensor:
    """Divide each token's weights by their sum. A single one becomes 1 and gets no gradient, or stays NaN."""
    if weights_Nk.shape[1] == 1:
        return weights_Nk * 0 + 1
    return weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)


def grouped_matmul(
    x_MI: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool = False, row_multiple: int = 1
) -> Tensor:
    pieces = []
    for (start, end), matrix in zip(_expert_row_ranges(ends_E), weight.unbind(0), strict=True):
        rows = pad_rows(x_MI[start:end], row_multiple)
        product = rows @ matrix if transposed else F.linear(rows, matrix)
        pieces.append(product[: end - start])
    done = torch.cat(pieces)
    return F.pad(done, (0, 0, 0, len(x_MI) - len(done)))


def add_expert_lora(
    y_MO: Tensor,
    h_Mr: Tensor,
    weight: Tensor,
    ends_E: Tensor,
    scaling: float,
    transposed: bool = False,
    row_multiple: int = 1,
) -> Tensor:
    return torch.add(y_MO, grouped_matmul(h_Mr, weight, ends_E, transposed, row_multiple), alpha=scaling)


def combine(
    y_MD: Tensor,
    copies_Nk: Tensor,
    weights_Nk: Tensor | None,
    ends_E: Tensor,
    bias_ED: Tensor | None = None,
    experts_Nk: Tensor | None = None,
) -> Tensor:
    is_here_Nk = copies_Nk < ends_E[-1]
    total: Tensor | None = None
    for choice, places_N in enumerate(copies_Nk.unbind(1)):
        rows_ND = y_MD[places_N].to(torch.promote_types(y_MD.dtype, torch.float32))
        if bias_ED is not None and experts_Nk is not None:
            rows_ND = rows_ND + bias_ED.index_select(0, experts_Nk[:, choice].clamp(0, len(bias_ED) - 1))
        rows_ND = rows_ND.masked_fill(~is_here_Nk[:, choice, None], 0)
        if weights_Nk is not None:
            rows_ND = rows_ND * weights_Nk[:, choice, None]
        total = rows_ND if total is None else total + rows_ND
    assert total is not None, "tokens without experts"
    return total.to(y_MD.dtype)


def add_grouped_matmul(out_EOI: Tensor, a_MO: Tensor, b_MI: Tensor, ends_E: Tensor, scale: float = 1.0) -> None:
    for (start, end), out_OI in zip(_expert_row_ranges(ends_E), out_EOI, strict=True):
        add_matmul(out_OI, a_MO[start:end].t(), b_MI[start:end], scale)


class BiasedClamp(NamedTuple):
    """The biases of gate and up, and the numbers of the clamped activation."""

    bias_EO: Tensor
    alpha: float
    limit: float


def expert_glu(gate_up_M2I: Tensor, ends_E: Tensor, clamp: BiasedClamp | None = None) -> Tensor:
    if clamp is None:
        gate, up = gate_up_M2I.chunk(2, dim=-1)
        return F.silu(gate) * up
    _, (gate, up) = _clamped(gate_up_M2I, ends_E, clamp)
    return ((up + 1) * (gate * (clamp.alpha * gate).sigmoid())).to(gate_up_M2I.dtype)


def _clamped(
    gate_up_M2I: Tensor, ends_E: Tensor, clamp: BiasedClamp
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return gate and up with biases, (M, I) each, before and after clamping. Sums are rounded to the dtype."""
    places_M = torch.arange(len(gate_up_M2I), dtype=ends_E.dtype, device=ends_E.device)
    experts_M = torch.searchsorted(ends_E, places_M, right=True).clamp_max(len(clamp.bias_EO) - 1)
    biased = gate_up_M2I + clamp.bias_EO.index_select(0, experts_M)
    biased = biased.to(torch.promote_types(biased.dtype, torch.float32))
    gate, up = biased[:, ::2], biased[:, 1::2]
    return (gate, up), (gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit))


def weighted_glu_backward(
    grad_MI: Tensor,
    gate_up_M2I: Tensor,
    weights_Nk: Tensor,
    choices_M: Tensor,
    ends_E: Tensor,
    clamp: BiasedClamp | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, weight = grad_MI.float(), weights_Nk.float().flatten()[choices_M].unsqueeze(-1)
    if clamp is None:
        gate, up = gate_up_M2I.float().chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = (gate * sigmoid).to(grad_MI.dtype).float()
        act = silu * up
        grad_gate = grad * weight * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        grad_gate_up = torch.cat([grad_gate, grad * weight * silu], dim=-1)
    else:
        (raw_gate, raw_up), (gate, up) = _clamped(gate_up_M2I, ends_E, clamp)
        sigmoid = (clamp.alpha * gate).sigmoid()
        act = (up + 1) * gate * sigmoid
        grad_gate = grad * weight * (up + 1) * sigmoid * (1 + clamp.alpha * gate * (1 - sigmoid))
        grad_gate = grad_gate.masked_fill(raw_gate > clamp.limit, 0)
        grad_up = (grad * weight * gate * sigmoid).masked_fill(raw_up.abs() > clamp.limit, 0)
        grad_gate_up = torch.stack((grad_gate, grad_up), dim=-1).flatten(1)
    is_here_M = torch.arange(len(grad_MI), device=grad_MI.device) < ends_E[-1]
    grad_weight = torch.empty_like(weight[:, 0])
    grad_weight[choices_M] = (grad * act).sum(-1).masked_fill(~is_here_M, 0)
    return grad_gate_up.to(grad_MI.dtype), (act * weight).to(grad_MI.dtype), grad_weight.view_as(weights_Nk)
