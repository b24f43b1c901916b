"""The loss of a reward model on ranked answers: Bradley-Terry on every comparison of two answers.

A unit is the answers to one prompt, K adjacent rows. Each row has one trained token, at which the model's value is the
score of the answer. A row without a trained token fills up a unit with fewer answers. The reward of a row is the rating
of its answer: the answer with the higher rating is preferred, and equal ratings are not compared. Shape letters are
those of pack.py, and U is the number of units.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from areno.errors import DataError
from areno.loss_fns.data_pack import DataPack


def reward_model_loss_fn(
    pack: DataPack, values: Tensor, *, margin_coef: float = 1.0, center_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean of -log sigmoid(r_i - r_j - margin_coef m_ij) + center_coef (r_i + r_j)^2 over comparisons.

    r_i is the score of the preferred answer and r_j that of the other. The first term is the Bradley-Terry likelihood
    (arXiv 2203.02155 eq. 1). m_ij is the margin (arXiv 2307.09288 eq. 2): the difference between the two answers'
    `returns`, or 0 without `returns`. The second term keeps the scores around 0 (arXiv 2312.09244 sec. 2), because the
    first term depends only on their differences.

    The loss averages the comparisons of each unit, and then the units, weighed by their number of answers. So the
    weight of a prompt grows with the number of its answers, and not with the number of pairs, as in arXiv 2203.02155.

    Statistics are averaged in the same way: accuracy (share of comparisons in which the preferred answer has the higher
    score; a tie counts half), margin (r_i - r_j) and confidence (the probability that the model gives to its own
    choice, sigmoid(|r_i - r_j|)). The confidence of a calibrated model is its accuracy. `rewards` are the scores of all
    answers.
    """
    size, lengths_R = pack.rows_per_unit, pack.row_lengths()
    if size < 2 or pack.n_rows % size or bool((lengths_R > 1).any()):
        raise DataError(
            "a reward model trains on units of at least two rows, the answers to a prompt, each with one trained token "
            f"for its score; rows_per_unit is {size}, and a row has {int(lengths_R.max())} trained tokens"
        )
    present_UK = (lengths_R > 0).view(-1, size)
    scores_R = pack.sum_rows(pack.trained(values))
    scores_UK = scores_R.view(-1, size)
    ratings_UK = pack.need("rewards").view(-1, size)
    is_better_UKK = (ratings_UK[:, :, None] > ratings_UK[:, None, :]) & present_UK[:, :, None] & present_UK[:, None, :]
    n_U = is_better_UKK.sum((1, 2))
    if not bool(((n_U > 0) | ~present_UK.any(1)).all()):
        raise DataError("the answers to a prompt have equal ratings, so none is preferred; leave the prompt out")

    apart_UKK = scores_UK[:, :, None] - scores_UK[:, None, :]
    logits_UKK = apart_UKK
    if margin_coef and pack.returns is not None:
        levels_UK = pack.sum_rows(pack.trained(pack.returns)).view(-1, size)
        logits_UKK = apart_UKK - margin_coef * (levels_UK[:, :, None] - levels_UK[:, None, :])
    losses_UKK = -logsigmoid(logits_UKK)
    if center_coef:
        losses_UKK = losses_UKK + center_coef * (scores_UK[:, :, None] + scores_UK[:, None, :]).square()

    def mean(values_UKK: Tensor) -> Tensor:
        of_units_U = values_UKK.where(is_better_UKK, 0.0).sum((1, 2)) / n_U.clamp(min=1)
        return pack.row_mean(of_units_U * present_UK.sum(1))

    apart_UKK = apart_UKK.detach()
    stats = {
        "accuracy": mean((torch.sign(apart_UKK) + 1) / 2),
        "margin": mean(apart_UKK),
        "confidence": mean(apart_UKK.abs().sigmoid()),
        "rewards": pack.of_trained_rows(scores_R.detach()),
    }
    return mean(losses_UKK), stats
