"""Checks requests, and distributes them over the data-parallel replicas of a model.

RequestLimits rejects requests that a decoder cannot serve, before they are queued.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from areno import trace
from areno.engine.reports import RolloutStats
from areno.errors import ConfigError, EngineError, Key, Problem
from areno.schema.fields import partial_section, problems_between, settings
from areno.schema.values import InvalidValue, show
from areno.types import RETURNED, Begun, GenerationOutput, GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of the requests that a decoder can serve."""

    vocab_size: int
    context_len: int
    kv_tokens: int  # longest sequence that fits the KV cache if no other sequence runs
    cache_tokens: int = 0  # memory of the KV cache, in tokens of all layers

    def max_new(self, request: GenerationRequest) -> int:
        """Return how many completion tokens a sample may have. Raises RequestRefused if the request is invalid."""
        params, n_prompt = request.params, len(request.prompt)
        context = min(self.context_len, params.max_context_len or self.context_len)
        max_new = min(params.max_new_tokens, context - n_prompt)
        if request.n_samples < 1:
            raise _refusal(
                request,
                "n_samples",
                f"n_samples is {request.n_samples}; at least 1 is needed",
                "set {}",
                "gconfig.n_samples",
            )
        if n_prompt == 0:
            raise _refusal(request, "prompt", "the prompt has no tokens; at least one is needed")
        if params.max_prompt_len is not None and n_prompt > params.max_prompt_len:
            why = f"the prompt has {n_prompt} tokens, and at most {params.max_prompt_len} may be"
            raise _refusal(request, "prompt", why, "shorten it or raise {}", "max_prompt_len")
        if max_new < 1:
            why = f"the prompt has {n_prompt} tokens, which leaves no room for a completion in a context of {context}"
            advice = f"shorten the prompt or raise {{}} (the model's own limit is {self.context_len})"
            raise _refusal(request, "prompt", why, advice, "gconfig.max_tokens")
        if n_prompt + max_new - 1 > self.kv_tokens:  # the last token is never an input
            why = f"a prompt of {n_prompt} tokens with up to {max_new} new ones does not fit the KV cache of "
            why += f"{self.kv_tokens} tokens even alone"
            keys = "rollout.max_kv_tokens", "rollout.mem_fraction", "gconfig.max_tokens", "gconfig.max_new_tokens"
            raise _refusal(request, "max_new_tokens", why, "raise {} (or {}), or lower {} or {}", *keys)
        if request.grammar is not None and params.min_new_tokens:
            why = "its grammar decides when a completion ends"
            raise _refusal(request, "min_new_tokens", why, "leave {} at 0", "gconfig.min_new_tokens")
        if not 0 <= request.top_logprobs <= self.vocab_size:
            why = f"it asks for {request.top_logprobs} top log-probabilities; 0 to {self.vocab_size} are there"
            raise _refusal(request, "top_logprobs", why)
        if request.begun is not None:
            self._check_begun(request, request.begun, max_new)
        self._check_ids(request)
        return max_new

    def _check_begun(self, request: GenerationRequest, begun: Begun, max_new: int) -> None:
        """Raise RequestRefused if a partly generated sample (`begun`) cannot be continued."""
        n_tokens = len(begun.tokens)
        if request.n_samples != 1:
            why = f"it continues a sample and asks for {request.n_samples} samples; a request continues one sample"
        elif not 0 < n_tokens < max_new:
            why = f"it continues after {n_tokens} tokens; 1 to {max_new - 1} are possible"
        elif not len(begun.logprobs) == len(begun.versions) == n_tokens:
            why = f"it continues after {n_tokens} tokens with {len(begun.logprobs)} log-probabilities and "
            why += f"{len(begun.versions)} versions; one for each token is needed"
        elif request.wants_scores or request.stream or request.pieces:
            why = "it continues a sample and asks for top or raw log-probabilities or partial outputs; none is kept"
        else:
            return
        raise _refusal(request, "begun", why)

    def _check_ids(self, request: GenerationRequest) -> None:
        """Raise RequestRefused if a token id in the request is outside the model's vocabulary."""
        for field, ids, key in (
            ("prompt", request.prompt, "tokenizer_path"),
            ("begun", None if request.begun is None else request.begun.tokens, ""),
            ("stop_token_ids", request.params.stop_token_ids, "gconfig.stop_token_ids"),
            ("logit_bias", request.logit_bias, ""),
        ):
            if not ids:
                continue
            least, most = min(ids), max(ids)
            if least < 0 or most >= self.vocab_size:
                wrong = show(int(least if least < 0 else most))
                why = f"{field} holds the token id {wrong}; the model's vocabulary is 0..{self.vocab_size - 1}"
                raise _refusal(request, field, why, *(["check {}", key] if key else []))


