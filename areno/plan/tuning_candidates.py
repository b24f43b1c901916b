"""Candidates for the settings of memory and speed of a run, from its forecast. `areno/run/tuning_trials.py` tries them.

A candidate sets the number of samples that are decoded at once, the recomputation of activations, the size of
micro-batches, and whether the KV cache stays while models are trained. Settings that the user set are never changed.
This module imports no torch.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areno.config.policy_experiments import PolicyExperimentConfig
from areno.cost.footprint import gib_text
from areno.errors import ConfigError, Problem
from areno.models.known_shapes import resolve_model_config
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import Hardware
from areno.plan.phases import SequenceLengths
from areno.plan.plan import max_sequence_len
from areno.plan.settings_that_fit import command_line_of, fitting_changes, set_values

BATCH = "train_dataset.batch_size"
AT_ONCE = "rollout.max_concurrent_rollouts"
DROP = "rollout.drop_rollout_state"
RECOMPUTE = "actor.gradient_checkpointing"
BUDGET = "actor.mb_spec.max_tokens_per_mb"
_MINI_BS = "actor.mb_spec.mini_bs"

CHOSEN = (AT_ONCE, DROP, RECOMPUTE, BUDGET, BATCH)
"""The settings that may be chosen. Only the last one changes what is learned."""

_BUDGETS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_HALVINGS = 3  # of the number of samples that are decoded at once
# Factors by which a candidate must be faster, because it cannot adapt when there is less memory than expected.
_FIXED_BUDGET, _NO_RECOMPUTE = 1.02, 1.01
_NEAR = 1.15  # candidates are tried if they are at most this much slower than the best one
_LARGER = 1.1  # a larger step is chosen if its time per sample is at most this much longer
_OF_A_KIND = 2  # candidates that are tried with equal settings apart from micro-batches
_MOST = 6  # candidates that are tried


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings of memory and speed for a run."""

    settings: Mapping[str, Any]  # BUDGET: None leaves the size to the engine
    full: Forecast  # for samples of the largest lengths: predicts memory
    usual: Forecast  # for samples of mean lengths: predicts time

    @property
    def config(self) -> PolicyExperimentConfig:
        assert isinstance(self.usual.config, PolicyExperimentConfig)
        return self.usual.config

    @property
    def peak_memory_bytes(self) -> int:
        """Expected peak memory of a device in bytes, including the CUDA context."""
        return self.full.peak_memory_bytes + self.full.hardware.cuda_context_bytes

    @property
    def n_rows(self) -> int:
        return self.config.rows_per_step

    @property
    def settings_without_budget(self) -> tuple[Any, ...]:
        """The values of all settings except the size of micro-batches."""
        return tuple(self.settings.get(key) for key in CHOSEN if key != BUDGET)

    @property
    def micro_batch_sizes(self) -> list[tuple[str, int]]:
        """Return (name, largest number of tokens in a micro-batch) for each phase."""
        phases = zip(self.usual.phases, self.full.phases, strict=True)
        return [(one.name, min(one.budget, int(other.n_tokens))) for one, other in phases if one.budget is not None]

    def seconds_per_sample(self, step_seconds: float) -> float:
        """Return the number by which candidates are compared: weighted seconds per sample."""
        price = step_seconds / self.n_rows
        if self.settings.get(BUDGET) is not None:
            price *= _FIXED_BUDGET
        if self.settings.get(RECOMPUTE) is False:
            price *= _NO_RECOMPUTE
        return price

    def __str__(self) -> str:
        config = self.config
        spec, size = config.actor.mb_spec, "automatic micro-batches"
        if spec.max_tokens_per_mb is not None:
            size = f"micro-batches of {spec.max_tokens_per_mb:,} tokens"
        elif spec.mini_bs is not None:
            size = f"micro-batches of {spec.mini_bs:,} rows"
        recomputed = "with" if config.actor.gradient_checkpointing else "without"
        dropped = ", the KV cache dropped" if config.rollout.drop_rollout_state else ""
        return f"{config.max_concurrent_samples:,} samples at once, {size}, {recomputed} recomputation{dropped}"


def given_candidate_settings(keys: Collection[str]) -> set[str]:
    """Return which settings of a candidate are in `keys`, by their own names or by that of their section."""
    return {name for name in (*CHOSEN, _MINI_BS) if any(name == key or name.startswith(f"{key}.") for key in keys)}


