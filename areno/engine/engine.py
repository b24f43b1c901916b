"""The driver's side of the engine: starts the workers, and sends them requests to sample and rows to train or score."""

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
from areno.cost.prefix_sharing import PrefixSharing
from areno.cost.token_budget import SCORE, TRAIN
from areno.engine.chosen_token_budgets import ChosenTokenBudgets
from areno.engine.device_memory import process_resident_bytes
from areno.engine.dispatcher import Dispatcher
from areno.engine.processes.workers import start_workers
from areno.engine.reports import EngineInfo
from areno.engine.requests import RequestLimits, check_params
from areno.engine.sampling import SamplingEngine
from areno.engine.train.checked_rows import TOP, read_prompt_masks, read_routes_to_score, read_tokens
from areno.engine.train.micro_batches import divide_rows, divide_steps, sharing_with_teachers, store_old_logprobs
from areno.engine.train.training_rows import read_training_rows
from areno.errors import CheckpointError, EngineError, Key
from areno.models.registry import load_config
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, GenerationRequest, TokenValue, TrainSequence

logger = logging.getLogger("areno")

_LOOK_S = 0.05  # between two looks at a state that is being written

TokenRows = Sequence[Sequence[int] | np.ndarray]


class Engine(SamplingEngine, AbstractContextManager["Engine"]):
    """The models of a run (the actor, and roles such as a critic) and the worker processes that compute them.

    Use it as a context manager, or call `close`. `workers` is the setting `engine.workers`. Raises EngineError if a
    worker cannot start or load the actor.
    """

    def __init__(self, spec: EngineSpec, workers: str = "auto"):
        self._roles: dict[str, RoleSpec] = {"actor": spec.actor}  # as loaded
        self._wanted, self._mode = spec, workers
        super().__init__(start_workers(spec, workers))
        self._infos: dict[str, EngineInfo] = {}  # of roles whose vocabulary may differ from the actor's
        self._train_sharing: dict[str, PrefixSharing] = {
            "actor": self.info.sharing
        }  # when training shares prefixes, by role
        self._budgets = ChosenTokenBudgets(lambda: self._call("token_budgets"))
        self._rollouts: list[RolloutSpec] = []  # that the budgets take into account
        self._writes_state = False
        self._lost_state = False  # whether a state was being written when the workers were restarted

    # -- roles -----------------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, RoleSpec]) -> None:
        """Load the models of roles in order. Skips a role that is already loaded with the same spec.

        Raises EngineError if a role is loaded with another spec (then nothing is loaded), if a rollout phase is open,
        or if a model cannot be loaded (then the roles before it stay loaded).
        """
        for name, spec in roles.items():
            if name in self._roles and self._roles[name] != spec:
                raise EngineError(self._roles[name].mismatch_message(name, spec))
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
        """Free the memory of a role other than the actor. Its trained weights are lost unless they were saved."""
        self._require_head(role)
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

    def _require_head(self, name: str, head: str | None = None) -> RoleSpec:
        """Return the spec of a role that must have this head ("scores": "value" or "step"). Else raises EngineError."""
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
        """Train the model of a role on rows of tokens, by one or several optimizer steps, and return statistics.

        Without `update`, takes one step, with micro-batches as in EngineSpec.mb_spec. If the role has a value head,
        `loss_fn` gets values in place of log-probabilities. Sets `old_logprobs` of the rows. `row_name` is what errors
        call a row.

        Raises DataError for an invalid row, before anything is trained. Raises EngineError if the role cannot be
        trained, a rollout phase is open, or memory runs out.
        """
        spec = self._require_head(role)
        if spec.optimizer is None:
            if role == "actor":
                raise EngineError("this engine was built without an optimizer and cannot train the actor")
            raise EngineError(
                f"role {role!r} was loaded without an optimizer and cannot be trained; release it, and give "
                "ensure_roles an optimizer for it"
            )
        if self.limits is not None and not self.clock.is_paused:
            raise EngineError("train was called inside a rollout phase, whose KV cache is of the weights as they are")
        update = self._with_micro_batch_size(update or UpdateSpec(self.spec.mb_spec), role)
        info, divergence = self.info, update.divergence
        checked = read_training_rows(rows, info, row_name, divergence is not None)
        layout, sharing = self.spec.layout, self._train_sharing[role]
        if divergence is not None and TOP[0] not in checked.fields:
            teachers = list(dict.fromkeys(teacher or divergence.role for teacher in checked.teachers))
            for teacher in teachers:
                self._require_head(teacher, "lm")
            rules = [self._train_sharing[teacher] for teacher in teachers]
            sharing = sharing_with_teachers(sharing, rules, checked, layout.cp_size)
        shares = divide_steps(
            checked, update, layout.n_data_parallel_groups, spec.section, info.cost, layout.cp_size, sharing
        )
        args = [(role, steps, loss_fn, update) for steps in shares for _ in range(layout.cp_size)]
        with self._poll_lock:
            results = self.workers.call_each("train", args)
        self._budgets.halve(role, TRAIN, max(result.n_halvings for result in results))
        store_old_logprobs(rows, shares, results[:: layout.cp_size])
        return results[0].stats

    def skip_updates(self, role: str, n: int) -> dict[str, float]:
        """Advance the learning-rate schedule of a trained role by `n` updates that have no rows to train on."""
        return self._call("skip_updates", role, n)[0]

    def logprobs(
        self,
        role: str,
        token_rows: TokenRows,
        sampling: SamplingConfig | None = None,
        mb_spec: MicroBatchSpec | None = None,
        routes: Sequence[Any] | None = None,
        prompt_masks: Sequence[Any] | None = None,
        value: TokenValue = "logprob",
    ) -> list[np.ndarray]:
        """Return the log-probability of each token, one float32 array per row. See `Trainer.score_logprobs`."""
        of_rows = {
            "routes": read_routes_to_score(routes, token_rows, self.info.routes, role),
            "prompt_masks": read_prompt_masks(prompt_masks, token_rows),
        }
        more = {"sampling": sampling or SamplingConfig(), "value": value}
        return self._score("logprobs", role, token_rows, mb_spec, of_rows, **more)

    def values(self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None) -> list[np.ndarray]:
        """Return the value of the state before each token, 0 for the first. A PRM gives the log-odds of "right"."""
        return self._score("values", role, token_rows, mb_spec)

    def rewards(self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None) -> list[float]:
        return self._score("rewards", role, token_rows, mb_spec)

    def step_probabilities(
        self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None
    ) -> list[np.ndarray]:
        """Return the probability of the label "right" after each token. Rows must be shorter than the context."""
        self._require_head(role, "step")
        # A value is aligned with the token after it, so that the last token needs one after it, too.
        scored = self._score("values", role, [[*row, row[-1]] for row in token_rows], mb_spec)
        return [1 / (1 + np.exp(-values[1:].astype(np.float64))) for values in scored]

    def complete(
        self,
        role: str,
        requests: Sequence[GenerationRequest],
        decoder: DecoderConfig | None = None,
        max_running: int | None = None,
    ) -> list[list[GenerationOutput]]:
        """Sample completions with the model of a role, in a decoder that exists only for this call.

        A rollout phase may be open. It is interrupted during the call, and its decoder keeps its cache, CUDA graphs and
        samples. If the role is offloaded, its model is on the device during the call. Requests must not stream, and
        their token ids are those of the role's vocabulary.

        Raises ConfigError, DataError or GrammarError for an invalid request. Raises EngineError if a request cannot be
        served, there is too little memory, or the model computes no finite numbers.
        """
        self._require_head(role, "lm")
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
        spec = RolloutSpec.for_call(role, n_samples, min(longest, info.context_len), *how)
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

    def _score(
        self,
        what: str,
        role: str,
        rows: TokenRows,
        mb_spec: MicroBatchSpec | None,
        of_rows: Mapping[str, Sequence[Any] | None] = MappingProxyType({}),
        **more: Any,
    ) -> list[Any]:
        """Call TrainBackend.logprobs, .values or .rewards (`what`) on rows divided over the data-parallel replicas.

        `of_rows` maps names of arguments to sequences with one item per row. `more` are equal for all rows.
        """
        self._require_head(role, {"logprobs": "lm", "values": "scores", "rewards": "value"}[what])
        info, sharing = self._infos.get(role, self.info), self._train_sharing[role]
        shares, tokens = divide_rows(rows, self.spec.layout.n_data_parallel_groups, info, sharing)
        given = {name: values for name, values in of_rows.items() if values is not None}
        n_together = self.spec.layout.cp_size
        spec, may_halve = mb_spec or self.spec.mb_spec, False
        if spec.is_automatic:
            spec, may_halve = MicroBatchSpec(max_tokens_per_mb=self._budgets.token_budget(role, SCORE)), self._may_halve
        more |= {"mb_spec": spec, "may_halve": may_halve}
        args = [
            (
                role,
                what,
                [tokens[index] for index in share],
                more | {name: [values[index] for index in share] for name, values in given.items()},
            )
            for share in shares
        ]
        with self._poll_lock:
            results = self.workers.call_each("score", [each for each in args for _ in range(n_together)])[::n_together]
        scored = [values for values, _ in results]
        self._budgets.halve(role, SCORE, max(n_halvings for _, n_halvings in results))
        pairs = zip(itertools.chain(*shares), itertools.chain(*scored), strict=True)
        return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]

    def save(self, folder: str, role: str = "actor", background: bool = False, merge: bool = False) -> None:
        """Save the model of a role as a Hugging Face folder.

        A model with a value head is saved as a ...ForSequenceClassification model of transformers, and a process reward
        model as a ...ForTokenClassification model. Trained LoRA adapters are saved without the base model, as a folder
        of peft, unless `merge` is True. With `background`, files are written after the call returns. Then poll
        `is_saved`.
        """
        self._require_head(role)
        self._call("save", folder, role, background, merge)

    def is_saved(self) -> bool:
        """Return whether all files that `save` writes in the background are complete. Raises CheckpointError once."""
        return all(self._call("is_saved"))

    # -- sizes of micro-batches ------------------------------------------------------------------------------------

    @property
    def token_budgets(self) -> dict[str, Any]:
        """The chosen micro-batch tokens by role, and the device memory they were chosen for, to store on disk."""
        return {"device_bytes": self.info.device_bytes, "tokens": copy.deepcopy(self._budgets.tokens)}

    def restore_token_budgets(self, record: Mapping[str, Any]) -> None:
        """Restore the result of `token_budgets` from an earlier process, if its devices had the same memory."""
        if record["device_bytes"] == self.info.device_bytes:
            known = {role: dict(tokens) for role, tokens in record["tokens"].items() if role in self._roles}
            self._budgets.tokens = known

    def _with_micro_batch_size(self, update: UpdateSpec, role: str) -> UpdateSpec:
        """Return `update`, with a micro-batch size that the engine chooses if `update.mb_spec` sets none."""
        if not update.mb_spec.is_automatic:
            return update
        if update.gradient_accumulation_steps is not None:
            return replace(update, mb_spec=update.mb_spec.with_fixed_size)
        spec = MicroBatchSpec(max_tokens_per_mb=self._budgets.token_budget(role, TRAIN))
        return replace(update, mb_spec=spec, may_halve=self._may_halve)

    @property
    def _may_halve(self) -> bool:
        """Return whether a step that runs out of memory may continue with smaller micro-batches.

        It may not with `engine.deterministic`, because the order of sums would then depend on the free memory.
        """
        return not self.spec.engine.deterministic

    # -- state -----------------------------------------------------------------------------------------------------

    def save_state(self, folder: str | Path, with_moments: bool = True) -> None:
        """Start writing the training state of every role with an optimizer to a new folder.

        The training state holds float32 master weights, optimizer moments and the number of updates, at the time of
        this call. Each rank writes its own shard. Raises EngineError if an earlier state is not completely written.
        """
        if not self.is_state_written():
            raise EngineError("a state is being written already; wait for it with state_written(wait=True)")
        self._call("save_state", str(folder), with_moments)
        self._writes_state = True

    def is_state_written(self, wait: bool = False) -> bool:
        """Return whether the files of the last `save_state` are complete. True if there was none.

        Raises CheckpointError once if they could not be written. The engine can still be used.
        """
        if self._lost_state:
            self._lost_state = False
            raise CheckpointError("the run state was not written: the workers were lost meanwhile")
        while self._writes_state:
            try:
                self._writes_state = not all(self._call("is_state_written"))
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
        in another order, and 8-bit moments are quantised again. Without `with_moments`, moments start at zero, and the
        learning-rate schedule continues.

        Raises CheckpointError for an incomplete or damaged folder. Raises EngineError if the roles, models or
        optimizers differ, or in a rollout phase. Nothing is loaded in these cases.
        """
        if self.limits is not None:
            raise EngineError("load_state was called inside a rollout phase; call end_rollout first")
        self._call("load_state", str(folder), with_moments)

    @property
    def device_names(self) -> list[str]:
        """Kind of each device, such as "cpu" or "NVIDIA H200"."""
        return [self.info.device_name or "cpu"] * len(self.spec.devices)

    def state_digests(self) -> dict[str, list[int]]:
        """Return the digests of all weights and moments by buffer and rank, see `areno.engine.state.digests`."""
        by_rank = self._call("state_digests")
        many = len(by_rank) > 1
        return {
            f"{name} of rank {rank}" if many else name: parts
            for rank, found in enumerate(by_rank)
            for name, parts in found.items()
        }

    def memory_table(self) -> tuple[str, str]:
        return self._call("memory_table")[0]

    def peak_memory_gib(self) -> float:
        """Return the largest peak memory of a worker since `peak_memory_gib` or `train` was last called."""
        return max(self._call("memory_gib"))

    def phase_memory_gib(self) -> float:
        """Return the largest peak memory of a worker since `phase_memory_gib` was last called."""
        return max(self._call("phase_memory_gib"))

    def host_memory_gib(self) -> float:
        return (process_resident_bytes() + self.workers.host_bytes()) / 2**30

    def begin_kernel_profile(self) -> None:
        self._call("begin_kernel_profile")

    def end_kernel_profile(self, name: str) -> None:
        self._call("end_kernel_profile", name)

    def write_memory_snapshots(self, name: str) -> None:
        self._call("write_memory_snapshot", name)

    def synchronize(self) -> None:
        """Wait until the devices have finished all work, for exact timing. `train` may return before that."""
        self._call("synchronize")

    def restart(self) -> None:
        """Restart the workers after a WorkerLost, with the same roles, loaded from their folders.

        Trained weights and unfinished requests are lost, and the rollout phase ends. On a cluster that has lost nodes
        there may be fewer data-parallel replicas than before. After an EngineError, the engine can only be restarted
        again or closed.
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
