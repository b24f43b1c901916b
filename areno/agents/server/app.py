"""The web application: routes, the key, errors in OpenAI's form, streams of events, and what happens when it ends."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from aiohttp import web

from areno.agents.protocol.errors import ApiError
from areno.agents.protocol.requests import ChatRequest, read_chat, read_completion
from areno.agents.server import answers
from areno.agents.server.chat import ChatCompletions
from areno.agents.server.completions import Completions
from areno.agents.server.sampling import Sampler
from areno.types import SamplingParams

logger = logging.getLogger("areno.server")

_SMALL = 1 << 15  # bytes of a body that is worth remembering
_MOST_READ = 512
_CLIENT_GONE = 499  # the status in /metrics; nobody sees it otherwise


@dataclass(kw_only=True)
class Server:
    """What the application serves. models: names that requests may use. keys: any of them opens /v1; none: it is open.

    defaults: of sampling, for what a request leaves open. created: when, in seconds since the epoch.
    """

    chat: ChatCompletions
    completions: Completions
    sampler: Sampler
    models: list[str]
    keys: list[str]
    defaults: SamplingParams
    created: int

    def application(self) -> web.Application:
        """To be run by an AppRunner with `handler_cancellation`."""
        app = web.Application(client_max_size=self.sampler.limits.max_body, middlewares=[self._answer_errors])
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
            most = self.sampler.limits.max_body
            return _error_response(ApiError(413, f"the request has more than {most} bytes", code="request_too_large"))
        except web.HTTPException as error:
            status = error.status
            return _error_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
        except ConnectionError:  # nobody reads this answer
            return web.Response(status=status)
        except asyncio.CancelledError:
            raise
        except Exception:
            status = 500
            logger.exception("a request failed")
            return _error_response(ApiError(500, "the server failed; its log says why"))
        finally:
            metrics.in_flight -= 1
            metrics.requests[path.canonical if path is not None else "other", status] += 1

    def _check_key(self, request: web.Request) -> None:
        if not self.keys or not request.path.startswith("/v1/"):
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        right = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.keys]
        if kind.lower() != "bearer" or not any(right):
            missing = "You didn't provide an API key; send it as Authorization: Bearer KEY"
            raise ApiError(401, "Incorrect API key provided" if given else missing, code="invalid_api_key")

    async def _read_chat(self, request: web.Request) -> ChatRequest:
        # The agents of all samples of a prompt begin with the same request.
        body = await request.read()
        return self._chat_of(body) if len(body) <= _SMALL else read_chat(_json_of(body), self.defaults)

    @cached_property
    def _chat_of(self) -> Callable[[bytes], ChatRequest]:
        return lru_cache(_MOST_READ)(lambda body: read_chat(_json_of(body), self.defaults))

    def _check_model(self, name: str) -> None:
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"The model `{name}` does not exist; there is {known}", param="model",
                           code="model_not_found")  # fmt: skip

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
        given = await self._read_chat(request)
        self._check_model(given.model)
        with self.sampler.place(given.options.n):
            chat = await self.chat.open(given)
            return await (self._stream(request, chat.chunks()) if given.options.stream else _whole(chat.answer()))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        given = read_completion(_json_of(await request.read()), self.defaults)
        self._check_model(given.model)
        with self.sampler.place(given.options.n * len(given.prompts)):
            completion = self.completions.open(given)
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


def _json_of(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error


def _error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)
