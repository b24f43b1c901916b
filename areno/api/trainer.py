"""Trainer: one policy and what can be done with it. The loops in trainers/ are written in its terms."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areno.agents.trajectories import LossMaskPolicy
from areno.api.metrics import MetricsRecorder, StepLog, Stopwatch
from areno.api.session import ProxySettings, RolloutSession, Sessions
from areno.config.experiments import ExperimentConfig, LossFn
from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig, at_temperature
from areno.data.encode import encode_generation_prompt
from areno.data.loader import given_prompt_loader
from areno.engine.engine import Engine, OnProgress
from areno.engine.spec import EngineInfo, OldLogprobs, RoleSpec, UpdateSpec
from areno.errors import ArenoError, CheckpointError, EngineError, Rename, keys_renamed
from areno.files.durable import as_checkpoint_error, atomic_write_folder
from areno.models.folder import is_replaceable
from areno.plan.arguments import (
    check_count,
    check_folder,
    check_positive,
    check_prompts,
    check_rows,
    check_sampling,
    check_token_rows,
    check_update,
)
from areno.plan.backend import Areno, ArenoConfig, argument_of, plan_of_arguments, read_arguments
from areno.plan.facts import memory_told, tell_model
from areno.plan.plan import TrainerPlan, plan_of_experiment
from areno.tracking.console import RolloutProgress
from areno.tracking.run_log import RunLog
from areno.types import ModelRole, PromptBatch, RolloutResult, SamplingParams, TrainSequence

logger = logging.getLogger("areno")


class Trainer(contextlib.AbstractContextManager["Trainer"]):
    """One policy with its tokenizer, its optimizer and the models beside it: rollout, scoring, training, saving.

    Construction only checks the arguments; `init()` loads the model. Samples are drawn inside `rollout_session`,
    everything else is called outside of one. Use as a context manager, or call close().

    world_size: ranks, one for each device. model_path: local folder or hub id. backend_type: areno.Areno, the default.
    custom_config: an ArenoConfig. metrics_log_dir: folder for TensorBoard event files; None writes none.
    """

    def __init__(
        self,
        world_size: int,
        model_path: str,
        backend_type: type[Areno] | None = None,
        custom_config: ArenoConfig | None = None,
        metrics_log_dir: str | None = None,
    ):
        settings = read_arguments(world_size, model_path, backend_type, custom_config, metrics_log_dir)
        self._begin(lambda: plan_of_arguments(settings), argument_of, settings.metrics_log_dir)

    @classmethod
    def from_config(cls, config: ExperimentConfig) -> Trainer:
        """The Trainer of an experiment's configuration, before init(). Its errors name the configuration's keys.

        Reads the model's config.json and the tokenizer. ConfigError names every setting that does not fit the model or
        the machine; CheckpointError for a folder that is no model.
        """
        return cls.from_plan(plan_of_experiment(config))

    @classmethod
    def from_plan(cls, plan: TrainerPlan, clock: Stopwatch | None = None) -> Trainer:
        """The Trainer of a plan, before init(). clock: of a loop, which then keeps the records of the steps itself."""
        trainer = cls.__new__(cls)
        trainer._begin(lambda: plan, None, None, clock)
        return trainer

    def _begin(
        self,
        open_plan: Callable[[], TrainerPlan],
        rename: Rename | None,
        metrics_log_dir: str | None,
        clock: Stopwatch | None = None,
    ) -> None:
        """rename: setting -> argument of the script, for errors; None keeps the settings."""
        self._open_plan, self._metrics_log_dir = open_plan, metrics_log_dir
        self._named = contextlib.nullcontext if rename is None else partial(keys_renamed, rename)
        self._engine: Engine | None = None
        self._closed = False
        self._resources = contextlib.ExitStack()
        self.clock = Stopwatch() if clock is None else clock
        self._steps = StepLog(self.clock) if clock is None else None
        self._rollouts = 0  # that chose their own seed
        self.sampling = SamplingConfig()  # of the last rollout
        self.loss_mask_policy = LossMaskPolicy()  # of the last session that served agents

    def init(self) -> None:
        """Load the tokenizer, start the workers and load the model. Call it once, before anything else.

        Raises ConfigError for what does not fit model or machine, CheckpointError for a path that is no model.
        """
        self._refuse_closed()
        if self._engine is not None:
            raise EngineError("init() was called before; call it once, and make a new Trainer for another model")
        self._resources.enter_context(RunLog())  # without it, a script that set up no logging would see nothing
        with self._named():
            if self._steps is not None and self._metrics_log_dir is not None:
                self._steps.recorder = self._resources.enter_context(MetricsRecorder(self._metrics_log_dir))
            self._plan = plan = self._open_plan()
            engine = self._resources.enter_context(Engine(plan.spec, plan.workers))
        self._engine, self._sessions = engine, Sessions(engine, plan)
        tell_model(engine)

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The running engine. EngineError before init() and after close()."""
        self._refuse_closed()
        if self._engine is None:
            raise EngineError("this Trainer has no model yet; call init() first")
        return self._engine

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self.engine.info

    def _outside_rollout(self, what: str) -> Engine:
        """The engine, for `what` has no place in a session. EngineError where one is open."""
        engine = self.engine
        self._sessions.refuse(what)
        return engine

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("this Trainer is closed; make a new one")

    def get_tokenizer(self) -> Any:
        """The tokenizer of the model."""
        _ = self.engine
        return self._plan.tokenizer

    def load_prompt_batches(
        self,
        dataset: Any,
        *,
        batch_size: int,
        max_prompt_tokens: int,
        prompt_key: str = "prompt",
        solutions_key: str = "solutions",
    ) -> Iterator[PromptBatch]:
        """One pass over a dataset, in its order, as batches of `batch_size` encoded prompts; the last may be smaller.

        dataset: anything with a length and indexing whose rows are dictionaries; row[prompt_key] is text or chat
        messages. Rows of more than `max_prompt_tokens` tokens, chat template included, are skipped and counted.
        Raises DataError naming the row.
        """
        check_count("batch_size", batch_size)
        check_count("max_prompt_tokens", max_prompt_tokens)
        loader = given_prompt_loader(
            dataset,
            self.get_tokenizer(),
            batch_size=batch_size,
            max_prompt_tokens=max_prompt_tokens,
            prompt_key=prompt_key,
            solutions_key=solutions_key,
            enable_thinking=self._plan.rollout.enable_thinking,
        )
        return loader.batches() if self._steps is None else self._steps.counting_skipped(loader)

    # -- rollout ---------------------------------------------------------------------------------------------------

    def rollout_session(
        self,
        *,
        sampling_params: SamplingParams,
        loss_mask_policy: LossMaskPolicy | None = None,
        max_running_prompts: int | None = None,
        timeout_s: float = 300.0,
        proxy: bool = True,
        seed: int | None = None,
    ) -> RolloutSession:
        """A rollout session, as an async or a plain context manager. Samples can only be drawn inside a session.

        sampling_params: defaults for requests that bring none of their own. max_running_prompts: samples decoded at
        once; None takes that of ArenoConfig. proxy: serve the policy to agents, at session.get_base_url(), with a cache
        for conversations of sampling_params.max_context_len tokens. loss_mask_policy: which tokens of their
        trajectories are trained. timeout_s: for a request of an agent. seed: of what is drawn for agents; None gives
        each session its own.
        """
        if loss_mask_policy is not None and not proxy:
            raise ArenoError("loss_mask_policy is for the trajectories of agents; leave it out with proxy=False")
        check_sampling(1, sampling_params, self.engine.info.vocab_size)
        check_positive("timeout_s", timeout_s)
        if max_running_prompts is not None:
            check_count("max_running_prompts", max_running_prompts)
        settings = None
        if proxy:
            seed = self._own_seed() if seed is None else seed
            settings = ProxySettings(params=sampling_params, timeout_s=timeout_s, seed=seed)
            self.sampling = sampling_params
            self.loss_mask_policy = loss_mask_policy or LossMaskPolicy()
        return RolloutSession(
            self._sessions, max_running_prompts or self._plan.rollout.max_concurrent_rollouts, settings
        )

    def rollout_batch(
        self,
        prompts: Sequence[str],
        n_samples: int,
        sampling_params: SamplingParams,
        *,
        seed: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[RolloutResult]:
        """Sample every prompt `n_samples` times. A text goes through the chat template where the tokenizer has one.

        A prompt may also be a list of chat messages. See rollout_token_batch for the rest.
        """
        tokenizer = self.get_tokenizer()
        self._sessions.need("rollout_batch")
        check_prompts(prompts)
        rows = [encode_generation_prompt(tokenizer, prompt, self._plan.rollout.enable_thinking) for prompt in prompts]
        return self.rollout_token_batch(rows, n_samples, sampling_params, seed=seed, on_progress=on_progress)

    def rollout_token_batch(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        n_samples: int,
        sampling_params: SamplingParams,
        *,
        seed: int | None = None,
        on_progress: OnProgress | None = None,
        at_once: int | None = None,
    ) -> list[RolloutResult]:
        """Sample every prompt `n_samples` times; results in prompt order. Raises EngineError outside a session.

        What is drawn depends on `seed`, the prompt's place in the list, the sample's number and the weights; not on
        batching. Without a seed each call has its own, and a script that is run again draws the same. on_progress:
        called with what finished and each rank's counters; None logs these every decode_progress_interval_s. at_once:
        prompts under way at the same time; when one is done, the next one follows. None: all of them.
        """
        engine = self.engine
        session = self._sessions.need("rollout_token_batch")
        check_sampling(n_samples, sampling_params, engine.info.vocab_size)
        check_token_rows(prompt_tokens, "prompt_tokens", engine.info.vocab_size)
        if at_once is not None:
            check_count("at_once", at_once)
        seed = self._own_seed() if seed is None else seed
        check_count("seed", seed, least=None)
        report: Any = contextlib.nullcontext(on_progress)
        if on_progress is None:
            copies, interval_s = engine.spec.layout.dp_size, self._plan.progress_interval_s
            report = RolloutProgress("rollout", len(prompt_tokens), n_samples, copies, interval_s=interval_s)
        with self._named(), self.clock.phase("rollout"), report as say:
            results = session.generate(prompt_tokens, n_samples, sampling_params, seed, say, at_once)
        self.sampling = sampling_params
        return results

    def _own_seed(self) -> int:
        """Of a rollout that was given none; a script that is run again gets the same."""
        self._rollouts += 1
        return self.engine.spec.seed * 1_000_003 + self._rollouts

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self,
        batch_data: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int = 8,
        gradient_accumulation_steps: int | None = None,
        *,
        mb_spec: MicroBatchSpec | None = None,
        n_minibatches: int = 1,
        temperature: float | None = None,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        rows_per_unit: int = 1,
        old_logprobs: OldLogprobs = "recompute",
    ) -> dict[str, float]:
        """Take optimizer steps of the policy on rows, one unless said otherwise.

        Importance ratios compare with the policy before the first call on a row, which leaves its log-probabilities in
        `TrainSequence.old_logprobs` for later calls. So the first update of a row has ratio exactly 1.

        Args:
            loss_fn: (pack, logprobs) -> (loss, stats), from areno.loss_fns or the script's own.
            mini_bs: Rows in a forward pass, unless mb_spec or ArenoConfig.runtime decides. Results do not depend on it.
            gradient_accumulation_steps: Forward passes of each optimizer step. None makes one step of all rows.
            n_minibatches: Number of steps, each on its part of the rows, which `seed` shuffles.
            temperature: Sampling temperature of the rows. None is the one of `sampling`.
            sampling: Settings that the rows were sampled with. None are those of this Trainer's last rollout.
            rows_per_unit: Number of adjacent rows that are never separated.
            old_logprobs: "recompute" as above; steps after the first of a call cost a scoring pass. "loglinear": the
                loss interpolates in these steps. "rollout": ratios compare with the rollout. Neither keeps any.

        Returns statistics by name (docs/sdk.md lists them). Raises DataError for rows of the wrong form.
        """
        sampling = self._sampling(temperature, sampling)
        how = (self._micro_batches(mini_bs, mb_spec), n_minibatches, gradient_accumulation_steps, sampling)
        update = UpdateSpec(*how, seed=seed, rows_per_unit=rows_per_unit, old_logprobs=old_logprobs)
        return self._train("actor", batch_data, loss_fn, update)

    def train_values(
        self,
        role: str,
        batch_data: Sequence[TrainSequence],
        mini_bs: int = 8,
        gradient_accumulation_steps: int | None = None,
        *,
        cliprange_value: float = 0.5,
        value_loss_coef: float = 0.5,
        mb_spec: MicroBatchSpec | None = None,
        n_minibatches: int = 1,
        seed: int = 0,
    ) -> dict[str, float]:
        """One optimizer step of a trainable role with values, such as a critic, on the `returns` of rows.

        cliprange_value: how far values may move from the rows' `values` and still be judged by where they are.
        value_loss_coef: factor on the loss. The rest is as in train(); statistics are recorded as train/<role>_*.
        """
        from areno.loss_fns.ppo import value_loss_fn

        if role == "actor":
            raise EngineError("train_values is for a role with values, such as a critic; the actor is trained by train")
        check_positive("cliprange_value", cliprange_value)
        check_positive("value_loss_coef", value_loss_coef)
        loss_fn = partial(value_loss_fn, cliprange_value=cliprange_value, value_loss_coef=value_loss_coef)
        mb_spec = self._micro_batches(mini_bs, mb_spec)
        update = UpdateSpec(mb_spec, n_minibatches, gradient_accumulation_steps, seed=seed)
        return self._train(role, batch_data, loss_fn, update)

    def _sampling(self, temperature: float | None, sampling: SamplingConfig | None) -> SamplingConfig:
        return at_temperature(temperature) if temperature is not None else sampling or self.sampling

    def _micro_batches(self, mini_bs: int, mb_spec: MicroBatchSpec | None) -> MicroBatchSpec:
        if mb_spec is not None:
            return mb_spec
        return MicroBatchSpec(mini_bs=mini_bs, max_tokens_per_mb=self.engine.spec.mb_spec.max_tokens_per_mb)

    def _train(self, role: str, rows: Sequence[TrainSequence], loss_fn: LossFn, update: UpdateSpec) -> dict[str, float]:
        check_update(update, loss_fn)
        engine = self._outside_rollout("train" if role == "actor" else "train_values")
        check_rows(rows)
        with self._named():
            with self.clock.phase("train" if role == "actor" else f"train_{role}"):
                stats = engine.train(rows, loss_fn, update, role, "batch_data[{}]")
            return stats if self._steps is None else self._steps.trained(role, rows, stats)

    # -- models beside the policy ----------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, ModelRole | RoleSpec]) -> None:
        """Load the models that are not there yet, by role name. What is there already stays, with its training.

        EngineError where a loaded role is asked for in another form; release it first. See docs/sdk.md for the names.
        """
        from areno.plan.plan import script_roles

        engine = self._outside_rollout("ensure_roles")
        with self._named(), memory_told(engine):
            engine.ensure_roles(script_roles(roles, engine.spec.actor))

    def release_role(self, role: str) -> None:
        """Free the memory of a role."""
        self._outside_rollout("release_role").release_role(role)

    def score_logprobs(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        temperature: float | None = None,
        *,
        sampling: SamplingConfig | None = None,
        mb_spec: MicroBatchSpec | None = None,
        routes: Sequence[Any] | None = None,
    ) -> list[list[float]]:
        """Return the log-probability of every token given the tokens before it, under the model of a role.

        Args:
            role: "actor", or a role with a language model, such as "ref".
            token_rows: Token ids of each row.
            temperature: Of softmax(logits / temperature). None is the one of `sampling`.
            sampling: Settings that the rows were sampled with. None are those of this Trainer's last rollout.
            mb_spec: Rows of one forward pass. None is the one of the engine.
            routes: RolloutSequence.routes of each row, for the actor.

        Returns:
            One list for each row, aligned with its tokens. The first entry is 0.0.

        Raises:
            ConfigError: The temperature is not a number that logits can be divided by.
        """
        sampling = self._sampling(temperature, sampling)
        score = partial(self.engine.logprobs, routes=routes)
        scored = self._score("score_logprobs", score, role, token_rows, sampling, mb_spec)
        return [row.tolist() for row in scored]

    def score_values(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[list[float]]:
        """A critic's value of the state before every token; the first of a row has 0.0."""
        return [row.tolist() for row in self._score("score_values", self.engine.values, role, token_rows, mb_spec)]

    def score_rewards(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[float]:
        """A reward model's score of every row, read at its last token."""
        return self._score("score_rewards", self.engine.rewards, role, token_rows, mb_spec)

    def _score(self, what: str, score: Callable[..., list[Any]], role: str, rows: Any, *settings: Any) -> list[Any]:
        self._sessions.refuse(what)
        check_token_rows(rows, "token_rows", may_be_empty=True)
        if not rows:
            return []
        with self._named(), self.clock.phase("score"):
            return score(role, rows, *settings)

    # -- the end ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path, *, merge_adapters: bool = False) -> str:
        """Write the policy as a Hugging Face folder and return its path.

        A checkpoint that is there is replaced, also where the path is a link to it. The folder appears when it is
        whole. CheckpointError, and nothing left behind, where that cannot be, and for a folder that is no checkpoint.
        With adapters it has only these, in the form of peft, or with merge_adapters the whole model with these in it.
        """
        _ = self.engine
        check_folder("path", path)
        final = Path(os.path.abspath(Path(path).expanduser()))
        if os.path.exists(final) and not is_replaceable(final):
            raise CheckpointError(f"{path} is there and is no checkpoint, so it is not replaced; choose another path")
        with as_checkpoint_error(final, "hold the checkpoint", "path"):
            atomic_write_folder(final, partial(self.write_checkpoint, merge_adapters=merge_adapters))
        logger.info("checkpoint saved: %s", path)
        return str(path)

    def write_checkpoint(
        self, folder: str | Path, role: str = "actor", background: bool = False, merge_adapters: bool = False
    ) -> None:
        """Write a role as a Hugging Face folder, file by file. save_checkpoint makes the folder appear whole.

        background: return as soon as a copy of the weights is in host memory; see checkpoint_written.
        """
        engine = self._outside_rollout("save_checkpoint")
        with self._named():
            engine.save(str(folder), role, background, merge_adapters)

    def checkpoint_written(self) -> bool:
        """Whether all that write_checkpoint began in the background is on the disk. CheckpointError if it cannot be."""
        with self._named():
            return self.engine.saved()

    def close(self) -> None:
        """Free the devices, end the workers, close the metrics. Calling it again does nothing."""
        self._closed, self._engine = True, None
        self._resources.close()

    def __exit__(self, *exc: object) -> None:
        self.close()
