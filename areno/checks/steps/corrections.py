"""Checks of the weights and masks that correct for samples of another policy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areno.checks.formulas.correction_formulas import chosen_tokens, corrected, m2_kept
from areno.checks.inputs.findings import Finding, green, red
from areno.checks.steps.model_numbers import largest_distance, sampling_temperature
from areno.checks.steps.policy_rows import sampled_steps
from areno.checks.steps.step_formula import field_of, mask_of
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.trainers import off_policy_correction
from areno.types import TrainSequence

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_OF_ROWS, _OF_TOKENS = 1.5, 1.0  # largest distance of log-probabilities of the rollout from those of training
_GOLDEN = 0.6180339887  # its multiples fill an interval evenly
_COPIES = 8
_STEP_ERROR = 1e-3  # of weights near 1, which hold rounding of two passes
_ERROR = 1e-6

_SELECTIONS = ("top_entropy", "clip_cov", "kl_cov")

Arrays = list[np.ndarray]


def correction_weights(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether tokens have the weights and masks of the formula: in the steps, and far from the rollout's policy."""
    actor, name = found.run.config.actor, "correction-weights"
    if not isinstance(actor, RatioConfig) or not actor.needs_proximal_logprobs:
        return
    for step in sampled_steps(found.run) if actor.chosen_token_selection is None else ():
        model, weights = found.run.models["actor"], {key: x.double() for key, x in step.update.before.items()}
        prox = []
        for row in step.rows:
            with torch.no_grad():
                all_ = model.logprobs(weights, np.asarray(row.tokens).tolist(), sampling_temperature(found.run.config))
            prox.append(all_[mask_of(row)].numpy())
        behave = [field_of(row, "logprobs").numpy() for row in step.rows]
        given = [np.ones(0) if row.weights is None else field_of(row, "weights").numpy() for row in step.rows]
        wanted = _wanted(prox, behave, step.rows, actor)[0]
        if (apart := largest_distance(given, wanted)) > _STEP_ERROR:
            text = f"the weights of the correction in step {step.update.step} are not those of the formula"
            yield red(name, f"{text}, by up to {apart:.2g}: pi(before the update) / pi(rollout), with its bounds")
            return
    rows = [row for step in sampled_steps(found.run) for row in step.rows]
    fault, n_masked, n_tokens = _away(rows, actor)
    if fault:
        yield red(name, f"away from the policy that sampled, {fault}")
    else:
        text = "the weights of the correction are those of the formula, also away from the policy that sampled"
        yield green(name, f"{text}, where {n_masked} of {n_tokens} tokens are masked or have the weight 0")


