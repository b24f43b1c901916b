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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from areno.kernels.backend import can_use_triton, dispatch_by_device
from areno.kernels.experts import reference
from areno.kernels.experts.reference import BiasedClamp as BiasedClamp


class ExpertGroups(NamedTuple):
    """The copies of tokens after sorting by expert, one for each (token, chosen expert) pair."""

    tokens_M: Tensor  # int64, the token of each copy
    choices_M: Tensor  # int64, the pair of each copy: token * k + choice
    copies_Nk: Tensor  # int64, the copy of each pair, the inverse of `choices_M`
    ends_E: Tensor  # int32, index after the last copy of each expert of this rank


choose_experts = dispatch_by_device(reference.choose_experts)
"""Return the experts with the largest logits, the largest first, int64, and their float32 weights (N, k).

The weights are those of the softmax over all experts, divided by their sum for each token if `normalised`, times
`scale`. A single normalised weight is exactly 1, and gets no gradient. With `bias_X`, the experts with the largest sums
of bias and sigmoid are chosen, and weights are sigmoids.
"""


def expert_weights(
    logits_NX: Tensor, chosen_Nk: Tensor, normalised: bool, sigmoid: bool = False, scale: float = 1.0
) -> Tensor:
    """Return the weights of given experts as `choose_experts` does. Differentiable with respect to the logits."""
    given = logits_NX, chosen_Nk, normalised, sigmoid, scale
    if not can_use_triton(logits_NX):
        return reference.expert_weights(*given)
    return _ExpertWeights.apply(*given)  # type: ignore[return-value]


class _ExpertWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NX: Tensor, chosen_Nk: Tensor, *how: Any) -> Tensor:
        from areno.kernels.experts.triton_routing import expert_weights

        ctx.save_for_backward(logits_NX, chosen_Nk)
        ctx.how = how
        return expert_weights(logits_NX, chosen_Nk, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from areno.kernels.experts.triton_routing import expert_weights_backward

        return expert_weights_backward(grads[0], *ctx.saved_tensors, *ctx.how), *(None,) * 4


expert_load = dispatch_by_device(reference.expert_load)
"""Return statistics of the first `n_tokens` tokens, (parts, 2 X + 2), to be summed over the parts.

These are, for each expert, how many tokens use it, and the sum of its probabilities, which are shares of a token's
scores; then the entropy of the probabilities in nats, and the number of used experts that are not in `own_Nk`, the
router's own choice (None: 0). A token counts `counts_N` times (None: once).
"""


def group_by_expert(chosen_Nk: Tensor, first: int, n_experts: int) -> ExpertGroups:
    """Sort the copies by expert, and those of one expert by token. `first` is the index of this rank's first expert."""
    if can_use_triton(chosen_Nk) and chosen_Nk.numel():
        from areno.kernels.experts.triton_routing import sort_by_expert

        return ExpertGroups(*sort_by_expert(chosen_Nk, first, n_experts))
    top_k = chosen_Nk.shape[1]
    local_M = chosen_Nk.flatten() - first
    local_M = local_M.masked_fill((local_M < 0) | (local_M >= n_experts), n_experts).int()
    sorted_M, choices_M = local_M.sort(stable=True)
    experts_E = torch.arange(n_experts, dtype=torch.int32, device=chosen_Nk.device)
    ends_E = torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)
    places = torch.empty_like(choices_M)
    places.scatter_(0, choices_M, torch.arange(len(choices_M), device=chosen_Nk.device))
    return ExpertGroups(choices_M // top_k, choices_M, places.view_as(chosen_Nk), ends_E)


grouped_matmul = dispatch_by_device(reference.grouped_matmul)
"""Return the product of each row with its expert's matrix, (M, O). Weights are (E, O, I), `transposed` (E, I, O).

For `engine.exact`, the torch reference pads each group to a multiple of `row_multiple` rows. The Triton kernel computes
each row by itself, and needs `row_multiple` 1.
"""

add_grouped_matmul = dispatch_by_device(reference.add_grouped_matmul)
"""Add scale * a^T b over the rows of each expert to its gradient in place, summed in the dtype of `out_EOI`."""

add_expert_lora = dispatch_by_device(reference.add_expert_lora)
"""Return y + scaling * h W^T, where each row h has few elements and W is its expert's matrix, as in `grouped_matmul`.

Triton changes `y_MO` in place. The torch reference copies it.
"""

combine = dispatch_by_device(reference.combine)
"""Return the weighted sum (N, D) of each token's expert outputs, in the order of its choices, in at least fp32.

If the weights are None, they are 1. Choices of experts on other ranks count as 0. If given, `bias_ED` is added to the
outputs first. `experts_Nk` are then the choices, as indices of this rank's experts.
"""

expert_glu = dispatch_by_device(reference.expert_glu)
"""Return silu(gate) * up, with gate and up side by side in the columns of `gate_up_M2I`.

With `clamp`, return (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within +-`limit`. Gate
and up then alternate in the columns. Their biases are added first.
"""

weighted_glu_backward = dispatch_by_device(reference.weighted_glu_backward)
"""Compute y = w * expert_glu(...) again, with the router weight w of each row, and its gradients.

The results are the gradient of gate and up, y, and the float32 gradient of `weights_Nk`, which is 0 for experts of
other ranks. `choices_M` as in `ExpertGroups`.
"""
