"""The class Trainer: one policy with rollout, scoring, training and saving. The loops in areno/trainers use it."""

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
from areno.api.session import ProxySettings, RolloutSession, RolloutSteering, SessionState, request_seed, sequence_of
from areno.config.experiments import ExperimentConfig, LossFn
from areno.config.models import ROWS_COUNTED, MicroBatchSpec
from areno.config.rollout import DecoderConfig, SamplingConfig, sampling_at_temperature
from areno.config.teacher import Divergence
from areno.data.encode import encode_generation_prompt
from areno.data.loader import given_prompt_loader
from areno.engine.engine import Engine
from areno.engine.reports import EngineInfo
from areno.engine.requests import OnProgress
from areno.errors import ArenoError, CheckpointError, ConfigError, DataError, EngineError, Rename, keys_renamed
from areno.files.durable import as_checkpoint_error, atomic_write_folder
from areno.models.folder import is_replaceable
from areno.plan.argument_checks import (
    check_count,
    check_folder,
    check_positive,
    check_prompts,
    check_rows,
    check_sampling,
    check_token_rows,
    check_update,
)
from areno.plan.plan import TrainerPlan, plan_of_experiment
from areno.plan.sdk_arguments import Areno, ArenoConfig, argument_of, plan_of_arguments, read_arguments
from areno.plan.startup_log import log_memory_after, log_model
from areno.specs.role import RoleSpec
from areno.specs.update import OldLogprobs, UpdateSpec
from areno.tracking.console import RolloutProgress
from areno.tracking.run_log import RunLog
from areno.types import (
    GenerationOutput,
    GenerationRequest,
    ModelRole,
    PromptBatch,
    RolloutResult,
    RolloutSequence,
    SamplingParams,
    TokenValue,
    TrainSequence,
)

logger = logging.getLogger("areno")


