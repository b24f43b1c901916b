"""What each token of a row adds to the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from areno.config.experiments import LossFn
from areno.trainers.measure_loss import pack_of
from areno.types import TrainSequence


def attribute_loss(
    loss_fn: LossFn, row: TrainSequence, logprobs: Sequence[float]
) -> tuple[float, np.ndarray | None, np.ndarray]:
    """The loss of a row that is a step of its own, and each token's part in it: (loss, contributions, gradient).

    contributions: (n,), what each token adds to the policy term of the loss. A policy loss is linear in the weights of
    tokens (`DataPack.weights`), so these are its derivatives times the weights, and their sum is the policy term. None
    where the loss does not use weights. gradient: (n,), of the loss by each token's log-probability: negative where
    training makes the token more likely, 0 where it is clipped or not trained.
    """
    pack, given = pack_of([row]), torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    weights = torch.ones_like(given) if pack.weights is None else pack.weights.clone()
    pack.weights = weights.requires_grad_()
    loss, _ = loss_fn(pack, given)
    by_logprob, by_weight = torch.autograd.grad(loss, [given, weights], allow_unused=True)
    contributions = None if by_weight is None else (by_weight * weights).detach().numpy()
    return loss.item(), contributions, torch.zeros(len(given)).numpy() if by_logprob is None else by_logprob.numpy()
