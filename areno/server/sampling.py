"""Sampling of clients' requests on the engine, within the limits of the server, and its metrics for Prometheus."""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits, RequestRefused
from areno.errors import ArenoError, EngineError
from areno.server.errors import CONTEXT_FULL, ApiError
from areno.server.requests import MAX_MESSAGES, SampleOptions
from areno.server.token_sources import token_digest
from areno.types import GenerationOutput, GenerationRequest, SamplingParams

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(_SECONDS, value)] += 1
        self._sum += value

    def prometheus_lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip([*map(str, _SECONDS), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """Counters since the server's start.

    Prompt tokens are counted at a request's first output, sampled tokens at the end of each sample. `requests` counts
    HTTP requests by (path, status). `aborted` counts engine requests without a complete answer. `first_token` (only for
    streamed requests) and `whole` are histograms of the seconds until the first token and until the end.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.in_flight = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.aborted = 0
        self.first_token, self.whole = Histogram(), Histogram()

    def prometheus_text(self, gauges: Iterable[tuple[str, str, float]]) -> str:
        """Return the text of the page /metrics, in Prometheus's format. `gauges` are (name, help text, value)."""
        lines = []

        def add_metric(name: str, kind: str, about: str, samples: Iterable[str]) -> None:
            lines.extend([f"# HELP {name} {about}", f"# TYPE {name} {kind}", *samples])

        by_status = [
            f'areno_requests_total{{path="{path}",status="{status}"}} {n}'
            for (path, status), n in sorted(self.requests.items())
        ]
        add_metric("areno_requests_total", "counter", "HTTP requests that were answered.", by_status)
        counters = {
            "areno_prompt_tokens_total": ("Tokens of prompts.", self.prompt_tokens),
            "areno_prompt_tokens_cached_total": ("Of these, found in the cache.", self.cached_tokens),
            "areno_prompt_tokens_computed_total": ("Of these, prefilled.", self.prompt_tokens - self.cached_tokens),
            "areno_completion_tokens_total": ("Tokens that were sampled.", self.completion_tokens),
            "areno_requests_aborted_total": ("Requests whose client went away or ran out of time.", self.aborted),
        }
        for name, (about, value) in counters.items():
            add_metric(name, "counter", about, [f"{name} {value}"])
        for name, about, value in [("areno_requests_in_flight", "Requests being answered.", self.in_flight), *gauges]:
            add_metric(name, "gauge", about, [f"{name} {value:g}"])
        seconds = {
            "areno_time_to_first_token_seconds": ("Of streamed requests.", self.first_token),
            "areno_request_seconds": ("From a request to the end of its answer.", self.whole),
        }
        for name, (about, histogram) in seconds.items():
            add_metric(name, "histogram", about, histogram.prometheus_lines(name))
        return "\n".join(lines) + "\n"


MAX_SEEN = 1 << 16  # prompts whose repetitions are counted
_ids = itertools.count(1 << 48)  # of the requests of all servers; ids of calls to Engine.generate begin at 0

_NAMES = {"n_samples": "n", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of GenerationRequest and SamplingParams -> fields of the API. All others have the same name."""
_ADVICE = {"max_new_tokens": "; shorten the prompt or lower max_tokens", "min_new_tokens": "; leave min_tokens out"}


@dataclass(kw_only=True)
class ServerLimits:
    max_body: int = 16 * 2**20  # bytes, also after decompression
    max_messages: int = MAX_MESSAGES
    max_samples: int = 4096  # in progress or waiting
    max_remembered: int = 64_000_000  # tokens in the cache of conversations
    timeout_s: float = 3600.0  # until the answer to a request
    shutdown_s: float = 30.0  # for requests in progress


class EngineClient:
    """Sends requests to an engine in a rollout phase.

    If a request has no seed, its seed derives from `seed`, the prompt, and the number of earlier such requests for this
    prompt. If `raw_logprobs`, clients get log-probabilities at temperature 1, except in the field `areno`.
    """

    def __init__(
        self,
        engine: Engine,
        request_limits: RequestLimits,
        defaults: SamplingParams,
        limits: ServerLimits,
        seed: int,
        raw_logprobs: bool = False,
    ):
        self.engine, self.request_limits, self.defaults, self.limits = engine, request_limits, defaults, limits
        self.stop_ids = frozenset(engine.spec.eos_token_ids) | frozenset(defaults.stop_token_ids or ())
        self._raw_logprobs = raw_logprobs
        self.metrics = ServerMetrics()
        self._seed = seed
        self._seen: OrderedDict[int, int] = OrderedDict()  # digest of a prompt -> its requests without a seed
        self.n_samples = 0
        self._waiting: deque[asyncio.Future[None]] = deque()  # requests in `wait_for_place`

    def generation_request(
        self, prompt: list[int], options: SampleOptions, *, digest: int | None = None, **more: Any
    ) -> GenerationRequest:
        """Build the engine's request. Raises ApiError 400 if the engine cannot serve it.

        `digest` is `token_digest(prompt)`, computed if it is None but needed. `more` are fields of `GenerationRequest`.
        """
        request = GenerationRequest(
            request_id=next(_ids),
            prompt=prompt,
            n_samples=options.n,
            params=options.params,
            seed=self.next_seed(prompt, digest) if options.seed is None else options.seed,
            stream=options.stream,
            logit_bias=options.logit_bias,
            top_logprobs=options.n_top or 0,
            raw_logprobs=self._raw_logprobs and options.n_top is not None and options.params.logprob_temperature != 1,
            **more,
        )
        try:
            self.request_limits.max_new(request)
        except RequestRefused as error:
            too_long = len(prompt) >= min(self.request_limits.context_len, options.params.max_context_len or 1 << 60)
            raise _client_error(error, CONTEXT_FULL if too_long else None) from error
        return request

    def next_seed(self, prompt: list[int], digest: int | None) -> int:
        # Requests arrive in any order, so a seed derived from a counter would differ between runs.
        digest = token_digest(prompt) if digest is None else digest
        n_seen = self._seen[digest] = self._seen.pop(digest, 0) + 1
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return (self._seed * 0x9E3779B97F4A7C15 + digest + n_seen * 0xD1342543DE82EF95) % 2**64

    @property
    def max_prompt_tokens(self) -> int:
        """The largest number of prompt tokens that leaves room to sample one token."""
        return min(self.request_limits.context_len - 1, self.request_limits.kv_tokens)

    @contextmanager
    def reserve(self, n: int) -> Iterator[None]:
        """Count `n` samples as in progress. Raises ApiError 429, or 400 if `n` alone exceeds the limit."""
        max_samples = self.limits.max_samples
        if n > max_samples:
            message = f"the request asks for {n} samples, and at most {max_samples} may be in progress"
            raise ApiError(400, f"{message}; lower n or send fewer prompts", param="n")
        if self.n_samples + n > max_samples:
            message = f"{self.n_samples} samples are in progress, and at most {max_samples} may be; try later"
            raise ApiError(429, message)
        with self._counted(n):
            yield

    @contextmanager
    def _counted(self, n: int) -> Iterator[None]:
        self.n_samples += n
        try:
            yield
        finally:
            self.n_samples -= n
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_result(None)

    async def wait_for_place(self, n: int) -> None:
        """Return when `reserve(n)` will succeed."""
        while self.n_samples and self.n_samples + n > self.limits.max_samples:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            try:
                await waiting
            finally:
                self._waiting.remove(waiting)

    async def outputs(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """Yield partial and finished outputs of all samples as they arrive. Leaving the iteration aborts the request.

        Raises ApiError if the request times out (408), is refused (400) or fails (500, 503).
        """
        started, is_first, done = time.monotonic(), True, False
        try:
            async with aclosing(self.engine.generate_stream(request, self.limits.timeout_s)) as stream:
                async for output in stream:
                    if output.finish_reason == "error":
                        raise ApiError(500, "the model produced non-finite logits for this request")
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
            raise _client_error(error) from error
        except EngineError as error:  # the message names settings of the server, so it goes into the log only
            raise ApiError(503, "the server has stopped sampling; its log says why") from error
        except ArenoError as error:
            raise ApiError(400, str(error.renamed(_api_field))) from error
        finally:
            self.metrics.aborted += not done
            self.metrics.whole.observe(time.monotonic() - started)

    async def finished_outputs(self, request: GenerationRequest) -> list[GenerationOutput]:
        """Return the finished samples, ordered by sample number. Raises the errors of `outputs`."""
        async with aclosing(self.outputs(request)) as stream:  # type: ignore[type-var]
            found = [output async for output in stream if output.finish_reason is not None]
        return sorted(found, key=lambda output: output.sample)

    def gauges(self) -> list[tuple[str, str, float]]:
        """Return (name, help text, value) for each gauge. Gauges of the engine are sums over its decoders."""
        stats, drafts = self.engine.rollout_stats(), self.engine.draft_counts()
        return [
            ("areno_samples_running", "Samples in the batch.", sum(one.running for one in stats)),
            ("areno_samples_waiting", "Samples waiting for a place in it.", sum(one.waiting for one in stats)),
            ("areno_samples_in_flight", "Samples of requests being answered.", self.n_samples),
            ("areno_preemptions", "Samples sent back to waiting.", sum(one.preemptions for one in stats)),
            ("areno_drafted_tokens", "Drafted tokens that were verified.", drafts.drafted),
            ("areno_accepted_tokens", "Drafted tokens that were accepted.", drafts.accepted),
        ]


def _client_error(error: RequestRefused, code: str | None = None) -> ApiError:
    """Convert the engine's refusal to an ApiError that names the field of the client's request."""
    advice = "; shorten the prompt" if code == CONTEXT_FULL else _ADVICE.get(error.field, "")
    return ApiError(400, error.why + advice, param=_api_field(error.field), code=code)


def _api_field(key: str) -> str:
    name = key.rpartition(".")[2]
    return _NAMES.get(name, name)
