"""Distributes requests over the data-parallel replicas of a model.

The Dispatcher decides which replica samples which requests. Requests with the longest expected completions come first.
A replica gets as many samples as it has room for, and the rest waits for the replica that finishes first. If a replica
is idle, another one is asked to return requests that it has not started. These decisions change when samples are
finished, not their tokens. The Dispatcher only keeps records. The engine sends the requests.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from areno import trace
from areno.engine.reports import RolloutStats
from areno.types import RETURNED, GenerationOutput, GenerationRequest

_TAIL = 32  # tokens at the end of a prompt
_AHEAD = 16  # a replica gets 1/16 more samples than it can run at once, so that its batch stays full
_ASK_EVERY_S = 0.1  # least time between questions to a replica, which answers after a step


@dataclass(slots=True, eq=False)
class RequestPart:
    """Samples of one request that are sampled on the same replica, so that their prompt is prefilled once.

    `request` has a new id. `request_id` is the id of the caller's request.
    """

    request: GenerationRequest
    request_id: int
    length: float  # expected completion tokens of each sample
    missing: int  # samples that are not finished
    rank: int | None = None  # the replica; None while queued
    added_at: int = 0  # on the clock of areno.trace


def _group_by_prompt(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Sort requests so that equal prompts are neighbours, because the scheduler shares prefills between neighbours.

    Prompts keep the order of their first requests. An interrupted sample is grouped with no other request.
    """
    places: dict[object, int] = {}

    def group_index(request: GenerationRequest) -> int:
        # The end of a prompt tells prompts apart. Reading all of it would take long for 100,000 tokens.
        key = id(request) if request.begun is not None else (len(request.prompt), *request.prompt[-_TAIL:])
        return places.setdefault(key, len(places))

    return sorted(requests, key=group_index)


