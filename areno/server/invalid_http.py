"""A runner of aiohttp applications whose responses to invalid HTTP have the JSON form of OpenAI's errors."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from areno.server.errors import ApiError


class _Protocol(RequestHandler):
    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> Any:
        if isinstance(resp, web.Response) and resp.status >= 400 and resp.content_type != "application/json":
            error = ApiError(resp.status, resp.text or resp.reason)
            resp = web.json_response(error.body(), status=error.status)
            resp.force_close()
        return await super().finish_response(request, resp, start_time)


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Protocol(self, loop=asyncio.get_running_loop(), **self._kwargs)


class Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
