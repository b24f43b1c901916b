"""Tries candidates in worker processes, with random weights and made-up rows, before a run."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from areno.config.models import MicroBatchSpec
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.config.rollout import DecoderConfig
from areno.config.teacher import Divergence
from areno.cost.footprint import GIB
from areno.engine.engine import Engine
from areno.loss_fns import distillation_loss_fn, gspo_loss_fn, value_loss_fn
from areno.plan.forecast import Forecast, forecast
from areno.plan.lr_schedule import with_schedules
from areno.plan.phases import Phase
from areno.plan.plan import TrainerPlan, sampling_params
from areno.plan.roles import experiment_roles
from areno.plan.tuning_candidates import Candidate, LengthLimits
from areno.plan.vocabularies import complete_roles
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationRequest, TrainSequence

LIMIT_S = 90.0
"""Seconds of all trials together. No trial begins whose expected end is later."""
_START_S = {True: 25.0, False: 8.0}  # expected time to start an engine on a GPU, and on a CPU, before one was measured
_PREFILL_S, _ROLLOUT_S, _TRAIN_S = 1.0, 3.0, 4.0  # expected times of a trial's parts, to which its work is limited
_WARM_UP_TOKENS, _RANDOM_LOGPROB = 8, -10.0  # tokens of a prompt, and of an answer; a log-probability


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial:
    step_s: float  # of a whole step: the forecast times the ratio of measured to predicted time
    peak: int  # of a device's memory in bytes, with the CUDA context


class Trials(AbstractContextManager["Trials"]):
    """Tries candidates in an engine. The engine is restarted if a candidate needs another engine or has failed.

    If `probes_rollout` is false, trials only make the KV cache and decode no samples.
    """

    def __init__(self, plan: TrainerPlan, probes_rollout: bool = True):
        self._plan, self._probes_rollout = plan, probes_rollout
        self._engine: Engine | None = None
        self._recomputes: bool | None = None  # of the engine
        self._began = time.monotonic()
        self._start_s = _START_S[plan.spec.devices[0].startswith("cuda")]
        self._longest_s = 0.0  # of the trials, without starts
        self._rollouts: dict[tuple[Any, ...], float] = {}  # measured / predicted time, by the settings of the rollout
        self._cache_of: RolloutSpec | None = None  # rollout whose KV cache the engine may hold
        self._is_new = True  # whether the engine has run no trial

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def fits_time_limit(self, candidate: Candidate) -> bool:
        starts = self._engine is None or self._recomputes != candidate.config.actor.gradient_checkpointing
        expected = (self._longest_s or 2 * (_ROLLOUT_S + _TRAIN_S)) + (self._start_s if starts else 0.0)
        return time.monotonic() - self._began + expected <= LIMIT_S

    def run(self, candidate: Candidate) -> MeasuredTrial:
        """Run the phases of a step with a candidate's settings on part of the work. An error closes the engine."""
        try:
            engine = self._engine_for(candidate.config)
            began = time.monotonic()
            trial = _Trial(engine, self._plan, candidate, self._rollouts if self._probes_rollout else None)
            if trial.spec != self._cache_of:
                engine.end_rollout(drop=True)  # the cache of another candidate, which would count as memory of this one
            self._cache_of = trial.spec
            step_s, peak = trial.run(warm_up=self._is_new)
            self._is_new = False
        except BaseException:
            self._close()
            raise
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        return MeasuredTrial(step_s=step_s, peak=peak)

    def _engine_for(self, config: PolicyExperimentConfig) -> Engine:
        recomputes = config.actor.gradient_checkpointing
        if self._engine is not None and recomputes == self._recomputes:
            return self._engine
        self._close()
        began = time.monotonic()
        plan, roles = with_schedules(config, self._plan, complete_roles(experiment_roles(config), self._plan), 1000)
        spec = plan.spec
        actor = replace(spec.actor, gradient_checkpointing=recomputes)
        if actor.lora is not None:
            actor = replace(actor, lora=replace(actor.lora, init_from=""))
        spec = replace(spec, actor=actor, planned=roles, engine=replace(spec.engine, dummy_load=True))
        self._engine, self._recomputes = Engine(spec, "spawn"), recomputes
        self._is_new, self._cache_of = True, None
        self._engine.ensure_roles(roles)
        _warm_up(self._engine, config)
        self._start_s = time.monotonic() - began
        return self._engine