class Trainer(contextlib.AbstractContextManager["Trainer"]):
    """One policy with its tokenizer and optimizer: rollout, scoring, training and saving.

    The Trainer can also load further models, such as a reference model, a critic or a reward model.

    The constructor only checks the arguments; `init()` loads the model. Draw samples inside a `rollout_session`, and
    make all other calls outside. A call at the wrong time raises EngineError. Use a Trainer as a context manager, or
    call close().

    Args:
        world_size: Number of ranks, one for each device.
        model_path: Local model folder or hub id.
        backend_type: areno.Areno, the default and only choice.
        custom_config: Further settings. None uses the defaults of ArenoConfig.
        metrics_log_dir: Folder for TensorBoard event files. None writes no event files.

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
        self._set_attributes(lambda: plan_of_arguments(settings), argument_of, settings.metrics_log_dir)

    @classmethod
    def from_config(cls, config: ExperimentConfig) -> Trainer:
        """Make a Trainer from an experiment's configuration. Call `init()` next.

        This method reads the model's config.json and the tokenizer, and loads no weights. The message of a ConfigError
        names the keys of settings.
        """
        return cls.from_plan(plan_of_experiment(config))

    @classmethod
    def from_plan(cls, plan: TrainerPlan, clock: Stopwatch | None = None) -> Trainer:
        """Make a Trainer from a plan, such as from `plan_of_experiment`. Call `init()` next.

        `clock` is the stopwatch of a training loop, which then records the metrics of its steps itself.
        """
        trainer = cls.__new__(cls)
        trainer._set_attributes(lambda: plan, None, None, clock)
        return trainer

    def _set_attributes(
        self,
        open_plan: Callable[[], TrainerPlan],
        rename: Rename | None,
        metrics_log_dir: str | None,
        clock: Stopwatch | None = None,
    ) -> None:
        """Set the attributes of a new Trainer.

        For error messages, `rename` maps the name of a setting to the name of the argument that a script passed.
        """
        self._open_plan, self._metrics_log_dir = open_plan, metrics_log_dir
        self._named = contextlib.nullcontext if rename is None else partial(keys_renamed, rename)
        self._engine: Engine | None = None
        self._closed = False
        self._resources = contextlib.ExitStack()
        self.clock = Stopwatch() if clock is None else clock
        self._steps = StepLog(self.clock) if clock is None else None
        self._rollouts = 0  # number of rollouts whose seed was None
        self.sampling = SamplingConfig()  # of the last rollout
        self.loss_mask_policy = LossMaskPolicy()  # of the last session that served agents

    def init(self) -> None:
        """Load the tokenizer, start the workers and load the model. Call this once, before anything else.

        Raises:
            ConfigError: An argument does not fit the model or the machine.
            CheckpointError: A path holds no model.
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
        self._engine, self._sessions = engine, SessionState(engine, plan)
        log_model(engine)

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The running engine."""
        self._refuse_closed()
        if self._engine is None:
            raise EngineError("this Trainer has no model yet; call init() first")
        return self._engine

    @property
    def info(self) -> EngineInfo:
        """Properties of the loaded model, such as vocab_size and context_len."""
        return self.engine.info

    def _engine_outside_rollout(self, what: str) -> Engine:
        """Return the engine. If a rollout session is open, raise an EngineError that quotes the method name `what`."""
        engine = self.engine
        self._sessions.require_no_session(what)
        return engine

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("this Trainer is closed; make a new one")

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model, an object of the transformers library."""
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
        """Yield the rows of a dataset once, in their order, as batches of encoded prompts.

        Args:
            dataset: A list of dictionaries, or any object with a length and indexing whose rows are dictionaries.
            batch_size: Number of prompts in a batch. The last batch may be smaller.
            max_prompt_tokens: Longest prompt in tokens, chat template included. Longer rows are skipped and counted.
            prompt_key: Name of the column with the prompt, a text or a list of chat messages.
            solutions_key: Name of the column with the reference answers. It may be absent.

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
        return loader.batches() if self._steps is None else self._steps.count_skipped_rows(loader)

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
        """Make a rollout session, an async or plain context manager. Samples can only be drawn inside a session.

        Args:
            sampling_params: Default sampling settings for agents' requests that set none.
            loss_mask_policy: Setting that selects the trained tokens of agents' trajectories. None uses the default
                LossMaskPolicy(). Only with proxy=True.
            max_running_prompts: Largest number of samples (not prompts) decoded at once, over all ranks. None uses the
                value set in ArenoConfig.
            timeout_s: Timeout of an agent's request, in seconds.
            proxy: Whether to serve the policy to agents at session.get_base_url(). The KV cache then has room for
                conversations of sampling_params.max_context_len tokens.
            seed: Seed of agents' requests. None derives a new seed for each session. The derived seeds are the same in
                every run of the script.
        """
        if loss_mask_policy is not None and not proxy:
            raise ArenoError("loss_mask_policy is for the trajectories of agents; leave it out with proxy=False")
        check_sampling(1, sampling_params, self.engine.info.vocab_size)
        check_positive("timeout_s", timeout_s)
        if max_running_prompts is not None:
            check_count("max_running_prompts", max_running_prompts)
        settings = None
        if proxy:
            seed = self._next_seed() if seed is None else seed
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
        """Sample `n_samples` completions of every prompt, a text or a list of chat messages.

        A text goes through the chat template, if the tokenizer has one. The other arguments and the result are those of
        `rollout_token_batch`.
        """
        tokenizer = self.get_tokenizer()
        self._sessions.require_open("rollout_batch")
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
        """Sample `n_samples` completions of every prompt, which is given as token ids.

        A sample depends on `seed`, the index of the prompt in the list, the index of the sample, the sampling settings
        and the weights. A sample does not depend on batching.

        Args:
            seed: Seed of the call. None derives a new seed for each call. The derived seeds are the same in every run
                of the script.
            on_progress: Called during the rollout with (finished samples, statistics of each rank). None logs the
                statistics every decode_progress_interval_s seconds.
            at_once: Largest number of prompts in progress at the same time. When a prompt is complete, the next prompt
                starts. None samples all at once.

        Returns:
            One result with `n_samples` sequences for each prompt, in the order of the prompts.
        """
        engine = self.engine
        session = self._sessions.require_open("rollout_token_batch")
        check_sampling(n_samples, sampling_params, engine.info.vocab_size)
        check_token_rows(prompt_tokens, "prompt_tokens", engine.info.vocab_size)
        if at_once is not None:
            check_count("at_once", at_once)
        seed = self._next_seed() if seed is None else seed
        check_count("seed", seed, least=None)
        report: Any = contextlib.nullcontext(on_progress)
        if on_progress is None:
            copies, interval_s = engine.spec.layout.dp_size, self._plan.progress_interval_s
            report = RolloutProgress("rollout", len(prompt_tokens), n_samples, copies, interval_s=interval_s)
        with self._named(), self.clock.phase("rollout"), report as say:
            results = session.generate(prompt_tokens, n_samples, sampling_params, seed, say, at_once)
        self.sampling = sampling_params
        return results

    def rollout_until(
        self, requests: Sequence[GenerationRequest], progress: RolloutSteering, n_steps: int | None = None
    ) -> list[GenerationOutput]:
        """Sample requests until enough samples have finished, and stop the other samples.

        A later call can continue the stopped samples, with the weights that the policy has then.

        Args:
            requests: The requests, the oldest first. Their fields `begun` may have tokens of earlier calls.
            progress: Called at first without samples, then with (newly finished samples, statistics of each rank).
                Returns (number of further samples that must finish before the next call, further requests). The number
                0 ends the rollout.
            n_steps: Largest number of decoding steps between two calls of `progress`. None chooses a number.

        Returns:
            The outputs of the stopped samples with their tokens so far. Their finish_reason is None, unless they
            finished in the last step. `areno.engine.requests.continuation_requests` makes the requests that continue
            them.
        """
        session = self._sessions.require_open("rollout_until")
        with self._named(), self.clock.phase("rollout"):
            return session.generate_until(requests, progress, n_steps)

    def _next_seed(self) -> int:
        """Derive a new seed for a rollout whose seed is None. Every run of the script derives the same seeds."""
        self._rollouts += 1
        return self.engine.spec.seed * 1_000_003 + self._rollouts

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self,
        batch_data: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | None = None,
        gradient_accumulation_steps: int | None = None,
        *,
        mb_spec: MicroBatchSpec | None = None,
        n_minibatches: int = 1,
        temperature: float | None = None,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        rows_per_unit: int = 1,
        old_logprobs: OldLogprobs = "recompute",
        divergence: Divergence | None = None,
        differentiates_entropy: bool = False,
    ) -> dict[str, float]:
        """Train the policy on rows. By default, take one optimizer step.

        By default, importance ratios divide by the probabilities under the policy before the first training call on a
        row. That call stores the log-probabilities in `TrainSequence.old_logprobs`, and later calls on the row reuse
        them. In the first update on a row, all ratios are therefore exactly 1.

        Args:
            batch_data: Rows to train on.
            loss_fn: Loss function (pack, logprobs) -> (loss, statistics), from areno.loss_fns or defined by the script.
            mini_bs: Number of rows in a micro-batch (one forward pass), unless mb_spec or ArenoConfig.runtime sets the
                size. Results do not depend on this number. None lets the engine choose a number of tokens that suits
                the models and the device. With gradient_accumulation_steps, None means 16 rows.
            gradient_accumulation_steps: Number of micro-batches in each optimizer step. None with n_minibatches=1 takes
                one step on all rows.
            mb_spec: Size of micro-batches, which replaces mini_bs.
            n_minibatches: Number of optimizer steps. The rows are shuffled with `seed` and split into this many parts,
                one for each step. Set at most one of n_minibatches and gradient_accumulation_steps.
            temperature: Temperature that the rows were sampled with. If given, `sampling` is ignored.
            sampling: Settings that the rows were sampled with. If this and `temperature` are None, the settings of this
                Trainer's last rollout are used.
            rows_per_unit: Number of adjacent rows that stay in one micro-batch, such as 2 for DPO.
            old_logprobs: Which log-probabilities importance ratios divide by. "recompute" takes those before the first
                training call, as described above. With several optimizer steps, this usually costs an additional
                forward pass over the rows. "loglinear" does the same in the first step, and in later steps the loss
                interpolates the log-probabilities. "rollout" takes the log-probabilities of the rollout. Only
                "recompute" stores log-probabilities in the rows.
            divergence: Divergence from a teacher that the loss function reads as `pack.divergence`, see
                docs/distillation.md. The teacher is a role that ensure_roles has loaded, or the rows list its
                log-probabilities in `TrainSequence.teacher_top`. None computes no divergence.
            differentiates_entropy: Whether `pack.entropy` has a gradient, for a loss with an entropy bonus. This takes
                about as much time and memory of the LM head as a divergence. Not together with `divergence`.

        Returns:
            Statistics by name. docs/sdk.md lists them.

        Raises:
            DataError: A row has the wrong form.
            EngineError: Memory ran out, or the loss function returned no loss.
        """
        sampling = self._sampling_config(temperature, sampling)
        accumulates = gradient_accumulation_steps is not None
        how = (
            self._resolve_micro_batch_spec(mini_bs, mb_spec, accumulates),
            n_minibatches,
            gradient_accumulation_steps,
            sampling,
        )
        more = {"rows_per_unit": rows_per_unit, "old_logprobs": old_logprobs, "divergence": divergence}
        more["differentiates_entropy"] = differentiates_entropy
        update = UpdateSpec(*how, seed=seed, **more)
        return self._run_training("actor", batch_data, loss_fn, update)

    def train_values(
        self,
        role: str,
        batch_data: Sequence[TrainSequence],
        mini_bs: int | None = None,
        gradient_accumulation_steps: int | None = None,
        *,
        cliprange_value: float = 0.5,
        value_loss_coef: float = 0.5,
        mb_spec: MicroBatchSpec | None = None,
        n_minibatches: int = 1,
        seed: int = 0,
    ) -> dict[str, float]:
        """Train a critic on the `returns` of rows. By default, take one optimizer step.

        The arguments that are not listed are those of `train`.

        Args:
            role: Name of a trainable role with a value head, such as "critic".
            batch_data: Rows with `returns` and `values`.
            cliprange_value: Clip range of the PPO value loss. Predicted values are clipped to within this distance of
                the row's `values`.
            value_loss_coef: Factor on the loss.

        Returns:
            Statistics by name. The Trainer records them as train/<role>_*.
        """
        from areno.loss_fns.ppo import value_loss_fn

        if role == "actor":
            raise EngineError("train_values is for a role with values, such as a critic; the actor is trained by train")
        check_positive("cliprange_value", cliprange_value)
        check_positive("value_loss_coef", value_loss_coef)
        loss_fn = partial(value_loss_fn, cliprange_value=cliprange_value, value_loss_coef=value_loss_coef)
        mb_spec = self._resolve_micro_batch_spec(mini_bs, mb_spec, gradient_accumulation_steps is not None)
        update = UpdateSpec(mb_spec, n_minibatches, gradient_accumulation_steps, seed=seed)
        return self._run_training(role, batch_data, loss_fn, update)

    def _sampling_config(self, temperature: float | None, sampling: SamplingConfig | None) -> SamplingConfig:
        return sampling_at_temperature(temperature) if temperature is not None else sampling or self.sampling

    def _resolve_micro_batch_spec(
        self, mini_bs: int | None, mb_spec: MicroBatchSpec | None, accumulates: bool
    ) -> MicroBatchSpec:
        """Return `mb_spec` or, if it is None, the spec of `mini_bs` and the engine's max_tokens_per_mb.

        If neither sets a size, the engine chooses it. If `accumulates` (gradient accumulation is set), the size is then
        ROWS_COUNTED rows.
        """
        if mb_spec is not None:
            return mb_spec
        budget = self.engine.spec.mb_spec.max_tokens_per_mb
        mini_bs = ROWS_COUNTED if mini_bs is None and budget is None and accumulates else mini_bs
        return MicroBatchSpec(mini_bs=mini_bs, max_tokens_per_mb=budget)

    def _run_training(
        self, role: str, rows: Sequence[TrainSequence], loss_fn: LossFn, update: UpdateSpec
    ) -> dict[str, float]:
        check_update(update, loss_fn)
        engine = self._engine_outside_rollout("train" if role == "actor" else "train_values")
        check_rows(rows)
        with self._named():
            with self.clock.phase("train" if role == "actor" else f"train_{role}"):
                stats = engine.train(rows, loss_fn, update, role, "batch_data[{}]")
            if self._steps is not None and not stats["response_len"]:
                logger.warning("no row of batch_data has a trained token, so the update was skipped (skipped_steps)")
            return stats if self._steps is None else self._steps.record_training_call(role, rows, stats)

    # -- further models --------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, ModelRole | RoleSpec]) -> None:
        """Load further models, such as a reference model or a critic, unless they are loaded already.

        A model that is loaded already keeps its trained weights. `roles` maps a role, such as "ref", to its model and
        settings. docs/sdk.md lists the roles. Raises EngineError if a role is loaded with other settings: release it
        first.
        """
        from areno.plan.roles import script_roles
        from areno.plan.vocabularies import complete_roles

        engine = self._engine_outside_rollout("ensure_roles")
        with self._named(), log_memory_after(engine):
            engine.ensure_roles(complete_roles(script_roles(roles, engine.spec.actor), self._plan))

    def release_role(self, role: str) -> None:
        """Unload the model of a role that ensure_roles loaded, and free its memory."""
        self._engine_outside_rollout("release_role").release_role(role)

    def score_logprobs(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        temperature: float | None = None,
        *,
        sampling: SamplingConfig | None = None,
        mb_spec: MicroBatchSpec | None = None,
        routes: Sequence[Any] | None = None,
        prompt_masks: Sequence[Any] | None = None,
        value: TokenValue = "logprob",
    ) -> list[list[float]]:
        """Compute the log-probability of every token given the earlier tokens of its row.

        Args:
            role: Name of a role with a language-model head, such as "actor" or "ref".
            temperature: Temperature of the distribution, softmax(logits / temperature). If given, `sampling` is
                ignored.
            sampling: Settings that the rows were sampled with. If this and `temperature` are None, the settings of this
                Trainer's last rollout are used.
            mb_spec: Size of micro-batches. None uses the size set in ArenoConfig.
            routes: Experts that the rollout chose (RolloutSequence.routes) for each row, for an actor with routing
                replay. None lets the router choose the experts.
            prompt_masks: For each row, True for each token whose log-probability is not needed, as in
                TrainSequence.prompt_mask. The logits of these tokens are not computed. None computes all.
            value: What to return of each token, see `areno.types.TokenValue`.

        Returns:
            For each row, one value per token, 0.0 for the first token and for masked tokens.
        """
        sampling = self._sampling_config(temperature, sampling)
        score = partial(self.engine.logprobs, routes=routes, prompt_masks=prompt_masks, value=value)
        scored = self._run_scoring("score_logprobs", score, role, token_rows, sampling, mb_spec)
        return [row.tolist() for row in scored]

    def score_values(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[list[float]]:
        """Compute the value that the critic of a role predicts before every token, 0.0 for the first token."""
        return [
            row.tolist() for row in self._run_scoring("score_values", self.engine.values, role, token_rows, mb_spec)
        ]

    def score_rewards(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[float]:
        """Compute the score of a reward model, such as the role "reward", at the last token of every row."""
        return self._run_scoring("score_rewards", self.engine.rewards, role, token_rows, mb_spec)

    def score_steps(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        step_ends: Sequence[Sequence[int]],
        *,
        mb_spec: MicroBatchSpec | None = None,
    ) -> list[list[float]]:
        """Compute the probability, from 0 to 1, that each step is right, with a process reward model such as "reward".

        Args:
            step_ends: For each row, the index of the last token of each step. A step includes the separator after it.
        """
        if len(step_ends) != len(token_rows):
            raise DataError(f"step_ends has {len(step_ends)} lists for {len(token_rows)} rows")
        scored = self._run_scoring("score_steps", self.engine.step_probabilities, role, token_rows, mb_spec)
        for number, (row, ends) in enumerate(zip(scored, step_ends, strict=True)):
            if wrong := [end for end in ends if not 0 <= end < len(row)]:
                raise DataError(f"step_ends[{number}] has {wrong[0]}, but row {number} has {len(row)} tokens")
        return [[float(row[end]) for end in ends] for row, ends in zip(scored, step_ends, strict=True)]

    def complete(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        sampling_params: SamplingParams,
        *,
        grammar: str | None = None,
        seed: int = 0,
    ) -> list[RolloutSequence]:
        """Sample one completion of every row with the model of a role, such as a judge.

        The model decodes with a KV cache of its own, which takes free memory and is freed afterwards. The settings of
        the cache are those of rollouts.

        Args:
            role: Name of a role with a language-model head, such as "judge".
            token_rows: Token ids of each row, by the tokenizer of the role.
            grammar: Grammar that each completion follows, in the syntax of llguidance. None samples freely.

        Raises:
            GrammarError: The grammar cannot be compiled.
        """
        check_sampling(1, sampling_params)
        check_count("seed", seed, least=None)
        if grammar is not None and not isinstance(grammar, str):
            raise ConfigError(f"grammar: is {grammar!r}; the text of a grammar or None is expected")
        rollout, engine = self._plan.rollout, self.engine

        def complete_rows(role: str, rows: Sequence[Sequence[int]]) -> list[list[GenerationOutput]]:
            requests = [
                GenerationRequest(
                    request_id=index,
                    prompt=row,  # type: ignore[arg-type]  # the engine reads it
                    params=sampling_params,
                    seed=request_seed(seed, index),
                    grammar=grammar,
                )
                for index, row in enumerate(rows)
            ]
            return engine.complete(role, requests, DecoderConfig.of(rollout), rollout.max_concurrent_rollouts)

        return [sequence_of(output) for [output] in self._run_scoring("complete", complete_rows, role, token_rows)]

    def _run_scoring(
        self, what: str, score: Callable[..., list[Any]], role: str, rows: Any, *settings: Any
    ) -> list[Any]:
        """Check that no rollout session is open and that `rows` are valid, and call `score(role, rows, *settings)`."""
        self._sessions.require_no_session(what)
        check_token_rows(rows, "token_rows", may_be_empty=True)
        if not rows:
            return []
        with self._named(), self.clock.phase("score"):
            return score(role, rows, *settings)

    # -- the end ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path, *, merge_adapters: bool = False) -> str:
        """Save the policy as a checkpoint folder in Hugging Face format, and return `path` as a string.

        The folder appears when it is complete. An existing checkpoint is replaced, even if the path is a link to it.

        Args:
            merge_adapters: Whether to merge LoRA adapters into the weights and save the whole model. If False, a policy
                with adapters saves only the adapters, in the format of peft.

        Raises:
            CheckpointError: The folder exists and is not a checkpoint, or cannot be written. No partial files remain.
        """
        self._engine_outside_rollout("save_checkpoint")
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
        """Write the model of a role into a folder in Hugging Face format, file by file.

        If writing fails, a partial checkpoint remains in the folder. To write either all files or none, use
        save_checkpoint.

        Args:
            background: If True, return as soon as the weights are copied to host memory, and write the files in the
                background. Then checkpoint_written tells when the files are complete.
            merge_adapters: Whether to merge LoRA adapters into the weights. If False, only the adapters are written.
        """
        engine = self._engine_outside_rollout("write_checkpoint")
        with self._named():
            engine.save(str(folder), role, background, merge_adapters)

    def checkpoint_written(self) -> bool:
        """Return whether the files of all calls of write_checkpoint with background=True are complete on disk.

        Raises CheckpointError if a checkpoint cannot be written.
        """
        with self._named():
            return self.engine.is_saved()

    def close(self) -> None:
        """End the worker processes, free the devices and close the metrics files. Further calls do nothing."""
        self._closed, self._engine = True, None
        self._resources.close()

    def __exit__(self, *exc: object) -> None:
        self.close()
