"""The turns of agents that others wrote: a client for their framework that remembers what it asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areno.agents.trajectories import AgentItem, AgentTrajectory, AgentTrajectoryTurn


class Recorder:
    """An `openai.AsyncOpenAI` (`client`) for one sample, and the trajectory of its chat completions.

    ctx: of the agent. A stream is recorded, too, but reaches the framework as a whole.
    """

    def __init__(self, ctx: Any):
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._turns: list[dict[str, Any]] = []
        self.client = AsyncOpenAI(
            base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0,
            http_client=DefaultAsyncHttpxClient(event_hooks={"response": [self._keep]}),
        )  # fmt: skip

    async def __aenter__(self) -> Recorder:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()

    def trajectory(
        self, item: AgentItem, reward: float | None = None, parts: Mapping[str, float] | None = None
    ) -> AgentTrajectory:
        """All turns so far. reward, parts: see AgentTrajectory."""
        turns = [AgentTrajectoryTurn(item, **turn) for turn in self._turns]
        return AgentTrajectory(turns, reward, parts or {})

    async def _keep(self, response: Any) -> None:
        if response.status_code != 200 or not response.request.url.path.endswith("/chat/completions"):
            return
        asked, body = json.loads(response.request.content), (await response.aread()).decode()
        if asked.get("stream"):
            events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
            answer = [json.loads(event) for event in events]
        else:
            answer = json.loads(body)
        given = {"tools": asked.get("tools"), "tool_choice": asked.get("tool_choice")}
        self._turns.append({"messages": asked["messages"], "response": answer, **given})
