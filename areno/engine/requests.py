"""Which requests a decoder has room for. Checked before a request is queued, so that its caller gets the error.

Which copy of the model draws which samples: the longest first, and none runs dry while another has some waiting.

A copy is sent what it has room for. The rest waits here for the copy that gets done first. A copy may still have
requests that it cannot begin, since its KV cache is full: it is asked to give these back when another one is idle.
Where samples are drawn changes when they are there, and nothing else. Plain numbers: nothing is sent from here.

Many requests at once, for a caller who waits until the last sample is there.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from areno.engine.spec import RolloutStats
from areno.errors import ConfigError, EngineError, Key, Problem, non_finite_logits
from areno.schema.fields import partial_section, problems_between, settings
from areno.schema.values import InvalidValue, show
from areno.types import RETURNED, GenerationOutput, GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The requests that a decoder can serve.

    Attributes:
        vocab_size: Vocabulary of the model.
        context_len: Context of the model, in tokens.
        kv_tokens: Longest sequence that fits the KV cache alone, in tokens.
        cache_tokens: Tokens that fill the memory of the KV cache with keys and values of all layers.
        stop_strings: Whether there is a tokenizer, which stop strings need.
        grammars: Whether grammars can be compiled, which needs the tokenizer, too.
    """

    vocab_size: int
    context_len: int
    kv_tokens: int
    cache_tokens: int = 0
    stop_strings: bool  # whether there is a tokenizer, without which stop strings cannot be found
    grammars: bool = False  # whether grammars can be compiled, which needs the tokenizer, too

    def max_new(self, request: GenerationRequest) -> int:
        """Return the most tokens that each sample of a request may get.

        The values of `request.params` must be valid; check_params checks them.

        Raises:
            RequestRefused: The decoder has no room for the request.
        """
        params, n_prompt = request.params, len(request.prompt)
        context = min(self.context_len, params.max_context_len or self.context_len)
        max_new = min(params.max_new_tokens, context - n_prompt)
        if request.n_samples < 1:
            raise _refused(
                request,
                "n_samples",
                f"n_samples is {request.n_samples}; at least 1 is needed",
                "set {}",
                "gconfig.n_samples",
            )
        if n_prompt == 0:
            raise _refused(request, "prompt", "the prompt has no tokens; at least one is needed")
        if params.max_prompt_len is not None and n_prompt > params.max_prompt_len:
            why = f"the prompt has {n_prompt} tokens, and at most {params.max_prompt_len} may be"
            raise _refused(request, "prompt", why, "shorten it or raise {}", "max_prompt_len")
        if max_new < 1:
            why = f"the prompt has {n_prompt} tokens, which leaves no room for a completion in a context of {context}"
            advice = f"shorten the prompt or raise {{}} (the model's own limit is {self.context_len})"
            raise _refused(request, "prompt", why, advice, "gconfig.max_tokens")
        if n_prompt + max_new - 1 > self.kv_tokens:  # the last token is never an input
            why = f"a prompt of {n_prompt} tokens with up to {max_new} new ones does not fit the KV cache of "
            why += f"{self.kv_tokens} tokens even alone"
            keys = "rollout.max_kv_tokens", "rollout.mem_fraction", "gconfig.max_tokens", "gconfig.max_new_tokens"
            raise _refused(request, "max_new_tokens", why, "raise {} (or {}), or lower {} or {}", *keys)
        if params.stop and not self.stop_strings:
            why = "stop strings need a tokenizer, and there is none"
            raise _refused(request, "stop", why, "use {}", "gconfig.stop_token_ids")
        if request.grammar is not None and not self.grammars:
            raise _refused(
                request, "grammar", "a grammar needs a tokenizer, and there is none", "set {}", "tokenizer_path"
            )
        if request.grammar is not None and params.min_new_tokens:
            why = "its grammar decides when a completion ends"
            raise _refused(request, "min_new_tokens", why, "leave {} at 0", "gconfig.min_new_tokens")
        if not 0 <= request.top_logprobs <= self.vocab_size:
            why = f"it asks for {request.top_logprobs} top log-probabilities; 0 to {self.vocab_size} are there"
            raise _refused(request, "top_logprobs", why)
        self._check_ids(request)
        return max_new

    def _check_ids(self, request: GenerationRequest) -> None:
        """Raise RequestRefused for a token id that the model does not have."""
        for field, ids, key in (
            ("prompt", request.prompt, "tokenizer_path"),
            ("stop_token_ids", request.params.stop_token_ids, "gconfig.stop_token_ids"),
            ("logit_bias", request.logit_bias, ""),
        ):
            if not ids:
                continue
            least, most = min(ids), max(ids)
            if least < 0 or most >= self.vocab_size:
                wrong = show(int(least if least < 0 else most))
                why = f"{field} holds the token id {wrong}; the model's vocabulary is 0..{self.vocab_size - 1}"
                raise _refused(request, field, why, *(["check {}", key] if key else []))


class RequestRefused(EngineError):
    """A request that a decoder cannot serve.

    Attributes:
        field: The field of the request or of its sampling parameters that is wrong.
        why: What is wrong, without the number of the request and without settings, for a client of a server.
    """

    field = why = ""


