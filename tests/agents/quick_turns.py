"""The conversations of two_turns.py, without `openai`, which takes most of a second to import in each process."""

import asyncio

import aiohttp

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def run_agent(ctx, batch):
    url, headers = f"{ctx.get_base_url()}/chat/completions", {"Authorization": f"Bearer {ctx.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:

        async def run_one(item):
            messages = [{"role": "user", "content": item.prompt}]
            turns = []
            for _ in range(2):
                given = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 6}
                async with client.post(url, json=given) as got:
                    response = await got.json()
                turns.append(AgentTrajectoryTurn(item=item, messages=messages, response=response, tools=TOOLS))
                messages.append(response["choices"][0]["message"])
                messages.append({"role": "tool", "tool_call_id": "call_1", "content": f"result for {item.prompt}"})
            return AgentTrajectory(turns=turns)

        return await asyncio.gather(*(run_one(item) for item in batch.iter_samples()))
