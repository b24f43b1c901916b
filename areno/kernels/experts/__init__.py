"""Mixture of experts: the choice of experts, sorting of tokens by expert, and products with each expert's matrix.

Tokens are copied once for each of their experts and sorted by expert, so the copies of one expert are neighbours: a
group. Copies for experts of other ranks come last, and are not computed. With Triton, nothing here waits for the
device and launches depend on shapes alone, so a CUDA graph can capture them. Each row is computed by itself, with sums
in a fixed order.

Shape letters: N tokens, k experts of a token, M = N k copies, E experts of this rank, X experts of all ranks, I inputs,
O outputs, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areno.kernels.backend import form, use_triton


class Groups(NamedTuple):
    """The order of copies after sorting by expert.

    Attributes:
        tokens_M: int64, the token of each copy.
        choices_M: int64, which choice of which token a copy is: token * k + choice.
        places_Nk: int64, the index of the copy of each choice.
        ends_E: int32, where the group of each expert ends.
    """

    tokens_M: Tensor
    choices_M: Tensor
    places_Nk: Tensor
    ends_E: Tensor


def choose_experts(logits_NX: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest router logits, the largest first.

    Args:
        logits_NX: router logits over all experts.
        top_k: k, the number of experts of a token.
        normalised: divide the weights of a token by their sum.

    Returns:
        The chosen experts (N, k) int64, and their weights (N, k) float32: the softmax over all experts.
    """
    return form(logits_NX, __name__).choose_experts(logits_NX, top_k, normalised)


def group_by_expert(chosen_Nk: Tensor, first: int, n_experts: int) -> Groups:
    """Sort the copies of tokens by expert, and the copies of one expert by token.

    Args:
        chosen_Nk: int64, the experts of each token.
        first: this rank's first expert.
        n_experts: E, the number of this rank's experts.

    Returns:
        The sorted order.
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
    """Multiply each row with its expert's matrix. Only the torch reference is differentiable.

    Args:
        x_MI: copies, sorted by expert.
        weight: (E, O, I), of which the transpose is used; (E, I, O) if transposed.
        ends_E: int32, where the group of each expert ends.
        transposed: use the matrix itself.
        row_multiple: the torch reference pads groups to a multiple of so many rows, for `engine.exact`.

    Returns:
        (M, O) in the dtype of x. Rows after the last group are undefined.
    """
    return form(x_MI, __name__).grouped_matmul(x_MI, weight, ends_E, transposed, row_multiple)


def add_grouped_matmul(out_EOI: Tensor, a_MO: Tensor, b_MI: Tensor, ends_E: Tensor) -> None:
    """Add a^T b of each group's rows to out, in the precision of out.

    Args:
        out_EOI: the weight gradients, changed in place.
        a_MO: gradients of the outputs, sorted by expert.
        b_MI: the inputs, sorted by expert.
        ends_E: int32, where the group of each expert ends.
    """
    form(a_MO, __name__).add_grouped_matmul(out_EOI, a_MO, b_MI, ends_E)


def combine(y_MD: Tensor, places_Nk: Tensor, weights_Nk: Tensor | None, ends_E: Tensor) -> Tensor:
    """Sum the weighted copies of each token, in the order of its choices and in at least fp32.

    Args:
        y_MD: results of the copies, sorted by expert.
        places_Nk: int64, the index of the copy of each choice.
        weights_Nk: the weight of each choice. None: 1.
        ends_E: int32, where the group of each expert ends.

    Returns:
        (N, D) in the dtype of y. Experts of other ranks count as 0.
    """
    return form(y_MD, __name__).combine(y_MD, places_Nk, weights_Nk, ends_E)


def weighted_swiglu_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, weights_M: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of w * silu(gate) * up, and that product.

    Args:
        grad_MI: the gradient of the product.
        gate_up_M2I: gate and up, side by side.
        weights_M: w.
        ends_E: int32, where the group of each expert ends.

    Returns:
        The gradient of gate and up, side by side (M, 2 I); w * silu(gate) * up (M, I); the gradient of w (M,) float32.
        Rows after the last group have 0 as gradient of w and are undefined otherwise.
    """
    return form(grad_MI, __name__).weighted_swiglu_backward(grad_MI, gate_up_M2I, weights_M, ends_E)
