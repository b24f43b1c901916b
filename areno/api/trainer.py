"""Trainer: one policy and what can be done with it. The loops in trainers/ are written in its terms."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from areno.api.backend import Areno, ArenoConfig, in_arguments, read_arguments
from areno.api.batches import dataset_loader
from areno.api.chat import encode_generation_prompt
from areno.api.checks import (
    check_count,
    check_positive,
    check_prompts,
    check_rows,
    check_sampling,
    check_token_rows,
)
from areno.api.console import setup_logging
from areno.api.loop import RolloutProgress
from areno.api.metrics import MetricsRecorder
from areno.api.saver import explained, write_whole
from areno.api.session import RolloutSession, Sessions
from areno.api.step_log import StepLog
from areno.api.types import ModelRole, PromptBatch, RolloutResult
from areno.config.model_roles import MicroBatchSpec
from areno.engine.engine import Engine, OnProgress
from areno.engine.spec import EngineInfo, EngineSpec, RoleSpec, RolloutSpec
from areno.engine.types import SamplingParams, TrainSequence
from areno.errors import ArenoError, CheckpointError, ConfigError, EngineError, Problem
from areno.models.companions import GENERATION, TOKENIZER

logger = logging.getLogger("areno")

LossFn = Callable[..., Any]  # (pack: DataPack, logprobs or values: Tensor) -> (loss, stats), see areno.loss_fns


class Trainer:
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
        self._settings = read_arguments(world_size, model_path, backend_type, custom_config, metrics_log_dir)
        self._runtime = self._settings.custom_config.runtime
        self._wording: Callable[[], AbstractContextManager[None]] = in_arguments
        self._engine: Engine | None = None
        self._closed = False
        self._log = StepLog()
        self._rollouts = 0  # that chose their own seed
        self._temperature = 1.0  # of the last rollout

    @classmethod
    def from_spec(cls, spec: EngineSpec, tokenizer: Any, *, workers: str = "auto") -> Trainer:
        """A Trainer of an engine that a recipe describes: initialised, its errors naming the recipe's settings."""
        runtime = {"seed": spec.seed, "max_tokens_per_mb": spec.mb_spec.max_tokens_per_mb}
        config = ArenoConfig(tp_size=spec.tp_size, optimizer=spec.optimizer, runtime=runtime)
        trainer = cls(spec.world_size, spec.model_path, custom_config=config)
        trainer._wording = contextlib.nullcontext
        trainer._adopt(Engine(spec, workers), tokenizer)
        return trainer

    def init(self) -> None:
        """Load the tokenizer, start the workers and load the model. To be called once, before anything else.

        Raises ConfigError for what does not fit model or machine, CheckpointError for a path that is no model.
        """
        self._refuse_closed()
        if self._engine is not None:
            raise EngineError("init() was called before; call it once, and make a new Trainer for another model")
        if not logger.hasHandlers():  # a script that set up no logging would see nothing of what areno says
            setup_logging()
        with in_arguments():
            if self._settings.metrics_log_dir is not None:
                self._log.recorder = MetricsRecorder(self._settings.metrics_log_dir)
            self._adopt(*Areno(self._settings).start())

    def _adopt(self, engine: Engine, tokenizer: Any) -> None:
        from areno.kernels.attention import BACKENDS  # imports torch

        self._engine, self._tokenizer = engine, tokenizer
        self._sessions = Sessions(engine, self._runtime)
        info = engine.info
        logger.info(
            "model: %.1fM parameters, %s on %s, attention by %s", info.n_params / 1e6, info.dtype,
            ", ".join(engine.spec.devices), BACKENDS[info.attn_backend],
        )  # fmt: skip

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

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("this Trainer is closed; make a new one")

    def get_tokenizer(self) -> Any:
        """The tokenizer of the model."""
        _ = self.engine
        return self._tokenizer

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
        loader = dataset_loader(
            dataset,
            self.get_tokenizer(),
            batch_size=batch_size,
            max_prompt_tokens=max_prompt_tokens,
            prompt_key=prompt_key,
            solutions_key=solutions_key,
            enable_thinking=self._runtime.enable_thinking,
        )
        return self._log.counting_skipped(loader)

    # -- rollout ---------------------------------------------------------------------------------------------------

    def rollout_session(
        self,
        *,
        sampling_params: SamplingParams,
        loss_mask_policy: Any = None,
        max_running_prompts: int | None = None,
        timeout_s: float = 300.0,
        proxy: bool = True,
    ) -> RolloutSession:
        """The border of rollout, as an async context manager; rollouts are drawn inside of it, with proxy=False.

        sampling_params: defaults for requests that bring none of their own. max_running_prompts: samples decoded at
        once; None is that of ArenoConfig. proxy: serve the model to agents; not available yet, and loss_mask_policy
        and timeout_s, which are for agents, have no use without it.
        """
        _ = self.engine
        if proxy:
            raise ArenoError("the OpenAI-compatible proxy is not available yet; pass proxy=False and draw samples by "
                             "rollout_batch or rollout_token_batch")  # fmt: skip
        if loss_mask_policy is not None:
            raise ArenoError("loss_mask_policy is for the trajectories of agents; leave it out with proxy=False")
        check_sampling(1, sampling_params)
        running = self._settings.custom_config.max_running_prompts
        if max_running_prompts is not None:
            check_count("max_running_prompts", max_running_prompts)
            running = max_running_prompts
        return RolloutSession(self._sessions, max_running=running, drop=self._runtime.drop_rollout_state)

    def rollout_phase(self, spec: RolloutSpec, *, drop: bool = False) -> RolloutSession:
        """The session of a loop, a plain context manager: with a cache as `spec` says, freed at the end if `drop`."""
        _ = self.engine
        return RolloutSession(self._sessions, spec=spec, drop=drop)

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
        _ = self.engine
        self._sessions.need("rollout_batch")
        check_prompts(prompts)
        thinking = self._runtime.enable_thinking
        rows = [encode_generation_prompt(self._tokenizer, prompt, thinking) for prompt in prompts]
        return self.rollout_token_batch(rows, n_samples, sampling_params, seed=seed, on_progress=on_progress)

    def rollout_token_batch(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        n_samples: int,
        sampling_params: SamplingParams,
        *,
        seed: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[RolloutResult]:
        """Sample every prompt `n_samples` times; results in prompt order. Raises EngineError outside a session.

        What is drawn depends on `seed`, the prompt's place in the list, the sample's number and the weights; not on
        batching. Without a seed each call has its own, and a script that is run again draws the same. on_progress:
        called with what finished and each rank's counters; None logs these every decode_progress_interval_s.
        """
        engine = self.engine
        session = self._sessions.need("rollout_token_batch")
        check_sampling(n_samples, sampling_params)
        check_token_rows(prompt_tokens, "prompt_tokens", engine.info.vocab_size)
        if seed is not None:
            check_count("seed", seed, least=None)
        else:
            self._rollouts += 1
            seed = engine.spec.seed * 1_000_003 + self._rollouts
        report = contextlib.nullcontext(on_progress) if on_progress else self._progress(len(prompt_tokens), n_samples)
        with self._wording(), self._log.watch.phase("rollout"), report as say:
            results = session.generate(prompt_tokens, n_samples, sampling_params, seed, say)
        self._temperature = sampling_params.temperature or 1.0  # 0 is greedy, with log-probabilities at 1
        return results

    def _progress(self, n_prompts: int, n_samples: int) -> RolloutProgress:
        interval_s = self._settings.custom_config.decode_progress_interval_s
        return RolloutProgress("rollout", n_prompts, n_samples, self.engine.spec.dp_size, interval_s=interval_s)

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
        seed: int = 0,
        granularity: int = 1,
    ) -> dict[str, float]:
        """One optimizer step of the policy on rows, and its statistics (docs/sdk.md says what each of them is).

        loss_fn: (pack, logprobs) -> (loss, stats), from areno.loss_fns or the script's own. mini_bs: rows in a forward
        pass, where neither mb_spec nor the max_tokens_per_mb of ArenoConfig.runtime decides. The result does not depend
        on either. gradient_accumulation_steps: an optimizer step after each so many forward passes; None makes one
        step of all rows. n_minibatches: so many steps, each on its part of the rows, which `seed` shuffles.
        temperature: the one the rows were sampled at; None is that of this Trainer's last rollout. granularity: so
        many adjacent rows are never separated. Raises DataError for rows of the wrong form.
        """
        return self._train(
            "actor",
            batch_data,
            loss_fn,
            mini_bs=mini_bs,
            gradient_accumulation_steps=gradient_accumulation_steps,
            mb_spec=mb_spec,
            n_minibatches=n_minibatches,
            temperature=self._temperature if temperature is None else temperature,
            seed=seed,
            granularity=granularity,
        )

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
        from areno.loss_fns.value import value_loss_fn

        if role == "actor":
            raise EngineError("train_values is for a role with values, such as a critic; the actor is trained by train")
        check_positive("cliprange_value", cliprange_value)
        check_positive("value_loss_coef", value_loss_coef)
        return self._train(
            role,
            batch_data,
            partial(value_loss_fn, cliprange_value=cliprange_value, value_loss_coef=value_loss_coef),
            mini_bs=mini_bs,
            gradient_accumulation_steps=gradient_accumulation_steps,
            mb_spec=mb_spec,
            n_minibatches=n_minibatches,
            temperature=1.0,
            seed=seed,
            granularity=1,
        )

    def _train(
        self,
        role: str,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        *,
        mini_bs: int,
        gradient_accumulation_steps: int | None,
        mb_spec: MicroBatchSpec | None,
        n_minibatches: int,
        temperature: float,
        seed: int,
        granularity: int,
    ) -> dict[str, float]:
        engine = self.engine
        self._sessions.refuse("train" if role == "actor" else "train_values")
        check_rows(rows, engine.info.vocab_size, engine.info.context_len)
        check_count("n_minibatches", n_minibatches)
        check_count("granularity", granularity)
        check_count("seed", seed, least=0)
        check_positive("temperature", temperature)
        if gradient_accumulation_steps is not None:
            check_count("gradient_accumulation_steps", gradient_accumulation_steps)
        if n_minibatches > 1 and gradient_accumulation_steps is not None:
            both = f"is {n_minibatches}, and gradient_accumulation_steps is {gradient_accumulation_steps}"
            raise ConfigError([Problem("n_minibatches", f"{both}; both cut the rows into steps, give one of them")])
        if not callable(loss_fn):
            raise ConfigError([Problem("loss_fn", f"is a {type(loss_fn).__name__}; a function is expected")])
        if mb_spec is not None and not isinstance(mb_spec, MicroBatchSpec):
            raise ConfigError([Problem("mb_spec", f"is a {type(mb_spec).__name__}; a MicroBatchSpec is expected")])
        if mb_spec is None:
            budget = self._runtime.max_tokens_per_mb
            mb_spec = MicroBatchSpec(mini_bs=mini_bs, max_tokens_per_mb=budget)
        with self._wording():
            with self._log.watch.phase("train" if role == "actor" else f"train_{role}"):
                stats = engine.train(
                    rows,
                    loss_fn,
                    role=role,
                    mb_spec=mb_spec,
                    gradient_accumulation_steps=gradient_accumulation_steps,
                    n_minibatches=n_minibatches,
                    temperature=temperature,
                    seed=seed,
                    granularity=granularity,
                )
            return self._log.trained(role, rows, stats)

    # -- models beside the policy ----------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, ModelRole | RoleSpec]) -> None:
        """Load the models that are not there yet, by role name. What is there already stays, with its training.

        EngineError where a loaded role is asked for in another form; release it first. See docs/sdk.md for the names.
        """
        from areno.api.roles import role_specs

        engine = self.engine
        self._sessions.refuse("ensure_roles")
        with self._wording():
            engine.ensure_roles(role_specs(roles, engine.spec))

    def release_role(self, role: str) -> None:
        """Free the memory of a role."""
        engine = self.engine
        self._sessions.refuse("release_role")
        engine.release_role(role)

    def score_logprobs(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        temperature: float | None = None,
        *,
        mb_spec: MicroBatchSpec | None = None,
    ) -> list[list[float]]:
        """Log-probability of every token given those before it, under a role ("actor", "ref"); the first has 0.0.

        temperature: that of softmax(logits / temperature); None is the one of this Trainer's last rollout.
        """
        temperature = self._temperature if temperature is None else temperature
        check_positive("temperature", temperature)
        return self._score(
            "score_logprobs", token_rows, lambda engine: engine.logprobs(role, token_rows, temperature, mb_spec)
        )

    def score_values(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[list[float]]:
        """A critic's value of the state before every token; the first of a row has 0.0."""
        return self._score("score_values", token_rows, lambda engine: engine.values(role, token_rows, mb_spec))

    def score_rewards(
        self, role: str, token_rows: Sequence[Sequence[int]], *, mb_spec: MicroBatchSpec | None = None
    ) -> list[float]:
        """A reward model's score of every row, read at its last token."""
        return self._score("score_rewards", token_rows, lambda engine: engine.rewards(role, token_rows, mb_spec))

    def _score(self, what: str, token_rows: Any, score: Callable[[Engine], list[Any]]) -> list[Any]:
        engine = self.engine
        self._sessions.refuse(what)
        info = engine.info
        check_token_rows(token_rows, "token_rows", info.vocab_size, context_len=info.context_len, may_be_empty=True)
        if not token_rows:
            return []
        with self._wording(), self._log.watch.phase("score"):
            return score(engine)

    # -- the end ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path) -> str:
        """Write the policy as a Hugging Face folder and return its path. A checkpoint that is there is replaced.

        The folder appears when it is whole. CheckpointError, and nothing left behind, where that cannot be, and for a
        folder of that name which is no checkpoint.
        """
        _ = self.engine
        if not isinstance(path, (str, Path)) or not str(path).strip():
            raise ConfigError([Problem("path", f"is {path!r}; the name of a folder is expected")])
        final = Path(os.path.abspath(Path(path).expanduser()))
        if final.exists() and not _is_replaceable(final):
            raise CheckpointError(f"{path} is there and is no checkpoint, so it is not replaced; choose another path")
        with explained(final, "hold the checkpoint", "path"):
            write_whole(final, self.write_checkpoint)
        logger.info("checkpoint saved: %s", path)
        return str(path)

    def write_checkpoint(self, folder: str | Path, role: str = "actor") -> None:
        """Write a role as a Hugging Face folder, file by file; for one who makes that whole or not at all."""
        engine = self.engine
        self._sessions.refuse("save_checkpoint")
        with self._wording():
            engine.save(str(folder), role)

    def close(self) -> None:
        """Free the devices, end the workers, close the metrics. Calling it again does nothing."""
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._log.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_replaceable(folder: Path) -> bool:
    """Whether what stands there is an empty folder, or a model's files and nothing else that could be of value."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    others = {name for name in names - {"config.json", *TOKENIZER, *GENERATION} if ".safetensors" not in name}
    return not names or ("config.json" in names and not others)
