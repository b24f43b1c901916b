"""The backend a Trainer drives: starts the workers, gives them requests and rows, times the phases."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from areno.config.model_roles import MicroBatchSpec
from areno.engine.limits import RequestLimits
from areno.engine.spec import EngineInfo, EngineSpec, RoleSpec, RolloutSpec, RolloutStats
from areno.engine.types import GenerationOutput, GenerationRequest, TrainSequence
from areno.engine.workers import start_workers
from areno.errors import EngineError

OnProgress = Callable[[list[GenerationOutput], list[RolloutStats]], None]


class Engine:
    """Some models on some devices, the actor and roles beside it. Use as a context manager, or call close()."""

    def __init__(self, spec: EngineSpec, workers: str = "auto"):
        self.spec = spec
        self._roles: dict[str, RoleSpec] = {"actor": spec.actor}  # as loaded
        self._workers = start_workers(spec, workers)
        self.info: EngineInfo = self._workers.call("info")[0]
        self._limits: RequestLimits | None = None  # None outside a rollout phase
        self._load = [0] * spec.dp_size  # samples under way on each data-parallel rank
        self._rank_of: dict[int, int] = {}
        self._missing: dict[int, int] = {}  # request id -> samples still to come

    # -- roles -----------------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, RoleSpec]) -> None:
        """Load the models of these roles beside the actor, as far as they are not there.

        A role that is loaded stays as it is, with what it has learned. EngineError where it is loaded with another
        spec, before anything is loaded. A role that cannot be loaded is absent afterwards; those before it are there.
        """
        for name, spec in roles.items():
            if name in self._roles and self._roles[name] != spec:
                raise EngineError(_difference(name, self._roles[name], spec))
        for name, spec in roles.items():
            if name not in self._roles:
                if self._limits is not None:
                    raise EngineError(
                        f"role {name!r} cannot be loaded inside a rollout phase, whose KV cache has taken the memory; "
                        "call ensure_roles before it"
                    )
                self._workers.call("load_role", name, spec)
                self._roles[name] = copy.deepcopy(spec)  # what the caller does to theirs is not what is loaded

    def release_role(self, role: str) -> None:
        """Free the memory of a role. What it has learned is lost unless it was saved."""
        self._role(role)
        if role == "actor":
            raise EngineError("the actor cannot be released, only a role of ensure_roles; close the engine instead")
        self._workers.call("release_role", role)
        del self._roles[role]

    def _role(self, name: str, head: str | None = None) -> RoleSpec:
        """The spec of a loaded role. EngineError where it is not loaded or has another head than the given one."""
        if not isinstance(name, str) or name not in self._roles:
            raise EngineError(
                f"there is no role {name!r}; loaded are: {', '.join(self._roles)}; call ensure_roles for {name!r} first"
            )
        spec = self._roles[name]
        if head == "lm" and spec.head == "value":
            raise EngineError(
                f"role {name!r} ({spec.path}) has a value head, which gives one number for each token and no "
                "log-probabilities; score its values or rewards instead"
            )
        if head == "value" and spec.head == "lm":
            raise EngineError(
                f"role {name!r} ({spec.path}) is a language model, which gives log-probabilities and no values or "
                "rewards; name a role that was loaded with head='value', such as a critic or a reward model"
            )
        return spec

    # -- rollout ---------------------------------------------------------------------------------------------------

    def begin_rollout(self, spec: RolloutSpec) -> RequestLimits:
        """Enter the rollout phase: requests may be submitted from now on. Returns what there is room for."""
        limits = min(self._workers.call("begin_rollout", spec), key=lambda of_rank: of_rank.kv_tokens)
        self._limits = limits
        return limits

    def end_rollout(self, drop: bool = False) -> None:
        """Leave the rollout phase. Requests under way are dropped; `drop` frees KV cache and graphs, too."""
        self._limits = None
        self._workers.call("end_rollout", drop)
        self._workers.poll(0.0)  # what finished before the workers stopped
        self._load = [0] * self.spec.dp_size
        self._rank_of.clear()
        self._missing.clear()

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests, each on the rank with the fewest samples under way. They join the running batch.

        EngineError where one of them cannot be served; then none is queued.
        """
        if self._limits is None:
            raise EngineError("a request arrived outside a rollout phase; call begin_rollout first")
        requests, ids = list(requests), set(self._missing)
        for request in requests:
            if request.request_id in ids:
                raise EngineError(f"request id {request.request_id} is already under way; ids must differ")
            ids.add(request.request_id)
            self._limits.max_new(request)
        batches: list[list[GenerationRequest]] = [[] for _ in self._load]
        for request in requests:
            rank = self._load.index(min(self._load))
            self._load[rank] += request.n_samples
            self._rank_of[request.request_id] = rank
            self._missing[request.request_id] = request.n_samples
            batches[rank].append(request)
        for rank, batch in enumerate(batches):
            if batch:
                self._workers.cast(rank, "submit", batch)

    def abort(self, request_id: int) -> None:
        """End a request early; its samples come back with finish_reason "abort"."""
        if request_id in self._rank_of:
            self._workers.cast(self._rank_of[request_id], "abort", [request_id])

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Samples that finished, as soon as there are some or after `timeout` seconds."""
        outputs = self._workers.poll(timeout)
        for output in outputs:
            rank = self._rank_of[output.request_id]
            self._load[rank] -= 1
            self._missing[output.request_id] -= 1
            if self._missing[output.request_id] == 0:
                del self._missing[output.request_id], self._rank_of[output.request_id]
        return outputs

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: OnProgress | None = None
    ) -> dict[int, list[GenerationOutput]]:
        """Submit requests and wait for all of them: request id -> outputs in sample order."""
        self.submit(requests)
        done: dict[int, list[GenerationOutput]] = {request.request_id: [] for request in requests}
        left = sum(request.n_samples for request in requests)
        while left:
            outputs = self.poll(0.5)
            for output in outputs:
                done[output.request_id].append(output)
            left -= len(outputs)
            if on_progress is not None:
                on_progress(outputs, self._workers.stats())
        for outputs in done.values():
            outputs.sort(key=lambda output: output.sample)
        return done

    # -- training and scoring --------------------------------------------------------------------------------------

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: Any,
        *,
        role: str = "actor",
        mb_spec: MicroBatchSpec | None = None,
        n_minibatches: int = 1,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        granularity: int = 1,
    ) -> dict[str, float]:
        """Optimizer steps of a role on `rows`; see TrainBackend.train. Returns the step's statistics.

        For a role with head "value", loss_fn is given values in the place of log-probabilities.
        """
        if self._role(role).optimizer is None:
            if role == "actor":
                raise EngineError("this engine was built without an optimizer and cannot train the actor")
            raise EngineError(
                f"role {role!r} was loaded without an optimizer and cannot be trained; release it, and give "
                "ensure_roles an optimizer for it"
            )
        if self._limits is not None:
            raise EngineError("train was called inside a rollout phase, whose KV cache is of the weights as they are")
        started = time.perf_counter()
        stats = self._workers.call(
            "train",
            role,
            list(rows),
            loss_fn,
            mb_spec=mb_spec or self.spec.mb_spec,
            n_minibatches=n_minibatches,
            gradient_accumulation_steps=gradient_accumulation_steps,
            temperature=temperature,
            seed=seed,
            granularity=granularity,
        )[0]
        return {**stats, "step_train_time_s": time.perf_counter() - started}

    def logprobs(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        temperature: float = 1.0,
        mb_spec: MicroBatchSpec | None = None,
    ) -> list[list[float]]:
        """Per-token log-probabilities of whole rows under a role's model; the first token of a row has 0.0."""
        self._role(role, "lm")
        return self._scored("logprobs", role, token_rows, temperature, mb_spec or self.spec.mb_spec)

    def values(
        self, role: str, token_rows: Sequence[Sequence[int]], mb_spec: MicroBatchSpec | None = None
    ) -> list[list[float]]:
        """Values of whole rows: entry t is that of the state before token t, so the first token of a row has 0.0."""
        self._role(role, "value")
        return self._scored("values", role, token_rows, mb_spec or self.spec.mb_spec)

    def rewards(
        self, role: str, token_rows: Sequence[Sequence[int]], mb_spec: MicroBatchSpec | None = None
    ) -> list[float]:
        """One score for each row: what the value head gives at its last token."""
        self._role(role, "value")
        return self._scored("rewards", role, token_rows, mb_spec or self.spec.mb_spec)

    def _scored(self, method: str, role: str, token_rows: Sequence[Sequence[int]], *how: Any) -> list[Any]:
        """A worker's scoring method over the model copies, results in the order of the rows."""
        size = self.spec.dp_size
        parts = [[list(row) for row in token_rows[rank::size]] for rank in range(size)]
        scored = self._workers.call_each(method, [(role, part, *how) for part in parts])
        return [scored[index % size][index // size] for index in range(len(token_rows))]

    def save(self, folder: str, role: str = "actor") -> None:
        """Write a role's model as a Hugging Face folder, one with a value head as a ...ForSequenceClassification.

        Not atomic: the saver gives a temporary name and renames.
        """
        self._role(role)
        self._workers.call("save", folder, role)

    def peak_memory_gib(self) -> float:
        """The most memory that a worker's models, cache and work took since this or `train` was last called."""
        return max(memory["memory_gib"] for memory in self._workers.call("memory"))

    def wait(self) -> None:
        """Return when the devices have done all they were given. `train` returns with the weights still being written,
        which whatever comes next waits for; who measures time does not want to."""
        self._workers.call("wait")

    def close(self) -> None:
        """Free the devices."""
        self._workers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _difference(name: str, loaded: RoleSpec, wanted: RoleSpec) -> str:
    was, now = _flat(dataclasses.asdict(loaded)), _flat(dataclasses.asdict(wanted))
    changed = ", ".join(
        f"{field}={now.get(field)!r} (loaded with {was.get(field)!r})"
        for field in dict.fromkeys([*now, *was])
        if now.get(field) != was.get(field)
    )
    how = "the actor is what the engine was built for" if name == "actor" else "call release_role first to replace it"
    return f"role {name!r} is loaded already, asked for now with {changed}; {how}"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
