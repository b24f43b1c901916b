"""As two_turns.py, but nothing is returned: the session of each sample has recorded the turns."""

import asyncio

from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def run_agent(ctx, batch):
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:

        async def run_one(item):
            messages = [{"role": "user", "content": item.prompt}]
            for _ in range(2):
                response = await client.chat.completions.create(
                    model="policy", messages=messages, tools=TOOLS, max_tokens=6
                )
                messages.append(response.choices[0].message)
                messages.append({"role": "tool", "tool_call_id": "call_1", "content": f"result for {item.prompt}"})

        await asyncio.gather(*(run_one(item) for item in batch.iter_samples()))
