"""Rollout sessions. Samples are drawn inside a session; scoring, training and saving happen outside.

A session may also serve the policy to agents over HTTP (areno.agents.proxy). ExpectedLengths estimates the length of
completions. An engine with several data-parallel copies of the model uses the estimates to balance the load.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from areno.config.rollout import DecoderConfig
from areno.engine.engine import Engine
from areno.engine.reports import RolloutStats
from areno.engine.requests import OnProgress, RequestLimits
from areno.errors import ArenoError, EngineError
from areno.plan.argument_checks import check_count
from areno.plan.plan import TrainerPlan
from areno.specs.rollout import RolloutSpec
from areno.types import TOKEN_SCORE, GenerationOutput, GenerationRequest, RolloutResult, RolloutSequence, SamplingParams

if TYPE_CHECKING:
    from areno.agents.proxy import SessionProxy

_MAX_PROMPTS = 200_000  # prompts that are remembered


class CompletionLengthEstimator:
    """Estimates the number of tokens in a completion of a prompt from earlier rollouts.

    The estimate for a prompt is the mean length of its completions in the last rollout that contained it. The estimate
    for a new prompt is the mean length over the whole last rollout.

    The estimates decide which device generates a sample, but never change the sample. So a resumed run, which starts
    without estimates, draws the same samples.
    """

    def __init__(self) -> None:
        self._of_prompt: dict[int, float] = {}
        self._mean: float | None = None

    def estimate(self, prompt: Sequence[int]) -> float | None:
        """Return the expected number of tokens in a completion of a prompt, or None before the first rollout."""
        return self._of_prompt.get(hash(tuple(prompt)), self._mean)

    def record(self, prompts: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]) -> None:
        """Record the number of tokens in each completion of each prompt of a rollout."""
        if len(self._of_prompt) + len(prompts) > _MAX_PROMPTS:
            self._of_prompt.clear()
        for prompt, drawn in zip(prompts, lengths, strict=True):
            self._of_prompt[hash(tuple(prompt))] = sum(drawn) / len(drawn)
        n_samples = sum(map(len, lengths))
        self._mean = sum(map(sum, lengths)) / n_samples if n_samples else self._mean


# The smallest size of a KV cache: enlarging a cache later would discard its CUDA graphs.
_SHORTEST = 128  # tokens
_FEWEST = 64  # samples; a cache has room for a multiple of this number
_SERVED = 256  # samples, for agents, whose number of requests is not known
_MOST = 1024  # samples per data-parallel copy of the model: more samples hardly raise the throughput


RolloutSteering = Callable[[list[GenerationOutput], list[RolloutStats]], tuple[int, Sequence[GenerationRequest]]]
"""A function that decides when a rollout ends. It is called with (newly finished samples, statistics of each rank), and
returns (n, further requests): the rollout cannot end before n further samples have finished. The next call comes after
about n finished samples, or after a number of decoding steps. n = 0 ends the rollout.
"""


def request_seed(seed: int, index: int) -> int:
    """Return the seed of request `index`, from the low 32 bits of a rollout's seed. Higher bits are mixed in."""
    return (seed << 32) + (seed >> 32) * 0x9E3779B97F4A7C15 + index


class SessionState:
    """State shared by the rollout sessions of one Trainer, of which at most one is open."""

    def __init__(self, engine: Engine, plan: TrainerPlan):
        self.engine, self.plan = engine, plan
        self.open: RolloutSession | None = None
        # The size that the KV cache was made for. It only grows, so that the rollouts of a loop share one decoder.
        self.longest = _SHORTEST  # tokens of a sequence
        self.most = _FEWEST  # samples at once, if max_running is None
        self.interrupted = False  # whether Ctrl-C interrupted a rollout
        self.lengths = CompletionLengthEstimator()

    def require_open(self, what: str) -> RolloutSession:
        """Return the open session. If there is none, raise an EngineError that quotes the method name `what`."""
        if self.open is None:
            hint = "wrap it in `async with trainer.rollout_session(sampling_params=..., proxy=False):`"
            raise EngineError(f"{what} was called outside a rollout session; {hint}")
        return self.open

    def require_no_session(self, what: str) -> None:
        """If a session is open, raise an EngineError that quotes the method `what`. Else call `end_interrupted`."""
        if self.open is not None and not self.open.is_suspended:
            hint = "which is for drawing samples only; leave its `with` block first"
            raise EngineError(f"{what} was called inside a rollout session, {hint}")
        self.end_interrupted()

    def end_interrupted(self) -> None:
        """End a rollout that Ctrl-C interrupted, if there is one, so that a notebook can continue."""
        if self.interrupted:
            self.interrupted = False
            self.engine.end_rollout(drop=True)


