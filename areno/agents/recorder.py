"""A recorder for agent frameworks, such as OpenAI's Agents SDK, which send requests to the model themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areno.agents.trajectories import AgentItem, AgentTrajectory, AgentTrajectoryTurn


class Recorder:
    """Provides an OpenAI client for an agent framework, and records the chat completions of this client.

    An example of an agent framework is OpenAI's Agents SDK. Use one Recorder per sample, in an `async with` block.
    Streamed responses are recorded, too. However, the client waits for the whole response before it passes on the first
    chunk.

    Args:
        ctx: The argument `ctx` of the agent function.

    Attributes:
        client: An `openai.AsyncOpenAI` to pass to the agent framework.
    """

    def __init__(self, ctx: Any):
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._turns: list[dict[str, Any]] = []
        self.client = AsyncOpenAI(
            base_url=ctx.get_base_url(),
            api_key=ctx.api_key,
            max_retries=0,
            timeout=None,  # the server limits the time of each request
            http_client=DefaultAsyncHttpxClient(event_hooks={"response": [self._record_response]}),
        )

    async def __aenter__(self) -> Recorder:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()

    def trajectory(
        self, item: AgentItem, reward: float | None = None, parts: Mapping[str, float] | None = None
    ) -> AgentTrajectory:
        """Return the trajectory of all requests and responses so far.

        Args:
            item: The item that the agent worked on.
            reward: The reward of the trajectory. None leaves the reward to the reward function.
            parts: Further numbers to log by name, such as components of the reward.
        """
        turns = [AgentTrajectoryTurn(item, **turn) for turn in self._turns]
        return AgentTrajectory(turns, reward, parts or {})

    async def _record_response(self, response: Any) -> None:
        """Record a chat completion as a turn. The OpenAI client calls this for each HTTP response."""
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
