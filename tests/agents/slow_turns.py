"""Conversations of one to three turns, of which some are much longer than others. Used by tests of training."""

import aiohttp

from areno.api.agentic import AgentTrajectory, AgentTrajectoryTurn


async def run_agent(ctx, batch):
    url, headers = f"{ctx.get_base_url()}/chat/completions", {"Authorization": f"Bearer {ctx.api_key}"}
    trajectories = []
    async with aiohttp.ClientSession(headers=headers) as client:
        for item in batch.iter_samples():
            is_long = item.record["solutions"] % 4 == 0
            messages, turns = [{"role": "user", "content": item.prompt}], []
            for _ in range(3 if is_long else 1):
                given = {"model": "policy", "messages": messages, "max_tokens": 60 if is_long else 6}
                given["ignore_eos"] = is_long
                async with client.post(url, json=given) as got:
                    response = await got.json()
                turns.append(AgentTrajectoryTurn(item=item, messages=messages, response=response))
                messages.append(response["choices"][0]["message"])
                messages.append({"role": "user", "content": f"and then, {item.prompt}?"})
            trajectories.append(AgentTrajectory(turns=turns))
    return trajectories
