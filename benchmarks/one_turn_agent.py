"""The agent that the benchmark runs. It sends one request for each sample, with one client for the whole process."""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI

from areno.agents.trajectories import AgentTrajectory, AgentTrajectoryTurn


@cache
def client_of(base_url: str, api_key: str) -> AsyncOpenAI:
    """Return a cached HTTP client, since building a client takes longer than a request."""
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def run_agent(ctx: Any, batch: Any) -> list[AgentTrajectory]:
    """Send one chat request for each sample, for as many tokens as `new_tokens` of the item's record."""
    client, found = client_of(ctx.get_base_url(), ctx.api_key), []
    for item in batch.iter_samples():
        messages: Any = [{"role": "user", "content": item.prompt}]
        response = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=item.record["new_tokens"], extra_body={"ignore_eos": True}
        )
        found.append(AgentTrajectory([AgentTrajectoryTurn(item=item, messages=messages, response=response)]))
    return found
