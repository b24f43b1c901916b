"""The agent function: one request with a tool for each sample."""

import asyncio

from moves import SYSTEM, TOOLS
from openai import AsyncOpenAI

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn

CHOICE = {"type": "function", "function": {"name": "choose_move"}}


async def run_agent(ctx, batch):
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:

        async def run_one(item):
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": item.prompt},
            ]
            response = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, tool_choice=CHOICE
            )
            turn = AgentTrajectoryTurn(item=item, messages=messages, response=response, tools=TOOLS, tool_choice=CHOICE)
            return AgentTrajectory(turns=[turn])

        return await asyncio.gather(*(run_one(item) for item in batch.iter_samples()))
