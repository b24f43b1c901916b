"""Conversations of one to three turns, of which some are much longer than others. Used by tests of training.

A long one goes on when no short one is in progress: then it is not done before these, however busy the machine is.
"""

import asyncio

import aiohttp

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn

n_short = 0  # in progress


async def run_agent(ctx, batch):
    global n_short
    n_short += (of_short := sum(item.record["solutions"] % 4 != 0 for item in batch.iter_samples()))
    try:
        return await converse(ctx, batch)
    finally:
        n_short -= of_short


async def converse(ctx, batch):
    url, headers = f"{ctx.get_base_url()}/chat/completions", {"Authorization": f"Bearer {ctx.api_key}"}
    trajectories = []
    async with aiohttp.ClientSession(headers=headers) as client:
        for item in batch.iter_samples():
            is_long = item.record["solutions"] % 4 == 0
            messages, turns = [{"role": "user", "content": item.prompt}], []
            for turn in range(3 if is_long else 1):
                while turn and n_short:
                    await asyncio.sleep(0.005)
                given = {"model": "policy", "messages": messages, "max_tokens": 60 if is_long else 6}
                given["ignore_eos"] = is_long
                async with client.post(url, json=given) as got:
                    response = await got.json()
                turns.append(AgentTrajectoryTurn(item=item, messages=messages, response=response))
                messages.append(response["choices"][0]["message"])
                messages.append({"role": "user", "content": f"and then, {item.prompt}?"})
            trajectories.append(AgentTrajectory(turns=turns))
    return trajectories
