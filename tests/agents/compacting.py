"""An agent with two compactions and a sub-agent. Its session records all of it; nothing is returned."""

from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def run_agent(ctx, batch):
    [item] = batch
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:

        async def ask(messages, **options):
            answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=12, **options)
            return [*messages, answer.choices[0].message]

        def user(text):
            return {"role": "user", "content": text}

        async def work(start):
            messages = await ask([user(start)], tools=TOOLS)
            return await ask([*messages, user("Go on.")], tools=TOOLS)

        talk = await work(item.prompt)
        for _ in range(2):
            *_, summary = await ask([*talk, user("Summarise all of it, please.")])
            talk = await work(f"{item.prompt} The summary is: {summary.content}")
        await work("Sub-agent, look.")
