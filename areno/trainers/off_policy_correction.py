"""Weights and masks of tokens before an update: of rows that another policy sampled, and of chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areno.config.ratio import RatioConfig
from areno.loss_fns.correction import behave_weights, m2_keep
from areno.loss_fns.token_selection import TokenSelection
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
    """Apply `correct_rows` with log-probabilities from before the update, and `select_tokens`, as the settings ask."""
    actor, stats = setup.config.actor, dict[str, float]()
    if isinstance(actor, RatioConfig) and actor.needs_proximal_logprobs:
        logprobs = rollout.scores.scores_of_rows("proximal", rows)
        with setup.run.clock.phase("recompute"):
            stats = correct_rows(rows, logprobs, actor)
    if (selection := actor.chosen_token_selection) is not None:
        entropies = rollout.scores.scores_of_rows("entropy", rows) if selection.needs_entropy else None
        stats["selected_frac"] = select_tokens(rows, selection, entropies, setup.run.progress.seed)
    return stats


def select_tokens(
    rows: Sequence[TrainSequence], selection: TokenSelection, entropies: Sequence[Any] | None, seed: int
) -> float:
    """Set `weights` or `kl_weights` of rows for the tokens that a selection chooses. Return their share."""
    logprobs, masks = trained(rows, "logprobs"), [trained_mask(row) for row in rows]
    lengths = [len(row) for row in logprobs]
    if not sum(lengths):
        return 0.0
    entropies_T = None
    if entropies is not None:
        entropies_T = np.concatenate([np.asarray(all_)[mask] for all_, mask in zip(entropies, masks, strict=True)])
    advantages_T = np.concatenate(trained(rows, "advantages"))
    chosen_T = selection.choose(np.concatenate(logprobs), advantages_T, entropies_T, seed)
    chosen = np.split(chosen_T, np.cumsum(lengths)[:-1])
    if selection.effect == "kl":
        set_trained(rows, "kl_weights", [selection.kl_coef * each for each in chosen])
    else:
        kept = chosen if selection.effect == "keep" else [~each for each in chosen]
        weighted = all(row.weights is not None for row in rows)
        before = trained(rows, "weights") if weighted else [np.ones(length) for length in lengths]
        set_trained(rows, "weights", [one * other for one, other in zip(before, kept, strict=True)])
    return float(chosen_T.mean())
