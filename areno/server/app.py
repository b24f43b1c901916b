"""The web application: routes, the key, errors in OpenAI's form, streams of events, and what happens when it ends.

Puts a server together: conversations, sampling and endpoints over one engine.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from aiohttp import web

from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits
from areno.server import answers
from areno.server.chat import ChatCompletions
from areno.server.completions import Completions
from areno.server.conversations import Conversations, prompt_threads
from areno.server.errors import ApiError
from areno.server.fields import read_json, too_large, unpacked
from areno.server.host import Threads
from areno.server.parsers import parser_for_template
from areno.server.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from areno.server.sampling import Sampler, ServerLimits
from areno.types import SamplingParams

logger = logging.getLogger("areno.server")
T = TypeVar("T")

_SMALL = 1 << 15  # bytes of a body that is worth remembering
_MOST_READ = 512
_MOST_FRAMES = 10  # of a traceback in the log
_MOST_NAME = 200  # characters of a model's name that an error repeats
_CLIENT_GONE = 499  # the status in /metrics; nobody sees it otherwise


@dataclass(kw_only=True)
class Server:
    """What the application serves. models: names that requests may use. keys: any of them opens /v1; none: it is open.

    defaults: of sampling, for what a request leaves open. created: when, in seconds since the epoch. threads: read
    large requests.
    """

    chat: ChatCompletions
    completions: Completions
    sampler: Sampler
    models: list[str]
    keys: list[str]
    defaults: SamplingParams
    created: int
    threads: Threads

    def __post_init__(self) -> None:
        self._reading: set[asyncio.Task[Any]] = set()  # handlers whose requests have not arrived as a whole
        self._is_ending = False  # of the application that was made last

    def application(self) -> web.Application:
        """To be run by an AppRunner with `handler_cancellation`."""
        app = web.Application(client_max_size=self.sampler.limits.max_body, middlewares=[self._answer_errors])
        app.on_shutdown.append(self._end_reading)
        self._is_ending = False
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        return app

    # -- around every request --------------------------------------------------------------------------------------

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        metrics, path = self.sampler.metrics, request.match_info.route.resource
        metrics.in_flight += 1
        status = _CLIENT_GONE
        try:
            self._check_key(request)
            response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            return _error_response(error)
        except web.HTTPRequestEntityTooLarge:
            status = 413
            return _error_response(too_large(self.sampler.limits.max_body))
        except web.HTTPException as error:
            status = error.status
            return _error_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
        except ConnectionError:  # nobody reads this answer
            return web.Response(status=status)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            status = 500
            logger.error("a request failed: %s", "".join(traceback.format_exception(error, limit=-_MOST_FRAMES)))
            return _error_response(ApiError(500, "the server failed; its log says why"))
        finally:
            metrics.in_flight -= 1
            metrics.requests[path.canonical if path is not None else "other", status] += 1

    def _check_key(self, request: web.Request) -> None:
        if not self.keys or not request.path.startswith("/v1/"):
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode(errors="surrogateescape")  # the bytes of the header, whatever they are
        right = [hmac.compare_digest(sent, key.encode()) for key in self.keys]
        if kind.lower() != "bearer" or not any(right):
            missing = "You didn't provide an API key; send it as Authorization: Bearer KEY"
            raise ApiError(401, "Incorrect API key provided" if given else missing, code="invalid_api_key")

    async def _body(self, request: web.Request) -> bytes:
        """Return the body of a request. Raises ApiError where the server ends before it has arrived."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            body = await request.read()
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, f"the body cannot be read: {error}") from None
        except asyncio.CancelledError:
            if self._is_ending:
                raise ApiError(503, "the server ends, and this request has not arrived as a whole") from None
            raise
        finally:
            self._reading.discard(task)
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return body
        return await self.threads.run(lambda: unpacked(body, encoding, self.sampler.limits.max_body))

    async def _end_reading(self, app: web.Application) -> None:
        self._is_ending = True
        for task in self._reading:
            task.cancel()

    async def _read(self, request: web.Request, read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of the body. The event loop is not held up by a large one."""
        body = await self._body(request)
        return read(body) if len(body) <= _SMALL else await self.threads.run(lambda: read(body))

    def _chat_of(self, body: bytes) -> ChatRequest:
        # The agents of all samples of a prompt begin with the same request.
        return self._small_chat_of(body) if len(body) <= _SMALL else self._any_chat_of(body)

    @cached_property
    def _small_chat_of(self) -> Callable[[bytes], ChatRequest]:
        return lru_cache(_MOST_READ)(self._any_chat_of)

    def _any_chat_of(self, body: bytes) -> ChatRequest:
        return read_chat(read_json(body), self.defaults, self.sampler.limits.max_messages)

    def _completion_of(self, body: bytes) -> CompletionRequest:
        return read_completion(read_json(body), self.defaults)

    def _check_model(self, name: str) -> None:
        if name not in self.models:
            known = ", ".join(self.models)
            said = f"The model `{name[:_MOST_NAME]}` does not exist; there is {known}"
            raise ApiError(404, said, param="model", code="model_not_found")

    # -- routes ----------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=self.sampler.metrics.text(self.sampler.gauges()),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    def _model_object(self, name: str) -> dict[str, Any]:
        room = self.sampler.room
        return {"id": name, "object": "model", "created": self.created, "owned_by": "areno",
                "max_model_len": min(room.context_len, room.kv_tokens)}  # fmt: skip

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object(name) for name in self.models]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._check_model(name)
        return web.json_response(self._model_object(name))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        given = await self._read(request, self._chat_of)
        self._check_model(given.model)
        with self.sampler.place(given.options.n):
            chat = await self.chat.open(given)
            return await (self._stream(request, chat.chunks()) if given.options.stream else _whole(chat.answer()))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        given = await self._read(request, self._completion_of)
        self._check_model(given.model)
        with self.sampler.place(given.options.n * len(given.prompts)):
            completion = await self.completions.open(given)
            stream = given.options.stream
            return await (self._stream(request, completion.chunks()) if stream else _whole(completion.answer()))

    async def _stream(self, request: web.Request, chunks: AsyncIterator[Any]) -> web.StreamResponse:
        """Server-sent events. An error before the first chunk is an answer of its own, a later one an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        async with aclosing(chunks) as stream:  # type: ignore[type-var]
            try:
                async for chunk in stream:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(answers.event(chunk))
                await response.write(answers.END)
            except ApiError as error:
                if not response.prepared:
                    raise
                await response.write(answers.event(error.body()))
        await response.write_eof()
        return response


async def _whole(answer: Awaitable[bytes]) -> web.Response:
    return web.Response(body=await answer, content_type="application/json", charset="utf-8")


def _error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)


