"""Chooses settings of memory and speed by a trial before a run, see the section `tune` of the settings.

`areno/plan/tuning_candidates.py` lists candidates from a forecast. `choose` tries the best ones in worker processes of
their own, with random weights and made-up rows, and ends these processes before it returns. The chosen settings are
written to tuned.yaml in the folder of the run. A resumed run takes them from its folder, and is not tuned again.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from areno.config.experiments import ExperimentConfig
from areno.config.models import MicroBatchSpec
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.config.rollout import DecoderConfig
from areno.config.teacher import Divergence
from areno.cost.footprint import GIB, gib
from areno.engine.engine import Engine
from areno.errors import ConfigError, EngineError, Problem
from areno.files.durable import atomic_write_text
from areno.loss_fns import distillation_loss_fn, gspo_loss_fn, value_loss_fn
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import Hardware, devices_here, this_cpu
from areno.plan.lr_schedule import with_schedules
from areno.plan.phases import Phase
from areno.plan.plan import TrainerPlan, plan_of_experiment, sampling_params
from areno.plan.roles import experiment_roles, with_common_ids
from areno.plan.settings_that_fit import set_values, shown
from areno.plan.tuning_candidates import (
    AT_ONCE,
    BATCH,
    CHOSEN,
    Candidate,
    Limits,
    candidates,
    given_settings,
    nothing_fits,
    shortlist,
)
from areno.schema.fields import changed
from areno.schema.values import value_at
from areno.specs.engine import EngineSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.tracking.run_folder import TUNED, folder_of, is_described, settings_of
from areno.types import GenerationRequest, TrainSequence

logger = logging.getLogger("areno")

LIMIT_S = 90.0
"""Seconds of all trials together. No trial begins whose expected end is later."""
_START_S = {True: 25.0, False: 8.0}  # expected time to start an engine on a GPU, and on a CPU, before one was measured
_PREFILL_S, _ROLLOUT_S, _TRAIN_S = 1.0, 3.0, 4.0  # expected times of a trial's parts, to which its work is limited
_WARM_UP_TOKENS, _RANDOM_LOGPROB = 8, -10.0  # tokens of a prompt, and of an answer; a log-probability


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a trial."""

    step_s: float  # of a whole step: the forecast times the ratio of measured to predicted time
    peak: int  # of a device's memory in bytes, with the CUDA context
    seconds: float  # duration of the trial


def tune(config: ExperimentConfig, given: Collection[str], reuse: str = "") -> str | None:
    """Choose the settings of a new run that the user has not given, if tune.enabled is true, and set them in `config`.

    Returns the content of tuned.yaml, based on the task `reuse` so that it can be given as --config-name, or None if
    nothing was chosen. `given` has dotted names of settings. Raises EngineError if each trial has failed.
    """
    if not isinstance(config, PolicyExperimentConfig) or not config.tune.enabled:
        return None
    began = time.monotonic()
    chosen = choose(config, given_settings(given))
    if not chosen:
        logger.info("tune: no setting is left to choose, so that nothing is tried")
        return None
    if BATCH in chosen:
        text = "tune: %s=%d is chosen, since it was not given; unlike the other settings, it changes what is learned"
        logger.info(text, BATCH, chosen[BATCH])
    set_values(config, chosen)
    logger.info("tune: in %.0f s, chosen: %s", time.monotonic() - began, shown(chosen))
    return _tuned_yaml(chosen, reuse)


def _tuned_yaml(chosen: Mapping[str, Any], base: str) -> str:
    nested = OmegaConf.create({"defaults": [base or "recipe", "_self_"]})
    for key, value in chosen.items():
        OmegaConf.update(nested, key, value)
    lines = [
        "# Settings of memory and speed that tune.enabled=true has chosen. To start another run with them, add",
        f"#   {shown(chosen)}",
        f"# or name the folder of this file: --config-dir=FOLDER --config-name={Path(TUNED).stem}",
    ]
    return "\n".join([*lines, OmegaConf.to_yaml(nested)])


def restore(config: ExperimentConfig, folder: Path, given: Collection[str] = ()) -> None:
    """Set the settings that were chosen before an earlier process of a run, unless the user gives others now.

    They are set even if tune.enabled is now false, because the run continues with the settings that it began with.
    """
    if not isinstance(config, PolicyExperimentConfig):  # another algorithm, with which the run cannot be resumed
        return
    before, kept = settings_of(folder, TUNED), given_settings(given)
    found = {key: value_at(before, key) for key in CHOSEN if key not in kept}
    set_values(config, {key: value for key, value in found.items() if value is not None})