class RequestRefused(EngineError):
    """Raised for a request that a decoder cannot serve.

    `field` names the invalid field of the request. `why` is the reason without request id and settings, to send to a
    client of the server.
    """

    field = why = ""


def _refusal(request: GenerationRequest, field: str, why: str, advice: str = "", *keys: str) -> RequestRefused:
    """Return the error for a request. `advice` has one {} for each of `keys`, which are names of settings."""
    advice = advice and f"; {advice}"
    error = RequestRefused("request {} cannot be served: {}" + advice, request.request_id, why, *map(Key, keys))
    error.field, error.why = field, why
    return error


_MAX_KNOWN = 1024
_known_good: set[str] = set()  # parameters that were checked: requests with the same ones come by the thousand


def check_params(params: SamplingParams) -> None:
    """Raise ConfigError if sampling parameters are out of the bounds that SamplingConfig declares."""
    if (text := repr(params)) in _known_good:
        return
    problems, known = [], {}
    for name, value in asdict(params).items():
        field, value = settings(SamplingParams)[name], _to_plain_values(value)
        try:
            known[name] = field.convert(value)
            # `convert` also accepts a number written as text, for files. In a script this is a mistake.
            if known[name] != value:
                raise InvalidValue(f"is {show(value)}; expected {field.type_text}")
        except InvalidValue as error:
            known.pop(name, None)
            problems.append(Problem(name, str(error)))
    problems += problems_between(partial_section(SamplingParams, known))
    if problems:
        raise ConfigError([problem.under("SamplingParams") for problem in problems])
    if len(_known_good) >= _MAX_KNOWN:
        _known_good.clear()
    _known_good.add(text)


def _to_plain_values(value: Any) -> Any:
    """Convert numpy numbers to Python numbers, and tuples to lists, also inside lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [_to_plain_values(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value


_TAIL = 32  # tokens at the end of a prompt
_AHEAD = 16  # a copy gets 1/16 more samples than it can run at once, so that its batch stays full
_ASK_EVERY_S = 0.1  # least time between questions to a copy, which answers after a step


@dataclass(slots=True, eq=False)
class RequestPart:
    """Samples of one request that are sampled on the same replica, so that their prompt is prefilled once.

    `request` has a new id. `request_id` is the id of the caller's request.
    """

    request: GenerationRequest
    request_id: int
    length: float  # expected completion tokens of each sample
    missing: int  # samples that are not finished
    rank: int | None = None  # the copy; None while queued
    added_at: int = 0  # on the clock of areno.trace


def _group_by_prompt(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Sort requests so that equal prompts are neighbours, because the scheduler shares prefills between neighbours.

    Prompts keep the order of their first requests. An interrupted sample is grouped with no other request.
    """
    places: dict[object, int] = {}

    def place(request: GenerationRequest) -> int:
        # The end of a prompt tells prompts apart. Reading all of it would take long for 100,000 tokens.
        key = id(request) if request.begun is not None else (len(request.prompt), *request.prompt[-_TAIL:])
        return places.setdefault(key, len(places))

    return sorted(requests, key=place)


