"""Losses of DPO and IPO on pairs of answers, of which one is preferred.

Rows 2i and 2i + 1 of the pack are the chosen and the rejected answer of a pair. h of a row is the sum over its trained
tokens of (log p - log p_ref). L is the number of trained tokens of the row. Shape letters are those of pack.py, and P
is the number of pairs.

Statistics are means over the step's pairs:

    rewards_chosen, rewards_rejected    the implicit rewards beta * h (for ipo beta * h / L)
    margin                              rewards_chosen - rewards_rejected
    accuracy                            the share of pairs with a positive margin; a margin of exactly 0 counts half
    logps_chosen, logps_rejected        log-probabilities summed over the trained tokens of a row
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from areno.errors import DataError
from areno.loss_fns.pack import DataPack
from areno.loss_fns.policy import entropy_stats

LossType = Literal["sigmoid", "ipo"]


def dpo_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: LossType = "sigmoid",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean of `preference_loss` over the step's pairs.

    Call `Trainer.train` with rows_per_unit=2, so that both rows of a pair are in the same micro-batch.

    Args:
        pack: The micro-batch, with ref_logprobs. Row 0 is the chosen answer of the first pair, row 1 the rejected
            answer, and so on.
        logprobs: (N,) log-probabilities under the trained policy, differentiable.
        beta: Strength of the pull towards the reference model: the factor on the margin, or the tau of ipo.
        label_smoothing: Assumed probability that the chosen and the rejected answer of a pair are swapped. Only for
            "sigmoid".
        loss_type: "sigmoid" (DPO) or "ipo".

    Returns:
        (loss, statistics): the micro-batch's share of the loss of the optimizer step, a 0-dim tensor, and detached
        tensors by name.

    Raises:
        DataError: rows_per_unit is not 2, a row has no trained token, or the pack has no ref_logprobs.
        ValueError: loss_type is unknown, or label_smoothing is not 0 with "ipo".
    """
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
    trained_T = pack.trained(logprobs)
    scores_R = pack.sum_rows(trained_T - pack.trained(pack.need("ref_logprobs")))
    if loss_type == "ipo":
        scores_R = scores_R / lengths_R
    losses_P = preference_loss(scores_R[0::2] - scores_R[1::2], beta, label_smoothing, loss_type)
    loss = _pair_mean(pack, losses_P)

    rewards_R = beta * scores_R.detach()
    logps_R = pack.sum_rows(trained_T.detach())
    margins_P = rewards_R[0::2] - rewards_R[1::2]
    of_pairs = {
        "rewards_chosen": rewards_R[0::2],
        "rewards_rejected": rewards_R[1::2],
        "margin": margins_P,
        "accuracy": (torch.sign(margins_P) + 1) / 2,  # 0.5 where neither answer is preferred
        "logps_chosen": logps_R[0::2],
        "logps_rejected": logps_R[1::2],
    }
    return loss, {name: _pair_mean(pack, values_P) for name, values_P in of_pairs.items()} | entropy_stats(pack)


def preference_loss(margins_P: Tensor, beta: float, label_smoothing: float, loss_type: LossType) -> Tensor:
    """Compute the loss of each pair, differentiable.

    With loss_type "sigmoid" the loss is -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m), where m = h_chosen -
    h_rejected and s is label_smoothing. With s = 0 this is arXiv 2305.18290 eq. 7. A positive s is conservative DPO (E.
    Mitchell, A note on DPO with noisy preferences, 2023).

    With loss_type "ipo" the loss is (d - 1 / (2 beta))^2, where d = h_chosen / L_chosen - h_rejected / L_rejected. This
    is arXiv 2310.12036 eq. 17 with beta for tau. The paper has h in place of h / L. The mean over tokens, as in TRL,
    keeps the square from growing with the length of the answers.

    Args:
        margins_P: (P,) margins, m for "sigmoid" and d for "ipo".
        beta: Factor on the margin, or the tau of ipo.
        label_smoothing: Probability s that the label of a pair is wrong. Must be 0 for "ipo".
        loss_type: "sigmoid" or "ipo".

    Returns:
        (P,) losses.

    Raises:
        ValueError: loss_type is unknown, or label_smoothing is not 0 for "ipo".
    """
    if loss_type == "sigmoid":
        agree_P = logsigmoid(beta * margins_P)
        if not label_smoothing:
            return -agree_P
        return -(1 - label_smoothing) * agree_P - label_smoothing * logsigmoid(-beta * margins_P)
    if loss_type != "ipo":
        raise ValueError(f"loss_type is {loss_type!r}; expected sigmoid or ipo")
    if label_smoothing:
        raise ValueError("label_smoothing is for loss_type sigmoid; with ipo it must be 0")
    return (margins_P - 1 / (2 * beta)).square()


def _pair_mean(pack: DataPack, values_P: Tensor) -> Tensor:
    """Return the micro-batch's share of the step's mean over pairs, 0-dim. `values_P` has a value for each pair."""
    return pack.row_mean(values_P) * 2
