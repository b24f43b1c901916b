"""The agent that the benchmark runs. It sends one request for each sample, with one client for the whole process."""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI

from areno.agents.trajectories import AgentTrajectory, AgentTrajectoryTurn


@cache
def client_of(base_url: str, api_key: str) -> AsyncOpenAI:
    """Return the HTTP client for a server, from a cache, since building a client takes longer than a request.

    Args:
        base_url: Address of the server.
        api_key: API key for the server.
    """
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def run_agent(ctx: Any, batch: Any) -> list[AgentTrajectory]:
    """Send one chat request for each sample of a batch.

    Args:
        ctx: Context with the address and API key of the server.
        batch: Items to run. `new_tokens` in an item's record is the number of tokens to generate. It is sent as
            `max_tokens`, which counts generated tokens alone in a chat request.

    Returns:
        A trajectory with one turn for each sample.
    """
    client, found = client_of(ctx.get_base_url(), ctx.api_key), []
    for item in batch.iter_samples():
        messages: Any = [{"role": "user", "content": item.prompt}]
        response = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=item.record["new_tokens"], extra_body={"ignore_eos": True}
        )
        found.append(AgentTrajectory([AgentTrajectoryTurn(item=item, messages=messages, response=response)]))
    return found
