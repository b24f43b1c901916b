"""What /metrics shows, in the text form of Prometheus.

Between requests of clients and the engine: ids, seeds, limits, and the end of what nobody waits for any more.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits, RequestRefused
from areno.errors import ArenoError, EngineError
from areno.server.errors import CONTEXT_FULL, ApiError
from areno.server.requests import MOST_MESSAGES, SampleOptions
from areno.server.tokens import digest_of
from areno.types import GenerationOutput, GenerationRequest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts of observations by upper bound."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """The samples of the metric `name`."""
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """The counters of one server, since it was started. Tokens are counted when their request is done."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.in_flight = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.aborted = 0
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, gauges: Iterable[tuple[str, str, float]]) -> str:
        """The page. gauges: (name, help, value) of what others count."""
        lines = []

        def metric(name: str, kind: str, about: str, samples: Iterable[str]) -> None:
            lines.extend([f"# HELP {name} {about}", f"# TYPE {name} {kind}", *samples])

        told = [f'areno_requests_total{{path="{p}",status="{s}"}} {n}' for (p, s), n in sorted(self.requests.items())]
        metric("areno_requests_total", "counter", "HTTP requests that were answered.", told)
        counters = {
            "areno_prompt_tokens_total": ("Tokens of prompts.", self.prompt_tokens),
            "areno_prompt_tokens_cached_total": ("Of these, found in the cache.", self.cached_tokens),
            "areno_prompt_tokens_computed_total": ("Of these, prefilled.", self.prompt_tokens - self.cached_tokens),
            "areno_completion_tokens_total": ("Tokens that were sampled.", self.completion_tokens),
            "areno_requests_aborted_total": ("Requests whose client went away or ran out of time.", self.aborted),
        }
        for name, (about, value) in counters.items():
            metric(name, "counter", about, [f"{name} {value}"])
        for name, about, value in [("areno_requests_in_flight", "Requests being answered.", self.in_flight), *gauges]:
            metric(name, "gauge", about, [f"{name} {value:g}"])
        seconds = {
            "areno_time_to_first_token_seconds": ("Of streamed requests.", self.first_token),
            "areno_request_seconds": ("From a request to the end of its answer.", self.whole),
        }
        for name, (about, histogram) in seconds.items():
            metric(name, "histogram", about, histogram.lines(name))
        return "\n".join(lines) + "\n"


_MOST_SEEN = 1 << 16  # prompts whose draws are counted
_FIRST_ID = 1 << 48  # of requests; calls of Engine.generate count theirs from 0

