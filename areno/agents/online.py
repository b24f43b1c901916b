"""The gateway for external programs (agent.mode=online), which start sessions and query the policy in them.

It has one address for the whole run, and passes requests on to the server of the sample's rollout session. Its paths
are those of AReaL: the admin key starts a session, and the key of the session queries the policy, reports rewards and
ends it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import aiohttp
from aiohttp import web

from areno.agents.online_sessions import OnlineSessions, OpenSample, session_data
from areno.agents.running import ContextFor, OnDone, RunnerWithThreads
from areno.agents.trajectories import AgentItem
from areno.config.agent import AgentConfig
from areno.errors import ConfigError, EngineError, Problem
from areno.server.app import error_response, sent_key
from areno.server.errors import ApiError
from areno.server.json_bodies import RequestFields, read_json
from areno.server.threads import ServerThread
from areno.user_processes.pool import SlowCallTimer

logger = logging.getLogger("areno.agents")

ADMIN_KEY = "ARENO_ADMIN_API_KEY"
FILE = "online.json"
_KNOWN_KEY = "areal-admin-key"  # AReaL's default
_REWARD = "/rl/set_reward"
_MAX_BODY = 1 << 16  # bytes of a request that the gateway reads itself
_WAIT_S, _LOOK_S = 3.0, 0.05  # for a sample; HTTP clients wait for at least 5 s
_GRACE_S = 0.5  # for the answers to programs that wait
_OWN_HEADERS = {  # of one connection, and those with the key of the gateway
    *("host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te", "trailer"),
    *("authorization", "x-api-key"),
}


class OnlineAgents(RunnerWithThreads):
    """Serves sessions to external programs. Use it in a `with` block."""

    def __init__(self, config: AgentConfig):
        super().__init__()
        given = os.environ.get(ADMIN_KEY, "")
        if given == _KNOWN_KEY:
            raise ConfigError(Problem(ADMIN_KEY, f"is {_KNOWN_KEY}, which everybody knows; set a key of your own"))
        self._config, self._has_own_key = config, not given
        self._admin_key = given or secrets.token_urlsafe(32)
        self._sessions = OnlineSessions(config, self.clock)
        self._thread = ServerThread(self._application, config.host, config.port, grace_s=_GRACE_S)
        self._is_everywhere = config.host in ("0.0.0.0", "::")
        self._n_submitted = 0
        self._file: Path | None = None
        self._slow = SlowCallTimer()
        self._is_closing = False
        self.url = ""

    def __enter__(self) -> OnlineAgents:
        try:
            self.url = self._thread.start()
        except EngineError as error:
            raise ConfigError(Problem("agent.port", str(error))) from error
        if self._is_everywhere:
            self.url = f"http://{gethostname()}:{self.url.rpartition(':')[2]}"
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def announce(self, folder: Path) -> None:
        """Log the address of the gateway, and write it to a file in the folder of the run."""
        self._file = folder / FILE
        told = {"url": self.url, **({"admin_api_key": self._admin_key} if self._has_own_key else {})}
        written = self._file.with_suffix(".part")
        written.unlink(missing_ok=True)
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(told, file)
        os.replace(written, self._file)
        place = self._file if self._has_own_key else f"${ADMIN_KEY}"
        logger.info("agents: programs start sessions at %s; the admin key is in %s", self.url, place)

    def close(self) -> None:
        self._is_closing = True
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._sessions.clear()
        self._thread.stop()

    def submit(self, items: Sequence[AgentItem], context: ContextFor, on_done: OnDone) -> None:
        self._n_submitted += 1
        self._slow = SlowCallTimer()
        self._sessions.add(
            [
                OpenSample(
                    item,
                    context([item]),
                    (self._n_submitted, item.prompt_index),
                    partial(self.finish, self.round, on_done, index),
                )
                for index, item in enumerate(items)
            ]
        )

    def look_at_limits(self) -> None:
        self._sessions.look_at_limits()
        if self._slow.is_due() and (n_waiting := self._sessions.n_waiting):
            logger.info("agents: %d samples wait for sessions, which programs start at %s", n_waiting, self.url)

    def restart_busy_workers(self) -> None:
        super().restart_busy_workers()
        self._sessions.clear()

    # -- the gateway -----------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_handle_errors])
        app.cleanup_ctx.append(self._open_client)
        app.router.add_get("/health", self._health)
        app.router.add_post("/grant_capacity", self._grant_capacity)
        app.router.add_post("/rl/start_session", self._start_session)
        app.router.add_post("/rl/end_session", self._end_session)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _open_client(self, app: web.Application) -> AsyncIterator[None]:
        # No limits: the server behind has them.
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._client:
            yield

    def _check_admin_key(self, request: web.Request) -> None:
        given = sent_key(request)
        if not given:
            raise ApiError(401, "send the admin key as Authorization: Bearer KEY", code="invalid_api_key")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._admin_key.encode()):
            raise ApiError(403, "this is not the admin key of the run", code="invalid_api_key")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _grant_capacity(self, request: web.Request) -> web.Response:
        """Return how many sessions can be started. The steps of the run grant them."""
        self._check_admin_key(request)
        return web.json_response({"capacity": self._sessions.n_waiting})

    async def _start_session(self, request: web.Request) -> web.Response:
        self._check_admin_key(request)
        fields = RequestFields(read_json(await request.read() or b"{}"))
        task_id, key = fields.text("task_id"), fields.text("api_key")
        if key == self._admin_key:
            raise ApiError(400, "api_key is the admin key; leave it out, or give another one", param="api_key")
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _WAIT_S
        while (sample := self._sessions.start(task_id, key)) is None:
            if self._is_closing:
                raise ApiError(503, "the run has ended", code="run_ended")
            if loop.time() > ends_at:
                raise ApiError(429, "no sample waits for a session now; ask again", code="no_capacity")
            await asyncio.sleep(_LOOK_S)
        # If the gateway listens on all addresses, the client knows one of them.
        url = f"http://{request.host}" if self._is_everywhere else self.url
        told = {"session_id": sample.id, "api_key": sample.key, "base_url": f"{url}/v1", **session_data(sample)}
        return web.json_response(told, dumps=partial(json.dumps, default=str))

    async def _end_session(self, request: web.Request) -> web.Response:
        sample = self._sessions.end(sent_key(request))
        return web.json_response({"message": "success", "interaction_count": sample.n_answers})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        key, path = sent_key(request), request.rel_url.raw_path
        if key == self._admin_key:
            raise ApiError(401, "the admin key starts sessions; use the key of a session", code="invalid_api_key")
        sample = self._sessions.find(key, may_be_closing=path == _REWARD)
        if not path.startswith(("/v1/", "/rl/", "/inference/")):
            path = f"/v1{path}"
        self._sessions.begin_request(sample)
        status, response = 0, web.StreamResponse()
        try:
            url = f"{sample.context.base_url.removesuffix('/v1')}{path}"
            body = request.content if request.can_read_body else None
            headers = {**_passed_on(request.headers), "Authorization": f"Bearer {sample.context.api_key}"}
            async with self._client.request(request.method, url, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            status = answer.status
            await response.write_eof()
            return response
        except aiohttp.ClientError:
            if response.prepared:
                raise ConnectionResetError("the rollout session has ended") from None
            raise ApiError(503, "the rollout session of this sample has ended") from None
        finally:
            is_reward = path == _REWARD
            is_answered = status == 200 and request.method == "POST" and not is_reward
            self._sessions.end_request(sample, is_answered=is_answered, sets_reward=status == 200 and is_reward)


def _passed_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}


@web.middleware
async def _handle_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        response = error_response(error, request.path)
        if error.status == 429:
            response.headers["Retry-After"] = "1"
        return response
    except web.HTTPRequestEntityTooLarge:
        return error_response(ApiError(413, f"the body has more than {_MAX_BODY} bytes"), request.path)