class _Trial:
    """The trial of one candidate.

    `rollouts`: settings of a rollout -> measured / predicted time. This trial adds its ratio. If None, no samples are
    decoded.
    """

    def __init__(
        self, engine: Engine, plan: TrainerPlan, candidate: Candidate, rollouts: dict[tuple[Any, ...], float] | None
    ):
        self.engine, self.plan, self.candidate, self._rollouts = engine, plan, candidate, rollouts
        self.config = candidate.config
        self._limits = LengthLimits.from_config(self.config)
        self._draw = random.Random(self.config.seed)
        self.n_prompts = max(1, min(self.config.rows_per_step, self.config.tune.max_samples) // self._n_samples)
        self._peak = 0.0  # GiB
        self._is_cuda = candidate.usual.hardware.is_cuda
        assert plan.max_len is not None
        shared = plan.shared
        self.spec = RolloutSpec(
            max_running=self._n_at_once,
            max_len=plan.max_len,
            decoder=DecoderConfig.of(self.config.rollout),
            keeps_cache=not self.config.rollout.drop_rollout_state,
            shared=shared if shared is not None and shared.usual == self._n_at_once else None,
        )

    @property
    def _n_samples(self) -> int:
        return self.config.gconfig.n_samples

    def run(self, warm_up: bool) -> tuple[float, int]:
        """Return (seconds of a whole step, peak memory in bytes). With `warm_up`, each phase on a GPU runs twice."""
        self.engine.peak_memory_gib()  # begins to record a new peak
        decodes = self._rollout()
        factors = {phase.name: decodes for phase in self.candidate.usual.phases if phase.decodes}
        # A judge that writes is not tried. Its decoder works like the actor's, with a cache of the planned size.
        peaks = [
            phase.peak_memory_bytes / GIB
            for phase in self.candidate.full.phases
            if phase.decodes and phase.name != "rollout"
        ]
        self._peak = max([self._peak, *peaks])
        rows, n_prompts = self._random_rows()
        predicted = {phase.name: phase for phase in self._predicted_phases(n_prompts).phases}
        for name, phase in predicted.items():
            if phase.decodes:
                continue
            if warm_up and self._is_cuda:
                self._run_phase(phase, rows)
            self.engine.synchronize()
            began = time.perf_counter()
            self._run_phase(phase, rows)
            self.engine.synchronize()
            factors[name] = (time.perf_counter() - began) / phase.seconds
            self._peak = max(self._peak, self.engine.peak_memory_gib())
        step_s = sum(phase.seconds * factors[phase.name] for phase in self.candidate.usual.phases)
        return step_s, int(self._peak * GIB) + self.candidate.usual.hardware.cuda_context_bytes

    def _predicted_phases(self, n_prompts: int, prompt: int | None = None, answer: int | None = None) -> Forecast:
        """Return the forecast for part of a step's work. A length of None stands for the mean."""
        mean_lengths, found = self._limits.mean_lengths, self.candidate.usual
        data = replace(self.config.train_dataset, batch_size=n_prompts)
        rollout = replace(self.config.rollout, max_concurrent_rollouts=self._n_at_once)
        # A part of the rows need not divide into the updates of a step.
        trained = {name: replace(model, ppo_n_minibatches=1) for name, model in self.config.trained_models().items()}
        config = replace(self.config, train_dataset=data, rollout=rollout, **trained)
        return forecast(
            config, found.hardware, found.n_devices, prompt or mean_lengths.prompt, answer or mean_lengths.answer
        )

    @property
    def _n_at_once(self) -> int:
        return self.config.max_concurrent_samples

    # -- rollout ---------------------------------------------------------------------------------------------------

    def _rollout(self) -> float:
        """Make the KV cache and decode samples. Return measured / predicted time, or 1 if no samples are decoded.

        Long prompts and answers are shortened, so that the rollout takes seconds.
        """
        engine, drops = self.engine, not self.spec.keeps_cache
        key = (self._n_at_once, drops, self.n_prompts)
        known = 1.0 if self._rollouts is None else self._rollouts.get(key)
        engine.begin_rollout(self.spec)
        if known is None:
            assert self._rollouts is not None
            usual = self._limits.mean_lengths

            def predicted(prompt: int, answer: int) -> float:
                return self._predicted_phases(self.n_prompts, prompt, answer).phases[0].seconds

            prompt = _largest_in_time(usual.prompt, lambda n: predicted(n, 1), _PREFILL_S)
            answer = _largest_in_time(usual.answer, lambda n: predicted(prompt, n), _ROLLOUT_S)
            if self._is_cuda:
                self._generate(prompt, answer)  # compiles kernels and records CUDA graphs
            if drops:
                engine.end_rollout(drop=True)
            began = time.perf_counter()
            if drops:  # each step makes the cache and the graphs again
                engine.begin_rollout(self.spec)
            self._generate(prompt, answer)
            known = self._rollouts[key] = (time.perf_counter() - began) / predicted(prompt, answer)
        self._peak = max(self._peak, engine.peak_memory_gib())
        engine.end_rollout(drops)
        return known

    def _generate(self, prompt: int, answer: int) -> None:
        """Decode samples of random lengths with these means. The lengths are the same in each call."""
        lengths = random.Random(self.config.seed)
        sampled = sampling_params(self.config.gconfig, self.config.actor.n_recorded_tokens)
        params = replace(sampled, ignore_eos=True, stop=None, stop_token_ids=None, min_new_tokens=0)
        requests = [
            GenerationRequest(
                request_id=index,
                prompt=self._random_tokens(min(_draw_length(lengths, prompt), self._limits.prompt)),
                n_samples=self._n_samples,
                params=replace(params, max_new_tokens=min(_draw_length(lengths, answer), self._limits.answer)),
                seed=index,
            )
            for index in range(self.n_prompts)
        ]
        self.engine.generate(requests)

    def _random_tokens(self, n: int) -> list[int]:
        return self._draw.choices(range(self.engine.info.vocab_size), k=n)

    # -- training and scoring --------------------------------------------------------------------------------------

    def _random_rows(self) -> tuple[list[TrainSequence], int]:
        """Return made-up rows of random lengths, one of them as long as allowed, and the number of their prompts.

        The rows can be trained in a few seconds, but are at least enough for a micro-batch on each device.
        """
        layout, usual = self.plan.spec.layout, self._limits.mean_lengths

        def pass_seconds(n_prompts: int) -> float:
            return sum(phase.seconds for phase in self._predicted_phases(n_prompts).phases if not phase.decodes)

        budgets = (phase.budget for phase in self.candidate.usual.phases if phase.budget is not None)
        fill = max(budgets, default=1) * layout.cp_size * layout.n_data_parallel_groups
        least = -(-fill // (self._n_samples * (usual.prompt + usual.answer)))
        n_prompts = min(self.n_prompts, max(least, _largest_in_time(self.n_prompts, pass_seconds, _TRAIN_S)))
        lengths = [
            (_draw_length(self._draw, usual.prompt), _draw_length(self._draw, usual.answer))
            for _ in range(n_prompts * self._n_samples)
        ]
        lengths[0] = (self._limits.prompt, self._limits.answer)
        n_recorded = _n_recorded_tokens(self.engine, self.config)
        rows = [
            _synthetic_row(prompt, self._random_tokens(prompt + answer), 1.0 if index % 2 else -1.0, n_recorded)
            for index, (prompt, answer) in enumerate(lengths)
        ]
        return rows, n_prompts

    def _run_phase(self, phase: Phase, rows: list[TrainSequence]) -> None:
        """Run the phase "train ROLE", "score ROLE" or "score actor again" on made-up rows."""
        verb, role, *_ = phase.name.split()
        if verb == "train":
            self._train(phase, role, rows)
            return
        spec = self.plan.spec.mb_spec
        if spec.is_automatic or self.config.actor.mb_spec.max_tokens_per_mb is not None:
            spec = MicroBatchSpec(max_tokens_per_mb=phase.budget)
        # A judge may have fewer tokens in its vocabulary than the actor.
        sizes = {model.name: model.config.vocab_size for model in self.candidate.usual.footprint.models}
        tokens: Any = [np.asarray(row.tokens) % sizes.get(role, sizes["actor"]) for row in rows]
        score: dict[str, Callable[..., Any]] = {"critic": self.engine.values, "reward": self.engine.rewards}
        score.get(role, self.engine.logprobs)(role, tokens, mb_spec=spec)

    def _train(self, phase: Phase, role: str, rows: list[TrainSequence]) -> None:
        section: Any = vars(self.config)[role]
        accumulates = section.gradient_accumulation_steps if role == "actor" else None
        spec: MicroBatchSpec = section.mb_spec if accumulates is None else section.mb_spec.with_fixed_size
        if spec.is_automatic:
            spec = MicroBatchSpec(max_tokens_per_mb=phase.budget)
        update = UpdateSpec(
            spec,
            gradient_accumulation_steps=accumulates,
            sampling=self.config.gconfig,
            old_logprobs=self.config.actor.old_logprobs if role == "actor" else "recompute",
            divergence=self.config.divergence if role == "actor" else None,
            differentiates_entropy=role == "actor" and self.config.actor.differentiates_entropy,
        )
        self.engine.train(rows, _loss_fn(update.divergence) if role == "actor" else value_loss_fn, update, role)


def _loss_fn(divergence: Divergence | None) -> Any:
    """Return a loss function with which passes of the actor compute as much as in the run."""
    loss_fn = partial(gspo_loss_fn, clip_eps=3e-4)
    return loss_fn if divergence is None else partial(distillation_loss_fn, policy_loss_fn=loss_fn)


def _synthetic_row(prompt: int, tokens: list[int], advantage: float, n_recorded: int = 0) -> TrainSequence:
    zeros, answer = [0.0] * len(tokens), len(tokens) - prompt
    listed = np.tile(np.arange(n_recorded), (len(tokens), 1))
    return TrainSequence(
        prompt_mask=[True] * prompt + [False] * answer,
        tokens=tokens,
        logprobs=[0.0] * prompt + [_RANDOM_LOGPROB] * answer,
        advantages=[0.0] * prompt + [advantage] * answer,
        returns=zeros,
        values=zeros,
        ref_logprobs=zeros,
        teacher_top=(listed, np.full(listed.shape, -math.log(2 * n_recorded))) if n_recorded else None,
        staleness=1,  # engine.exact compares the log-probabilities of newer rows with the rollout
    )


def _n_recorded_tokens(engine: Engine, config: PolicyExperimentConfig) -> int:
    return min(config.actor.n_recorded_tokens, engine.info.vocab_size)


def _draw_length(draw: random.Random, mean: int) -> int:
    """Draw a length uniformly from 1 to 2 * mean - 1."""
    return draw.randint(1, 2 * mean - 1)


def _largest_in_time(most: int, seconds: Callable[[int], float], limit_s: float) -> int:
    """Return the largest of `most`, `most` / 2, `most` / 4, ... that is expected to take at most `limit_s`."""
    while most > 1 and seconds(most) > limit_s:
        most //= 2
    return max(1, most)


def _warm_up(engine: Engine, config: PolicyExperimentConfig) -> None:
    row = _synthetic_row(_WARM_UP_TOKENS, [1] * 2 * _WARM_UP_TOKENS, 1.0, _n_recorded_tokens(engine, config))
    rows, spec = [row] * engine.spec.layout.n_data_parallel_groups, MicroBatchSpec(mini_bs=1)
    how = {"divergence": config.divergence, "differentiates_entropy": config.actor.differentiates_entropy}
    engine.train(rows, _loss_fn(config.divergence), UpdateSpec(spec, **how))
    if isinstance(config, CriticExperimentConfig):
        engine.train(rows, value_loss_fn, UpdateSpec(spec), "critic")
    engine.synchronize()