@dataclass(kw_only=True, frozen=True)
class ProxySettings:
    """Settings of the HTTP server through which a session serves the policy to agents.

    Attributes:
        params: Sampling settings for requests that set none.
        timeout_s: Timeout of a request, in seconds.
        seed: Seed for requests that set none.
    """

    params: SamplingParams
    timeout_s: float
    seed: int


class RolloutSession:
    """An async or plain context manager inside which samples can be drawn. `Trainer.rollout_session` makes it.

    The Trainer can be used after the block, even if the block ends with an error or a cancelled task.

    Args:
        max_running: Largest number of samples decoded at once, over all ranks. None uses the number of samples in a
            rollout, but at most 1024 for each data-parallel copy of the model.
        proxy: Settings of the HTTP server for agents. None starts no server.

    Attributes:
        is_suspended: Whether the session is between `suspend` and `resume`.
    """

    def __init__(self, sessions: SessionState, max_running: int | None, proxy: ProxySettings | None = None):
        self._sessions, self._max_running, self._settings = sessions, max_running, proxy
        self._running_spec: RolloutSpec | None = None  # the rollout settings that the engine decodes with now
        self.is_suspended = False
        self._room: RequestLimits | None = None  # the limits of requests with these settings
        self._proxy: SessionProxy | None = None
        self._servers: list[SessionProxy] = []  # with the one above

    def get_base_url(self) -> str:
        """Return the base URL at which OpenAI clients reach the policy, http://127.0.0.1:PORT/v1."""
        return self.proxy.base_url

    @property
    def api_key(self) -> str:
        """API key of this session. The server refuses requests without this key."""
        return self.proxy.api_key

    @property
    def timeout_s(self) -> float:
        """Timeout of an agent's request, in seconds."""
        return self.proxy.server.sampler.limits.timeout_s

    @property
    def proxy(self) -> SessionProxy:
        """The HTTP server of this session. Raises EngineError outside of the `with` block or with proxy=False."""
        if self._proxy is None:
            raise EngineError("this rollout session serves nothing; use it in a `with` block, and with proxy=True")
        return self._proxy

    def suspend(self) -> list[int]:
        """Interrupt all samples until `resume`. Meanwhile models can be trained, scored and saved.

        Requests that arrive meanwhile wait for `resume`, and their time limits do not count this waiting time. Returns
        the number of sampled tokens of each interrupted sample that has any.
        """
        self._check_open("suspend")
        n_tokens = self._sessions.engine.suspend_rollout()
        self.is_suspended = True
        return n_tokens

    def resume(self) -> None:
        """Continue the samples that `suspend` has interrupted, with the weights that the actor has now."""
        self.is_suspended = False
        self._sessions.engine.resume_rollout()

    def _check_open(self, name: str) -> None:
        if self._sessions.open is not self:
            raise EngineError(f"{name} was called outside the `with` block of its rollout session")

    def prepare(self, n_tokens: int) -> None:
        """Make the KV cache large enough for sequences of `n_tokens` tokens, prompt and completion together.

        The model's context is the upper limit. Raises EngineError if the cache must grow while streaming requests are
        open, because growing would end these requests.
        """
        check_count("n_tokens", n_tokens)
        self._check_open("prepare")
        self._grow_kv_cache(n_tokens)

    def _grow_kv_cache(self, n_tokens: int, n_samples: int = 1) -> None:
        sessions, plan, running = self._sessions, self._sessions.plan, self._running_spec
        longest, most = sessions.longest, sessions.most
        if n_tokens > longest:
            longest = max(longest, min(1 << (n_tokens - 1).bit_length(), sessions.engine.info.context_len))
        if n_samples > most:
            most = max(most, min(-(-n_samples // _FEWEST) * _FEWEST, _MOST * sessions.engine.spec.layout.dp_size))
        bound, shared = self._max_running or most, plan.shared
        spec = RolloutSpec(
            max_running=bound,
            max_len=plan.max_len or longest,
            decoder=DecoderConfig.of(plan.rollout),
            keeps_cache=not plan.rollout.drop_rollout_state,
            shared=shared if shared is not None and bound in (shared.usual, shared.most) else None,
        )
        if running == spec:
            return
        if running is not None:
            if sessions.engine.is_streaming:
                if spec.max_len == running.max_len:
                    return  # the excess samples wait in the queue
                raise EngineError(
                    f"{n_tokens} tokens need a larger cache, and making it would end the streams that are open; "
                    "call session.prepare with the longest length before the first stream"
                )
            self._running_spec = None
            sessions.engine.end_rollout()
        self._room = sessions.engine.begin_rollout(spec)
        sessions.longest, sessions.most = longest, most
        self._running_spec = spec

    def generate(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        n_samples: int,
        params: SamplingParams,
        seed: int,
        on_progress: OnProgress,
        at_once: int | None = None,
    ) -> list[RolloutResult]:
        """Sample every prompt `n_samples` times, see `Trainer.rollout_token_batch`."""
        engine = self._sessions.engine
        requests = [
            GenerationRequest(
                request_id=index,
                prompt=list(map(int, tokens)),
                n_samples=n_samples,
                params=params,
                seed=request_seed(seed, index),
                expected_tokens=self._sessions.lengths.estimate(tokens),
            )
            for index, tokens in enumerate(prompt_tokens)
        ]
        self._grow_kv_cache_for(requests)

        def progress_unless_cancelled(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> None:
            raise_if_cancelled()
            on_progress(outputs, stats)

        outputs = engine.generate(requests, progress_unless_cancelled, at_once)
        sequences = [[sequence_of(output) for output in outputs[request.request_id]] for request in requests]
        lengths = [[sequence.n_tokens for sequence in sampled] for sampled in sequences]
        self._sessions.lengths.record([request.prompt for request in requests], lengths)
        pairs = zip(requests, sequences, strict=True)
        return [RolloutResult(prompt_tokens=request.prompt, sequences=sampled) for request, sampled in pairs]

    def _grow_kv_cache_for(self, requests: Sequence[GenerationRequest]) -> None:
        self._grow_kv_cache(self._longest_sequence(requests), sum(request.n_samples for request in requests))

    def _longest_sequence(self, requests: Sequence[GenerationRequest]) -> int:
        context = self._sessions.engine.info.context_len
        longest = max(
            min(len(request.prompt) + request.params.max_new_tokens, request.params.max_context_len or context)
            for request in requests
        )
        return min(longest, context)

    def generate_until(
        self, requests: Sequence[GenerationRequest], progress: RolloutSteering, n_steps: int | None = None
    ) -> list[GenerationOutput]:
        """Sample until `progress` says that enough samples have finished, see `Trainer.rollout_until`.

        `n_steps` limits the decoding steps between two calls of `progress`. Since steps are counted and no clock is
        read, two runs stop after the same tokens.
        """
        engine = self._sessions.engine
        engine.check_not_suspended()
        if n_steps is not None:
            check_count("n_steps", n_steps)
        for request in requests:
            engine.check_request(request)
        due, n_open, outputs, stats = list(requests), 0, list[GenerationOutput](), engine.rollout_stats()
        while True:
            missing, more = progress(outputs, stats)
            for request in more:
                engine.check_request(request)
            due += more
            if missing <= 0:
                return engine.park()
            raise_if_cancelled()
            if due and not n_open:
                self._grow_kv_cache_for(due)
                engine.hold_decoding()
            # Longer prompts wait, because making the cache larger would end the samples in progress.
            running = self._running_spec
            if due and running is not None and self._longest_sequence(due) <= running.max_len:
                engine.submit(due)
                n_open, due = n_open + sum(request.n_samples for request in due), []
            outputs, stats = engine.advance(missing, n_steps)
            n_open -= len(outputs)

    def __enter__(self) -> RolloutSession:
        sessions = self._sessions
        if sessions.open is not None:
            raise EngineError("a rollout session is already open; leave its `with` block before opening another")
        sessions.end_interrupted()
        sessions.open = self
        try:
            if self._settings is not None:
                self._proxy = self.serve(self._settings)
            elif sessions.plan.max_len is not None:
                self._grow_kv_cache(0)
        except BaseException:
            sessions.open = None
            raise
        return self

    def serve(self, settings: ProxySettings, longest: int = 0) -> SessionProxy:
        """Start a server for agents, which runs until `end_server` or the end of the session.

        A session may have several servers, each with its own settings. `longest` is the length in tokens of the longest
        conversation that any server of the session allows. 0 takes the limit of this server.
        """
        from areno.agents.proxy import SessionProxy
        from areno.server.parsers import parser_of_settings

        self._check_open("serve")
        engine, plan = self._sessions.engine, self._sessions.plan
        # Conversations grow, and enlarging the cache would end conversations in progress.
        context = engine.info.context_len
        self._grow_kv_cache(min(max(settings.params.max_context_len or context, longest), context), _SERVED)
        assert self._room is not None
        proxy = SessionProxy(
            engine,
            self._room,
            plan.tokenizer,
            settings.params,
            timeout_s=settings.timeout_s,
            seed=settings.seed,
            thinking=plan.rollout.enable_thinking,
            parser=parser_of_settings(plan.tokenizer.chat_template, plan.tool_call_parser, plan.reasoning_parser),
        )
        self._servers.append(proxy)
        return proxy

    def end_server(self, server: SessionProxy) -> None:
        """Stop a server of this session, and abort its requests."""
        server.stop()
        self._servers.remove(server)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        sessions = self._sessions
        sessions.open = None
        for server in self._servers:
            server.stop()
        self._servers, self._proxy, self.is_suspended = [], None, False
        if self._running_spec is None:
            return
        self._running_spec = None
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            sessions.interrupted = True  # most scripts end now, and should not wait for the workers first
            return
        # If workers have ended, the first error says why.
        with contextlib.nullcontext() if error is None else contextlib.suppress(ArenoError):
            sessions.engine.end_rollout(sessions.plan.rollout.drop_rollout_state)

    async def __aenter__(self) -> RolloutSession:
        # A training loop awaits nothing else, and asyncio cancels a task (Ctrl-C) only where the task awaits.
        await asyncio.sleep(0)
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)


def raise_if_cancelled() -> None:
    """Raise CancelledError if the running asyncio task was cancelled, such as by Ctrl-C.

    asyncio delivers a cancellation only where a task awaits. A rollout never awaits, so the rollout calls this
    function instead.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return
    cancelling = getattr(task, "cancelling", None)  # Python 3.11; before, Ctrl-C raises KeyboardInterrupt at once
    if cancelling is not None and cancelling():
        raise asyncio.CancelledError


def sequence_of(output: GenerationOutput) -> RolloutSequence:
    """Convert a finished completion from the engine's GenerationOutput to the RolloutSequence of the SDK."""
    assert output.finish_reason is not None, "a partial output of a request that does not stream"
    given = vars(output)  # numbers that came as arrays stay arrays
    top_tokens, top_logprobs = _listed_with_sampled(output)
    return RolloutSequence(
        resp_tokens=given["tokens"],
        resp_logprobs=given["logprobs"],
        resp_versions=given["versions"],
        finish_reason=output.finish_reason,
        routes=output.routes,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
    )


def _listed_with_sampled(output: GenerationOutput) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return the most likely tokens at each position and their log-probabilities, with the sampled token as the last.

    The last id is -1 where the sampled token is among the others.
    """
    given = vars(output)
    if not len(given["top_logprobs"]):
        return None, None
    found_NK = np.asarray(given["top_logprobs"], TOKEN_SCORE)
    sampled_N1, logprobs_N1 = (np.asarray(given[name])[:, None] for name in ("tokens", "logprobs"))
    is_listed_N1 = (found_NK["token"] == sampled_N1).any(1, keepdims=True)
    tokens = np.concatenate((found_NK["token"], np.where(is_listed_N1, -1, sampled_N1)), 1)
    logprobs = np.concatenate((found_NK["logprob"], np.where(is_listed_N1, 0.0, logprobs_N1)), 1)
    return tokens.astype(np.int32), logprobs.astype(np.float32)