def tune_for_script(config: ExperimentConfig, run_dir: str | Path | None) -> str | None:
    """Tune a run that a script starts, or restore the settings of the run that it resumes.

    Settings that differ from their defaults count as given. Does nothing if a command has tuned the run before.
    """
    if run_dir is not None and is_described(Path(run_dir)):
        return None
    given = [key for key, _ in changed(config)]
    folder = folder_of(config, config.trial_name) if run_dir is None and config.trial_name else run_dir
    if folder is not None and (Path(folder) / TUNED).exists():
        restore(config, Path(folder), given)
        return None
    return tune(config, given)


def write(folder: Path, text: str | None) -> None:
    if text is None:
        return
    try:
        atomic_write_text(folder / TUNED, text)
    except OSError as error:
        raise ConfigError(Problem("cluster.fileroot", "cannot write to {}: {}", folder, error.strerror)) from error


def choose(config: PolicyExperimentConfig, given: Collection[str]) -> dict[str, Any]:
    """Try the best candidates for a run, and return the settings of the fastest one that fits."""
    plan = plan_of_experiment(config)
    hardware, n_devices = _hardware(plan.spec), len(plan.spec.devices)
    found = candidates(config, hardware, n_devices, given)
    if not found[0].settings:
        return {}
    most = int(config.tune.mem_frac * hardware.memory)
    fitting: list[tuple[Candidate, Measured]] = []
    least: int | None = None  # peak of a candidate that is too large
    error: EngineError | None = None
    with Trials(plan, probes_rollout=AT_ONCE not in given) as trials:
        smallest = min(found, key=lambda candidate: candidate.peak)
        for number, candidate in enumerate([*(tried := shortlist(found)), smallest]):
            is_last_resort = number == len(tried)
            if number and (not trials.may_begin(candidate) or (is_last_resort and fitting)):
                break
            try:
                measured = trials.run(candidate)
            except EngineError as failure:
                error = failure
                logger.warning("tune: %s: discarded, %s", candidate, str(failure).partition("\n")[0])
                continue
            is_too_large = f"; discarded, more than {gib(most)} GiB" if measured.peak > most else ""
            logger.info("tune: %s: %s%s", candidate, _predicted_and_measured(candidate, measured), is_too_large)
            if is_too_large:
                least = min(measured.peak, least or measured.peak)
            else:
                fitting.append((candidate, measured))
    if fitting:
        best, _ = min(fitting, key=lambda result: (-result[0].n_rows, result[0].price(result[1].step_s)))
        return dict(best.settings)
    if least is None and error is not None:
        raise error
    raise nothing_fits(config, hardware, n_devices, least)


def _predicted_and_measured(candidate: Candidate, measured: Measured) -> str:
    return (
        f"{candidate.usual.seconds:.2f} s a step predicted, {measured.step_s:.2f} s measured; "
        f"{gib(candidate.peak)} GiB predicted, {gib(measured.peak)} GiB measured"
    )


