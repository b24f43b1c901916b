"""Serve the policy to the agents of one rollout session.

`SessionProxy` runs the OpenAI-compatible server on this machine only, with a key of its own, until the session ends.
"""

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
from areno.server.messages import read_messages
from areno.server.sampling import ServerLimits
from areno.server.threads import ServerThread
from areno.types import Message, SamplingParams

POLICY = "policy"
"""Name of the model in a session. The name of its folder is accepted, too."""
_MAX_SAMPLES = 65_536
_MAX_PREFETCHED = 64  # prompts: while more are built, the agents of the first would wait


class SessionProxy:
    """The server of a session, running until `stop`.

    Args:
        engine: The engine, in a rollout phase.
        request_limits: Context length and KV-cache size of the rollout phase.
        tokenizer: Tokenizer of transformers, with the chat template.
        defaults: Sampling parameters for fields that a request leaves out.
        timeout_s: Seconds for the answer to a request.
        seed: Seed for requests that set none.
        thinking: Value of `enable_thinking` for the chat template. None keeps the template's default.

    Attributes:
        session: Name of the session, which each answer repeats.
        api_key: Key of the server.
        base_url: Address for OpenAI clients.
        server: The server.
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
    ):
        self.session, self.api_key = secrets.token_hex(8), secrets.token_urlsafe(32)
        names = dict.fromkeys([POLICY, Path(engine.spec.actor.path).name, engine.spec.actor.path])
        self.server = build_server(
            engine,
            request_limits,
            tokenizer,
            models=list(names),
            keys=[self.api_key],
            defaults=defaults,
            seed=seed,
            limits=ServerLimits(timeout_s=timeout_s, max_samples=_MAX_SAMPLES),
            thinking=thinking,
            session=self.session,
        )
        self._thread = ServerThread(self.server.application)
        self.base_url = f"{self._thread.start()}/v1"

    def prefetch(self, items: Iterable[AgentItem]) -> None:
        """Build the prompts of items whose agents begin now. Most agents first send the messages of their item.

        Args:
            items: Items of the agents.
        """
        conversations: list[list[Message]] = []
        items = list(items)
        for item in {item.prompt_index: item for item in items}.values():
            if len(conversations) < _MAX_PREFETCHED:
                with suppress(ApiError):
                    conversations.append(read_messages(item.messages or [{"role": "user", "content": item.prompt}]))
        self._thread.submit(self._prefetch(len(items), conversations))

    async def _prefetch(self, n_requests: int, conversations: list[list[Message]]) -> None:
        """Announce the requests to the engine and build their prompts."""
        self.server.sampler.engine.batcher.announce(n_requests)
        await self.server.chat.conversations.prefetch(conversations)

    def stop(self) -> None:
        """Abort the requests in progress and close the port."""
        self._thread.stop()