@dataclass(frozen=True)
class LengthLimits:
    """The largest lengths in tokens of prompts and answers that the settings of a run allow."""

    prompt: int
    answer: int

    @staticmethod
    def from_config(config: PolicyExperimentConfig) -> LengthLimits:
        context = resolve_model_config(config.actor.path, "actor.path").max_position_embeddings
        longest = max_sequence_len(config, context)
        answer = max(1, min(config.gconfig.max_new_tokens, longest - 1))
        most = longest if config.agent.fn is not None else config.train_dataset.max_length_or_unlimited
        return LengthLimits(max(1, min(most, longest - answer)), answer)

    @property
    def mean_lengths(self) -> SequenceLengths:
        """The mean lengths if lengths are drawn uniformly from 1 to the limits."""
        return SequenceLengths(prompt=(self.prompt + 1) // 2, answer=(self.answer + 1) // 2)


def candidates(
    config: PolicyExperimentConfig, hardware: Hardware, n_devices: int, given: Collection[str]
) -> list[Candidate]:
    """Return the candidates that fit into the share tune.mem_frac of a device, the best first.

    `given`: settings that the user set. The first candidates have the largest batch for which the time per sample is at
    most 10 % above the shortest. All other candidates follow. Of each kind, the fastest comes first. With
    engine.deterministic and the batch size in `given`, all returned candidates give bit-identical results.
    """
    limits = LengthLimits.from_config(config)
    keeps_bits = config.engine.deterministic and BATCH in given
    before = _token_budgets(forecast(config, hardware, n_devices, limits.prompt, limits.answer))
    most, found, too_large = int(config.tune.mem_frac * hardware.memory), [], []
    known: set[tuple[Any, ...]] = set()
    for settings in _candidate_settings(config, hardware, given, limits, keeps_bits):
        changed = copy.deepcopy(config)
        set_values(changed, settings)
        candidate = _candidate(changed, settings, hardware, n_devices, limits)
        if keeps_bits and _token_budgets(candidate.full) != before:
            continue
        if (work := (candidate.settings_without_budget, *candidate.micro_batch_sizes)) in known:
            continue  # the same work as with automatic micro-batches, which are first, or with smaller ones
        known.add(work)
        if candidate.full.fits and candidate.usual.fits:
            (found if candidate.peak_memory_bytes <= most else too_large).append(candidate)
    if not found:
        least = min((candidate.peak_memory_bytes for candidate in too_large), default=None)
        raise nothing_fits_error(config, hardware, n_devices, least)
    found.sort(key=lambda candidate: candidate.seconds_per_sample(candidate.usual.step_seconds))
    nearly_best = _LARGER * found[0].seconds_per_sample(found[0].usual.step_seconds)
    n_rows = max(each.n_rows for each in found if each.seconds_per_sample(each.usual.step_seconds) <= nearly_best)
    return [*(each for each in found if each.n_rows == n_rows), *(each for each in found if each.n_rows != n_rows)]


def shortlist(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that are worth a trial, in the order of the trials.

    These are the candidates that are nearly as fast as the best one, and the best one with automatic micro-batches.
    Candidates with equal recomputation follow each other, because they can share an engine.
    """
    best = found[0].seconds_per_sample(found[0].usual.step_seconds)
    chosen: list[Candidate] = []
    for candidate in found:
        alike = sum(each.settings_without_budget == candidate.settings_without_budget for each in chosen)
        is_near = (
            candidate.n_rows == found[0].n_rows
            and candidate.seconds_per_sample(candidate.usual.step_seconds) <= _NEAR * best
        )
        if is_near and alike < _OF_A_KIND and len(chosen) < _MOST:
            chosen.append(candidate)
    adaptable = next((candidate for candidate in found if candidate.settings.get(BUDGET) is None), found[0])
    if adaptable not in chosen:
        chosen.append(adaptable)
    recomputes = found[0].config.actor.gradient_checkpointing
    chosen.sort(key=lambda candidate: candidate.config.actor.gradient_checkpointing != recomputes)
    return chosen


def _candidate(
    config: PolicyExperimentConfig,
    settings: Mapping[str, Any],
    hardware: Hardware,
    n_devices: int,
    limits: LengthLimits,
) -> Candidate:
    usual = forecast(config, hardware, n_devices, limits.mean_lengths.prompt, limits.mean_lengths.answer)
    full = forecast(config, hardware, n_devices, limits.prompt, limits.answer)
    longest = -(-(limits.prompt + limits.answer) // config.engine.cp_size)
    if any(phase.budget is not None and phase.budget < longest for phase in full.phases):
        # A row that is longer than a micro-batch has a micro-batch of its own.
        longer = copy.deepcopy(config)
        set_values(longer, {BUDGET: longest, _MINI_BS: None})
        full = forecast(longer, hardware, n_devices, limits.prompt, limits.answer)
    return Candidate(settings=settings, full=full, usual=usual)


def _candidate_settings(
    config: PolicyExperimentConfig, hardware: Hardware, given: Collection[str], limits: LengthLimits, keeps_bits: bool
) -> Iterator[dict[str, Any]]:
    """Yield the settings of each candidate, without those in `given` and those that are not tuned here.

    `keeps_bits`: yield only settings that do not change results by a bit.
    """
    is_free = {key: key not in given for key in CHOSEN}
    at_once: list[int | None] = [None]
    if is_free[AT_ONCE] and (config.engine.exact or not keeps_bits):
        at_once = [*_concurrency_candidates(config, is_free[BATCH])]
    drops = (False, True) if is_free[DROP] and hardware.is_cuda else (None,)
    recomputes = (True, False) if is_free[RECOMPUTE] else (None,)
    counted = config.actor.gradient_accumulation_steps is not None  # micro-batches decide what is learned
    is_free[BUDGET] = is_free[BUDGET] and _MINI_BS not in given and not counted and not keeps_bits
    longest = -(-(limits.prompt + limits.answer) // config.engine.cp_size)
    budgets = (None, *(size for size in _BUDGETS if size >= longest)) if is_free[BUDGET] else (None,)
    for n, drop, recompute, budget in itertools.product(at_once, drops, recomputes, budgets):
        settings: dict[str, Any] = {AT_ONCE: n, DROP: drop, RECOMPUTE: recompute}
        settings = {key: value for key, value in settings.items() if value is not None}
        if is_free[BUDGET]:
            settings[BUDGET] = budget
        if is_free[BATCH]:
            together = n or config.max_concurrent_samples
            settings[BATCH] = _batch_size(config, together)
        yield settings


def _concurrency_candidates(config: PolicyExperimentConfig, chooses_batch: bool) -> Iterator[int]:
    """Yield possible numbers of samples that are decoded at once, the largest first."""
    n, most = config.gconfig.n_samples, config.tune.max_samples
    most = most // n * n if chooses_batch else min(most, config.rows_per_step)
    for halvings in range(_HALVINGS + 1):
        number = most >> halvings
        number = number // n * n if chooses_batch else number
        if number:
            yield number


def _batch_size(config: PolicyExperimentConfig, at_once: int) -> int:
    """Return the largest number of prompts whose samples fit into `at_once` and divide evenly into updates."""
    n, updates = config.gconfig.n_samples, [model.ppo_n_minibatches for model in config.trained_models().values()]
    most = max(1, min(at_once, config.tune.max_samples) // n)
    even = (size for size in range(most, 0, -1) if not any(size * n % update for update in updates))
    return next(even, config.train_dataset.batch_size)


def _token_budgets(found: Forecast) -> dict[str, int | None]:
    return {phase.name: phase.budget for phase in found.phases}


def nothing_fits_error(
    config: PolicyExperimentConfig, hardware: Hardware, n_devices: int, least: int | None
) -> ConfigError:
    """Return the error that no candidate fits. `least`: the smallest peak, if it is less than a whole device."""
    limits = LengthLimits.from_config(config)
    smaller = replace(hardware, memory=int(config.tune.mem_frac * hardware.memory))

    def predict(config: Any, n_devices: int) -> Forecast:
        return forecast(config, smaller, n_devices, limits.prompt, limits.answer)

    options = []
    if least is not None and least < hardware.memory:
        options.append(f"raise it to {math.ceil(100 * least / hardware.memory) / 100:.2f}")
    found = predict(config, n_devices)
    for way in fitting_changes(found, predict):
        options.append(f"set {command_line_of(way.changes)}" + (f" ({way.price})" if way.price else ""))
    options = options or ["choose a smaller model or a larger device"]
    text = "is {}, and no candidate fits into {} of the {} GiB of a device; {}"
    numbers = (config.tune.mem_frac, gib_text(smaller.memory), gib_text(hardware.memory))
    return ConfigError(Problem("tune.mem_frac", text, *numbers, ", or ".join(options)))
