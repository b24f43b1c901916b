"""Distribution of requests over the copies of the model, and waiting for all outputs.

The Dispatcher decides which copy of the model (data-parallel rank) samples which requests. Requests with the longest
expected completions come first. A copy gets as many samples as it has room for, and the rest waits for the copy that
finishes first. If a copy is idle, another copy is asked to return requests that it has not started. These decisions
change when samples are finished, not their tokens. The Dispatcher sends nothing itself.
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
_AHEAD = 16  # a copy gets 1/16 more samples than it can run at once, so that its batch stays full
_ASK_EVERY_S = 0.1  # least time between questions to a copy, which answers after a step


@dataclass(slots=True, eq=False)
class RequestPart:
    """Some samples of one request, which the same copy of the model samples.

    They are sampled together so that the copy prefills their prompt once. `request` has an id of its own, `request_id`
    is that of the caller's request.
    """

    request: GenerationRequest
    request_id: int
    length: float  # expected completion tokens of each sample
    missing: int  # samples that are not finished
    rank: int | None = None  # the copy; None while queued
    added_at: int = 0  # on the clock of areno.trace


def _group_by_prompt(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Sort requests so that equal prompts are neighbours, because the scheduler shares prefills between neighbours.

    Prompts keep the order of their first requests. Interrupted samples count as prompts of their own.
    """
    places: dict[object, int] = {}

    def place(request: GenerationRequest) -> int:
        # The end of a prompt tells prompts apart. Reading all of it would take long for 100,000 tokens.
        key = id(request) if request.begun is not None else (len(request.prompt), *request.prompt[-_TAIL:])
        return places.setdefault(key, len(places))

    return sorted(requests, key=place)


class Dispatcher:
    """Distributes requests over the copies of a model (data-parallel ranks).

    It only keeps the records, and sends nothing. `take_due` returns requests, which the engine sends to the copies.
    `choose_to_rebalance` may return a copy, which the engine asks to give unstarted requests back. If `fixed`, the
    distribution depends on the requests alone, not on which copy finishes first.
    """

    def __init__(self, n_copies: int, fixed: bool = False):
        self.n_copies, self._fixed = n_copies, fixed
        self._slots = math.inf
        self._numbers = itertools.count()
        self.clear()

    def begin(self, slots: int) -> None:
        """Start a rollout phase, in which a copy runs at most `slots` samples at the same time."""
        # With one copy there is nothing to decide, so all requests are sent at once.
        self._slots = slots if self.n_copies > 1 and not self._fixed else math.inf

    def clear(self) -> None:
        self._queue: deque[RequestPart] = deque()
        self._parts: dict[int, RequestPart] = {}  # by the id that the copies know
        self._of_request: dict[int, list[RequestPart]] = {}
        self.n_samples = [0] * self.n_copies  # sent to each copy and not finished
        self._tokens = [0.0] * self.n_copies  # expected tokens of these samples
        self._waiting = [0] * self.n_copies  # unstarted samples of each copy, by its last counters
        self._asked_at = [-math.inf] * self.n_copies

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._of_request

    @property
    def is_idle(self) -> bool:
        return not self._of_request

    @property
    def n_missing_by_request(self) -> dict[int, int]:
        """Number of unfinished samples, by request id."""
        return {id_: sum(part.missing for part in parts) for id_, parts in self._of_request.items()}

    def add(self, requests: Sequence[GenerationRequest], max_new_by_request: Mapping[int, int]) -> None:
        """Queue new requests after those that are queued.

        With several copies, the new requests are sorted by expected completion length, the longest first, and the
        samples of a request may be divided over several copies.
        """
        n_samples = sum(request.n_samples for request in requests)
        share = -(-n_samples // self.n_copies)
        # A resumed run has no expected lengths. If all samples can run at once, lengths are ignored, so that it divides
        # the requests like the original run.
        has_room = n_samples + sum(self.n_samples) <= self._slots * self.n_copies
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
        if self.n_copies > 1:
            # Interrupted samples are the oldest, and come first.
            parts.sort(key=lambda part: (not part.request.begun, -part.length, -part.missing))
        self._queue.extend(parts)

    def _divide_request(self, request: GenerationRequest, share: int) -> list[GenerationRequest]:
        """Divide a request into requests of at most `share` samples, with ids of their own."""
        n_parts = -(-request.n_samples // max(share, 1))
        bounds = [request.first_sample + request.n_samples * index // n_parts for index in range(n_parts + 1)]
        return [
            replace(request, request_id=next(self._numbers), first_sample=first, n_samples=end - first)
            for first, end in itertools.pairwise(bounds)
        ]

    def take_due(self) -> list[tuple[int, list[GenerationRequest]]]:
        """Return the queued requests that can be sent now, as (copy, requests) pairs, and record them as sent."""
        found: dict[int, list[GenerationRequest]] = {}
        while self._queue:
            free = [rank for rank in range(self.n_copies) if self.n_samples[rank] < self._slots * (1 + 1 / _AHEAD)]
            if not free:
                break
            # A copy with unstarted samples comes last.
            rank = min(free, key=lambda rank: (self._waiting[rank] > 0, self._tokens[rank], self.n_samples[rank]))
            part = self._queue.popleft()
            self._assign(part, rank)
            found.setdefault(rank, []).append(part.request)
        return [(rank, _group_by_prompt(requests)) for rank, requests in found.items()]

    def _assign(self, part: RequestPart, rank: int | None) -> None:
        """Assign a part to the copy `rank`, or to the queue if it is None, and update the counts."""
        for where, sign in ((part.rank, -1), (rank, 1)):
            if where is not None:
                self.n_samples[where] += sign * part.missing
                self._tokens[where] += sign * part.missing * part.length
        part.rank = rank

    def count_received(self, outputs: Iterable[GenerationOutput]) -> Iterator[GenerationOutput]:
        """Yield outputs with the caller's request ids, and count finished samples.

        An output whose `sample` is RETURNED says that a copy gives a request back unstarted. It is not yielded, and the
        request is queued again.
        """
        for output in outputs:
            part = self._parts[output.request_id]
            if output.sample == RETURNED:
                self._assign(part, None)
                self._queue.appendleft(part)
                continue
            output.request_id = part.request_id
            if output.finish_reason is not None:
                if output.phases:  # it was queued here before it was queued at its copy of the model
                    (first, start), *later = output.phases
                    output.phases = ((first, min(start, part.added_at)), *later)
                self._count_finished(part)
            yield output

    def _count_finished(self, part: RequestPart) -> None:
        """Count a finished sample of a part. Parts and requests without unfinished samples are forgotten."""
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
        """Choose a busy copy and how many unstarted samples it should return, because another copy is idle."""
        if self.n_copies == 1 or self._fixed:
            return None
        self._waiting = [of_copy.waiting for of_copy in stats]
        idle = [rank for rank, n in enumerate(self.n_samples) if n < self._slots and not self._waiting[rank]]
        if self._queue or not idle:
            return None
        rank, now = max(range(self.n_copies), key=lambda rank: self._waiting[rank]), time.monotonic()
        if not self._waiting[rank] or now - self._asked_at[rank] < _ASK_EVERY_S:
            return None
        self._asked_at[rank] = now
        return rank, -(-self._waiting[rank] * len(idle) // (len(idle) + 1))

    def sent_parts(self, request_id: int) -> list[tuple[int, int]]:
        """Return (copy, id of a part) for the parts of a caller's request that were sent."""
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