def _hardware(spec: EngineSpec) -> Hardware:
    """Return the device that each worker of an engine has. The memory of a CPU is divided by the number of workers."""
    if spec.devices[0].startswith("cuda"):
        here = devices_here()[0]
        if not here.is_cuda:
            text = "needs the command nvidia-smi, which is not there or finds no GPU; set it to false"
            raise ConfigError(Problem("tune.enabled", text))
        return here
    cpu = this_cpu()
    return replace(cpu, memory=cpu.memory // spec.world_size)


class Trials(AbstractContextManager["Trials"]):
    """Tries candidates in an engine, which is started again if a candidate needs another one or has failed.

    If `probes_rollout` is false, only the KV cache is made, and no samples are decoded.
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

    def may_begin(self, candidate: Candidate) -> bool:
        """Return whether the trial of a candidate is expected to end within the time limit."""
        starts = self._engine is None or self._recomputes != candidate.config.actor.gradient_checkpointing
        expected = (self._longest_s or 2 * (_ROLLOUT_S + _TRAIN_S)) + (self._start_s if starts else 0.0)
        return time.monotonic() - self._began + expected <= LIMIT_S

    def run(self, candidate: Candidate) -> Measured:
        """Run the phases of a step with a candidate's settings, on a part of its work. An error closes the engine."""
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
        return Measured(step_s=step_s, peak=peak, seconds=time.monotonic() - began)

    def _engine_for(self, config: PolicyExperimentConfig) -> Engine:
        recomputes = config.actor.gradient_checkpointing
        if self._engine is not None and recomputes == self._recomputes:
            return self._engine
        self._close()
        began = time.monotonic()
        plan, roles = with_schedules(config, self._plan, with_common_ids(experiment_roles(config), self._plan), 1000)
        spec = plan.spec
        actor = replace(spec.actor, gradient_checkpointing=recomputes)
        if actor.lora is not None:
            actor = replace(actor, lora=replace(actor.lora, init_from=""))
        roles = {name: replace(role, path=role.path or actor.path) for name, role in roles.items()}
        spec = replace(spec, actor=actor, planned=roles, engine=replace(spec.engine, dummy_load=True))
        self._engine, self._recomputes = Engine(spec, "spawn"), recomputes
        self._is_new, self._cache_of = True, None
        self._engine.ensure_roles(roles)
        _warm_up(self._engine, config)
        self._start_s = time.monotonic() - began
        return self._engine


class _Trial:
    """The trial of one candidate.

    `rollouts` holds measured / predicted time of earlier rollouts by their settings, and is extended. None decodes
    nothing.
    """

    def __init__(
        self, engine: Engine, plan: TrainerPlan, candidate: Candidate, rollouts: dict[tuple[Any, ...], float] | None
    ):
        self.engine, self.plan, self.candidate, self._rollouts = engine, plan, candidate, rollouts
        self.config = candidate.config
        self._limits = Limits.of(self.config)
        self._draw = random.Random(self.config.seed)
        self.n_prompts = max(1, min(self.config.rows_per_step, self.config.tune.max_samples) // self._n_samples)
        self._peak = 0.0  # GiB
        self._is_cuda = candidate.usual.hardware.is_cuda
        assert plan.max_len is not None
        shared = plan.shared
        self.spec = RolloutSpec(
            max_running=self._at_once,
            max_len=plan.max_len,
            decoder=DecoderConfig.of(self.config.rollout),
            keeps_cache=not self.config.rollout.drop_rollout_state,
            shared=shared if shared is not None and shared.usual == self._at_once else None,
        )

    @property
    def _n_samples(self) -> int:
        return self.config.gconfig.n_samples

    def run(self, warm_up: bool) -> tuple[float, int]:
        """Return (seconds of a whole step, peak of memory in bytes). With `warm_up`, each phase on a GPU runs twice."""
        self.engine.peak_memory_gib()  # begins to record a new peak
        decodes = self._rollout()
        factors = {phase.name: decodes for phase in self.candidate.usual.phases if phase.decodes}
        # A judge that writes is not tried. Its decoder works like the actor's, with a cache of the planned size.
        peaks = [phase.peak / GIB for phase in self.candidate.full.phases if phase.decodes and phase.name != "rollout"]
        self._peak = max([self._peak, *peaks])
        rows, n_prompts = self._random_rows()
        predicted = {phase.name: phase for phase in self._predict(n_prompts).phases}
        for name, phase in predicted.items():
            if phase.decodes:
                continue
            if warm_up and self._is_cuda:
                self._run_phase(phase, rows)
            self.engine.wait()
            began = time.perf_counter()
            self._run_phase(phase, rows)
            self.engine.wait()
            factors[name] = (time.perf_counter() - began) / phase.seconds
            self._peak = max(self._peak, self.engine.peak_memory_gib())
        step_s = sum(phase.seconds * factors[phase.name] for phase in self.candidate.usual.phases)
        return step_s, int(self._peak * GIB) + self.candidate.usual.hardware.context_bytes

    def _predict(self, n_prompts: int, prompt: int | None = None, answer: int | None = None) -> Forecast:
        """Return the forecast for a part of a step's work. Lengths that are None are the usual ones."""
        usual, found = self._limits.usual, self.candidate.usual
        data = replace(self.config.train_dataset, batch_size=n_prompts)
        rollout = replace(self.config.rollout, max_concurrent_rollouts=self._at_once)
        n_minibatches = {"ppo_n_minibatches": 1}  # a part of the rows need not divide into the updates of a step
        config = replace(
            self.config, train_dataset=data, rollout=rollout, actor=replace(self.config.actor, **n_minibatches)
        )
        if isinstance(config, CriticExperimentConfig):
            config = replace(config, critic=replace(config.critic, **n_minibatches))
        return forecast(config, found.hardware, found.n_devices, prompt or usual.prompt, answer or usual.answer)

    @property
    def _at_once(self) -> int:
        return self.config.rollout.max_concurrent_rollouts or self.config.rows_per_step

    # -- rollout ---------------------------------------------------------------------------------------------------

    def _rollout(self) -> float:
        """Make the KV cache and decode samples, and return measured / predicted time. 1 if no samples are decoded.

        Long prompts and answers are shortened, so that the rollout takes seconds.
        """
        engine, drops = self.engine, not self.spec.keeps_cache
        key = (self._at_once, drops, self.n_prompts)
        known = 1.0 if self._rollouts is None else self._rollouts.get(key)
        engine.begin_rollout(self.spec)
        if known is None:
            assert self._rollouts is not None
            usual = self._limits.usual

            def predicted(prompt: int, answer: int) -> float:
                return self._predict(self.n_prompts, prompt, answer).phases[0].seconds

            prompt = _largest_within(usual.prompt, lambda n: predicted(n, 1), _PREFILL_S)
            answer = _largest_within(usual.answer, lambda n: predicted(prompt, n), _ROLLOUT_S)
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
        """Decode samples. Their lengths are drawn, with the given means, and are the same in each call."""
        lengths = random.Random(self.config.seed)
        params = replace(
            sampling_params(self.config.gconfig), ignore_eos=True, stop=None, stop_token_ids=None, min_new_tokens=0
        )
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
        """Return made-up rows of drawn lengths, one of them at the limits, and the number of their prompts.

        There are as many as train in a few seconds, and at least as many as fill a micro-batch of each device.
        """
        layout, usual = self.plan.spec.layout, self._limits.usual

        def passes(n_prompts: int) -> float:
            return sum(phase.seconds for phase in self._predict(n_prompts).phases if not phase.decodes)

        budgets = (phase.budget for phase in self.candidate.usual.phases if phase.budget is not None)
        fill = max(budgets, default=1) * layout.cp_size * layout.data_size
        least = -(-fill // (self._n_samples * (usual.prompt + usual.answer)))
        n_prompts = min(self.n_prompts, max(least, _largest_within(self.n_prompts, passes, _TRAIN_S)))
        lengths = [
            (_draw_length(self._draw, usual.prompt), _draw_length(self._draw, usual.answer))
            for _ in range(n_prompts * self._n_samples)
        ]
        lengths[0] = (self._limits.prompt, self._limits.answer)
        return [self._random_row(*pair, index) for index, pair in enumerate(lengths)], n_prompts

    def _random_row(self, prompt: int, answer: int, index: int) -> TrainSequence:
        n, advantage = prompt + answer, 1.0 if index % 2 else -1.0
        zeros = [0.0] * n
        return TrainSequence(
            prompt_mask=[True] * prompt + [False] * answer,
            tokens=self._random_tokens(n),
            logprobs=[0.0] * prompt + [_RANDOM_LOGPROB] * answer,
            advantages=[0.0] * prompt + [advantage] * answer,
            returns=zeros,
            values=zeros,
            ref_logprobs=zeros,
            staleness=1,  # engine.exact compares the log-probabilities of newer rows with the rollout
        )

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
        spec: MicroBatchSpec = section.mb_spec if accumulates is None else section.mb_spec.counted
        if spec.is_automatic:
            spec = MicroBatchSpec(max_tokens_per_mb=phase.budget)
        update = UpdateSpec(
            spec,
            gradient_accumulation_steps=accumulates,
            sampling=self.config.gconfig,
            old_logprobs=self.config.actor.old_logprobs if role == "actor" else "recompute",
            divergence=self.config.divergence if role == "actor" else None,
        )
        self.engine.train(rows, _loss_fn(update.divergence) if role == "actor" else value_loss_fn, update, role)


def _loss_fn(divergence: Divergence | None) -> Any:
    """Return a loss function of the actor whose passes compute what those of the run do."""
    loss_fn = partial(gspo_loss_fn, clip_eps=3e-4)
    return loss_fn if divergence is None else partial(distillation_loss_fn, policy_loss_fn=loss_fn)


def _draw_length(draw: random.Random, mean: int) -> int:
    """Draw a length uniformly, from 1 on."""
    return draw.randint(1, 2 * mean - 1)


def _largest_within(most: int, seconds: Callable[[int], float], limit_s: float) -> int:
    """Return the largest of `most`, `most` / 2, `most` / 4, ... whose expected time is within a limit, at least 1."""
    while most > 1 and seconds(most) > limit_s:
        most //= 2
    return max(1, most)


def _warm_up(engine: Engine, config: PolicyExperimentConfig) -> None:
    n = 2 * _WARM_UP_TOKENS
    row = TrainSequence(
        prompt_mask=[True] * _WARM_UP_TOKENS + [False] * _WARM_UP_TOKENS,
        tokens=[1] * n,
        logprobs=[_RANDOM_LOGPROB] * n,
        advantages=[1.0] * n,
        returns=[0.0] * n,
        values=[0.0] * n,
        staleness=1,
    )
    rows, spec = [row] * engine.spec.layout.data_size, MicroBatchSpec(mini_bs=1)
    engine.train(rows, _loss_fn(config.divergence), UpdateSpec(spec, divergence=config.divergence))
    if isinstance(config, CriticExperimentConfig):
        engine.train(rows, value_loss_fn, UpdateSpec(spec), "critic")
    engine.wait()
