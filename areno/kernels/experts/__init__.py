"""Products of rows with the matrix of their expert, and what brings rows to their experts and back.

Tokens are copied once for each of their experts and sorted by expert, so an expert's copies are neighbours: a group.
A rank may hold only some of the experts. Copies for the others come last, and nothing computes them.

With Triton, nothing here waits for the device, and launches depend on shapes alone, so all of it can be captured in a
CUDA graph. Each row is computed by itself, in a fixed order of sums.

Shape letters: N tokens, k experts of a token, M = N k copies, E experts of this rank, I inputs, O outputs, D hidden
size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areno.kernels.backend import form, use_triton


class Groups(NamedTuple):
    """Which copy is where after sorting.

    tokens_M: int64, the token of each copy. choices_M: int64, which (token, choice) it is, token * k + choice.
    places_Nk: int64, where the copy of each choice is. ends_E: int32, where the group of each expert ends.
    """

    tokens_M: Tensor
    choices_M: Tensor
    places_Nk: Tensor
    ends_E: Tensor


def choose_experts(logits_NE: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits, the largest first: their numbers (N, k) int64, and their weights, float32.

    A weight is the softmax over all experts; normalised: divided by the sum of the token's weights.
    """
    return form(logits_NE, __name__).choose_experts(logits_NE, top_k, normalised)


def group_by_expert(chosen_Nk: Tensor, first: int, n_experts: int) -> Groups:
    """Sort the copies by expert, those of one expert by token. This rank holds `n_experts` from `first` on."""
    if use_triton(chosen_Nk):
        from areno.kernels.experts.triton_routing import MOST_COPIES, sorted_copies

        if 0 < chosen_Nk.numel() <= MOST_COPIES:
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


def grouped_product(
    x_MI: Tensor, weight: Tensor, ends_E: Tensor, *, transposed: bool = False, row_multiple: int = 1
) -> Tensor:
    """Each row times the transpose of its expert's matrix, (M, O); weight is (E, O, I).

    transposed: times the matrix itself; then weight is (E, I, O). The reference is differentiable, and it fills groups
    up to multiples of so many rows with zeros (see areno/engine/exact.py). Rows behind the last group hold
    anything.
    """
    return form(x_MI, __name__).grouped_product(x_MI, weight, ends_E, transposed, row_multiple)


def add_grouped_product(out_EOI: Tensor, a_MO: Tensor, b_MI: Tensor, ends_E: Tensor) -> None:
    """out += a^T b of each group's rows, in the precision of out."""
    form(a_MO, __name__).add_grouped_product(out_EOI, a_MO, b_MI, ends_E)


def combine(y_MD: Tensor, places_Nk: Tensor, weights_Nk: Tensor | None, ends_E: Tensor) -> Tensor:
    """Each token's copies times their weights (None: 1), added up in the order of its choices: (N, D).

    Sums are in fp32 (or more), the result is of the dtype of y. Copies of experts that are elsewhere count as 0.
    """
    return form(y_MD, __name__).combine(y_MD, places_Nk, weights_Nk, ends_E)


def weighted_swiglu_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, weights_M: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of w * (silu(gate) * up): (gradient of gate and up side by side, w * silu(gate) * up, gradient of w).

    Rows behind the last group: the gradient of w is 0, the others hold anything.
    """
    return form(grad_MI, __name__).weighted_swiglu_backward(grad_MI, gate_up_M2I, weights_M, ends_E)