def build_server(
    engine: Engine,
    room: RequestLimits,
    tokenizer: Any,
    *,
    models: list[str],
    keys: list[str],
    defaults: SamplingParams,
    limits: ServerLimits | None = None,
    seed: int = 0,
    thinking: bool | None = None,
    session: str | None = None,
) -> Server:
    """A server over an engine in a rollout phase, which has `room`.

    session: of training, where answers have their tokens and nothing is forced by tool_choice. The other arguments are
    those of Server, Sampler and Conversations.
    """
    stop_ids = frozenset(engine.spec.eos_token_ids) | frozenset(defaults.stop_token_ids or ())
    limits = limits or ServerLimits()
    sampler = Sampler(engine, room, limits, seed, stop_ids)
    threads = prompt_threads(tokenizer)
    conversations = Conversations(
        tokenizer, parser_for_template(tokenizer.chat_template), thinking=thinking, threads=threads,
        most_tokens=limits.max_remembered, most_prompt=sampler.most_prompt,
    )  # fmt: skip
    return Server(
        chat=ChatCompletions(conversations, sampler, session=session, enforces_calls=session is None),
        completions=Completions(tokenizer, sampler, threads, tells_tokens=session is not None),
        sampler=sampler,
        threads=threads,
        models=models,
        keys=keys,
        defaults=defaults,
        created=int(time.time()),
    )
