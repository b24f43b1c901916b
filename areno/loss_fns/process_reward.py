"""The loss of a process reward model on marked steps: cross entropy between two labels, wrong and right.

A row is a prompt with the steps of a solution. The trained tokens of a row stand for its steps: the model's value at
such a token is the log-odds that the step is right, given the row up to the end of the step. In the shape
letters of pack.py, T counts steps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from areno.loss_fns.data_pack import DataPack


def process_reward_loss_fn(pack: DataPack, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean over steps of -y log p - (1 - y) log(1 - p), where p = sigmoid(value).

    This is the cross entropy of a token classifier with two labels whose scores differ by the value (arXiv 2305.20050
    app. F). The label y, in `pack.returns`, is 1 for a right step and 0 for a wrong one. A number between them is the
    estimated probability that the step leads to a right answer (soft labels, arXiv 2312.08935 eq. 2).

    Statistics are means over steps: accuracy (share of steps whose p and label are on the same side of 0.5; p = 0.5
    counts half), margin (the log-odds of the label's side) and confidence (the probability that the model gives to its
    own choice). The confidence of a calibrated model is its accuracy. `rewards` are p of all steps. `first_error` has
    an entry for each row with a wrong step: 1 if the first step with p < 0.5 is the first wrong one, otherwise 0.
    """
    labels_T, logits_T = pack.trained(pack.need("returns")), pack.trained(values)
    loss = pack.token_mean(softplus(logits_T) - labels_T * logits_T)
    logits_T = logits_T.detach()
    sides_T = torch.where(labels_T >= 0.5, logits_T, -logits_T)
    true_R, found_R = _first_of_rows(pack, labels_T < 0.5), _first_of_rows(pack, logits_T < 0)
    stats = {
        "accuracy": pack.token_mean((torch.sign(sides_T) + 1) / 2),
        "margin": pack.token_mean(sides_T),
        "confidence": pack.token_mean(logits_T.abs().sigmoid()),
        "rewards": logits_T.sigmoid(),
        "first_error": (true_R == found_R)[true_R < len(labels_T)].float(),
    }
    return loss, stats


def _first_of_rows(pack: DataPack, holds_T: Tensor) -> Tensor:
    """Return for each row the index, among all T steps, of its first step where `holds_T` is True. T without any."""
    n_steps = len(holds_T)
    places_T = torch.arange(n_steps, device=holds_T.device).where(holds_T, n_steps)
    rows_T = pack.row_of_token.index_select(0, pack.trained_T)
    return places_T.new_full((pack.n_rows,), n_steps).scatter_reduce(0, rows_T, places_T, "amin")