_NAMES = {"n_samples": "n", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of our own records -> those of the API. All others have the same name."""
_ADVICE = {"max_new_tokens": "; shorten the prompt or lower max_tokens", "min_new_tokens": "; leave min_tokens out"}


@dataclass(kw_only=True)
class ServerLimits:
    """max_body: bytes of a request. max_messages: of a chat. max_samples: being sampled or waiting; more are refused.

    max_remembered: tokens of the conversations that are remembered. timeout_s: for the answer to a request. shutdown_s:
    for the answers under way when the server is told to end.
    """

    max_body: int = 16 * 2**20
    max_messages: int = MOST_MESSAGES
    max_samples: int = 4096
    max_remembered: int = 64_000_000
    timeout_s: float = 3600.0
    shutdown_s: float = 30.0


class Sampler:
    """Samples for requests, on an engine that is in a rollout phase.

    room: what the phase has room for. seed: of requests without one of their own: equal prompts draw the same, up to
    their order. stop_ids: end a completion.
    """

    def __init__(self, engine: Engine, room: RequestLimits, limits: ServerLimits, seed: int, stop_ids: frozenset[int]):
        self.engine, self.room, self.limits, self.stop_ids = engine, room, limits, stop_ids
        self.metrics = ServerMetrics()
        self._seed = seed
        self._ids = itertools.count(_FIRST_ID)
        self._seen: OrderedDict[int, int] = OrderedDict()  # prompts that chose no seed, and how often
        self.n_samples = 0  # under way

    def request(
        self, prompt: list[int], options: SampleOptions, *, digest: int | None = None, **more: Any
    ) -> GenerationRequest:
        """The engine's form of a request. digest: of the prompt, if known. ApiError 400 where it has no room."""
        request = GenerationRequest(
            request_id=next(self._ids),
            prompt=prompt,
            n_samples=options.n,
            params=options.params,
            seed=self._next_seed(prompt, digest) if options.seed is None else options.seed,
            stream=options.stream,
            logit_bias=options.logit_bias,
            top_logprobs=options.n_top or 0,
            **more,
        )
        try:
            self.room.max_new(request)
        except RequestRefused as error:
            too_long = len(prompt) >= min(self.room.context_len, options.params.max_context_len or 1 << 60)
            raise _of_client(error, CONTEXT_FULL if too_long else None) from error
        return request

    def _next_seed(self, prompt: list[int], digest: int | None) -> int:
        # Requests come in any order, so a seed by number would not be the same in another run.
        digest = digest_of(prompt) if digest is None else digest
        n_seen = self._seen[digest] = self._seen.pop(digest, 0) + 1
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return (self._seed * 0x9E3779B97F4A7C15 + digest + n_seen * 0xD1342543DE82EF95) % 2**64

    @property
    def most_prompt(self) -> int:
        """The most tokens that a prompt may have, with at least one token of an answer."""
        return min(self.room.context_len - 1, self.room.kv_tokens)

    def too_long(self) -> ApiError:
        """Return the error for a prompt whose tokens were not made because they are surely too many."""
        said = f"the prompt has more than {self.most_prompt} tokens, which leaves no room for a completion"
        return ApiError(400, f"{said}; shorten the prompt", param="prompt", code=CONTEXT_FULL)

    @contextmanager
    def place(self, n: int) -> Iterator[None]:
        """Hold room for `n` more samples. Raises ApiError 429 if too many are in progress, 400 if `n` can never fit."""
        if n > self.limits.max_samples:
            most = self.limits.max_samples
            said = f"the request asks for {n} samples, and at most {most} may be in progress"
            raise ApiError(400, f"{said}; lower n or send fewer prompts", param="n")
        if self.n_samples + n > self.limits.max_samples:
            raise ApiError(
                429, f"{self.n_samples} samples are under way, and at most {self.limits.max_samples} may be; try later"
            )
        self.n_samples += n
        try:
            yield
        finally:
            self.n_samples -= n

    async def outputs(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """What the engine gives for a request. Leaving early, for whatever reason, ends the request."""
        started, is_first, done = time.monotonic(), True, False
        try:
            async with aclosing(self.engine.generate_stream(request, self.limits.timeout_s)) as stream:
                async for output in stream:
                    if output.finish_reason == "error":
                        raise ApiError(500, "the model gave no finite numbers for this request")
                    if is_first:
                        is_first = False
                        if request.stream:
                            self.metrics.first_token.observe(time.monotonic() - started)
                        self.metrics.prompt_tokens += len(request.prompt)
                        self.metrics.cached_tokens += output.cached_tokens
                    if output.finish_reason is not None:
                        self.metrics.completion_tokens += len(output.tokens)
                    yield output
            done = True
        except TimeoutError:
            raise ApiError(408, f"no answer within {self.limits.timeout_s:g} s") from None
        except RequestRefused as error:
            raise _of_client(error) from error
        except EngineError as error:  # it names settings of the server, whose own log has it
            raise ApiError(503, "the server has stopped sampling; its log says why") from error
        except ArenoError as error:
            raise ApiError(400, str(error.renamed(_name_of))) from error
        finally:
            self.metrics.aborted += not done
            self.metrics.whole.observe(time.monotonic() - started)

    async def finished(self, request: GenerationRequest) -> list[GenerationOutput]:
        """All samples of a request, whole and in order."""
        async with aclosing(self.outputs(request)) as stream:  # type: ignore[type-var]
            found = [output async for output in stream if output.finish_reason is not None]
        return sorted(found, key=lambda output: output.sample)

    def gauges(self) -> list[tuple[str, str, float]]:
        """What the engine's decoders do now."""
        stats = self.engine.rollout_stats()
        return [
            ("areno_samples_running", "Samples in the batch.", sum(one.running for one in stats)),
            ("areno_samples_waiting", "Samples waiting for a place in it.", sum(one.waiting for one in stats)),
            ("areno_samples_in_flight", "Samples of requests being answered.", self.n_samples),
            ("areno_preemptions", "Samples sent back to waiting.", sum(one.preemptions for one in stats)),
        ]


def _of_client(error: RequestRefused, code: str | None = None) -> ApiError:
    """Return the error in the words of the request."""
    advice = "; shorten the prompt" if code == CONTEXT_FULL else _ADVICE.get(error.field, "")
    return ApiError(400, error.why + advice, param=_name_of(error.field), code=code)


def _name_of(key: str) -> str:
    """Return what the API calls a setting."""
    name = key.rpartition(".")[2]
    return _NAMES.get(name, name)
