"""Define the agent of the benchmark: one request for each sample, with one client for the whole process."""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI

from areno.agents.trajectories import AgentTrajectory, AgentTrajectoryTurn


@cache
def client_of(base_url: str, api_key: str) -> AsyncOpenAI:
    """Return the client of an address, which is built once, as building one takes longer than a request.

    Args:
        base_url: Address of the server.
        api_key: Key of the server.
    """
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def run_agent(ctx: Any, batch: Any) -> list[AgentTrajectory]:
    """Send one request for each sample. The record of an item has the number of tokens to sample.

    Args:
        ctx: Context with the address and key of the server.
        batch: The items to run.

    Returns:
        One trajectory of one turn for each sample.
    """
    client, found = client_of(ctx.get_base_url(), ctx.api_key), []
    for item in batch.iter_samples():
        messages: Any = [{"role": "user", "content": item.prompt}]
        response = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=item.record["new_tokens"], extra_body={"ignore_eos": True}
        )
        found.append(AgentTrajectory([AgentTrajectoryTurn(item=item, messages=messages, response=response)]))
    return found