def _refused(request: GenerationRequest, field: str, why: str, advice: str = "", *keys: str) -> RequestRefused:
    """Return the error of a request. advice: a text with {} for each of the settings `keys`."""
    advice = advice and f"; {advice}"
    error = RequestRefused("request {} cannot be served: {}" + advice, request.request_id, why, *map(Key, keys))
    error.field, error.why = field, why
    return error


_MAX_KNOWN = 1024
_known_good: set[str] = set()  # parameters that were checked: requests with the same ones come by the thousand


def check_params(params: SamplingParams) -> None:
    """Raise ConfigError with every value that is out of the bounds that SamplingConfig declares."""
    if (text := repr(params)) in _known_good:
        return
    problems, known = [], {}
    for name, value in asdict(params).items():
        field, value = settings(SamplingParams)[name], _plain(value)
        try:
            known[name] = field.convert(value)
            # A file may have numbers as text and the other way round; in a script this is a mistake.
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


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's own, a tuple as a list."""
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value


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
        """Start a rollout phase, in which each copy runs at most `slots` samples at once."""
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

    def add(self, requests: Sequence[GenerationRequest], max_new_by_request: Mapping[int, int]) -> None:
        """Queue requests after the earlier ones, the longest first.

        Args:
            requests: The requests.
            max_new_by_request: Request id -> most new tokens of a sample.
        """
        n_samples = sum(request.n_samples for request in requests)
        share = -(-n_samples // self.n_copies)
        # A run that goes on knows no lengths. Where all can run at once, it divides them as it would have.
        has_room = n_samples + sum(self.n_samples) <= self._slots * self.n_copies
        parts: list[Part] = []
        for request in requests:
            most = max_new_by_request[request.request_id]
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
        """Return a request in one piece, or in several if some copies would be idle otherwise."""
        n_parts = -(-request.n_samples // max(share, 1))
        bounds = [request.n_samples * place // n_parts for place in range(n_parts + 1)]
        return [
            replace(request, request_id=next(self._numbers), first_sample=first, n_samples=end - first)
            for first, end in itertools.pairwise(bounds)
        ]

    def due(self) -> list[tuple[int, list[GenerationRequest]]]:
        """Return the requests to send now, by copy."""
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
        """Count the missing samples of a part for another copy than before, or for none."""
        for where, sign in ((part.rank, -1), (rank, 1)):
            if where is not None:
                self.n_samples[where] += sign * part.missing
                self._tokens[where] += sign * part.missing * part.length
        part.rank = rank

    def received(self, outputs: Iterable[GenerationOutput]) -> Iterator[GenerationOutput]:
        """Yield the outputs with the request ids of the caller, and count each of them.

        A part that a copy has returned without starting it goes back to the queue.
        """
        for output in outputs:
            part = self._parts[output.request_id]
            if output.sample == RETURNED:
                self._place(part, None)
                self._queue.appendleft(part)
                continue
            output.request_id = part.request_id
            if output.finish_reason is not None:
                self._finish(part)
            yield output

    def _finish(self, part: Part) -> None:
        """Count one more finished sample of a part."""
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
        """Return a copy that shall return unstarted requests, and how many samples. None if no copy is idle."""
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


OnProgress = Callable[[list[GenerationOutput], list[RolloutStats]], None]


class RolloutEngine(Protocol):
    """The part of an Engine that `wait_for_all` uses."""

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests."""
        ...

    def poll(self, timeout: float) -> list[GenerationOutput]:
        """Return outputs, or an empty list after at most `timeout` seconds."""
        ...

    def rollout_stats(self) -> list[RolloutStats]:
        """Return the counters of each data-parallel rank."""
        ...


def wait_for_all(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], on_progress: OnProgress | None, at_once: int | None
) -> dict[int, list[GenerationOutput]]:
    """Sample all requests, which start in this order.

    Args:
        engine: The engine.
        requests: The requests.
        on_progress: Receives finished samples and the counters of each rank.
        at_once: Most requests in progress at the same time. None for all.

    Returns:
        The finished samples of each request by its id, in order.

    Raises:
        EngineError: The model gives a sample no finite numbers.
    """
    waiting = iter(requests)
    engine.submit(itertools.islice(waiting, at_once))
    n_samples = {request.request_id: request.n_samples for request in requests}
    done: dict[int, list[GenerationOutput]] = {request.request_id: [] for request in requests}
    left = sum(request.n_samples for request in requests)
    while left:
        outputs = [output for output in engine.poll(0.5) if output.finish_reason is not None]
        for output in outputs:
            if output.finish_reason == "error":  # with valid settings it can only be the model
                raise non_finite_logits()
            done[output.request_id].append(output)
        left -= len(outputs)
        if at_once is not None:
            ended = [id for id in {output.request_id for output in outputs} if len(done[id]) == n_samples[id]]
            engine.submit(itertools.islice(waiting, len(ended)))
        if on_progress is not None:
            on_progress(outputs, engine.rollout_stats())
    for outputs in done.values():
        outputs.sort(key=lambda output: output.sample)
    return done
