"""The loss of KTO: Kahneman-Tversky Optimization on single answers that are labelled desirable or undesirable.

h of a row is the sum over its trained tokens of (log p - log p_ref). Shape letters are those of pack.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.policy import entropy_stats


def kto_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    beta: float = 0.1,
    reference_point: float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean over rows of w (1 - sigmoid(beta (h - z0))), or of w (1 - sigmoid(beta (z0 - h))).

    The first form is for desirable rows, with w = desirable_weight. The second is for undesirable rows, with w =
    undesirable_weight (arXiv 2402.01306 sec. 4.1). The constant part of the loss is kept, so the smallest loss is 0.
    Rows without trained tokens do not count.

    The reference point z0 estimates KL(policy || reference) in nats. It is a number and not computed here, because all
    rows of an optimizer step must have the same one: a loss sees only a micro-batch. The KTO loop estimates it from
    answers to other prompts of the step. A gradient does not flow through it.

    Statistics: the observations rewards_chosen and rewards_rejected (beta h of desirable and of undesirable rows), and
    accuracy, the share of rows on the right side of z0, where a row at z0 counts half.

    Args:
        pack: The micro-batch, with ref_logprobs. The reward of a row is above 0.5 if its answer is desirable.
        logprobs: (N,) log-probabilities under the trained policy, differentiable.
        beta: Factor on h. The larger beta is, the closer the policy stays to the reference model.
    """
    trained_T, counts_R = pack.trained(logprobs), pack.row_lengths() > 0
    scores_R = pack.sum_rows(trained_T - pack.trained(pack.need("ref_logprobs")))
    is_good_R = pack.need("rewards") > 0.5
    gains_R = beta * (scores_R - reference_point)
    signed_R = torch.where(is_good_R, gains_R, -gains_R)
    weights_R = torch.full_like(scores_R, undesirable_weight).masked_fill(is_good_R, desirable_weight)
    loss = pack.row_mean((weights_R * (-signed_R).sigmoid()).where(counts_R, 0.0))

    rewards_R = beta * scores_R.detach()
    stats = {
        "rewards_chosen": rewards_R[is_good_R & counts_R],
        "rewards_rejected": rewards_R[~is_good_R & counts_R],
        "accuracy": pack.row_mean(((torch.sign(signed_R.detach()) + 1) / 2).where(counts_R, 0.0)),
    }
    return loss, stats | entropy_stats(pack)
