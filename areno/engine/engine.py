"""The backend a Trainer drives: starts the workers, gives them requests and rows, times the phases."""

from __future__ import annotations

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
    """One model on some devices. Use as a context manager, or call close()."""

    def __init__(self, spec: EngineSpec, workers: str = "auto"):
        self.spec = spec
        self._workers = start_workers(spec, workers)
        self.info: EngineInfo = self._workers.call("info")[0]
        self._limits: RequestLimits | None = None  # None outside a rollout phase
        self._load = [0] * spec.dp_size  # samples under way on each data-parallel rank
        self._rank_of: dict[int, int] = {}
        self._missing: dict[int, int] = {}  # request id -> samples still to come

    # -- roles -----------------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, RoleSpec]) -> None:
        """Load the models of these roles, as far as they are not there."""
        self._workers.call("ensure_roles", dict(roles))

    # -- rollout ---------------------------------------------------------------------------------------------------

    def begin_rollout(self, spec: RolloutSpec) -> None:
        """Enter the rollout phase: requests may be submitted from now on."""
        limits = self._workers.call("begin_rollout", spec)
        self._limits = min(limits, key=lambda of_rank: of_rank.kv_tokens)

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
        mb_spec: MicroBatchSpec | None = None,
        n_minibatches: int = 1,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> dict[str, float]:
        """Optimizer steps on `rows`; see TrainBackend.train. Returns the step's statistics."""
        if self.spec.optimizer is None:
            raise EngineError("this engine was built without an optimizer and cannot train")
        if self._limits is not None:
            raise EngineError("train was called inside a rollout phase, whose KV cache is of the weights as they are")
        started = time.perf_counter()
        stats = self._workers.call(
            "train",
            list(rows),
            loss_fn,
            mb_spec=mb_spec or self.spec.mb_spec,
            n_minibatches=n_minibatches,
            gradient_accumulation_steps=gradient_accumulation_steps,
            temperature=temperature,
            seed=seed,
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
        size = self.spec.dp_size
        parts = [[list(row) for row in token_rows[rank::size]] for rank in range(size)]
        scored = self._workers.call_each(
            "logprobs", [(role, part, temperature, mb_spec or self.spec.mb_spec) for part in parts]
        )
        return [scored[index % size][index // size] for index in range(len(token_rows))]

    def save(self, folder: str) -> None:
        """Write the actor as a Hugging Face folder. Not atomic: the saver gives a temporary name and renames."""
        self._workers.call("save", folder)

    def close(self) -> None:
        """Free the devices."""
        self._workers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
