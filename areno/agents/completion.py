"""The agent of a source without agents, in a run that also has sources with agents: a single completion."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from areno.agents.workflows import http_client
from areno.config.agent import AgentConfig


def completion_agent(settings: AgentConfig) -> Callable[[Any, Any], Any]:
    """Return an agent function that continues the tokens of its item, which its session records."""
    client = cache(http_client)

    async def run_agent(ctx: Any, batch: Any) -> None:
        [item] = batch
        url = f"{ctx.get_base_url().removesuffix('/v1')}/inference/v1/generate"
        response = await client().post(
            url, json={"token_ids": item.input_tokens}, headers={"Authorization": f"Bearer {ctx.api_key}"}
        )
        response.raise_for_status()

    return run_agent
