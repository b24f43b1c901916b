"""Weights and masks of rows that another policy sampled (off-policy correction)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areno.config.ratio import RatioConfig
from areno.loss_fns.correction import behave_weights, m2_keep
from areno.run.setup import PolicySetup
from areno.trainers.rollout import Rollout
from areno.trainers.rows import Arrays, set_trained, trained, trained_mask
from areno.types import TrainSequence


def correct_rows(rows: Sequence[TrainSequence], prox_logprobs: Sequence[Any], actor: RatioConfig) -> dict[str, float]:
    """Weight and mask tokens by the ratio of the policy before the update to the policy that sampled the rows.

    Sets `weights`. With the decoupled loss, also sets `prompt_mask` to True for rejected tokens. Returns statistics, as
    far as the settings use them: rejected_frac (share of tokens rejected by the decoupled loss), m2_masked_frac (share
    of tokens masked by M2PO) and prox_approx_abs_diff_mean (error of the "loglinear" interpolation, with
    prox_logp_method "metrics").
    """
    behave = trained(rows, "logprobs")
    prox = [np.asarray(all_)[trained_mask(row)] for all_, row in zip(prox_logprobs, rows, strict=True)]
    stats: dict[str, float] = {}
    if actor.prox_logp_method == "metrics":
        # The error of the interpolation that prox_logp_method=loglinear would use in place of `prox`.
        errors = [np.abs(old - new) / (row.staleness + 1) for row, old, new in zip(rows, behave, prox, strict=True)]
        if (apart := np.concatenate(errors)).size:
            stats["prox_approx_abs_diff_mean"] = apart.mean()
    # The weight is p_old / p_roll, so that weight times ratio is p / p_roll.
    limits = {} if actor.rejection_sampling is None else asdict(actor.rejection_sampling)
    weights, passed = behave_weights(prox, behave, **limits)
    if not actor.recompute_logprob:
        weights = [np.ones(len(old)) for old in behave]
    if actor.use_decoupled_loss:
        stats["rejected_frac"] = _masked_fraction(passed)
    if actor.m2_threshold is not None:
        keep = m2_keep(prox, behave, trained(rows, "advantages"), actor.m2_threshold)
        stats["m2_masked_frac"] = _masked_fraction(keep)
        weights = [one * other for one, other in zip(weights, keep, strict=True)]
    set_trained(rows, "weights", weights)
    if actor.use_decoupled_loss:
        for row, kept in zip(rows, passed, strict=True):
            mask = trained_mask(row)
            mask[mask] = kept
            row.prompt_mask = ~mask
    return {name: float(value) for name, value in stats.items()}


def _masked_fraction(keep: Arrays) -> float:
    kept = np.concatenate(keep)
    return float(1.0 - kept.mean()) if kept.size else 0.0


def correct_rollout(setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Apply `correct_rows` with log-probabilities from before the update, if the settings ask for a correction."""
    actor = setup.config.actor
    if not isinstance(actor, RatioConfig) or not actor.needs_proximal_logprobs:
        return {}
    logprobs = rollout.scores.scores_of_rows("proximal", rows)
    with setup.run.clock.phase("recompute"):
        return correct_rows(rows, logprobs, actor)
