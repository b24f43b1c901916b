"""Mixture of experts: choice of experts, sorting of tokens by expert, and products with each expert's matrix.

Each token is copied once for each of its experts, and the copies are sorted by expert. The copies of one expert are
then consecutive rows, a group. Copies for experts of other ranks come last, and are not computed. With Triton, nothing
here waits for the device and launches depend on shapes alone, so a CUDA graph can capture them. Each row is computed by
itself, with sums in a fixed order.

Shape letters: N tokens, k experts of a token, M = N k copies, E experts of this rank, X experts of all ranks, I inputs,
O outputs, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areno.kernels.backend import form, use_triton


class Groups(NamedTuple):
    """The copies of tokens after sorting by expert.

    There is one copy for each (token, chosen expert) pair. Each token has k choices.

    Attributes:
        tokens_M: int64, index of the token that each copy comes from.
        choices_M: int64, index of the (token, choice) pair of each copy: token * k + choice.
        places_Nk: int64, index of the copy of each (token, choice) pair. This is the inverse of `choices_M`.
        ends_E: int32, index after the last copy of each expert of this rank.
    """

    tokens_M: Tensor
    choices_M: Tensor
    places_Nk: Tensor
    ends_E: Tensor


def choose_experts(logits_NX: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest router logits for each token, the largest first.

    Args:
        logits_NX: router logits over all experts, (tokens, experts).
        top_k: number of experts for each token, k.
        normalised: whether the weights of a token are divided by their sum.

    Returns:
        The chosen experts (N, k) int64, and their weights (N, k) float32 from the softmax over all experts.
    """
    return form(logits_NX, __name__).choose_experts(logits_NX, top_k, normalised)


def group_by_expert(chosen_Nk: Tensor, first: int, n_experts: int) -> Groups:
    """Sort the copies of tokens by expert, and the copies of one expert by token.

    Args:
        chosen_Nk: int64, indices of the experts that each token has chosen, among the experts of all ranks.
        first: index of this rank's first expert.
        n_experts: number of experts on this rank, E.

    Returns:
        The sorted order. Copies for experts of other ranks are after `ends_E[-1]`.
    """
    if use_triton(chosen_Nk):
        from areno.kernels.experts.triton_routing import MAX_COPIES, sorted_copies

        if 0 < chosen_Nk.numel() <= MAX_COPIES:
            return Groups(*sorted_copies(chosen_Nk, first, n_experts))
    top_k = chosen_Nk.shape[1]
    local_M = chosen_Nk.flatten() - first
    local_M = local_M.masked_fill((local_M < 0) | (local_M >= n_experts), n_experts).int()
    sorted_M, choices_M = local_M.sort(stable=True)
    experts_E = torch.arange(n_experts, dtype=torch.int32, device=chosen_Nk.device)
    ends_E = torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)
    places = torch.empty_like(choices_M)
    places.scatter_(0, choices_M, torch.arange(len(choices_M), device=chosen_Nk.device))
    return Groups(choices_M // top_k, choices_M, places.view_as(chosen_Nk), ends_E)


def grouped_matmul(
    x_MI: Tensor, weight: Tensor, ends_E: Tensor, *, transposed: bool = False, row_multiple: int = 1
) -> Tensor:
    """Multiply each row with the matrix of its expert. Only the torch reference is differentiable.

    Args:
        x_MI: copies of tokens, one for each chosen expert, sorted by expert, (copies, inputs).
        weight: weight matrix of each expert, (E, O, I), or (E, I, O) if `transposed`.
        ends_E: int32, index after the last row of each expert.
        transposed: whether a row is multiplied with the expert's matrix (I, O). If False, it is multiplied with the
            transpose of the expert's matrix (O, I).
        row_multiple: the torch reference pads each group to a multiple of this number of rows, for `engine.exact`. Must
            be 1 with Triton, whose kernel computes each row by itself.

    Returns:
        (M, O) in the dtype of x. Rows after the last group are undefined.
    """
    return form(x_MI, __name__).grouped_matmul(x_MI, weight, ends_E, transposed, row_multiple)


def add_grouped_matmul(out_EOI: Tensor, a_MO: Tensor, b_MI: Tensor, ends_E: Tensor) -> None:
    """Add a^T b, computed over the rows of each expert, to the weight gradient of the expert.

    Args:
        out_EOI: weight gradients, (experts, outputs, inputs), changed in place. Sums are computed in the dtype of this
            tensor.
        a_MO: gradients with respect to the outputs, sorted by expert.
        b_MI: inputs, sorted by expert.
        ends_E: int32, index after the last row of each expert.
    """
    form(a_MO, __name__).add_grouped_matmul(out_EOI, a_MO, b_MI, ends_E)


def combine(y_MD: Tensor, places_Nk: Tensor, weights_Nk: Tensor | None, ends_E: Tensor) -> Tensor:
    """Sum the weighted expert outputs of each token, in the order of its choices and in at least fp32.

    Args:
        y_MD: expert outputs of the copies, sorted by expert.
        places_Nk: int64, index of the copy of each (token, choice) pair, from `Groups`.
        weights_Nk: weight of each choice. None means 1.
        ends_E: int32, index after the last row of each expert.

    Returns:
        (N, D) in the dtype of y. Choices of experts on other ranks count as 0.
    """
    return form(y_MD, __name__).combine(y_MD, places_Nk, weights_Nk, ends_E)


def weighted_swiglu_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, weights_M: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y = w * silu(gate) * up again, and its gradients.

    Args:
        grad_MI: gradient with respect to y.
        gate_up_M2I: gate and up, side by side.
        weights_M: w, the router weight of each row.
        ends_E: int32, index after the last row of each expert.

    Returns:
        (grad_gate_up, y, grad_w): the gradients with respect to gate and up, side by side (M, 2 I), y itself (M, I),
        and the gradient with respect to w (M,) in float32. In rows after the last expert's group, grad_w is 0, and
        grad_gate_up and y are undefined.
    """
    return form(grad_MI, __name__).weighted_swiglu_backward(grad_MI, gate_up_M2I, weights_M, ends_E)