def token_selection(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the tokens that actor.token_selection treats apart are those of its formula."""
    actor, name = found.run.config.actor, "token-selection"
    selection = actor.chosen_token_selection if isinstance(found.run.config, PolicyExperimentConfig) else None
    if selection is None or actor.token_selection not in _SELECTIONS:
        return
    temperature, counts = sampling_temperature(found.run.config), list[str]()
    for step in sampled_steps(found.run):
        model, weights = found.run.models["actor"], {key: x.double() for key, x in step.update.before.items()}
        entropies = []
        for row in step.rows:
            with torch.no_grad():
                log_p = model.log_distributions(weights, np.asarray(row.tokens).tolist(), temperature)[mask_of(row)[1:]]
            entropies.append(-(log_p.exp() * log_p).sum(-1).numpy())
        field = "kl_weights" if selection.effect == "kl" else "weights"
        joined = [
            np.concatenate([field_of(row, each).numpy() for row in step.rows]) for each in ("logprobs", "advantages")
        ]
        may, sizes = chosen_tokens(actor.token_selection, selection, joined[0], joined[1], np.concatenate(entropies))
        given = [
            np.ones(int(mask_of(row).sum())) if vars(row)[field] is None else field_of(row, field).numpy()
            for row in step.rows
        ]
        apart = np.concatenate(given) == 0 if selection.effect == "drop" else np.concatenate(given) != 0
        counts.append(f"{int(apart.sum())} of {len(apart)}")
        if (apart & ~may).any() or int(apart.sum()) not in sizes:
            text = (
                f"in step {step.update.step}, actor.token_selection={actor.token_selection} chooses {counts[-1]} tokens"
            )
            others = f", {int((apart & ~may).sum())} of them others than the formula" * bool((apart & ~may).any())
            yield red(name, f"{text}, and {sizes.stop - 1} by the formula{others}")
            return
    if counts:
        yield green(name, f"actor.token_selection chooses the tokens of its formula, {' and '.join(counts)}")


def _wanted(prox: Arrays, behave: Arrays, rows: Sequence[TrainSequence], actor: RatioConfig) -> tuple[Arrays, Arrays]:
    weights, kept = corrected(prox, behave, actor.rejection_sampling)
    if not actor.recompute_logprob:
        weights = [np.ones(len(row)) for row in behave]
    if actor.m2_threshold is not None:
        advantages = [field_of(row, "advantages").numpy() for row in rows]
        of_m2 = m2_kept(prox, behave, advantages, actor.m2_threshold)
        weights = [one * other for one, other in zip(weights, of_m2, strict=True)]
    if not actor.use_decoupled_loss:
        kept = [np.ones(len(row), bool) for row in prox]
    return weights, kept


def _away(rows: Sequence[TrainSequence], actor: RatioConfig) -> tuple[str, int, int]:
    """Correct rows whose ratios lie on both sides of each bound. Return (what is wrong, masked tokens, tokens)."""
    moved, prox, start = list[TrainSequence](), list[np.ndarray](), 0
    for number, row in enumerate([*rows] * _COPIES):
        n = len(row.tokens)  # type: ignore[arg-type]
        apart = _OF_ROWS * _spread(np.array([number])) + _OF_TOKENS * _spread(start + np.arange(n))
        all_ = np.minimum(np.asarray(row.logprobs) + np.zeros(n), -0.05)
        # As large a difference as fits a log-probability below 0.
        moved.append(
            replace(copy.copy(row), logprobs=np.minimum(all_ - apart, -0.01), prompt_mask=~mask_of(row).numpy())
        )
        prox.append(all_)
        start += n
    masks = [mask_of(row).numpy() for row in moved]
    behave = [np.asarray(row.logprobs)[mask] for row, mask in zip(moved, masks, strict=True)]
    wanted, kept = _wanted([each[mask] for each, mask in zip(prox, masks, strict=True)], behave, moved, actor)
    off_policy_correction.correct_rows(moved, prox, actor)
    given = [np.asarray(row.weights)[mask] for row, mask in zip(moved, masks, strict=True)]
    trained = [mask_of(row).numpy()[mask] for row, mask in zip(moved, masks, strict=True)]
    n_masked = sum(int(np.count_nonzero((one == 0) | ~other)) for one, other in zip(wanted, kept, strict=True))
    n_tokens = sum(map(len, kept))
    for found, right, what in ((trained, kept, "trained"), (given, wanted, "weighted")):
        wrong = [
            one != other if what == "trained" else np.abs(one - other) > _ERROR * (1 + other)
            for one, other in zip(found, right, strict=True)
        ]
        if any(each.any() for each in wrong):
            text = f"{sum(map(np.count_nonzero, wrong))} of {n_tokens} tokens are not {what} as the settings say"
            return f"{text}{_why(found, behave, prox, masks, actor)}", n_masked, n_tokens
    return "", n_masked, n_tokens


def _spread(numbers: np.ndarray) -> np.ndarray:
    """Return numbers from -1 to 1."""
    return 2 * (_GOLDEN * numbers % 1) - 1


def _why(found: Arrays, behave: Arrays, prox: Arrays, masks: Arrays, actor: RatioConfig) -> str:
    inner = [each[mask] for each, mask in zip(prox, masks, strict=True)]
    others: dict[str, Any] = {"the ratio is upside down": corrected(behave, inner, actor.rejection_sampling)}
    if actor.rejection_sampling is not None:
        others["rejection_sampling is left out"] = corrected(inner, behave, None)
    for text, both in others.items():
        if any(
            largest_distance([*map(np.asarray, found)], [each.astype(float) for each in other]) < 1e-6 for other in both
        ):
            return f": {text}"
    return ""


CHECKS = [of_two_steps(check) for check in (correction_weights, token_selection)]
