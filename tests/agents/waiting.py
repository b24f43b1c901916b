"""An agent that asks nothing, and ends when the prompt says: at once, for ever, or until there is a file."""

import asyncio
import os
import time
from pathlib import Path

from areno.api.agentic import AgentTrajectoryTurn

LONG = 600_000  # characters of a long answer, more than the buffer of a socket


async def run_agent(ctx, batch):
    [item] = batch.iter_samples()
    what, _, file = item.prompt.partition(" ")
    if what == "end":
        os._exit(3)
    while what == "block" and not Path(file).exists():
        time.sleep(0.01)
    while what == "for" or (what in ("until", "long") and not Path(file.removesuffix(" too")).exists()):
        await asyncio.sleep(0.01)
    if what == "long":
        messages = [{"role": "user", "content": "x" * LONG}]
        choice = {"message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
        return AgentTrajectoryTurn(item=item, messages=messages, response={"choices": [choice], "areno": {"a": [1]}})
    return []


def run_plain(ctx, batch):
    [item] = batch.iter_samples()
    what, _, file = item.prompt.partition(" ")
    while what == "for" or (what == "until" and not Path(file).exists()):
        time.sleep(0.01)
    return []
