"""The sampling side of the engine in the driver: sends requests to the workers and returns their samples."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from areno.engine.dispatcher import Dispatcher
from areno.engine.output_streams import Consumer, FairLock, OutputStreams, RequestBatcher, RunningClock, TimeLimit
from areno.engine.processes.workers import WorkerGroup
from areno.engine.reports import DraftCounts, EngineInfo, RolloutStats
from areno.engine.requests import OnProgress, RequestLimits, check_params, trace_request
from areno.engine.train.checked_rows import read_tokens
from areno.errors import EngineError, non_finite_logits
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationOutput, GenerationRequest

_TURN_S = 0.05  # longest poll of one thread while another thread waits to poll

# Decoding steps between looks at the finished samples, if these are not decisive.
_STEPS = 64  # of the only copy of the model: for displays of the progress
_STEPS_OF_COPIES = 16  # of each of several copies, which then wait for each other


class SamplingEngine:
    """Runs the rollout phases in which the workers sample from the actor.

    `limits` is None outside of a rollout phase. `clock` is paused while the phase is suspended. `Engine.restart`
    replaces `workers`, and `spec` may then have fewer ranks.
    """

    def __init__(self, workers: WorkerGroup):
        self.workers, self.spec = workers, workers.spec
        self.info: EngineInfo = workers.call("info")[0]
        # Streams poll from a thread of their own. `_poll_lock` gives the workers to one thread at a time.
        # `_records_lock` guards the records of requests below. It is never held for long.
        self._poll_lock, self._records_lock = FairLock(), threading.RLock()
        self.streams = OutputStreams(self._poll_for_streams, self._records_lock)
        self.batcher = RequestBatcher(self._submit_streams, lambda: self.dispatcher.is_idle, self.info.device != "cpu")
        self._ready: list[GenerationOutput] = []  # outputs that belong to no stream, for the next poll
        self._failure: Exception | None = None  # that the thread of the streams met, for the next poll
        self.limits: RequestLimits | None = None
        self.clock = RunningClock()
        self.dispatcher = Dispatcher(self.spec.layout.dp_size, self.spec.engine.deterministic)

    def begin_rollout(self, spec: RolloutSpec) -> RequestLimits:
        """Begin the rollout phase. Returns the limits of the rank with the smallest KV cache."""
        self.limits = limits = min(self._call("begin_rollout", spec), key=lambda of_rank: of_rank.kv_tokens)
        self.dispatcher.begin(-(-spec.max_running // self.spec.layout.dp_size))
        return limits

    def end_rollout(self, drop: bool = False) -> None:
        """End the rollout phase, and drop unfinished requests. `drop` also frees the KV cache and the CUDA graphs."""
        self.limits = None
        self.clock.resume()
        self.streams.end(EngineError("the rollout phase has ended, and with it every request under way"))
        self._call("end_rollout", drop)
        with self._poll_lock, self._records_lock:
            self.workers.poll(0.0)  # what finished before the workers stopped
            self._clear_requests()

    def suspend_rollout(self) -> list[int]:
        """Interrupt all samples of the rollout phase, if one is open, so that models can be trained.

        Requests stay unfinished, and those that are submitted meanwhile wait. Returns the number of tokens of each
        sample that was interrupted after its first token.
        """
        if self.limits is None:
            return []
        by_rank = self._call("suspend")
        self.clock.pause()
        return list(itertools.chain.from_iterable(by_rank))

    def resume_rollout(self) -> None:
        if self.limits is not None:
            self._call("resume")
            self.clock.resume()

    def check_not_suspended(self) -> None:
        """Raise an EngineError if the rollout phase is suspended. Samples would never finish."""
        if self.clock.is_paused:
            raise EngineError("no samples can be waited for while the rollout is suspended; resume the rollout first")

    def _clear_requests(self) -> None:
        self.dispatcher.clear()
        self._ready.clear()
        self._failure = None

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests. If no phase is open or a request cannot be served, raises EngineError and queues none."""
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
            self._send_due_requests()

    def check_request(self, request: GenerationRequest) -> None:
        """Raise ConfigError or DataError if sampling parameters or the prompt of a request are invalid."""
        check_params(request.params)
        prompt = request.prompt
        # The conversion to an array takes longer than these checks of a list. It names the problem of any other prompt.
        is_plain = isinstance(prompt, list) and bool(prompt) and {int}.issuperset(map(type, prompt))
        if not (is_plain and min(prompt) >= 0 and max(prompt) < self.info.vocab_size):
            read_tokens(prompt, "prompt", self.info.vocab_size)

    def _send_due_requests(self) -> None:
        for rank, batch in self.dispatcher.take_due_requests():
            self.workers.call_nowait(rank, "submit", batch)

    def abort(self, request_id: int) -> None:
        """End a request early. Its unfinished samples get finish_reason "abort". Unknown ids are ignored."""
        with self._records_lock:
            for rank, number in self.dispatcher.sent_parts(request_id):
                self.workers.call_nowait(rank, "abort", [number])
            self._deliver(self.dispatcher.drop_unsent(request_id))

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Return the outputs that have arrived, after waiting for the first one for at most `timeout` seconds.

        Requests with `stream` or `pieces` also have partial outputs, whose finish_reason is None. Outputs of
        `generate_stream` are not returned here. Raises EngineError if a worker has failed.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._poll_lock:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                shared = self.streams.has_consumers  # then turns are short, so that the other thread gets some
                if not self._ready:
                    left = max(0.0, deadline - time.monotonic())
                    self._receive(min(left, _TURN_S) if shared else left)
                ready, self._ready = self._ready, []
            if ready or not shared or time.monotonic() >= deadline:
                return ready

    def _receive(self, timeout: float) -> None:
        """Poll the workers, deliver outputs, and send queued requests. The caller must hold `_poll_lock`."""
        try:
            outputs = self.workers.poll(timeout)
            with self._records_lock:
                self._deliver(self.dispatcher.count_received(outputs))
                if (ask := self.dispatcher.choose_to_rebalance(self.workers.stats())) is not None:
                    rank, n_samples = ask
                    self.workers.call_nowait(rank, "drop_waiting", n_samples)
                self._send_due_requests()
        except Exception as error:
            self.streams.fail_all(error)
            raise

    def _deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        """Pass each output to its stream or to `poll`. The caller must hold `_records_lock`."""
        for output in outputs:
            if not self.streams.store_output(output, is_last=output.request_id not in self.dispatcher):
                self._ready.append(output)
            elif output.phases:  # the caller of `generate` has more to say of its samples, so it traces them itself
                trace_request(output)
        self.streams.deliver_stored()

    def _poll_for_streams(self) -> None:
        self.clock.wait(_TURN_S)  # a suspended worker in this process would return at once
        with self._poll_lock:
            try:
                self._receive(_TURN_S)
            except Exception as error:  # the streams have raised it; the next poll must raise it, too
                self._failure = error

    def _submit_streams(self, requests: Sequence[tuple[GenerationRequest, Consumer]]) -> None:
        with self._records_lock:
            self.submit([request for request, _ in requests])
            for request, consumer in requests:
                self.streams.open(request.request_id, consumer)

    @property
    def is_streaming(self) -> bool:
        return self.streams.has_reading_consumers

    async def generate_stream(
        self, request: GenerationRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yield the outputs of one request as they arrive, without blocking the event loop.

        The generator ends after the last sample of the request. It yields partial outputs only if the request sets
        `stream` or `pieces`. If the caller reads slowly, consecutive partial outputs of a sample are joined. Any number
        of these generators may run at the same time, also while another thread calls `generate`. The requests of
        `generate` have ids from 0 on, so `request` needs another request_id. If the caller stops reading (cancellation,
        aclose), the request is aborted.

        Raises ConfigError or DataError for an invalid request. Raises EngineError if the request cannot be served or a
        worker has failed. Raises TimeoutError after `timeout_s` seconds, in which suspended time does not count.
        """
        self.check_request(request)
        consumer, unfinished = Consumer(), request.n_samples
        limit = TimeLimit(consumer, self.clock, timeout_s)
        try:
            await self.batcher.submit(request, consumer)
            while unfinished:
                for output in await consumer.wait_for_outputs():
                    unfinished -= output.finish_reason is not None
                    yield output
        finally:
            limit.cancel()
            with self._records_lock:
                if unfinished and self.streams.abandon(consumer):
                    self.abort(request.request_id)

    def hold_decoding(self) -> None:
        """Decode only in calls of `advance` until the rollout phase ends.

        The set of tokens that a call samples then depends on the requests alone, and not on the clock.
        """
        self._call("hold_decoding")

    def advance(self, n_finished: int, n_steps: int | None = None) -> tuple[list[GenerationOutput], list[RolloutStats]]:
        """Decode in a held phase until each replica has `n_finished` finished samples or has run `n_steps`.

        Returns the finished samples and the statistics of each data-parallel rank. Raises EngineError if the model
        computes no finite numbers, or a worker has failed.
        """
        if n_steps is None:  # with several copies, no copy can know how many samples of the others have finished
            n_steps = _STEPS if self.spec.layout.dp_size == 1 else _STEPS_OF_COPIES
        outputs, stats = zip(*self._call("advance", n_finished, n_steps), strict=True)
        with self._records_lock:
            finished = self._with_callers_ids(outputs)
            self._send_due_requests()
        return finished, list(stats)

    def park(self) -> list[GenerationOutput]:
        """End all requests of a held phase, and return the tokens so far of each sample that a worker has.

        The finish_reason is None, unless the sample finished in the last step.
        """
        by_rank = self._call("park")
        with self._records_lock:
            outputs = self._with_callers_ids(by_rank)
            self.dispatcher.clear()
        return outputs

    def _with_callers_ids(self, by_rank: Iterable[Iterable[GenerationOutput]]) -> list[GenerationOutput]:
        """Return outputs with the request ids of the callers. The caller must hold `_records_lock`."""
        outputs = list(self.dispatcher.count_received(itertools.chain.from_iterable(by_rank)))
        if any(output.finish_reason == "error" for output in outputs):
            raise non_finite_logits()
        return outputs

    def rollout_stats(self) -> list[RolloutStats]:
        """Return the latest statistics of each data-parallel rank. Any thread may call this."""
        return self.workers.stats()

    def draft_counts(self) -> DraftCounts:
        """Return the counts of drafted and accepted tokens of the open or else the last rollout phase."""
        return DraftCounts.from_stats(self.rollout_stats())

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: OnProgress | None = None, at_once: int | None = None
    ) -> dict[int, list[GenerationOutput]]:
        """Submit requests, wait until all are finished, and return the samples of each request in order, by request id.

        At most `at_once` requests are unfinished at the same time. With `engine.deterministic` this limit is ignored,
        because the next submission would depend on the clock. `on_progress` is called after each poll. Raises
        EngineError as `poll` and `submit` do, and if the model computes no finite numbers.
        """
        self.check_not_suspended()
        if self.spec.engine.deterministic:
            at_once = None
        elif self.spec.layout.dp_size > 1:
            # Longest first, so that all copies finish at about the same time. With one copy, a resumed run must keep
            # the order.
            requests = sorted(requests, key=lambda request: -(request.expected_tokens or 0))
        waiting = iter(requests)
        self.submit(itertools.islice(waiting, at_once))
        n_samples = {request.request_id: request.n_samples for request in requests}
        done: dict[int, list[GenerationOutput]] = {request_id: [] for request_id in n_samples}
        left = sum(request.n_samples for request in requests)
        while left:
            outputs = [output for output in self.poll(0.5) if output.finish_reason is not None]
            for output in outputs:
                if output.finish_reason == "error":  # with valid settings only the model can be the cause
                    raise non_finite_logits()
                done[output.request_id].append(output)
            left -= len(outputs)
            if at_once is not None:
                ended = [id for id in {output.request_id for output in outputs} if len(done[id]) == n_samples[id]]
                self.submit(itertools.islice(waiting, len(ended)))
            if on_progress is not None:
                on_progress(outputs, self.rollout_stats())
        for samples in done.values():
            samples.sort(key=lambda output: output.sample)
        return done

    def _call(self, method: str, *args: Any) -> list[Any]:
        with self._poll_lock:
            return self.workers.call(method, *args)