class Dispatcher:
    """Distributes requests over the data-parallel replicas of a model. It only keeps records, and sends nothing.

    The engine sends the requests that `take_due_requests` returns. If `choose_to_rebalance` returns a replica, the
    engine asks it to return unstarted samples. If `fixed`, the distribution depends on the requests alone, not on which
    replica finishes first.
    """

    def __init__(self, n_replicas: int, fixed: bool = False):
        self.n_replicas, self._fixed = n_replicas, fixed
        self._slots = math.inf
        self._numbers = itertools.count()
        self.clear()

    def begin(self, slots: int) -> None:
        """Start a rollout phase, in which a replica runs at most `slots` samples at the same time."""
        # With one replica there is nothing to decide, so all requests are sent at once.
        self._slots = slots if self.n_replicas > 1 and not self._fixed else math.inf

    def clear(self) -> None:
        self._queue: deque[RequestPart] = deque()
        self._parts: dict[int, RequestPart] = {}  # by the id that the replicas know
        self._of_request: dict[int, list[RequestPart]] = {}
        self.n_samples = [0] * self.n_replicas  # sent to each replica and not finished
        self._tokens = [0.0] * self.n_replicas  # expected tokens of these samples
        self._waiting = [0] * self.n_replicas  # unstarted samples of each replica, by its last counters
        self._asked_at = [-math.inf] * self.n_replicas

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._of_request

    @property
    def is_idle(self) -> bool:
        return not self._of_request

    @property
    def n_unfinished_by_request(self) -> dict[int, int]:
        return {id_: sum(part.missing for part in parts) for id_, parts in self._of_request.items()}

    def add(self, requests: Sequence[GenerationRequest], max_new_by_request: Mapping[int, int]) -> None:
        """Queue new requests after those that are queued.

        With several replicas, the new requests are sorted by expected completion length, the longest first, and the
        samples of a request may be divided over several replicas.
        """
        n_samples = sum(request.n_samples for request in requests)
        share = -(-n_samples // self.n_replicas)
        # A resumed run has no expected lengths. If all samples can run at once, lengths are ignored, so that it divides
        # the requests like the original run.
        has_room = n_samples + sum(self.n_samples) <= self._slots * self.n_replicas
        parts: list[RequestPart] = []
        now = trace.now()
        for request in requests:
            most = max_new_by_request[request.request_id]
            length = most if has_room else min(request.expected_tokens or most, most)
            self._of_request[request.request_id] = mine = [
                RequestPart(part, request.request_id, length, part.n_samples, added_at=now)
                for part in self._divide_request(request, share)
            ]
            self._parts.update((part.request.request_id, part) for part in mine)
            parts += mine
        if self.n_replicas > 1:
            # Interrupted samples are the oldest, and come first.
            parts.sort(key=lambda part: (not part.request.begun, -part.length, -part.missing))
        self._queue.extend(parts)

    def _divide_request(self, request: GenerationRequest, share: int) -> list[GenerationRequest]:
        """Divide a request into requests of at most `share` samples, each with a new id."""
        n_parts = -(-request.n_samples // max(share, 1))
        bounds = [request.first_sample + request.n_samples * index // n_parts for index in range(n_parts + 1)]
        return [
            replace(request, request_id=next(self._numbers), first_sample=first, n_samples=end - first)
            for first, end in itertools.pairwise(bounds)
        ]

    def take_due_requests(self) -> list[tuple[int, list[GenerationRequest]]]:
        """Return the queued requests that can be sent now, as (rank, requests) pairs, and record them as sent."""
        found: dict[int, list[GenerationRequest]] = {}
        while self._queue:
            free = [rank for rank in range(self.n_replicas) if self.n_samples[rank] < self._slots * (1 + 1 / _AHEAD)]
            if not free:
                break
            # A replica with unstarted samples comes last.
            rank = min(free, key=lambda rank: (self._waiting[rank] > 0, self._tokens[rank], self.n_samples[rank]))
            part = self._queue.popleft()
            self._assign(part, rank)
            found.setdefault(rank, []).append(part.request)
        return [(rank, _group_by_prompt(requests)) for rank, requests in found.items()]

    def _assign(self, part: RequestPart, rank: int | None) -> None:
        """Record that replica `rank` samples a part, and update the counts. If `rank` is None, the part is queued."""
        for where, sign in ((part.rank, -1), (rank, 1)):
            if where is not None:
                self.n_samples[where] += sign * part.missing
                self._tokens[where] += sign * part.missing * part.length
        part.rank = rank

    def count_received(self, outputs: Iterable[GenerationOutput]) -> Iterator[GenerationOutput]:
        """Yield outputs with the caller's request ids, and count finished samples.

        An output whose `sample` is RETURNED means that a replica returns a request unstarted. It is not yielded, and
        the request is queued again.
        """
        for output in outputs:
            part = self._parts[output.request_id]
            if output.sample == RETURNED:
                self._assign(part, None)
                self._queue.appendleft(part)
                continue
            output.request_id = part.request_id
            if output.finish_reason is not None:
                if output.phases:  # it was queued here before it was queued at its replica of the model
                    (first, start), *later = output.phases
                    output.phases = ((first, min(start, part.added_at)), *later)
                self._count_finished(part)
            yield output

    def _count_finished(self, part: RequestPart) -> None:
        """Count a finished sample, and forget its part and its request if they have no unfinished samples left."""
        part.missing -= 1
        if part.rank is not None:
            self.n_samples[part.rank] -= 1
            self._tokens[part.rank] -= part.length
        if not part.missing:
            del self._parts[part.request.request_id]
            parts = self._of_request[part.request_id]
            parts.remove(part)
            if not parts:
                del self._of_request[part.request_id]

    def choose_to_rebalance(self, stats: Sequence[RolloutStats]) -> tuple[int, int] | None:
        """If a replica is idle, return the rank of a busy replica and how many unstarted samples to take from it."""
        if self.n_replicas == 1 or self._fixed:
            return None
        self._waiting = [of_replica.waiting for of_replica in stats]
        idle = [rank for rank, n in enumerate(self.n_samples) if n < self._slots and not self._waiting[rank]]
        if self._queue or not idle:
            return None
        rank, now = max(range(self.n_replicas), key=lambda rank: self._waiting[rank]), time.monotonic()
        if not self._waiting[rank] or now - self._asked_at[rank] < _ASK_EVERY_S:
            return None
        self._asked_at[rank] = now
        return rank, -(-self._waiting[rank] * len(idle) // (len(idle) + 1))

    def sent_parts(self, request_id: int) -> list[tuple[int, int]]:
        """Return (rank, id on this rank) of the parts of a caller's request that were sent."""
        parts = self._of_request.get(request_id, ())
        return [(part.rank, part.request.request_id) for part in parts if part.rank is not None]

    def drop_unsent(self, request_id: int) -> Iterator[GenerationOutput]:
        """Remove the samples of a caller's request that were not sent, and yield "abort" outputs for them."""
        for part in [part for part in self._of_request.get(request_id, ()) if part.rank is None]:
            self._queue.remove(part)
            first = part.request.first_sample
            for sample in range(first, first + part.missing):
                self._count_finished(part)
                yield GenerationOutput(
                    request_id=request_id, sample=sample, tokens=[], logprobs=[], versions=[], finish_reason="abort"
                )
