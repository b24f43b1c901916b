"""Mixture of experts: choice of experts, sorting of tokens by expert, and products with each expert's matrix.

Each token is copied once for each of its experts, and the copies are sorted by expert. The copies of one expert are
then consecutive rows, a group. Copies for experts of other ranks come last, and are not computed: their rows in results
are undefined, unless stated. With Triton, nothing here waits for the device and launches depend on shapes alone, so a
CUDA graph can capture them. Each row is computed by itself, with sums in a fixed order. Only the torch reference is
differentiable.

Shape letters: N tokens, k experts of a token, M = N k copies, E experts of this rank, X experts of all ranks, I inputs,
O outputs, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areno.kernels.backend import implementation, use_triton


class Groups(NamedTuple):
    """The copies of tokens after sorting by expert, one for each (token, chosen expert) pair."""

    tokens_M: Tensor  # int64, the token of each copy
    choices_M: Tensor  # int64, the pair of each copy: token * k + choice
    copies_Nk: Tensor  # int64, the copy of each pair, the inverse of `choices_M`
    ends_E: Tensor  # int32, index after the last copy of each expert of this rank


def choose_experts(logits_NX: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the experts with the largest logits, the largest first, int64, and their float32 weights (N, k).

    The weights are those of the softmax over all experts, divided by their sum for each token if `normalised`.
    """
    return implementation(logits_NX, __name__).choose_experts(logits_NX, top_k, normalised)


def group_by_expert(chosen_Nk: Tensor, first: int, n_experts: int) -> Groups:
    """Sort the copies by expert, and those of one expert by token. `first` is the index of this rank's first expert."""
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
    """Return the product of each row with its expert's matrix, (M, O). Weights are (E, O, I), `transposed` (E, I, O).

    For `engine.exact`, the torch reference pads each group to a multiple of `row_multiple` rows. The Triton kernel
    computes each row by itself, and needs `row_multiple` 1.
    """
    return implementation(x_MI, __name__).grouped_matmul(x_MI, weight, ends_E, transposed, row_multiple)


def add_grouped_matmul(out_EOI: Tensor, a_MO: Tensor, b_MI: Tensor, ends_E: Tensor) -> None:
    """Add a^T b over the rows of each expert to its weight gradient in place, summed in the dtype of `out_EOI`."""
    implementation(a_MO, __name__).add_grouped_matmul(out_EOI, a_MO, b_MI, ends_E)


def combine(y_MD: Tensor, copies_Nk: Tensor, weights_Nk: Tensor | None, ends_E: Tensor) -> Tensor:
    """Sum the expert outputs of each token, weighted by 1 if None, in the order of its choices and in at least fp32.

    The result is (N, D). Choices of experts on other ranks count as 0.
    """
    return implementation(y_MD, __name__).combine(y_MD, copies_Nk, weights_Nk, ends_E)


def weighted_swiglu_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, weights_M: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y = w * silu(gate) * up again, with the router weight w of each row, and its gradients.

    The results are the gradient of gate and up, y, and the float32 gradient of w, which is 0 after the last group.
    """
    return implementation(grad_MI, __name__).weighted_swiglu_backward(grad_MI, gate_up_M2I, weights_M, ends_E)
