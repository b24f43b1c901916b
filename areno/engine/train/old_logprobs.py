"""Old log-probabilities, the denominator of importance ratios, for each optimizer step of a batch of rows.

A ratio compares the current policy with the policy before the first update of the batch, both computed by the
training pass. The log-probabilities of the rollout (`DataPack.rollout_logprobs`) differ from these by rounding. In
bfloat16 the difference exceeds a narrow clip range such as that of GSPO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from areno.engine.train.packing import PackedTokens
from areno.loss_fns.data_pack import DataPack
from areno.specs.update import OldLogprobs

Batches = Sequence[tuple[PackedTokens, DataPack]]


def fill_missing(given_N: Tensor | None, found_N: Tensor) -> Tensor:
    """Replace the NaNs of `given_N` by the values of `found_N`. Returns `found_N` if `given_N` is None."""
    return found_N if given_N is None else torch.where(given_N.isnan(), found_N, given_N)


def set_old_logprobs(
    steps: Sequence[Batches], source: OldLogprobs, exact: bool, score: Callable[[PackedTokens], Tensor]
) -> None:
    """Set the old log-probabilities that must be known before the first update, in place.

    With source "rollout", all steps get the log-probabilities of the rollout. Otherwise the first step is left alone,
    because its own forward pass will give its old log-probabilities. For later steps, source "recompute" keeps the
    values that rows already have and scores the other rows. Source "loglinear" sets None, and the loss interpolates.
    Micro-batches without old and rollout log-probabilities, as in SFT, are left alone. If `exact`, on-policy rows need
    no scoring pass.
    """
    for number, step in enumerate(steps):
        if number == 0 and source != "rollout":
            continue  # without a look at its micro-batches, most of which are packed while the first one is computed
        for packed, pack in step:
            rollout_N, given_N = pack.rollout_logprobs, pack.old_logprobs
            if source == "rollout":
                pack.old_logprobs = rollout_N
            elif rollout_N is None and given_N is None:
                continue
            elif source == "loglinear":
                pack.old_logprobs = None  # the loss interpolates
            elif given_N is None or bool(pack.trained(given_N).isnan().any()):
                found_N = rollout_N if exact and _is_on_policy(pack) else None
                pack.old_logprobs = fill_missing(given_N, score(packed) if found_N is None else found_N)


def _is_on_policy(pack: DataPack) -> bool:
    return pack.staleness is not None and not bool(pack.staleness.any())


def step_old_logprobs(batches: Batches) -> np.ndarray | None:
    """Return the old log-probabilities of all N tokens of a step. None if any micro-batch lacks them."""
    found = [pack.old_logprobs for _, pack in batches if pack.old_logprobs is not None]
    return torch.cat(found).cpu().numpy() if len(found) == len(batches) else None
