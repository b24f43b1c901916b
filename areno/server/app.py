"""The web application of the OpenAI-compatible server: API keys, reading of bodies, error responses, event streams.

`build_server` makes a `Server` from a sampler and the tokenizer of its engine.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

from aiohttp import web

from areno.server.access import OriginGuard
from areno.server.anthropic_messages import MESSAGES
from areno.server.chat import ChatCompletions, OpenChat
from areno.server.completions import Completions
from areno.server.dialects import CHAT, Answer, ChatAnswer, Dialect
from areno.server.errors import ApiError
from areno.server.json_bodies import RequestFields, decompress, read_json, too_large_error
from areno.server.openai_responses import RESPONSES
from areno.server.parsers import ToolCallParser, parser_for_template
from areno.server.prompt_builder import PromptBuilder, prompt_threads
from areno.server.requests import ChatRequest, CompletionRequest, read_chat, read_completion, read_generate
from areno.server.sample_sessions import SampleSession, SampleSessions, SharedAnswer, ended_error
from areno.server.sampling import EngineClient
from areno.server.threads import END_ANSWERS, ThreadPool
from areno.types import SamplingParams

logger = logging.getLogger("areno.server")
T = TypeVar("T")

SMALL_BODY = 1 << 15  # bytes of a body that is read in the event loop and whose result is cached
_MAX_CACHED_REQUESTS = 512
_MAX_FRAMES = 10  # of a traceback in the log
_MAX_NAME = 200  # characters of a model's name that an error repeats
_KEEP_ALIVE_S = 5.0
_SAMPLE = "/s/{sample}"  # the path of a sample's session
_PUBLIC = {"/", "/health", "/metrics"}  # need no key
_MESSAGES = "/v1/messages"
_COUNT = f"{_MESSAGES}/count_tokens"
_DIALECTS = {"/v1/chat/completions": CHAT, _MESSAGES: MESSAGES, _COUNT: MESSAGES, "/v1/responses": RESPONSES}
_SESSION: web.RequestKey[SampleSession] = web.RequestKey("sample_session")
_JSON = {"Content-Type": "application/json; charset=utf-8"}
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_FAILURE = ApiError(500, "the server failed; its log says why")
_CLIENT_GONE = 499  # the status in /metrics; nobody sees it otherwise


@dataclass(kw_only=True)
class Server:
    chat: ChatCompletions
    completions: Completions
    sampler: EngineClient
    models: list[str]
    keys: list[str]  # a request to /v1 needs any of them; empty: none is needed
    guard: OriginGuard | None  # None: web pages may send requests
    created: int  # seconds since the epoch
    threads: ThreadPool
    samples: SampleSessions = field(default_factory=SampleSessions)

    def __post_init__(self) -> None:
        self._handling: set[asyncio.Task[Any]] = set()  # handlers of requests in progress
        self._reading: set[asyncio.Task[Any]] = set()  # those whose request bodies are still arriving
        self._is_shutting_down = self._is_over = False  # of the application that was made last

    def application(self) -> web.Application:
        """Return the application.

        With `AppRunner(..., handler_cancellation=True)`, a request ends when its client leaves.
        """
        app = web.Application(client_max_size=self.sampler.limits.max_body, middlewares=[self._handle_errors])
        app.on_shutdown.append(self._cancel_body_reads)
        app.on_response_prepare.append(self._add_headers)
        app[END_ANSWERS] = self._cancel_handlers
        self._is_shutting_down = self._is_over = False
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        for prefix in ("", _SAMPLE):
            app.router.add_get(prefix + "/", self._health)
            app.router.add_get(prefix + "/v1/models", self._list_models)
            app.router.add_get(prefix + "/v1/models/{name:.+}", self._get_model)
            app.router.add_post(prefix + "/v1/completions", self._create_completion)
            app.router.add_post(prefix + "/inference/v1/generate", self._generate_tokens)
            for path in _DIALECTS.keys() - {_COUNT}:
                app.router.add_post(prefix + path, partial(self._create_chat, _DIALECTS[path]))
            app.router.add_post(prefix + _COUNT, self._count_tokens)
        app.router.add_get(_SAMPLE, self._health)
        app.router.add_post(f"{_SAMPLE}/rl/set_reward", self._set_reward)
        return app

    # -- around every request --------------------------------------------------------------------------------------

    @web.middleware
    async def _handle_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        metrics, resource = self.sampler.metrics, request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        metrics.in_flight += 1
        status, task = _CLIENT_GONE, asyncio.current_task()
        assert task is not None
        self._handling.add(task)
        try:
            is_public = path in _PUBLIC
            if not is_public:
                self._check_key(request)
            if (response := self._check_origin(request, is_public)) is None:
                with self._shutdown_as_error():
                    response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            return error_response(error, path)
        except web.HTTPRequestEntityTooLarge:
            status = 413
            return error_response(too_large_error(self.sampler.limits.max_body), path)
        except web.HTTPException as error:
            status = error.status
            shown = "/s/..." if request.path.startswith("/s/") else request.path
            return error_response(ApiError(error.status, f"{request.method} {shown}: {error.reason}"), path)
        except ConnectionError:  # the client has disconnected
            return web.Response(status=status)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            status = 500
            self._log_failure(error)
            return error_response(_FAILURE, path)
        finally:
            self._handling.discard(task)
            metrics.in_flight -= 1
            metrics.requests[path, status] += 1

    def _log_failure(self, error: Exception) -> None:
        logger.error("a request failed: %s", "".join(traceback.format_exception(error, limit=-_MAX_FRAMES)))

    def _check_key(self, request: web.Request) -> None:
        """Find the session that a request belongs to, by its path or its key. Raises ApiError 401, 403 or 410."""
        given, named = sent_key(request), request.match_info.get("sample")
        address = None if request.transport is None else request.transport.get_extra_info("sockname")
        if isinstance(address, str):  # a Unix socket, whose session needs no key
            own = self.samples.of_sockets.get(address)
            if own is None:  # the connection was kept open
                raise ended_error()
            request[_SESSION] = own
            if (named or own.id) != own.id or (given in self.samples and given != own.id):
                raise ApiError(403, "this is the session of another sample", code="foreign_session")
            return
        if named is None:  # some clients have one key for all samples, and name the sample in a header
            headed = request.headers.get("X-Session-ID", "").partition(".")[0]
            named = next((one for one in (headed, given) if one in self.samples), None)
        if named is not None:
            request[_SESSION] = self.samples.find(named)
            return
        if not self.keys:
            return
        sent = given.encode(errors="surrogateescape")  # the bytes of the header, even if they are not UTF-8
        matches = [hmac.compare_digest(sent, key.encode()) for key in self.keys]
        if not any(matches):
            missing = "You didn't provide an API key; send it as Authorization: Bearer KEY"
            raise ApiError(401, "Incorrect API key provided" if given else missing, code="invalid_api_key")

    def _check_origin(self, request: web.Request, is_public: bool) -> web.Response | None:
        """Return the answer to a CORS preflight request, else None. Raises ApiError 403 for a foreign page."""
        if self.guard is None or ((self.keys or _SESSION in request) and not is_public):
            return None
        self.guard.check_request(request)
        return self.guard.preflight_response(request)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.guard is not None:
            response.headers.update(self.guard.cors_headers(request))

    async def _read_body(self, request: web.Request) -> bytes:
        """Return a decompressed body. Raises ApiError 503 if the server shuts down before the body is complete."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            body = await request.read()
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, f"the body cannot be read: {error}") from None
        except asyncio.CancelledError:
            if self._is_shutting_down:
                raise ApiError(503, "the server shuts down before this request has arrived completely") from None
            raise
        finally:
            self._reading.discard(task)
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return body
        return await self.threads.run(lambda: decompress(body, encoding, self.sampler.limits.max_body))

    async def _cancel_body_reads(self, app: web.Application) -> None:
        self._is_shutting_down = True
        for task in self._reading:
            task.cancel()

    def _cancel_handlers(self) -> None:
        self._is_over = True
        for task in self._handling:
            task.cancel()

    @contextmanager
    def _shutdown_as_error(self) -> Iterator[None]:
        """Convert a CancelledError in the block to an ApiError if the server shuts down."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            raise ApiError(503, "the server shuts down, and this answer did not end in time") from None

    async def _parse(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """Parse a body, a large one in a thread."""
        return read(body) if len(body) <= SMALL_BODY else await self.threads.run(lambda: read(body))

    def _read_chat(
        self, dialect: Dialect, body: bytes, sample: SampleSession | None
    ) -> tuple[ChatRequest, Answer, bytes]:
        """Return the checked request, the encoder of its answer, and what is equal in a request that repeats it."""
        # The agents of all samples of a prompt begin with the same request, so small requests are cached.
        is_usual = sample is None or not (sample.uses_run_sampling or sample.params)
        if dialect is CHAT and len(body) <= SMALL_BODY and is_usual:
            return self._read_small_chat(body), ChatAnswer(), body
        values, answer = dialect.read(read_json(body), self.chat.takes_later_system)
        values = values if sample is None else sample.body_for_run(values)
        # Not the body: programs put times and the number of the attempt into fields that are not read.
        return self._check_chat(values, sample), answer, b"" if sample is None else json.dumps(values).encode()

    @cached_property
    def _read_small_chat(self) -> Callable[[bytes], ChatRequest]:
        return lru_cache(_MAX_CACHED_REQUESTS)(lambda body: self._check_chat(read_json(body)))

    def _check_chat(self, values: Any, sample: SampleSession | None = None) -> ChatRequest:
        return read_chat(values, self._defaults(sample), self.sampler.limits.max_messages)

    def _defaults(self, sample: SampleSession | None) -> SamplingParams:
        return self.sampler.defaults if sample is None or sample.params is None else sample.params

    def _read_completion(self, body: bytes, sample: SampleSession | None) -> CompletionRequest:
        return read_completion(read_json(body), self._defaults(sample))

    def _check_model(self, name: str, sample: SampleSession | None = None) -> None:
        if sample is None and name not in self.models:
            known = ", ".join(self.models)
            message = f"The model `{name[:_MAX_NAME]}` does not exist; there is {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # -- routes ----------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=self.sampler.metrics.prometheus_text(self.sampler.gauges()),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    def _model_object(self, name: str) -> dict[str, Any]:
        limits = self.sampler.request_limits
        max_len = min(limits.context_len, limits.kv_tokens)
        return {"id": name, "object": "model", "created": self.created, "owned_by": "areno", "max_model_len": max_len}

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object(name) for name in self.models]})

    async def _get_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._check_model(name, request.get(_SESSION))
        return web.json_response(self._model_object(name))

    async def _create_chat(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        sample: SampleSession | None = request.get(_SESSION)
        body = await self._read_body(request)
        given, answer, key = await self._parse(body, lambda body: self._read_chat(dialect, body, sample))
        self._check_model(given.model, sample)

        async def pieces() -> AsyncIterator[bytes]:
            with nullcontext() if sample is not None else self.sampler.reserve(given.options.n):
                chats.append(chat := await self.chat.prepare(given, sample))
                if sample is not None:  # some programs end at a refusal, and some at a long silence
                    chat.place = self._place_for(given.options.n)
                async with aclosing(answer.pieces(chat)) as sampled:  # type: ignore[type-var]
                    async for piece in sampled:
                        if given.options.stream:
                            yield piece
            if not given.options.stream:  # the place is free before the client has its answer
                yield piece

        def record() -> None:
            if sample is not None:
                sample.record(chats[0].turns())

        chats: list[OpenChat] = []
        idle_s = _KEEP_ALIVE_S if given.options.stream else None
        if sample is None:
            shared = SharedAnswer(answer, pieces(), idle_s=idle_s)
        else:
            sample.count_request()
            shared = sample.shared_answer(request.path, key, answer, pieces, record, idle_s)
        return await self._send(request, given.options.stream, shared.read(), shared.answer)

    @asynccontextmanager
    async def _place_for(self, n: int) -> AsyncIterator[None]:
        """Wait for a place for `n` samples, and reserve it."""
        await self.sampler.wait_for_place(n)
        with self.sampler.reserve(n):
            yield

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await self._read_body(request)
        given, *_ = await self._parse(body, lambda body: self._read_chat(MESSAGES, body, request.get(_SESSION)))
        prompt = await self.chat.prompts.build_prompt_async(given.messages, given.tools, given.template)
        return web.json_response({"input_tokens": len(prompt.tokens)})

    async def _set_reward(self, request: web.Request) -> web.Response:
        sample = request[_SESSION]
        sample.count_reward()
        fields = RequestFields(read_json(await self._read_body(request)))
        sample.set_reward(fields.get("reward"), fields.get("interaction_id"))
        return web.json_response({"message": "success"})

    async def _generate_tokens(self, request: web.Request) -> web.Response:
        """Continue token ids, as vLLM's endpoint for trainers does. A session records turns without messages."""
        sample: SampleSession | None = request.get(_SESSION)
        body = await self._read_body(request)
        given = await self._parse(body, lambda body: read_generate(read_json(body), self._defaults(sample)))
        self._check_model(given.model or self.models[0], sample)
        if sample is None:
            with self.sampler.reserve(given.options.n):
                completion = await self.completions.prepare(given)
                return web.Response(body=await completion.create_token_response(), headers=_JSON)
        self._check_unrecorded(sample)
        async with self._place_for(given.options.n):
            completion = await self.completions.prepare(given)
            body = await completion.create_token_response()
        if not sample.is_ended:
            sample.record(completion.turns())
        return web.Response(body=body, headers=_JSON)

    def _check_unrecorded(self, sample: SampleSession | None) -> None:
        """Raise ApiError 400 in a session that records: this endpoint has no messages that could be recorded."""
        if sample is not None:
            sample.count_request()
            if sample.uses_run_sampling:
                raise ApiError(400, "this session records conversations alone; use /v1/chat/completions")

    async def _create_completion(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        sample: SampleSession | None = request.get(_SESSION)
        given = await self._parse(body, lambda body: self._read_completion(body, sample))
        self._check_model(given.model, sample)
        self._check_unrecorded(sample)
        with self.sampler.reserve(given.options.n * len(given.prompts)):
            completion = await self.completions.prepare(given)
            if given.options.stream:
                return await self._send(request, True, completion.pieces(), ChatAnswer())
            body = await completion.create_response()
        return web.Response(body=body, headers=_JSON)

    async def _send(
        self, request: web.Request, is_stream: bool, pieces: AsyncIterator[bytes], answer: Answer
    ) -> web.StreamResponse:
        """Send pieces as server-sent events, or as one body.

        Before the first piece, an error becomes an error response, later an event.
        """
        kind = _EVENTS if is_stream else _JSON
        response = web.StreamResponse(headers=kind)
        async with aclosing(pieces) as sampled:  # type: ignore[type-var]
            try:
                with self._shutdown_as_error():
                    async for piece in sampled:
                        if not response.prepared:
                            if not is_stream:
                                response.content_length = len(piece)
                            await response.prepare(request)
                        await response.write(piece)
            except ApiError as error:
                if not response.prepared:
                    raise
                await response.write(answer.failure(error))
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:
                if not response.prepared:
                    raise
                self._log_failure(error)
                await response.write(answer.failure(_FAILURE))
        await response.write_eof()
        return response


def sent_key(request: web.Request) -> str:
    """Return the key of a request, from the header of OpenAI's or of Anthropic's API, or ""."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def error_response(error: ApiError, path: str) -> web.Response:
    """Return an error in the dialect of a path."""
    dialect = _DIALECTS.get(path.removeprefix(_SAMPLE), CHAT)
    return web.json_response(dialect.error_body(error), status=error.status)


def build_server(
    sampler: EngineClient,
    tokenizer: Any,
    *,
    models: list[str],
    keys: list[str],
    thinking: bool | None = None,
    session: str | None = None,
    guard: OriginGuard | None = None,
    parser: ToolCallParser | None = None,
) -> Server:
    """Build a server that answers with samples.

    `session` names a training session and is None for a public server. In a session, answers carry token ids and
    log-probabilities in the field `areno`, and `tool_choice` forces nothing. If `thinking` or `parser` is None, the
    chat template decides. `models` are the names that /v1/models lists, and `keys` the accepted API keys.
    """
    threads = prompt_threads(tokenizer)
    prompts = PromptBuilder(
        tokenizer,
        parser or parser_for_template(tokenizer.chat_template),
        thinking=thinking,
        threads=threads,
        max_cached_tokens=sampler.limits.max_remembered,
        max_prompt_tokens=sampler.max_prompt_tokens,
    )
    return Server(
        chat=ChatCompletions(prompts, sampler, session=session),
        completions=Completions(tokenizer, sampler, threads, returns_tokens=session is not None),
        sampler=sampler,
        threads=threads,
        models=models,
        keys=keys,
        guard=guard,
        created=int(time.time()),
    )
