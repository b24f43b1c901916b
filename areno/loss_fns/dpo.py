"""The loss of training on pairs of answers, of which one is preferred: DPO and its variants.

Rows 2i and 2i + 1 of the pack are the chosen and the rejected answer of a pair. The formulas are in
preferences.py. Shape letters are those of pack.py, and P is the number of pairs.

Statistics are means over the step's pairs:

    rewards_chosen, rewards_rejected    the implicit rewards: beta times the score that the loss reads
    margin                              rewards_chosen - rewards_rejected
    accuracy                            the share of pairs with a positive margin; a margin of exactly 0 counts half
    logps_chosen, logps_rejected        log-probabilities summed over the trained tokens of a row
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.errors import DataError
from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.policy import entropy_stats
from areno.loss_fns.preferences import make_preference_loss


def dpo_loss_fn(
    pack: DataPack, logprobs: Tensor, *, loss_type: str = "sigmoid", **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean of a preference loss over the step's pairs. The defaults are DPO with beta 0.1.

    Call `Trainer.train` with rows_per_unit=2, so that both rows of a pair are in the same micro-batch.

    Args:
        pack: The micro-batch. Row 0 is the chosen answer of the first pair, row 1 the rejected answer, and so on. It
            has ref_logprobs, except for losses without a reference model (simpo, orpo).
        logprobs: (N,) log-probabilities under the trained policy, differentiable.
        loss_type: Name of the loss in `preferences.PREFERENCE_LOSSES`: "sigmoid" (DPO), "robust", "ipo", "simpo" or
            "orpo".
        settings: Settings of the loss by the names of its class, such as beta and label_smoothing.
    """
    how = make_preference_loss(loss_type, **settings)
    if pack.rows_per_unit != 2:
        raise DataError(
            f"DPO trains on pairs of rows, chosen and rejected in turn, but rows_per_unit is {pack.rows_per_unit}; "
            "train with rows_per_unit=2"
        )
    lengths_R = pack.row_lengths()
    if pack.n_rows % 2 or not bool((lengths_R > 0).all()):
        raise DataError(
            "DPO needs a trained token in every row, chosen and rejected; a row has none: its prompt_mask is True at "
            "each token that can be trained"
        )
    trained_T = scored_T = pack.trained(logprobs)
    if how.uses_reference:
        scored_T = trained_T - pack.trained(pack.need("ref_logprobs"))
    scores_R = pack.sum_rows(scored_T)
    if how.per_token:
        scores_R = scores_R / lengths_R
    losses_P, stats_P = how.pair_losses(scores_R[0::2], scores_R[1::2])
    loss = _pair_mean(pack, losses_P)

    rewards_R = how.beta * scores_R.detach()
    logps_R = pack.sum_rows(trained_T.detach())
    margins_P = rewards_R[0::2] - rewards_R[1::2]
    stats_P |= {
        "rewards_chosen": rewards_R[0::2],
        "rewards_rejected": rewards_R[1::2],
        "margin": margins_P,
        "accuracy": (torch.sign(margins_P) + 1) / 2,  # 0.5 where neither answer is preferred
        "logps_chosen": logps_R[0::2],
        "logps_rejected": logps_R[1::2],
    }
    return loss, {name: _pair_mean(pack, values_P) for name, values_P in stats_P.items()} | entropy_stats(pack)


def _pair_mean(pack: DataPack, values_P: Tensor) -> Tensor:
    return pack.row_mean(values_P) * 2
