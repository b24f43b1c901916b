"""Two turns: a call of a tool, whatever the model says, and an answer to its result. Used by tests of training."""

import asyncio

from openai import AsyncOpenAI

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def run_agent(ctx, batch):
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:

        async def run_one(item):
            messages = [{"role": "user", "content": item.prompt}]
            turns = []
            for _ in range(2):
                response = await client.chat.completions.create(
                    model="policy", messages=messages, tools=TOOLS, max_tokens=6
                )
                turns.append(AgentTrajectoryTurn(item=item, messages=messages, response=response, tools=TOOLS))
                messages.append(response.choices[0].message)
                messages.append({"role": "tool", "tool_call_id": "call_1", "content": f"result for {item.prompt}"})
            return AgentTrajectory(turns=turns)

        return await asyncio.gather(*(run_one(item) for item in batch.iter_samples()))
