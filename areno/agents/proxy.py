"""The OpenAI-compatible endpoint of one rollout session, through which agents sample from the policy.

Only processes on this machine can reach it, and they need the API key of the session.
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp.web import UnixSite

from areno.agents.trajectories import POLICY, AgentContext, AgentItem
from areno.config.agent import COMMAND, ONLINE, AgentConfig
from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits
from areno.errors import EngineError
from areno.server.access import OriginGuard
from areno.server.app import Server, build_server
from areno.server.errors import ApiError
from areno.server.messages import read_messages
from areno.server.parsers import ToolCallParser
from areno.server.sample_sessions import SampleSession
from areno.server.sampling import EngineClient, ServerLimits
from areno.server.threads import ServerThread
from areno.types import Message, SamplingParams

_MAX_SAMPLES = 65_536
_END_S = 5.0
_MAX_PLACE = 60  # characters
_MAX_PREFETCHED = 64  # prompts; with more, the first agents would wait until all are tokenized


class SampleServer:
    """Serves a policy on the loopback device, with a session for each sample. Thread-safe."""

    def __init__(self, server: Server):
        self.server = server
        self._thread = ServerThread(server.application)
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of Unix sockets, for this user alone
        self._sites: dict[str, tuple[str, UnixSite]] = {}  # by id of their session
        self._numbers = itertools.count()
        self.url = ""

    def start(self) -> None:
        self.url = self._thread.start()

    def open_sample(self, session: SampleSession) -> str:
        """Begin a session, and return its address, to which /v1 is added for OpenAI's clients."""
        self.server.samples.open(session)
        return f"{self.url}/s/{session.id}"

    def open_socket(self, session: SampleSession) -> str:
        """Return the path of a Unix socket that leads to a session, which has begun, and to no other."""
        if self._folder is None:
            # The path of a socket has at most 107 bytes.
            place = "/tmp" if len(tempfile.gettempdir()) > _MAX_PLACE else None
            self._folder = tempfile.TemporaryDirectory(prefix="areno-", dir=place)
        path = f"{self._folder.name}/{next(self._numbers)}"
        self.server.samples.of_sockets[path] = session
        self._sites[session.id] = path, self._thread.call(self._thread.open_socket(path), _END_S)
        return path

    def end_sample(self, session: SampleSession) -> None:
        """Refuse later requests of a session, and abort those in progress. Then its record is complete."""
        self.server.samples.end(session)
        with suppress(TimeoutError, EngineError):
            self._thread.call(self._end(session), _END_S)

    async def _end(self, session: SampleSession) -> None:
        await session.abort()
        path, site = self._sites.pop(session.id, ("", None))
        if site is not None:
            await site.stop()
            del self.server.samples.of_sockets[path]
            with suppress(FileNotFoundError):
                os.unlink(path)

    def submit(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the server's event loop without waiting for it."""
        self._thread.submit(work)

    def stop(self) -> None:
        """Abort all requests in progress and close the server's port."""
        self._thread.stop()
        if self._folder is not None:
            self._folder.cleanup()


class SessionProxy(SampleServer):
    """Serves one rollout session until `stop`. The engine must be in a rollout phase.

    `session` is a random name, which each response contains. `base_url` ends in /v1. If `thinking` or `parser` is None,
    the chat template decides.
    """

    def __init__(
        self,
        engine: Engine,
        request_limits: RequestLimits,
        tokenizer: Any,
        defaults: SamplingParams,
        *,
        timeout_s: float,
        seed: int,
        thinking: bool | None,
        parser: ToolCallParser | None = None,
    ):
        self.session, self.api_key = secrets.token_hex(8), secrets.token_urlsafe(32)
        names = dict.fromkeys([POLICY, Path(engine.spec.actor.path).name, engine.spec.actor.path])
        limits = ServerLimits(timeout_s=timeout_s, max_samples=_MAX_SAMPLES)
        server = build_server(
            EngineClient(engine, request_limits, defaults, limits, seed),
            tokenizer,
            models=list(names),
            keys=[self.api_key],
            thinking=thinking,
            session=self.session,
            guard=OriginGuard(),
            parser=parser,
        )
        super().__init__(server)
        self.start()
        self.base_url = f"{self.url}/v1"
        self._sessions: dict[tuple[int, int], SampleSession] = {}

    def begin_agent(
        self, items: Sequence[AgentItem], settings: AgentConfig, params: SamplingParams | None = None
    ) -> AgentContext:
        """Return the context of an agent. Unless the agent gets a whole batch, its items have new sessions.

        `params` are the sampling settings of requests that set none. None: those of the server.
        """
        if settings.whole_batch:
            return AgentContext(self.base_url, self.api_key, self.session, settings.timeout_s)
        is_program, is_online = settings.fn == COMMAND, settings.mode == ONLINE
        url, key, socket, names = self.base_url, "", None, {}
        for item in items:
            self.end_agent(item)
            session = self._sessions[item.key] = SampleSession(
                max_requests=settings.max_requests,
                max_tokens=settings.max_total_completion_tokens,
                params=params,
                uses_run_sampling=is_program or is_online,
                returns_tokens=not (is_program or is_online),
                takes_rewards=is_online,
            )
            of_sample, names[item.key] = f"{self.open_sample(session)}/v1", session.id
            if not settings.whole_group:
                url, key = of_sample, session.id
                socket = self.open_socket(session) if is_program and settings.box else None
        return AgentContext(url, key, self.session, settings.timeout_s, socket, names, self.base_url)

    def end_agent(self, item: AgentItem) -> SampleSession | None:
        """End the session of an item's agent, and return it. None if it has none."""
        session = self._sessions.pop(item.key, None)
        if session is not None:
            self.end_sample(session)
        return session

    def prefetch(self, items: Iterable[AgentItem]) -> None:
        """Tokenize the prompts of items in advance, and tell the engine how many requests to expect.

        Most agents begin with the messages of their item, so the prompt of the first request is then tokenized already.
        """
        conversations: list[list[Message]] = []
        items = list(items)
        for item in {item.prompt_index: item for item in items}.values():
            if len(conversations) < _MAX_PREFETCHED:
                with suppress(ApiError):
                    conversations.append(read_messages(item.messages or [{"role": "user", "content": item.prompt}]))
        self.submit(self._prefetch(len(items), conversations))

    async def _prefetch(self, n_requests: int, conversations: list[list[Message]]) -> None:
        self.server.sampler.engine.batcher.announce(n_requests)
        await self.server.chat.prompts.prefetch(conversations)
