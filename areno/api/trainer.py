"""Trainer: one policy with rollout, scoring, training and saving. The loops in trainers/ are written with it."""

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
from areno.plan.facts import log_memory_after, log_model
from areno.plan.plan import TrainerPlan, plan_of_experiment
from areno.tracking.console import RolloutProgress
from areno.tracking.run_log import RunLog
from areno.types import ModelRole, PromptBatch, RolloutResult, SamplingParams, TrainSequence

logger = logging.getLogger("areno")


class Trainer(contextlib.AbstractContextManager["Trainer"]):
    """One policy with its tokenizer, its optimizer and the models beside it: rollout, scoring, training, saving.

    The constructor only checks the arguments; `init()` loads the model. Draw samples inside a `rollout_session`, and
    make all other calls outside. Use a Trainer as a context manager, or call close().

    Args:
        world_size: Number of ranks, one for each device.
        model_path: Local model folder or hub id.
        backend_type: areno.Areno, the default and only choice.
        custom_config: Further settings.
        metrics_log_dir: Folder for TensorBoard event files. None writes none.

    Raises:
        ConfigError: An argument is invalid. All problems are reported together.
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
        """Make the Trainer of an experiment's configuration. Call `init()` next.

        Reads the model's config.json and the tokenizer.

        Raises:
            ConfigError: Settings do not fit the model or the machine. The message names their keys.
            CheckpointError: A folder holds no model.
        """
        return cls.from_plan(plan_of_experiment(config))

    @classmethod
    def from_plan(cls, plan: TrainerPlan, clock: Stopwatch | None = None) -> Trainer:
        """Make the Trainer of a plan. Call `init()` next.

        Args:
            plan: The plan.
            clock: Stopwatch of a loop that records its steps itself. None lets the Trainer record them.
        """
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
        """Set the state before `init()`. `rename` maps a setting to the argument of a script, for errors."""
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
        """Load the tokenizer, start the workers and load the model. Call this once, before anything else.

        Raises:
            ConfigError: An argument does not fit the model or the machine.
            CheckpointError: A path holds no model.
            EngineError: The Trainer is closed, or was initialised before.
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
        log_model(engine)

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
        """Facts about the loaded model."""
        return self.engine.info

    def _outside_rollout(self, what: str) -> Engine:
        """Return the engine for a call that is not allowed inside a session. EngineError if one is open."""
        engine = self.engine
        self._sessions.refuse(what)
        return engine

    def _refuse_closed(self) -> None:
        """Raise EngineError if the Trainer is closed."""
        if self._closed:
            raise EngineError("this Trainer is closed; make a new one")

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
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
        """Yield a dataset once, in its order, as batches of encoded prompts.

        Args:
            dataset: Any object with a length and indexing, whose rows are dictionaries.
            batch_size: Prompts in a batch. The last batch may be smaller.
            max_prompt_tokens: Longest prompt in tokens, chat template included. Longer rows are skipped and counted.
            prompt_key: Column of the prompt: a text or a list of chat messages.
            solutions_key: Column of the reference answers.

        Raises:
            DataError: A row is invalid. The message names the row.
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
        """Make a rollout session, an async or a plain context manager. Samples can only be drawn inside a session.

        Args:
            sampling_params: Defaults for requests without sampling settings.
            loss_mask_policy: Which tokens of agents' trajectories are trained.
            max_running_prompts: Most samples decoded at once. None takes the value of ArenoConfig.
            timeout_s: Longest time of an agent's request, in seconds.
            proxy: Serve the policy to agents at session.get_base_url(), with a KV cache for conversations of
                sampling_params.max_context_len tokens.
            seed: Seed of agents' requests. None gives each session its own.
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
        """Sample every prompt `n_samples` times.

        Args:
            prompts: Texts or lists of chat messages. A text goes through the chat template, if the tokenizer has one.
            n_samples: Samples of each prompt.
            sampling_params: Sampling settings.
            seed: See rollout_token_batch.
            on_progress: See rollout_token_batch.

        Returns:
            Results in the order of the prompts.

        Raises:
            EngineError: No session is open.
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
        """Sample every prompt `n_samples` times.

        A sample depends on `seed`, the position of the prompt in the list, the number of the sample and the weights. It
        does not depend on batching.

        Args:
            prompt_tokens: Token ids of each prompt.
            n_samples: Samples of each prompt.
            sampling_params: Sampling settings.
            seed: Seed of the call. None gives each call its own; a script that runs again draws the same samples.
            on_progress: Receives finished samples and the counters of each rank. None logs the counters every
                decode_progress_interval_s seconds.
            at_once: Most prompts in progress at the same time; when one is done, the next one starts. None for all.

        Returns:
            Results in the order of the prompts.

        Raises:
            EngineError: No session is open.
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
        """Return the seed of a rollout without one. A script that runs again gets the same seeds."""
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

        Importance ratios compare with the policy before the first call on a row. That call stores its log-probabilities
        in `TrainSequence.old_logprobs` for later calls. So the first update of a row has ratio exactly 1.

        Args:
            batch_data: Rows to train on.
            loss_fn: (pack, logprobs) -> (loss, stats), from areno.loss_fns or the script's own.
            mini_bs: Rows in a forward pass, unless mb_spec or ArenoConfig.runtime decides. Results do not depend on it.
            gradient_accumulation_steps: Forward passes of each optimizer step. None makes one step of all rows.
            mb_spec: Size of micro-batches, in place of mini_bs.
            n_minibatches: Number of steps, each on its part of the rows, which `seed` shuffles.
            temperature: Sampling temperature of the rows. None takes that of this Trainer's last rollout.
            sampling: Sampling settings of the rows, in place of temperature.
            seed: Seed of the shuffle.
            rows_per_unit: Number of adjacent rows that stay together.
            old_logprobs: "recompute" as above; steps after the first of a call cost a scoring pass. "loglinear": the
                loss interpolates in these steps. "rollout": ratios compare with the rollout. The last two store
                nothing.

        Returns:
            Statistics by name (docs/sdk.md lists them).

        Raises:
            DataError: A row has the wrong form.
            EngineError: A session is open, memory ran out, or the loss function returned no loss.
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
        """Take one optimizer step of a critic on the `returns` of rows.

        Args:
            role: A trainable role with values.
            batch_data: Rows with `returns` and `values`.
            mini_bs: See train.
            gradient_accumulation_steps: See train.
            cliprange_value: Largest move of a value from the row's `values` without clipping.
            value_loss_coef: Factor on the loss.
            mb_spec: See train.
            n_minibatches: See train.
            seed: See train.

        Returns:
            Statistics by name, recorded as train/<role>_*.
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
        """Return the size of micro-batches of a call."""
        if mb_spec is not None:
            return mb_spec
        return MicroBatchSpec(mini_bs=mini_bs, max_tokens_per_mb=self.engine.spec.mb_spec.max_tokens_per_mb)

    def _train(self, role: str, rows: Sequence[TrainSequence], loss_fn: LossFn, update: UpdateSpec) -> dict[str, float]:
        """Check the arguments of a training call, train, and record its statistics."""
        check_update(update, loss_fn)
        engine = self._outside_rollout("train" if role == "actor" else "train_values")
        check_rows(rows)
        with self._named():
            with self.clock.phase("train" if role == "actor" else f"train_{role}"):
                stats = engine.train(rows, loss_fn, update, role, "batch_data[{}]")
            return stats if self._steps is None else self._steps.trained(role, rows, stats)

    # -- models beside the policy ----------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, ModelRole | RoleSpec]) -> None:
        """Load the models that are not loaded yet, by role name. Loaded roles keep their training.

        Args:
            roles: Role name -> model. docs/sdk.md lists the names.

        Raises:
            EngineError: A loaded role is requested in another form; release it first.
        """
        from areno.plan.plan import script_roles

        engine = self._outside_rollout("ensure_roles")
        with self._named(), log_memory_after(engine):
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
        """Return the log-probability of every token given the tokens before it.

        Args:
            role: A role with a language-model head, such as "actor" or "ref".
            token_rows: Token ids of each row.
            temperature: Log-probabilities are those of softmax(logits / temperature). None takes that of this Trainer's
                last rollout.
            sampling: Sampling settings of the rows, in place of temperature.
            mb_spec: Size of micro-batches. None takes that of ArenoConfig.
            routes: For the actor, RolloutSequence.routes of each row.

        Returns:
            One number for each token, 0.0 for the first token of a row.
        """
        sampling = self._sampling(temperature, sampling)
        score = partial(self.engine.logprobs, routes=routes)
        scored = self._score("score_logprobs", score, role, token_rows, sampling, mb_spec)
        return [row.tolist() for row in scored]

    def score_values(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[list[float]]:
        """Return a critic's value of the state before every token, 0.0 for the first token of a row.

        Args:
            role: A role with values.
            token_rows: Token ids of each row.
            mb_spec: Size of micro-batches. None takes that of ArenoConfig.
        """
        return [row.tolist() for row in self._score("score_values", self.engine.values, role, token_rows, mb_spec)]

    def score_rewards(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[float]:
        """Return a reward model's score of every row, read at its last token.

        Args:
            role: A reward model.
            token_rows: Token ids of each row.
            mb_spec: Size of micro-batches. None takes that of ArenoConfig.
        """
        return self._score("score_rewards", self.engine.rewards, role, token_rows, mb_spec)

    def _score(self, what: str, score: Callable[..., list[Any]], role: str, rows: Any, *settings: Any) -> list[Any]:
        """Check the arguments of a scoring call, and score."""
        self._sessions.refuse(what)
        check_token_rows(rows, "token_rows", may_be_empty=True)
        if not rows:
            return []
        with self._named(), self.clock.phase("score"):
            return score(role, rows, *settings)

    # -- the end ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path, *, merge_adapters: bool = False) -> str:
        """Write the policy as a Hugging Face folder.

        The folder appears when it is complete. An existing checkpoint is replaced, even if the path is a link to it.

        Args:
            path: The folder.
            merge_adapters: Write the whole model with its adapters merged. Without it, a policy with adapters writes
                only the adapters, in the form of peft.

        Returns:
            The path.

        Raises:
            CheckpointError: The folder exists and is no checkpoint, or cannot be written. No partial files remain.
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
        """Write a role into a Hugging Face folder, file by file. save_checkpoint writes all or nothing.

        Args:
            folder: The folder.
            role: The role.
            background: Return when a copy of the weights is in host memory, see checkpoint_written.
            merge_adapters: See save_checkpoint.
        """
        engine = self._outside_rollout("save_checkpoint")
        with self._named():
            engine.save(str(folder), role, background, merge_adapters)

    def checkpoint_written(self) -> bool:
        """Return whether all checkpoints that write_checkpoint started in the background are on the disk.

        Raises:
            CheckpointError: One of them cannot be written.
        """
        with self._named():
            return self.engine.saved()

    def close(self) -> None:
        """Free the devices, end the workers, close the metrics. Further calls do nothing."""
        self._closed, self._engine = True, None
        self._resources.close()

    def __exit__(self, *exc: object) -> None:
        self.close()
