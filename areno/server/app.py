"""The web application of the OpenAI-compatible server: API keys, reading of bodies, error responses, event streams.

`build_server` makes a `Server` from a sampler and the tokenizer of its engine.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from aiohttp import web

from areno.server import response_bodies
from areno.server.access import OriginGuard
from areno.server.chat import ChatCompletions
from areno.server.completions import Completions
from areno.server.errors import ApiError
from areno.server.json_bodies import decompress, read_json, too_large_error
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import PromptBuilder, prompt_threads
from areno.server.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from areno.server.sampling import EngineClient
from areno.server.threads import END_ANSWERS, ThreadPool

logger = logging.getLogger("areno.server")
T = TypeVar("T")

SMALL_BODY = 1 << 15  # bytes of a body that is read in the event loop and whose result is cached
_MAX_CACHED_REQUESTS = 512
_MAX_FRAMES = 10  # of a traceback in the log
_MAX_NAME = 200  # characters of a model's name that an error repeats
_JSON = {"Content-Type": "application/json; charset=utf-8"}
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
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{name:.+}", self._get_model)
        app.router.add_post("/v1/chat/completions", self._create_chat_completion)
        app.router.add_post("/v1/completions", self._create_completion)
        return app

    # -- around every request --------------------------------------------------------------------------------------

    @web.middleware
    async def _handle_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        metrics, path = self.sampler.metrics, request.match_info.route.resource
        metrics.in_flight += 1
        status, task = _CLIENT_GONE, asyncio.current_task()
        assert task is not None
        self._handling.add(task)
        try:
            self._check_key(request)
            if (response := self._check_origin(request)) is None:
                with self._shutdown_as_error():
                    response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            return _error_response(error)
        except web.HTTPRequestEntityTooLarge:
            status = 413
            return _error_response(too_large_error(self.sampler.limits.max_body))
        except web.HTTPException as error:
            status = error.status
            return _error_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
        except ConnectionError:  # the client has disconnected
            return web.Response(status=status)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            status = 500
            logger.error("a request failed: %s", "".join(traceback.format_exception(error, limit=-_MAX_FRAMES)))
            return _error_response(ApiError(500, "the server failed; its log says why"))
        finally:
            self._handling.discard(task)
            metrics.in_flight -= 1
            metrics.requests[path.canonical if path is not None else "other", status] += 1

    def _check_key(self, request: web.Request) -> None:
        if not self.keys or not request.path.startswith("/v1/"):
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode(errors="surrogateescape")  # the bytes of the header, even if they are not UTF-8
        matches = [hmac.compare_digest(sent, key.encode()) for key in self.keys]
        if kind.lower() != "bearer" or not any(matches):
            missing = "You didn't provide an API key; send it as Authorization: Bearer KEY"
            raise ApiError(401, "Incorrect API key provided" if given else missing, code="invalid_api_key")

    def _check_origin(self, request: web.Request) -> web.Response | None:
        """Return the answer to a CORS preflight request, else None. Raises ApiError 403 for a foreign page."""
        if self.guard is None or (self.keys and request.path.startswith("/v1/")):
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

    async def _read_and_parse(self, request: web.Request, read: Callable[[bytes], T]) -> T:
        """Receive and parse a body. A large body is parsed in a thread."""
        body = await self._read_body(request)
        return read(body) if len(body) <= SMALL_BODY else await self.threads.run(lambda: read(body))

    def _read_chat(self, body: bytes) -> ChatRequest:
        # The agents of all samples of a prompt begin with the same request, so small requests are cached.
        return self._read_small_chat(body) if len(body) <= SMALL_BODY else self._parse_chat(body)

    @cached_property
    def _read_small_chat(self) -> Callable[[bytes], ChatRequest]:
        return lru_cache(_MAX_CACHED_REQUESTS)(self._parse_chat)

    def _parse_chat(self, body: bytes) -> ChatRequest:
        return read_chat(read_json(body), self.sampler.defaults, self.sampler.limits.max_messages)

    def _read_completion(self, body: bytes) -> CompletionRequest:
        return read_completion(read_json(body), self.sampler.defaults)

    def _check_model(self, name: str) -> None:
        if name not in self.models:
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
        self._check_model(name)
        return web.json_response(self._model_object(name))

    async def _create_chat_completion(self, request: web.Request) -> web.StreamResponse:
        given = await self._read_and_parse(request, self._read_chat)
        self._check_model(given.model)
        with self.sampler.reserve(given.options.n):
            chat = await self.chat.prepare(given)
            return await (
                self._stream(request, chat.chunks()) if given.options.stream else _json_response(chat.create_response())
            )

    async def _create_completion(self, request: web.Request) -> web.StreamResponse:
        given = await self._read_and_parse(request, self._read_completion)
        self._check_model(given.model)
        with self.sampler.reserve(given.options.n * len(given.prompts)):
            completion = await self.completions.prepare(given)
            stream = given.options.stream
            return await (
                self._stream(request, completion.chunks()) if stream else _json_response(completion.create_response())
            )

    async def _stream(self, request: web.Request, chunks: AsyncIterator[Any]) -> web.StreamResponse:
        """Send chunks as server-sent events. Before the first, an error becomes an error response, later an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        async with aclosing(chunks) as stream:  # type: ignore[type-var]
            try:
                with self._shutdown_as_error():
                    async for chunk in stream:
                        if not response.prepared:
                            await response.prepare(request)
                        await response.write(response_bodies.server_sent_event(chunk))
                    await response.write(response_bodies.END)
            except ApiError as error:
                if not response.prepared:
                    raise
                await response.write(response_bodies.server_sent_event(error.body()))
        await response.write_eof()
        return response


async def _json_response(answer: Awaitable[bytes]) -> web.Response:
    return web.Response(body=await answer, headers=_JSON)


def _error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)


def build_server(
    sampler: EngineClient,
    tokenizer: Any,
    *,
    models: list[str],
    keys: list[str],
    thinking: bool | None = None,
    session: str | None = None,
    guard: OriginGuard | None = None,
) -> Server:
    """Build a server that answers with samples.

    `session` names a training session and is None for a public server. In a session, answers carry token ids and
    log-probabilities in the field `areno`, and `tool_choice` forces nothing. If `thinking` is None, the default of the
    chat template applies. `models` are the names that /v1/models lists, and `keys` the accepted API keys.
    """
    threads = prompt_threads(tokenizer)
    prompts = PromptBuilder(
        tokenizer,
        parser_for_template(tokenizer.chat_template),
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
