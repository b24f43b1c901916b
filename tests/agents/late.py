"""One turn, ten times as slow as others. The agent gives the reward itself. Used by tests of several sources."""

import asyncio

from openai import AsyncOpenAI


async def run_agent(ctx, batch):
    [item] = batch
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:
        await asyncio.sleep(0.3)
        messages = [{"role": "user", "content": item.prompt}]
        await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    return 0.25 * item.sample_index
