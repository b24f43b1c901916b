"""Which copy of the model draws which samples: the longest first, and none runs dry while another has some waiting.

A copy is sent what it has room for. The rest waits here for the copy that gets done first. A copy may still have
requests that it cannot begin, since its KV cache is full: it is asked to give these back when another one is idle.
Where samples are drawn changes when they are there, and nothing else. Plain numbers: nothing is sent from here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from areno.engine.spec import RolloutStats
from areno.types import GIVEN_BACK, GenerationOutput, GenerationRequest

_AHEAD = 16  # a copy is sent a 16th more samples than it can run, so that none of its places is ever empty
_ASK_EVERY_S = 0.1  # a copy for what it has not begun: its answer takes a step of its decoder


@dataclass(slots=True, eq=False)
class Part:
    """Samples of one request that one copy draws together, so that their prompt is computed once.

    request: as the copy gets it, under a number of its own. request_id: that of the caller. length: expected tokens of
    each sample. missing: samples still to come. rank: of the copy; None while it waits here.
    """

    request: GenerationRequest
    request_id: int
    length: float
    missing: int
    rank: int | None = None


class Dispatcher:
    """The requests under way, for `n_copies` of the model. The engine sends what `due` and `to_ask` return.

    fixed: what a copy draws follows from the requests alone, not from which copy is done first.
    """

    def __init__(self, n_copies: int, fixed: bool = False):
        self.n_copies, self._fixed = n_copies, fixed
        self._slots = math.inf
        self._numbers = itertools.count()
        self.clear()

    def begin(self, slots: int) -> None:
        """A rollout phase begins, in which each copy runs at most `slots` samples at once."""
        # With one copy, there is nothing to decide. Without a limit, all is sent at once.
        self._slots = slots if self.n_copies > 1 and not self._fixed else math.inf

    def clear(self) -> None:
        """Forget all requests."""
        self._queue: deque[Part] = deque()
        self._parts: dict[int, Part] = {}  # by the number that the copies know
        self._of_request: dict[int, list[Part]] = {}
        self.n_samples = [0] * self.n_copies  # sent to each copy and not done
        self._tokens = [0.0] * self.n_copies  # of these
        self._waiting = [0] * self.n_copies  # of these, those not begun, when it was last heard
        self._asked_at = [-math.inf] * self.n_copies

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._of_request

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._of_request

    @property
    def missing(self) -> dict[int, int]:
        """Request id -> samples still to come."""
        return {id_: sum(part.missing for part in parts) for id_, parts in self._of_request.items()}

    def add(self, requests: Sequence[GenerationRequest], most_tokens: Mapping[int, int]) -> None:
        """Queue requests behind those that are here, the longest first. most_tokens: request id -> of a sample."""
        n_samples = sum(request.n_samples for request in requests)
        share = -(-n_samples // self.n_copies)
        # A run that goes on knows no lengths. Where all can run at once, it divides them as it would have.
        has_room = n_samples + sum(self.n_samples) <= self._slots * self.n_copies
        parts: list[Part] = []
        for request in requests:
            most = most_tokens[request.request_id]
            length = most if has_room else min(request.expected_tokens or most, most)
            self._of_request[request.request_id] = mine = [
                Part(part, request.request_id, length, part.n_samples) for part in self._cut(request, share)
            ]
            self._parts.update((part.request.request_id, part) for part in mine)
            parts += mine
        if self.n_copies > 1:
            parts.sort(key=lambda part: (-part.length, -part.missing))
        self._queue.extend(parts)

    def _cut(self, request: GenerationRequest, share: int) -> list[GenerationRequest]:
        """A request in one piece, unless some copies would have nothing to do then."""
        n_parts = -(-request.n_samples // max(share, 1))
        bounds = [request.n_samples * place // n_parts for place in range(n_parts + 1)]
        return [
            replace(request, request_id=next(self._numbers), first_sample=first, n_samples=end - first)
            for first, end in itertools.pairwise(bounds)
        ]

    def due(self) -> list[tuple[int, list[GenerationRequest]]]:
        """What to send to which copies now."""
        found: dict[int, list[GenerationRequest]] = {}
        while self._queue:
            free = [rank for rank in range(self.n_copies) if self.n_samples[rank] < self._slots * (1 + 1 / _AHEAD)]
            if not free:
                break
            # One that cannot begin what it has comes last.
            rank = min(free, key=lambda rank: (self._waiting[rank] > 0, self._tokens[rank], self.n_samples[rank]))
            part = self._queue.popleft()
            self._place(part, rank)
            found.setdefault(rank, []).append(part.request)
        return list(found.items())

    def _place(self, part: Part, rank: int | None) -> None:
        """Count a part, or what is missing of it, with another copy than before, or with none."""
        for where, sign in ((part.rank, -1), (rank, 1)):
            if where is not None:
                self.n_samples[where] += sign * part.missing
                self._tokens[where] += sign * part.missing * part.length
        part.rank = rank

    def received(self, outputs: Iterable[GenerationOutput]) -> Iterator[GenerationOutput]:
        """The outputs as the caller knows their requests, each counted as it is taken. What was given back waits here
        again."""
        for output in outputs:
            part = self._parts[output.request_id]
            if output.sample == GIVEN_BACK:
                self._place(part, None)
                self._queue.appendleft(part)
                continue
            output.request_id = part.request_id
            if output.finish_reason is not None:
                self._finish(part)
            yield output

    def _finish(self, part: Part) -> None:
        """One more of its samples is there."""
        rank = part.rank
        self._place(part, None)
        part.missing -= 1
        self._place(part, rank)
        if not part.missing:
            del self._parts[part.request.request_id]
            parts = self._of_request[part.request_id]
            parts.remove(part)
            if not parts:
                del self._of_request[part.request_id]

    def to_ask(self, stats: Sequence[RolloutStats]) -> tuple[int, int] | None:
        """A copy that is to give back samples it has not begun, and how many; None where nobody is idle."""
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

    def sent(self, request_id: int) -> list[tuple[int, int]]:
        """(copy, number there) of what copies have of a request."""
        parts = self._of_request.get(request_id, ())
        return [(part.rank, part.request.request_id) for part in parts if part.rank is not None]

    def dropped(self, request_id: int) -> Iterator[GenerationOutput]:
        """Drop what was not sent of a request; the outputs of its samples, each counted as it is taken."""
        for part in [part for part in self._of_request.get(request_id, ()) if part.rank is None]:
            self._queue.remove(part)
            first = part.request.first_sample
            for sample in range(first, first + part.missing):
                self._finish(part)
                yield GenerationOutput(
                    request_id=request_id, sample=sample, tokens=[], logprobs=[], versions=[], finish_reason="abort"
                )