class Dispatcher:
    """Distributes requests over the data-parallel replicas of a model. It only keeps records, and sends nothing.

    The engine sends the requests that `due` returns. If `choose_to_rebalance` returns a replica, the engine asks it to
    return unstarted samples. If `fixed`, the distribution depends on the requests alone, not on which replica finishes
    first.
    """

    def __init__(self, n_copies: int, fixed: bool = False):
        self.n_copies, self._fixed = n_copies, fixed
        self._slots = math.inf
        self._numbers = itertools.count()
        self.clear()

    def begin(self, slots: int) -> None:
        """Start a rollout phase, in which a replica runs at most `slots` samples at the same time."""
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
    def missing(self) -> dict[int, int]:
        """Number of unfinished samples, by request id."""
        return {id_: sum(part.missing for part in parts) for id_, parts in self._of_request.items()}

    def add(self, requests: Sequence[GenerationRequest], max_new_by_request: Mapping[int, int]) -> None:
        """Queue new requests after those that are queued.

        With several replicas, the new requests are sorted by expected completion length, the longest first, and the
        samples of a request may be divided over several replicas.
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
        """Divide a request into requests of at most `share` samples, each with a new id."""
        n_parts = -(-request.n_samples // max(share, 1))
        bounds = [request.first_sample + request.n_samples * index // n_parts for index in range(n_parts + 1)]
        return [
            replace(request, request_id=next(self._numbers), first_sample=first, n_samples=end - first)
            for first, end in itertools.pairwise(bounds)
        ]

    def due(self) -> list[tuple[int, list[GenerationRequest]]]:
        """Return the queued requests that can be sent now, as (rank, requests) pairs, and record them as sent."""
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
        """Record that replica `rank` samples a part, and update the counts. If `rank` is None, the part is queued."""
        for where, sign in ((part.rank, -1), (rank, 1)):
            if where is not None:
                self.n_samples[where] += sign * part.missing
                self._tokens[where] += sign * part.missing * part.length
        part.rank = rank

    def received(self, outputs: Iterable[GenerationOutput]) -> Iterator[GenerationOutput]:
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
                if output.phases:  # it was queued here before it was queued at its copy of the model
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
        """Return (rank, id on this rank) of the parts of a caller's request that were sent."""
        parts = self._of_request.get(request_id, ())
        return [(part.rank, part.request.request_id) for part in parts if part.rank is not None]

    def dropped(self, request_id: int) -> Iterator[GenerationOutput]:
        """Remove the samples of a caller's request that were not sent, and yield "abort" outputs for them."""
        for part in [part for part in self._of_request.get(request_id, ()) if part.rank is None]:
            self._queue.remove(part)
            first = part.request.first_sample
            for sample in range(first, first + part.missing):
                self._count_finished(part)
                yield GenerationOutput(
                    request_id=request_id, sample=sample, tokens=[], logprobs=[], versions=[], finish_reason="abort"
                )


def phase_spans(phases: trace.Phases) -> list[tuple[str, int, int]]:
    """Convert the phases of a finished sample to (name, start, end) of each phase."""
    return [(name, start, end) for (name, start), (_, end) in itertools.pairwise(phases)]


def trace_request(output: GenerationOutput) -> None:
    lane, phases = f"requests#{output.request_id}.{output.sample}", output.phases
    arguments = {"tokens": len(output.tokens), "cached_tokens": output.cached_tokens}
    trace.add(lane, "request", phases[0][1], phases[-1][1], **arguments, **version_range(vars(output)["versions"]))
    for name, start, end in phase_spans(phases):
        trace.add(lane, name, start, end)


def version_range(versions: Sequence[int]) -> dict[str, int]:
    """Return the first and, if it differs, the last version of the weights, as arguments of a trace event."""
    if not len(versions):
        return {}
    first, last = int(versions[0]), int(versions[-1])
    return {"weights_version": first} | ({"last_weights_version": last} if last != first else {})


def requests_of_rest(
    request: GenerationRequest, parked: Iterable[GenerationOutput], ids: Iterator[int]
) -> list[GenerationRequest]:
    """Return requests, with new ids, that continue the unfinished samples `parked` of a request.

    Each sample with tokens gets a request of its own. Consecutive samples without tokens share a request.
    """
    requests: list[GenerationRequest] = []
    for output in sorted(parked, key=lambda output: output.sample):
        sample = output.sample
        if output.tokens:
            begun = Begun(output.tokens, output.logprobs, output.versions)
            requests.append(replace(request, request_id=next(ids), first_sample=sample, n_samples=1, begun=begun))
        elif requests and (last := requests[-1]).begun is None and last.first_sample + last.n_samples == sample:
            requests[-1] = replace(last, n_samples=last.n_samples + 1)
        else:
            requests.append(replace(request, request_id=next(ids), first_sample=sample, n_samples=1, begun=None))
    return requests


OnProgress = Callable[[list[GenerationOutput], list[RolloutStats]], None]
