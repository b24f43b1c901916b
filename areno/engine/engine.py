"""What a Trainer drives: it starts the workers and gives them requests to sample and rows to train on or to score."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.engine.processes.workers import start_workers
from areno.engine.requests import Dispatcher, OnProgress, RequestLimits, check_params, wait_for_all
from areno.engine.spec import EngineInfo, EngineSpec, RoleSpec, RolloutSpec, RolloutStats, UpdateSpec
from areno.engine.streams import Consumer, FairLock, RequestBatcher, Streams
from areno.engine.train.micro_batches import keep_old_logprobs, share_rows, share_steps
from areno.engine.train.rows import add_routes, read_rows, read_tokens, routes_of_rows
from areno.errors import CheckpointError, EngineError
from areno.types import GenerationOutput, GenerationRequest, TrainSequence

_TURN_S = 0.05  # of a thread that polls the workers while others want to

TokenRows = Sequence[Sequence[int] | np.ndarray]


class Engine(AbstractContextManager["Engine"]):
    """The actor and the roles beside it, on some devices. Use it as a context manager, or call close().

    Attributes:
        spec: The specification, as the workers have completed it.
        info: Facts about the devices.
        workers: The processes of the ranks, or the one worker in this process.
        dispatcher: The requests that have not finished, by data-parallel rank.
        streams: The requests that consumers read piece by piece.
        batcher: Collects requests of streams that come shortly after each other, to submit them together.
        limits: Which requests a rollout accepts; None outside of a rollout.
    """

    def __init__(self, spec: EngineSpec, workers: str = "auto"):
        self._roles: dict[str, RoleSpec] = {"actor": spec.actor}  # as loaded
        self._wanted, self._mode, self.workers = spec, workers, start_workers(spec, workers)
        self.spec = self.workers.spec
        self.info: EngineInfo = self.workers.call("info")[0]
        # Streams poll from a thread of their own. `_poll_lock` gives the workers to one thread at a time.
        # `_records_lock` guards the records of requests below. It is never held for long.
        self._poll_lock, self._records_lock = FairLock(), threading.RLock()
        self.streams = Streams(self._poll_for_streams, self._records_lock)
        self.batcher = RequestBatcher(self._submit_streams, lambda: self.dispatcher.is_idle, self.info.device != "cpu")
        self._ready: list[GenerationOutput] = []  # outputs that belong to no stream, for the next poll
        self._failure: Exception | None = None  # that the thread of the streams met, for the next poll
        self.limits: RequestLimits | None = None
        self.dispatcher = Dispatcher(self.spec.layout.dp_size, self.spec.engine.deterministic)
        self._writes_state = False
        self._lost_state = False  # it was being written when the workers were started again

    # -- roles -----------------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, RoleSpec]) -> None:
        """Load the models of these roles beside the actor. A role that is loaded already stays, with what it learned.

        EngineError where one is loaded with another spec, before anything is loaded. A role that cannot be loaded is
        absent afterwards; those before it are there.
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
                self._call("load_role", name, spec)
                self._roles[name] = copy.deepcopy(spec)  # the caller may change theirs later

    def release_role(self, role: str) -> None:
        """Free the memory of a role. What it has learned is lost unless it was saved."""
        self._role(role)
        if role == "actor":
            raise EngineError("the actor cannot be released, only a role of ensure_roles; close the engine instead")
        self._call("release_role", role)
        del self._roles[role]

    @property
    def weights_version(self) -> int:
        """How many optimizer updates were applied to the actor: 0 for the weights it was loaded with."""
        return self._call("weights_version")[0]

    def _role(self, name: str, head: str | None = None) -> RoleSpec:
        """Return the spec of a loaded role. EngineError if the role is not loaded or has another head."""
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
        self.limits = limits = min(self._call("begin_rollout", spec), key=lambda of_rank: of_rank.kv_tokens)
        self.dispatcher.begin(-(-spec.max_running // self.spec.layout.dp_size))
        return limits

    def end_rollout(self, drop: bool = False) -> None:
        """Leave the rollout phase. Requests under way are dropped; `drop` frees the KV cache and CUDA graphs, too."""
        self.limits = None
        self.streams.end(EngineError("the rollout phase has ended, and with it every request under way"))
        self._call("end_rollout", drop)
        with self._poll_lock, self._records_lock:
            self.workers.poll(0.0)  # what finished before the workers stopped
            self._clear_requests()

    def _clear_requests(self) -> None:
        self.dispatcher.clear()
        self._ready.clear()
        self._failure = None

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests. They join the running batch of a copy of the model that has room for them; see Dispatcher.

        EngineError where one of them cannot be served; then none is queued.
        """
        if self.limits is None:
            raise EngineError("a request arrived outside a rollout phase; call begin_rollout first")
        requests = list(requests)
        with self._records_lock:
            max_new_by_request: dict[int, int] = {}
            for request in requests:
                if request.request_id in max_new_by_request or request.request_id in self.dispatcher:
                    raise EngineError(f"request id {request.request_id} is already under way; ids must differ")
                max_new_by_request[request.request_id] = self.limits.max_new(request)
            self.dispatcher.add(requests, max_new_by_request)
            self._send_due()

    def _send_due(self) -> None:
        for rank, batch in self.dispatcher.due():
            self.workers.cast(rank, "submit", batch)

    def abort(self, request_id: int) -> None:
        """End a request early; its samples come back with finish_reason "abort". Unknown ids are ignored."""
        with self._records_lock:
            for rank, number in self.dispatcher.sent(request_id):
                self.workers.cast(rank, "abort", [number])
            self._deliver(self.dispatcher.dropped(request_id))

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Return outputs of requests as soon as there are some, or an empty list after at most `timeout` seconds.

        A request with `stream` or `pieces` has partial outputs, whose finish_reason is None, before each finished
        sample.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._poll_lock:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                shared = self.streams.are_open  # then turns are short, so that the other thread gets some
                if not self._ready:
                    left = max(0.0, deadline - time.monotonic())
                    self._receive(min(left, _TURN_S) if shared else left)
                ready, self._ready = self._ready, []
            if ready or not shared or time.monotonic() >= deadline:
                return ready

    def _receive(self, timeout: float) -> None:
        """Poll the workers, give out what came, and send what there is room for now. Called with `_poll_lock` held."""
        try:
            outputs = self.workers.poll(timeout)
            with self._records_lock:
                self._deliver(self.dispatcher.received(outputs))
                if (ask := self.dispatcher.to_ask(self.workers.stats())) is not None:
                    rank, n_samples = ask
                    self.workers.cast(rank, "return_waiting", n_samples)
                self._send_due()
        except Exception as error:
            self.streams.fail(error)
            raise

    def _deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        """Give each output to its stream or put it into `_ready`. Called with `_records_lock` held."""
        for output in outputs:
            if not self.streams.take(output, is_last=output.request_id not in self.dispatcher):
                self._ready.append(output)
        self.streams.deliver_taken()

    def _poll_for_streams(self) -> None:
        with self._poll_lock:
            try:
                self._receive(_TURN_S)
            except Exception as error:  # the streams have it; who polls must get it, too
                self._failure = error

    def _submit_streams(self, requests: Sequence[tuple[GenerationRequest, Consumer]]) -> None:
        with self._records_lock:
            self.submit([request for request, _ in requests])
            for request, consumer in requests:
                self.streams.open(request.request_id, consumer)

    @property
    def is_streaming(self) -> bool:
        """Whether a caller reads the outputs of a generate_stream."""
        return self.streams.are_read

    async def generate_stream(
        self, request: GenerationRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yield the outputs of one request as they come, without blocking the event loop. Ends after the last sample.

        Without `request.stream` and `request.pieces` there are no partial outputs. With one of them, a slow reader gets
        longer partial outputs. Any number of streams may run beside each other, and beside generate() in another
        thread. The requests of generate() are numbered from 0, so a stream needs another request_id. To stop reading
        (cancelled, aclose) aborts the request.

        Args:
            request: The request.
            timeout_s: Longest time of the request, in seconds. None for no limit.

        Raises:
            EngineError: The request cannot be served.
            TimeoutError: The request took longer than timeout_s.
        """
        check_params(request.params)
        read_tokens(request.prompt, "prompt", self.info.vocab_size)
        consumer, unfinished, timer = Consumer(), request.n_samples, None
        if timeout_s is not None:
            timer = consumer.loop.call_later(timeout_s, consumer.queue.put_nowait, TimeoutError())
        try:
            await self.batcher.submit(request, consumer)
            while unfinished:
                for output in await consumer.next():
                    unfinished -= output.finish_reason is not None
                    yield output
        finally:
            if timer is not None:
                timer.cancel()
            with self._records_lock:
                if unfinished and self.streams.abandon(consumer):
                    self.abort(request.request_id)

    def rollout_stats(self) -> list[RolloutStats]:
        """Return the latest counters of each data-parallel rank. Any thread may call this."""
        return self.workers.stats()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        at_once: int | None = None,
    ) -> dict[int, list[GenerationOutput]]:
        """Submit requests and wait for all of them: request id -> finished samples in order.

        at_once: requests under way at the same time; when one is done, the next one is submitted. None: all. With
        `deterministic` it has no effect: when one is done depends on the clock.
        """
        if self.spec.engine.deterministic:
            at_once = None
        elif (
            self.spec.layout.dp_size > 1
        ):  # then the end is short; with one copy, a run that goes on must keep the order
            requests = sorted(requests, key=lambda request: -(request.expected_tokens or 0))
        return wait_for_all(self, requests, on_progress, at_once)

    # -- training and scoring --------------------------------------------------------------------------------------

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: Any,
        update: UpdateSpec | None = None,
        role: str = "actor",
        row_name: str = "row {}",
    ) -> dict[str, float]:
        """Take optimizer steps of a role on `rows`, and set their `old_logprobs`. Returns TrainBackend.train's stats.

        loss_fn: see areno.loss_fns; for a role with head "value" it is given values in the place of log-probabilities.
        update: None makes one step with the micro-batches of EngineSpec.mb_spec.
        DataError names the row that is wrong, by its index in `row_name`; nothing has been trained then.
        """
        spec = self._role(role)
        if spec.optimizer is None:
            if role == "actor":
                raise EngineError("this engine was built without an optimizer and cannot train the actor")
            raise EngineError(
                f"role {role!r} was loaded without an optimizer and cannot be trained; release it, and give "
                "ensure_roles an optimizer for it"
            )
        if self.limits is not None:
            raise EngineError("train was called inside a rollout phase, whose KV cache is of the weights as they are")
        update = update or UpdateSpec(self.spec.mb_spec)
        checked = read_rows(rows, self.info.vocab_size, self.info.context_len, row_name)
        add_routes(checked, rows, self.info.routes, row_name)
        shares = share_steps(
            checked, update, self.spec.layout.data_size, spec.section, self.info.cost, self.spec.layout.cp_size
        )
        args = [(role, steps, loss_fn, update) for steps in shares for _ in range(self.spec.layout.cp_size)]
        with self._poll_lock:
            results = self.workers.call_each("train", args)
        keep_old_logprobs(rows, checked, shares, results[:: self.spec.layout.cp_size])
        return results[0].stats

    def logprobs(
        self,
        role: str,
        token_rows: TokenRows,
        sampling: SamplingConfig | None = None,
        mb_spec: MicroBatchSpec | None = None,
        routes: Sequence[Any] | None = None,
    ) -> list[np.ndarray]:
        """Return the log-probability of every token given the tokens before it, under the model of a role.

        Args:
            role: Role with a language-model head.
            token_rows: Token ids of each row.
            sampling: Settings that the rows were sampled with. None is SamplingConfig().
            mb_spec: Rows of one forward pass. None is EngineSpec.mb_spec.
            routes: Experts of each row's tokens (TrainSequence.routes), for the actor. None lets the router choose.

        Returns:
            One float32 array for each row, aligned with its tokens. The first entry is 0.
        """
        read = routes_of_rows(routes, token_rows, self.info.routes, role)
        return self._scored("logprobs", role, token_rows, mb_spec, sampling or SamplingConfig(), routes=read)

    def values(self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None) -> list[np.ndarray]:
        """Values of every row, float32: entry t is that of the state before token t, so the first token has 0."""
        return self._scored("values", role, token_rows, mb_spec)

    def rewards(self, role: str, token_rows: TokenRows, mb_spec: MicroBatchSpec | None = None) -> list[float]:
        """One score for each row: what the value head gives at its last token."""
        return self._scored("rewards", role, token_rows, mb_spec)

    def _scored(
        self, what: str, role: str, rows: TokenRows, mb_spec: MicroBatchSpec | None, *more: Any, routes: Any = None
    ) -> list[Any]:
        """Worker.score, each model copy doing its part; results in the order of the rows."""
        self._role(role, "lm" if what == "logprobs" else "value")
        shares, given = share_rows(rows, routes, self.spec.layout.data_size, self.info)
        n_together = self.spec.layout.cp_size
        args = [(role, what, tokens, *more, mb_spec or self.spec.mb_spec, *its) for tokens, *its in given]
        with self._poll_lock:
            scored = self.workers.call_each("score", [each for each in args for _ in range(n_together)])[::n_together]
        pairs = zip(itertools.chain(*shares), itertools.chain(*scored), strict=True)
        return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]

    def save(self, folder: str, role: str = "actor", background: bool = False, merge: bool = False) -> None:
        """Write a role's model as a Hugging Face folder, one with a value head as a ...ForSequenceClassification.

        Adapters are written alone, as a folder of peft; with `merge`, merged into the weights of the whole model.
        background: return as soon as a copy of the weights is in host memory; `saved` says when the files are there.
        """
        self._role(role)
        self._call("save", folder, role, background, merge)

    def saved(self) -> bool:
        """Whether all that `save` began in the background is on the disk. CheckpointError, once, where it cannot be."""
        return all(self._call("saved"))

    # -- state -----------------------------------------------------------------------------------------------------

    def save_state(self, folder: str | Path, with_moments: bool = True) -> None:
        """Begin to write the training state of every role with an optimizer. Later updates are not in it.

        A state holds fp32 masters, moments (if `with_moments`) and update counters; weights are the rounded masters.
        Each rank writes its own part. `state_written` says when all is written. Raises EngineError before that.
        """
        if not self.state_written():
            raise EngineError("a state is being written already; wait for it with state_written(wait=True)")
        self._call("save_state", str(folder), with_moments)
        self._writes_state = True

    def state_written(self, wait: bool = False) -> bool:
        """Whether all files that `save_state` began are whole and on the disk; True as well if it was never called.

        wait: return when they are. CheckpointError, once, where they could not be written; the engine goes on.
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
                time.sleep(_TURN_S)
        return True

    def load_state(self, folder: str | Path, with_moments: bool = True) -> None:
        """Take over a state that `save_state` wrote, on any number of ranks, and its `weights_version`.

        The trained roles must be loaded. On as many ranks, training goes on exactly as it would have; on others up to
        the order of sums, and 8-bit moments are quantised anew where the shards differ.

        Without `with_moments`, or if the state has none, moments begin at zero. The learning-rate schedule goes on.

        Raises CheckpointError if the folder is incomplete or damaged, EngineError if the state is of other roles, other
        models or another type of optimizer. Nothing has been taken over then.
        """
        if self.limits is not None:
            raise EngineError("load_state was called inside a rollout phase; call end_rollout first")
        self._call("load_state", str(folder), with_moments)

    def memory_table(self) -> tuple[str, str]:
        """Return the computed memory of all models on each device: as one line, and as a table."""
        return self._call("memory_table")[0]

    def peak_memory_gib(self) -> float:
        """Peak memory of the worker that took most, in GiB, since this or `train` was last called."""
        return max(self._call("memory_gib"))

    def wait(self) -> None:
        """Return when the devices have finished all their work, for who measures time: `train` returns before that."""
        self._call("wait")

    def restart(self) -> None:
        """End what is left of the workers and start them again, with the same roles, as loaded from their folders.

        For after a WorkerLost. What was learned is lost, and so are requests under way; the rollout phase has ended.
        On a cluster that has lost nodes there may be fewer copies of the model than before.
        Raises as the constructor and ensure_roles do; after that the engine can only be restarted again or closed.
        """
        self.limits = None
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
        """Free the devices. Requests under way are lost."""
        self.streams.end(EngineError("the engine is closed"))
        self.workers.close()

    def _call(self, method: str, *args: Any) -> list[Any]:
        with self._poll_lock:
            return self.workers.call(method, *args)

    def __exit__(self, *exc: object) -> None:
        self.close()
