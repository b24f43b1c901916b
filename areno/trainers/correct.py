"""Weights and masks for rows that another policy sampled than the one before the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areno.config.models import PolicyConfig
from areno.loss_fns.correction import behave_weights, m2_keep
from areno.trainers.rows import Arrays, places_of, set_trained, trained
from areno.types import TrainSequence


def needs_proximal(actor: PolicyConfig) -> bool:
    """Return whether `correct_rows` needs a scoring pass of the policy before the update."""
    decoupled = actor.use_decoupled_loss and actor.prox_logp_method != "loglinear"
    return decoupled or actor.m2_threshold is not None


def correct_rows(rows: Sequence[TrainSequence], prox_logprobs: Sequence[Any], actor: PolicyConfig) -> dict[str, float]:
    """Weigh and mask tokens by how the policy before the update differs from the policy that sampled them.

    Args:
        rows: Rows to train on. Sets their `weights` and, where tokens are rejected, their `prompt_mask`.
        prox_logprobs: Log-probabilities of all tokens of each row, by a forward pass before the update.
        actor: Settings of the decoupled loss and M2PO.

    Returns:
        The shares of masked tokens, and with prox_logp_method "metrics" the error of the interpolation.
    """
    behave = trained(rows, "logprobs")
    prox = [np.asarray(all_)[places_of(row)] for all_, row in zip(prox_logprobs, rows, strict=True)]
    stats: dict[str, float] = {}
    if actor.prox_logp_method == "metrics":
        # The error of what prox_logp_method=loglinear would have taken for `prox`.
        errors = [np.abs(old - new) / (row.staleness + 1) for row, old, new in zip(rows, behave, prox, strict=True)]
        stats["prox_approx_abs_diff_mean"] = np.concatenate(errors).mean()
    # The weight is p_old / p_roll, so that weight times ratio is p / p_roll.
    limits = {} if actor.rejection_sampling is None else asdict(actor.rejection_sampling)
    weights, passed = behave_weights(prox, behave, **limits)
    if not actor.recompute_logprob:
        weights = [np.ones(len(old)) for old in behave]
    if actor.use_decoupled_loss:
        stats["rejected_frac"] = _share_masked(passed)
    if actor.m2_threshold is not None:
        keep = m2_keep(prox, behave, trained(rows, "advantages"), actor.m2_threshold)
        stats["m2_masked_frac"] = _share_masked(keep)
        weights = [one * other for one, other in zip(weights, keep, strict=True)]
    set_trained(rows, "weights", weights)
    if actor.use_decoupled_loss:
        for row, kept in zip(rows, passed, strict=True):
            places = places_of(row)
            places[places] = kept
            row.prompt_mask = ~places
    return {name: float(value) for name, value in stats.items()}


def _share_masked(keep: Arrays) -> float:
    kept = np.concatenate(keep)
    return float(1.0 - kept.mean()) if kept.size else 0.0
