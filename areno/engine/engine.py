"""The driver's side of the engine: it starts workers, and sends them requests to sample and rows to train or score."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from areno.config.models import MicroBatchSpec
from areno.config.rollout import DecoderConfig, SamplingConfig
from areno.engine.memory import resident_bytes
from areno.engine.processes.workers import start_workers
from areno.engine.requests import Dispatcher, RequestLimits, check_params
from areno.engine.sampling import SamplingEngine
from areno.engine.spec import EngineInfo, EngineSpec, RoleSpec, RolloutSpec, Sharing, UpdateSpec
from areno.engine.token_budget import SCORE, TRAIN, ChosenBudgets
from areno.engine.train.micro_batches import keep_old_logprobs, share_rows, share_steps, sharing_beside_teachers
from areno.engine.train.rows import TOP, masks_of_rows, read_tokens, read_training_rows, routes_of_rows
from areno.errors import CheckpointError, EngineError, Key
from areno.models.registry import load_config
from areno.types import GenerationOutput, GenerationRequest, TrainSequence

logger = logging.getLogger("areno")

_LOOK_S = 0.05  # between two looks at a state that is being written

TokenRows = Sequence[Sequence[int] | np.ndarray]


class Engine(SamplingEngine, AbstractContextManager["Engine"]):
    """The models of a run (the actor, and roles such as a critic) and the worker processes that compute them.

    Use it as a context manager, or call `close`.

    Args:
        spec: Description of the models and devices.
        workers: "inline" runs the worker in this process (one device), "spawn" starts worker processes, "ray" uses the
            nodes of a Ray cluster. "auto" is "inline" for a single CPU device, else "spawn".

    Attributes beside those of SamplingEngine:
        train_seconds: Seconds that the slowest worker took for the last call of `train`. 0.0 before the first.

    Raises:
        EngineError: A worker cannot start or load the actor.
    """

    def __init__(self, spec: EngineSpec, workers: str = "auto"):
        self._roles: dict[str, RoleSpec] = {"actor": spec.actor}  # as loaded
        self._wanted, self._mode = spec, workers
        super().__init__(start_workers(spec, workers))
        self._infos: dict[str, EngineInfo] = {}  # of roles whose vocabulary may differ from the actor's
        self._train_sharing: dict[str, Sharing] = {"actor": self.info.sharing}  # when training shares prefixes, by role
        self._budgets = ChosenBudgets(lambda: self._call("token_budgets"))
        self._rollouts: list[RolloutSpec] = []  # that the budgets take into account
        self.train_seconds = 0.0
        self._writes_state = False
        self._lost_state = False  # whether a state was being written when the workers were restarted

    # -- roles -----------------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, RoleSpec]) -> None:
        """Load the models of roles such as a critic or a reference. A role already loaded with the same spec is kept.

        Args:
            roles: Spec of each role, by role name. They are loaded in order.

        Raises:
            EngineError: A role is already loaded with another spec (then nothing is loaded), a rollout phase is
                open, or a model cannot be loaded (then the roles before it stay loaded).
        """
        for name, spec in roles.items():
            if name in self._roles and self._roles[name] != spec:
                raise EngineError(self._roles[name].difference(name, spec))
        for name, spec in roles.items():
            if name not in self._roles:
                if self.limits is not None:
                    raise EngineError(
                        f"role {name!r} cannot be loaded inside a rollout phase, whose KV cache has taken the memory; "
                        "call ensure_roles before it"
                    )
                self._train_sharing[name] = self._call("load_role", name, spec)[0]
                if spec.own_tokenizer:
                    config = load_config(spec.path, spec.head)
                    vocabulary = {"vocab_size": config.vocab_size, "context_len": config.max_position_embeddings}
                    self._infos[name] = replace(self.info, **vocabulary)
                self._roles[name] = copy.deepcopy(spec)  # a copy, because the caller may change the spec later
                self._budgets.are_due = True

    def release_role(self, role: str) -> None:
        """Free the memory of a role other than the actor. Its trained weights are lost unless they were saved.

        Raises:
            EngineError: The role is not loaded, or is the actor.
        """
        self._role(role)
        if role == "actor":
            raise EngineError("the actor cannot be released, only a role of ensure_roles; close the engine instead")
        self._call("release_role", role)
        del self._roles[role]
        self._infos.pop(role, None)
        self._budgets.tokens.pop(role, None)

    @property
    def weights_version(self) -> int:
        """Number of optimizer updates applied to the actor. 0 for newly loaded weights. `load_state` restores it."""
        return self._call("weights_version")[0]

    def _role(self, name: str, head: str | None = None) -> RoleSpec:
        """Return the spec of a loaded role.

        Raises EngineError if the role is not loaded. If `head` is given, also raises EngineError if the model of the
        role has no head of this kind: "lm", "value", "step" or "scores", which stands for "value" and "step".
        """
        if not isinstance(name, str) or name not in self._roles:
            raise EngineError(
                f"there is no role {name!r}; loaded are: {', '.join(self._roles)}; call ensure_roles for {name!r} first"
            )
        spec = self._roles[name]
        if head == "lm" and spec.head != "lm":
            raise EngineError(
                f"role {name!r} ({spec.path}) has a value head, which gives one number for each token and no "
                "log-probabilities; score its values, rewards or steps instead"
            )
        if head == "step" and spec.head != "step":
            raise EngineError(
                f"role {name!r} ({spec.path}) is no process reward model, which has two labels for each token "
                "(...ForTokenClassification), and scores no steps"
            )
        if head == "value" and spec.head == "step":
            raise EngineError(
                f"role {name!r} ({spec.path}) is a process reward model, which scores steps and not whole rows; call "
                "score_steps"
            )
        if head in ("value", "scores") and spec.head == "lm":
            raise EngineError(
                f"role {name!r} ({spec.path}) is a language model, which gives log-probabilities and no values or "
                "rewards; name a role that was loaded with head='value', such as a critic or a reward model"
            )
        return spec

    def begin_rollout(self, spec: RolloutSpec) -> RequestLimits:
        """Enter the rollout phase, in which requests can be submitted.

        Args:
            spec: Settings of the phase.

        Returns:
            The limits of requests, from the rank with the smallest KV cache.
        """
        limits = super().begin_rollout(spec)
        if spec not in self._rollouts:
            self._rollouts.append(copy.deepcopy(spec))
            self._budgets.are_due = True
        return limits

    # -- training and scoring --------------------------------------------------------------------------------------

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: Any,
        update: UpdateSpec | None = None,
        role: str = "actor",
        row_name: str = "row {}",
    ) -> dict[str, float]:
        """Train the model of a role on rows of tokens, by one or several optimizer steps.

        Sets `old_logprobs` of the rows.

        Args:
            rows: The rows. Their lists and arrays of values per token must cover prompt and response.
            loss_fn: Function (pack, logprobs) -> (loss, stats), which is called with a DataPack (a micro-batch) and the
                log-probability of each token. For a role with a value head, it gets values in place of
                log-probabilities. See areno.loss_fns.
            update: Division of the rows into steps. None makes one step with the micro-batches of EngineSpec.mb_spec.
            role: Role to train.
            row_name: Name of a row in messages, with {} for its index.

        Returns:
            Statistics by name, such as the grad_norm before clipping and the number of skipped_steps.

        Raises:
            DataError: A row is invalid. Nothing has been trained then.
            EngineError: The role cannot be trained, a rollout phase is open, or memory ran out.
        """
        spec = self._role(role)
        if spec.optimizer is None:
            if role == "actor":
                raise EngineError("this engine was built without an optimizer and cannot train the actor")
            raise EngineError(
                f"role {role!r} was loaded without an optimizer and cannot be trained; release it, and give "
                "ensure_roles an optimizer for it"
            )
        if self.limits is not None and not self.clock.is_paused:
            raise EngineError("train was called inside a rollout phase, whose KV cache is of the weights as they are")
        update = self._sized_update(update or UpdateSpec(self.spec.mb_spec), role)
        info, divergence = self.info, update.divergence
        checked = read_training_rows(rows, info, row_name, divergence is not None)
        layout, sharing = self.spec.layout, self._train_sharing[role]
        if divergence is not None and TOP[0] not in checked.fields:
            teachers = list(dict.fromkeys(teacher or divergence.role for teacher in checked.teachers))
            for teacher in teachers:
                self._role(teacher, "lm")
            rules = [self._train_sharing[teacher] for teacher in teachers]
            sharing = sharing_beside_teachers(sharing, rules, checked, layout.cp_size)
        shares = share_steps(checked, update, layout.data_size, spec.section, info.cost, layout.cp_size, sharing)
        args = [(role, steps, loss_fn, update) for steps in shares for _ in range(layout.cp_size)]
        with self._poll_lock:
            results = self.workers.call_each("train", args)
        self.train_seconds = max(result.seconds for result in results)
        self._budgets.lower(role, TRAIN, max(result.n_halvings for result in results))
        keep_old_logprobs(rows, shares, results[:: layout.cp_size])
        return results[0].stats

    def skip_updates(self, role: str, n: int) -> dict[str, float]:
        """Count updates of a trained role that have no rows. Only its learning-rate schedule advances.

        Returns:
            The statistics `lr` and `skipped_steps`.
        """
        return self._call("skip_updates", role, n)[0]

    def logprobs(
        self,
        role: str,
        token_rows: TokenRows,
        sampling: SamplingConfig | None = None,
        mb_spec: MicroBatchSpec | None = None,
        routes: Sequence[Any] | None = None,
        prompt_masks: Sequence[Any] | None = None,
    ) -> list[np.ndarray]:
        """Return the log-probability of each token given the tokens before it, under the model of a role.

        Args:
            role: Role with a language-model head.
            token_rows: Token ids of each row.
            sampling: Settings that the rows were sampled with. Their temperature divides the logits. None is
                SamplingConfig().
            mb_spec: Size of a micro-batch. None is EngineSpec.mb_spec.
            routes: Routing replay, for the actor only: recorded experts of each row's tokens, as in
                TrainSequence.routes. None lets the router choose.
            prompt_masks: For each row, True for each token whose log-probability is not needed, as
                TrainSequence.prompt_mask. None computes all.

        Returns:
            One float32 array for each row, with one entry per token. Entry 0 is 0, because no token precedes it, and so
            are the entries of masked tokens.
        """
        of_rows = {
            "routes": routes_of_rows(routes, token_rows, self.info.routes, role),
            "prompt_masks": masks_of_rows(prompt_masks, token_rows),
        }
        return self._scored("logprobs", role, token_rows, mb_spec, of_rows, sampling=sampling or SamplingConfig())

    def values(self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None) -> list[np.ndarray]:
        """Return the value of the state before each token of each row, computed by a role's value head.

        Args:
            role: Role with a value head, or a process reward model, whose values are log-odds of the label "right".
            token_rows: Token ids of each row.
            mb_spec: Size of a micro-batch. None is EngineSpec.mb_spec.

        Returns:
            One float32 array for each row, with one entry per token. Entry t is the value after tokens 0 to t - 1.
            Entry 0 is 0.
        """
        return self._scored("values", role, token_rows, mb_spec)

    def rewards(self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None) -> list[float]:
        """Return the score that a reward model gives to each row.

        Args:
            role: Role of the reward model, which must have a value head.
            token_rows: Token ids of each row.
            mb_spec: Size of a micro-batch. None is EngineSpec.mb_spec.

        Returns:
            For each row, the output of the value head at the last token of the row.
        """
        return self._scored("rewards", role, token_rows, mb_spec)

    def steps(self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None) -> list[np.ndarray]:
        """Return the probability that a process reward model gives to the label "right", after each token.

        Args:
            role: Role of the process reward model.
            token_rows: Token ids of each row. A row is shorter than the context of the model.
            mb_spec: Size of a micro-batch. None is EngineSpec.mb_spec.

        Returns:
            One float64 array for each row, with one entry per token. Entry t is the probability after tokens 0 to t.
        """
        self._role(role, "step")
        # A value is aligned with the token after it, so that the last token needs one after it, too.
        scored = self._scored("values", role, [[*row, row[-1]] for row in token_rows], mb_spec)
        return [1 / (1 + np.exp(-values[1:].astype(np.float64))) for values in scored]

    def complete(
        self,
        role: str,
        requests: Sequence[GenerationRequest],
        decoder: DecoderConfig | None = None,
        max_running: int | None = None,
    ) -> list[list[GenerationOutput]]:
        """Sample completions with the model of a role, in a decoder that exists only for this call.

        The decoder of the actor keeps its cache, its CUDA graphs and its samples. So a rollout phase may be open, which
        is interrupted for the time of the call. If the role is offloaded, its model is on the device for this time.

        Args:
            role: Role with a language-model head.
            requests: The requests, which may not stream. Their tokens are those of the role's vocabulary.
            decoder: Settings of the decoder. None uses the defaults.
            max_running: Largest number of samples that are decoded at the same time, over all ranks. None: at most 512
                for each copy of the model.

        Returns:
            For each request, its samples in the order of their numbers.

        Raises:
            ConfigError: Sampling parameters of a request are out of bounds.
            DataError: A prompt is empty, or is not a list of the role's token ids.
            EngineError: A request cannot be served, there is too little memory, or the model computes no finite
                numbers.
            GrammarError: A grammar cannot be compiled.
        """
        self._role(role, "lm")
        if not requests:
            return []
        info, copies = self._infos.get(role, self.info), self.spec.layout.dp_size
        for request in requests:
            check_params(request.params)
        requests = [
            replace(each, request_id=at, prompt=read_tokens(each.prompt, f"token_rows[{at}]", info.vocab_size).tolist())
            for at, each in enumerate(requests)
        ]
        n_samples = sum(request.n_samples for request in requests)
        longest = max(len(request.prompt) + request.params.max_new_tokens for request in requests)
        how = (decoder or DecoderConfig(), max_running, self.spec.layout)
        spec = RolloutSpec.of_call(role, n_samples, min(longest, info.context_len), *how)
        # Not by the dispatcher: a call with the same requests then divides them alike, whichever copy is faster.
        shares = [(spec, requests[copy::copies]) for copy in range(copies)]
        with self._poll_lock:
            outputs = itertools.chain(*self.workers.call_each("complete", shares))
        found: list[list[GenerationOutput]] = [[] for _ in requests]
        for output in sorted(outputs, key=lambda each: each.sample):
            if output.finish_reason == "error":
                text = "the model of {} produced non-finite logits; its folder may be damaged"
                raise EngineError(text, Key(self._roles[role].key))
            found[output.request_id].append(output)
        return found

    def _scored(
        self,
        what: str,
        role: str,
        rows: TokenRows,
        mb_spec: MicroBatchSpec | None,
        of_rows: Mapping[str, Sequence[Any] | None] = MappingProxyType({}),
        **more: Any,
    ) -> list[Any]:
        """Score rows with the model of a role: log-probabilities, values or rewards.

        Divides the rows over the copies of the model, and calls one method of TrainBackend on each copy.

        Args:
            what: The method to call: "logprobs", "values" or "rewards".
            role: Name of the role.
            rows: Token ids of each row.
            mb_spec: Size of a micro-batch. None is EngineSpec.mb_spec.
            of_rows: Arguments of the method with an entry for each row, by name. Arguments that are None are left out.
            **more: Further arguments of the method: for "logprobs" `sampling`, a SamplingConfig, otherwise none.

        Returns:
            What the method returns for each row, in the order of `rows`: an array with one entry per token, or a
            float for "rewards".
        """
        self._role(role, {"logprobs": "lm", "values": "scores", "rewards": "value"}[what])
        info, sharing = self._infos.get(role, self.info), self._train_sharing[role]
        shares, tokens = share_rows(rows, self.spec.layout.data_size, info, sharing)
        given = {name: values for name, values in of_rows.items() if values is not None}
        n_together = self.spec.layout.cp_size
        spec, may_halve = mb_spec or self.spec.mb_spec, False
        if spec.is_automatic:
            spec, may_halve = MicroBatchSpec(max_tokens_per_mb=self._budgets.of(role, SCORE)), self._may_halve
        args = [
            (
                role,
                what,
                [tokens[index] for index in share],
                spec,
                may_halve,
                more | {name: [values[index] for index in share] for name, values in given.items()},
            )
            for share in shares
        ]
        with self._poll_lock:
            results = self.workers.call_each("score", [each for each in args for _ in range(n_together)])[::n_together]
        scored = [values for values, _ in results]
        self._budgets.lower(role, SCORE, max(n_halvings for _, n_halvings in results))
        pairs = zip(itertools.chain(*shares), itertools.chain(*scored), strict=True)
        return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]

    def save(self, folder: str, role: str = "actor", background: bool = False, merge: bool = False) -> None:
        """Save the model of a role as a Hugging Face folder.

        A model with a value head is saved as a ...ForSequenceClassification model of transformers, and a process
        reward model as a ...ForTokenClassification model. Trained LoRA adapters are saved without the base model, as a
        folder of peft, unless `merge` is True.

        Args:
            folder: Folder to write.
            role: Name of the role.
            background: If True, return as soon as the weights are copied to host memory, and write the files in the
                background. `saved` returns whether the files are complete.
            merge: Whether to save the whole model with the adapters merged into its weights.
        """
        self._role(role)
        self._call("save", folder, role, background, merge)

    def saved(self) -> bool:
        """Return whether all files that `save` writes in the background are complete.

        Raises:
            CheckpointError: The files could not be written. The error is raised once, and then no more.
        """
        return all(self._call("saved"))

    # -- sizes of micro-batches ------------------------------------------------------------------------------------

    @property
    def token_budgets(self) -> dict[str, Any]:
        """The chosen sizes of micro-batches, as a training state records them: device memory, and tokens by role."""
        return {"device_bytes": self.info.device_bytes, "tokens": copy.deepcopy(self._budgets.tokens)}

    def restore_token_budgets(self, record: Mapping[str, Any]) -> None:
        """Continue with the sizes of micro-batches of an earlier process of the run.

        Does nothing if the devices of that process had another amount of memory.

        Args:
            record: The `token_budgets` of that process.
        """
        if record["device_bytes"] == self.info.device_bytes:
            known = {role: dict(tokens) for role, tokens in record["tokens"].items() if role in self._roles}
            self._budgets.tokens = known

    def _sized_update(self, update: UpdateSpec, role: str) -> UpdateSpec:
        """Return an update whose micro-batches have a size, chosen by the engine if `update.mb_spec` sets none."""
        if not update.mb_spec.is_automatic:
            return update
        if update.gradient_accumulation_steps is not None:
            return replace(update, mb_spec=update.mb_spec.counted)
        spec = MicroBatchSpec(max_tokens_per_mb=self._budgets.of(role, TRAIN))
        return replace(update, mb_spec=spec, may_halve=self._may_halve)

    @property
    def _may_halve(self) -> bool:
        """Whether a step that runs out of memory may continue with smaller micro-batches.

        With `engine.deterministic` it may not, because the free memory would decide the order of sums.
        """
        return not self.spec.engine.deterministic

    # -- state -----------------------------------------------------------------------------------------------------

    def save_state(self, folder: str | Path, with_moments: bool = True) -> None:
        """Start writing the training state of every role with an optimizer, and return before it is written.

        The training state holds float32 master weights, optimizer moments and the number of updates, at the time of
        this call. Each rank writes its own shard.

        Args:
            folder: Folder of the state, which must be new.
            with_moments: Whether to write the moments of the optimizers.

        Raises:
            EngineError: The state of an earlier call is not completely written; see `state_written`.
        """
        if not self.state_written():
            raise EngineError("a state is being written already; wait for it with state_written(wait=True)")
        self._call("save_state", str(folder), with_moments)
        self._writes_state = True

    def state_written(self, wait: bool = False) -> bool:
        """Return whether the files of the last `save_state` are complete. True if `save_state` was not called.

        Args:
            wait: Whether to wait until the files are complete.

        Raises:
            CheckpointError: The files could not be written. The error is raised once. The engine can still be used.
        """
        if self._lost_state:
            self._lost_state = False
            raise CheckpointError("the run state was not written: the workers were lost meanwhile")
        while self._writes_state:
            try:
                self._writes_state = not all(self._call("state_written"))
            except Exception:
                self._writes_state = False
                raise
            if self._writes_state and not wait:
                return False
            if self._writes_state:
                time.sleep(_LOOK_S)
        return True

    def load_state(self, folder: str | Path, with_moments: bool = True) -> None:
        """Load a training state that `save_state` wrote, together with its `weights_version`.

        The trained roles must be loaded. The number of ranks may differ from that of the run that wrote the state. With
        the same number of ranks, training continues exactly as in that run. With another number, sums may be computed
        in another order, and 8-bit moments are quantised anew.

        Args:
            folder: The folder of the state.
            with_moments: Whether to load the moments of the optimizers. If False, or if the state has no moments, they
                start at zero. The learning-rate schedule continues in any case.

        Raises:
            CheckpointError: The folder is incomplete or damaged. Nothing is loaded.
            EngineError: The state has other roles, models or optimizers, or a rollout phase is open. Nothing is
                loaded.
        """
        if self.limits is not None:
            raise EngineError("load_state was called inside a rollout phase; call end_rollout first")
        self._call("load_state", str(folder), with_moments)

    def memory_table(self) -> tuple[str, str]:
        """Return the estimated memory of all models on each device, as two texts.

        Returns:
            A summary in one line, and a table of several lines.
        """
        return self._call("memory_table")[0]

    def peak_memory_gib(self) -> float:
        """Return the largest peak memory of a worker in GiB, since the last call of this method or of `train`."""
        return max(self._call("memory_gib"))

    def phase_memory_gib(self) -> float:
        """Return the largest peak memory of a worker in GiB, since the last call of this method.

        The peaks that `train` and `peak_memory_gib` return do not depend on calls of this method.
        """
        return max(self._call("phase_memory_gib"))

    def host_memory_gib(self) -> float:
        """Return the host memory that the driver and all workers have in use, in GiB."""
        return (resident_bytes() + self.workers.host_bytes()) / 2**30

    def begin_kernels(self) -> None:
        """Begin to record the operators and kernels of each rank, see EngineSpec.profiling."""
        self._call("begin_kernels")

    def end_kernels(self, name: str) -> None:
        """Write the operators and kernels since `begin_kernels`, one file for each rank.

        Args:
            name: Part of the files' names.
        """
        self._call("end_kernels", name)

    def write_memory_snapshots(self, name: str) -> None:
        """Write the state of each rank's device memory to a file.

        Args:
            name: Part of the files' names.
        """
        self._call("write_memory_snapshot", name)

    def wait(self) -> None:
        """Wait until the devices have finished all work, for exact timing. `train` may return earlier."""
        self._call("wait")

    def restart(self) -> None:
        """Restart the workers after a WorkerLost, with the same roles, loaded from their folders.

        Trained weights and unfinished requests are lost, and the rollout phase ends. On a cluster that has lost nodes
        there may be fewer copies of the model than before.

        Raises:
            EngineError: A worker cannot start or load its models. The engine can then only be restarted again or
                closed.
        """
        self.limits, self._budgets.are_due = None, True
        self.streams.end(EngineError("the workers were started again, and every request under way is lost"))
        with self._poll_lock:
            self._lost_state = self._lost_state or self._writes_state  # which the restart before this may have found
            self._writes_state = False
            self.workers.close()
            self.workers = start_workers(self._wanted, self._mode, again=True)
            with self._records_lock:
                self.spec = self.workers.spec  # which may have fewer copies
                self.dispatcher = Dispatcher(self.spec.layout.dp_size, self.spec.engine.deterministic)
                self._clear_requests()
            for name, spec in self._roles.items():
                if name != "actor":
                    self.workers.call("load_role", name, spec)

    def close(self) -> None:
        """Stop the workers and free the devices. Unfinished requests are lost."""
        self.streams.end(EngineError("the engine is closed"))
        self.workers.close()

    def __exit__(self, *exc: object) -> None:
        self.close()
