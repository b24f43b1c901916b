"""An agent that asks nothing, and ends when the prompt says: at once, for ever, or until there is a file."""

import asyncio
import os
from pathlib import Path


async def run_agent(ctx, batch):
    [item] = batch.iter_samples()
    what, _, file = item.prompt.partition(" ")
    if what == "end":
        os._exit(3)
    while what == "for" or (what == "until" and not Path(file.removesuffix(" too")).exists()):
        await asyncio.sleep(0.01)
    return []
