"""Mixture of experts in plain torch, as a loop over the experts of this rank.

The host reads the group sizes, so on CUDA these functions wait for the device. `choose_experts`, `grouped_matmul` and
`combine` are differentiable. Shape letters as in `areno.kernels.experts`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.matmul import add_matmul, pad_rows


def _groups(ends_E: Tensor) -> list[tuple[int, int]]:
    """Return (first row, index after the last row) for each expert, in the rows sorted by expert."""
    ends = ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def choose_experts(logits_NX: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the top_k experts of each token (N, k), and their weights (N, k) from the softmax over all experts.

    Args:
        logits_NX: router logits over all experts.
        top_k: number of experts for each token.
        normalised: whether the weights of a token are divided by their sum.
    """
    chosen_Nk = logits_NX.topk(top_k, dim=-1).indices
    weights_Nk = logits_NX.softmax(-1).gather(1, chosen_Nk)
    return chosen_Nk, weights_Nk / weights_Nk.sum(-1, keepdim=True) if normalised else weights_Nk


def grouped_matmul(x_MI: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool, row_multiple: int) -> Tensor:
    """Multiply each row with the matrix of its expert, differentiable.

    Args:
        x_MI: copies of tokens, one for each chosen expert, sorted by expert, (copies, inputs).
        weight: weight matrix of each expert, (E, O, I), or (E, I, O) if `transposed`.
        ends_E: int32, index after the last row of each expert.
        transposed: whether a row is multiplied with the expert's matrix (I, O). If False, it is multiplied with the
            transpose of the expert's matrix (O, I).
        row_multiple: each group is padded to a multiple of this number of rows during the product.

    Returns:
        (M, O). Rows after the last group are 0.
    """
    pieces = []
    for (start, end), matrix in zip(_groups(ends_E), weight.unbind(0), strict=True):
        rows = pad_rows(x_MI[start:end], row_multiple)
        product = rows @ matrix if transposed else F.linear(rows, matrix)
        pieces.append(product[: end - start])
    done = torch.cat(pieces)
    return F.pad(done, (0, 0, 0, len(x_MI) - len(done)))


def combine(y_MD: Tensor, places_Nk: Tensor, weights_Nk: Tensor | None, ends_E: Tensor) -> Tensor:
    """Sum the weighted expert outputs of each token, in the order of its choices and in at least fp32.

    Args:
        y_MD: expert outputs of the copies, sorted by expert.
        places_Nk: int64, index of the copy of each (token, choice) pair.
        weights_Nk: weight of each choice. None means 1.
        ends_E: int32, index after the last row of each expert.

    Returns:
        (N, D) in the dtype of y. Choices of experts on other ranks count as 0.
    """
    is_here_Nk = places_Nk < ends_E[-1]
    total: Tensor | None = None
    for choice, places_N in enumerate(places_Nk.unbind(1)):
        rows_ND = y_MD[places_N].to(torch.promote_types(y_MD.dtype, torch.float32))
        rows_ND = rows_ND.masked_fill(~is_here_Nk[:, choice, None], 0)
        if weights_Nk is not None:
            rows_ND = rows_ND * weights_Nk[:, choice, None]
        total = rows_ND if total is None else total + rows_ND
    assert total is not None, "tokens without experts"
    return total.to(y_MD.dtype)


def add_grouped_matmul(out_EOI: Tensor, a_MO: Tensor, b_MI: Tensor, ends_E: Tensor) -> None:
    """Add a^T b, computed over the rows of each expert, to the expert's matrix in `out_EOI`, in place."""
    for (start, end), out_OI in zip(_groups(ends_E), out_EOI, strict=True):
        add_matmul(out_OI, a_MO[start:end].t(), b_MI[start:end])


def weighted_swiglu_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, weights_M: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of y = w * silu(gate) * up, and y, rounded where the Triton kernel rounds.

    Args:
        grad_MI: gradient with respect to y.
        gate_up_M2I: gate and up, side by side.
        weights_M: w, the router weight of each row.
        ends_E: int32, index after the last row of each expert.

    Returns:
        (grad_gate_up, y, grad_w): the gradients with respect to gate and up, side by side (M, 2 I), y itself (M, I),
        and the gradient with respect to w (M,), which is 0 in rows after the last expert's group.
    """
    gate, up = gate_up_M2I.float().chunk(2, dim=-1)
    weight = weights_M.float().unsqueeze(-1)
    grad, sigmoid = grad_MI.float(), gate.sigmoid()
    silu = (gate * sigmoid).to(grad_MI.dtype).float()
    act = silu * up
    grad_gate = grad * weight * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_gate_up = torch.cat([grad_gate, grad * weight * silu], dim=-1).to(grad_MI.dtype)
    is_here_M = torch.arange(len(grad_MI), device=grad_MI.device) < ends_E[-1]
    grad_weight = (grad * act).sum(-1).masked_fill(~is_here_M, 0)
    return grad_gate_up, (act * weight).to(grad_MI.dtype), grad_weight
