"""The server of one rollout session: on this machine only, behind a key of its own, gone with the session."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from areno.agents.trajectories import AgentItem
from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits
from areno.server.app import build_server
from areno.server.errors import ApiError
from areno.server.host import ServerThread
from areno.server.messages import read_messages
from areno.server.sampling import ServerLimits
from areno.types import Message, SamplingParams

POLICY = "policy"
"""The name of the model in a session; that of its folder does as well."""
_MOST_SAMPLES = 65_536
_MOST_EXPECTED = 64  # prompts: while more are made, the agents of the first would wait


class SessionProxy:
    """Serves the policy to agents until `stop`. The arguments are those of build_server."""

    def __init__(
        self,
        engine: Engine,
        room: RequestLimits,
        tokenizer: Any,
        defaults: SamplingParams,
        *,
        timeout_s: float,
        seed: int,
        thinking: bool | None,
    ):
        self.session, self.api_key = secrets.token_hex(8), secrets.token_urlsafe(32)
        names = dict.fromkeys([POLICY, Path(engine.spec.actor.path).name, engine.spec.actor.path])
        self.server = build_server(
            engine, room, tokenizer, models=list(names), keys=[self.api_key], defaults=defaults, seed=seed,
            limits=ServerLimits(timeout_s=timeout_s, max_samples=_MOST_SAMPLES), thinking=thinking,
            session=self.session,
        )  # fmt: skip
        self._thread = ServerThread(self.server.application)
        self.base_url = f"{self._thread.start()}/v1"

    def expect(self, items: Iterable[AgentItem]) -> None:
        """Agents of these items begin now. Most ask for what their item says, so its prompt is made meanwhile."""
        conversations: list[list[Message]] = []
        items = list(items)
        for item in {item.prompt_index: item for item in items}.values():
            if len(conversations) < _MOST_EXPECTED:
                with suppress(ApiError):
                    conversations.append(read_messages(item.messages or [{"role": "user", "content": item.prompt}]))
        self._thread.begin(self._expect(len(items), conversations))

    async def _expect(self, n_requests: int, conversations: list[list[Message]]) -> None:
        self.server.sampler.engine.gathering.announce(n_requests)
        await self.server.chat.conversations.expect(conversations)

    def stop(self) -> None:
        """End the requests under way and close the port."""
        self._thread.stop()
