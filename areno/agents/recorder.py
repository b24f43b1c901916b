"""Record the turns of an agent framework.

`Recorder` gives the framework an OpenAI client and keeps each request and response as a turn of a trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areno.agents.trajectories import AgentItem, AgentTrajectory, AgentTrajectoryTurn


class Recorder:
    """An OpenAI client for one sample that records its chat completions. Use it in an `async with` block.

    A streamed response is recorded, too, but reaches the framework as a whole.

    Args:
        ctx: Context of the agent.

    Attributes:
        client: An `openai.AsyncOpenAI`, to be given to the framework.
    """

    def __init__(self, ctx: Any):
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._turns: list[dict[str, Any]] = []
        self.client = AsyncOpenAI(
            base_url=ctx.get_base_url(),
            api_key=ctx.api_key,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(event_hooks={"response": [self._record]}),
        )

    async def __aenter__(self) -> Recorder:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()

    def trajectory(
        self, item: AgentItem, reward: float | None = None, parts: Mapping[str, float] | None = None
    ) -> AgentTrajectory:
        """Return the trajectory of all turns so far.

        Args:
            item: Item of the agent.
            reward: Reward of the trajectory, if the agent knows it.
            parts: Further numbers to log, by name.
        """
        turns = [AgentTrajectoryTurn(item, **turn) for turn in self._turns]
        return AgentTrajectory(turns, reward, parts or {})

    async def _record(self, response: Any) -> None:
        """Record the request and the response as a turn."""
        if response.status_code != 200 or not response.request.url.path.endswith("/chat/completions"):
            return
        request, body = json.loads(response.request.content), (await response.aread()).decode()
        if request.get("stream"):
            events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
            answer = [json.loads(event) for event in events]
        else:
            answer = json.loads(body)
        given = {"tools": request.get("tools"), "tool_choice": request.get("tool_choice")}
        self._turns.append({"messages": request["messages"], "response": answer, **given})
