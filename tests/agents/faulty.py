"""An agent that does what the prompt says, however bad. Used by tests of the agent processes."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp  # `openai` takes most of a second to import in each process; two_turns.py uses that

from areno.agents import process
from areno.api.agentic import AgentItem, AgentTrajectory, AgentTrajectoryTurn

_now, _sleep = time.monotonic, time.sleep


def _later():
    return _now() + 1000


def time_is_over():
    """The clock of the event loop jumps, so that agents are out of time at once; who looks after the loop is asleep."""
    process.time = SimpleNamespace(sleep=lambda seconds: _sleep(1000))
    _sleep(2 * process._TICK_S)
    time.monotonic = _later


async def ask(ctx, item):
    messages = [{"role": "user", "content": item.prompt}]
    url, headers = f"{ctx.get_base_url()}/chat/completions", {"Authorization": f"Bearer {ctx.api_key}"}
    given = {"model": "policy", "messages": messages, "max_tokens": 4}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as client,
        client.post(url, json=given, headers=headers) as got,
    ):
        response = await got.json()
    return AgentTrajectoryTurn(item=item, messages=messages, response=response)


async def ask_often(ctx, item):
    """Asks several times over one connection. After the first answer it forks, and the copy only sleeps."""
    messages = [{"role": "user", "content": item.prompt}]
    url, headers = f"{ctx.get_base_url()}/chat/completions", {"Authorization": f"Bearer {ctx.api_key}"}
    given = {"model": "policy", "messages": messages, "max_tokens": 4}
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        for number in range(8):
            async with client.post(url, json=given, headers=headers) as got:
                response = await got.json()
            if number == 0 and os.fork() == 0:
                await asyncio.sleep(1_000_000)
    return AgentTrajectory([AgentTrajectoryTurn(item=item, messages=messages, response=response)])


async def run_agent(ctx, batch):
    [item] = batch.iter_samples()
    what = item.prompt.split()[0]
    if what == "raise":
        raise ValueError("no luck")
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os._exit(7)
    if what == "block":
        process.time = SimpleNamespace(monotonic=_later, sleep=_sleep)  # for who looks after the loop, it has been long
        while True:
            time.sleep(0.1)
    if what == "sleep":  # until there is a file, if one is named, and the time is over
        for file in map(Path, item.prompt.split()[1:]):
            while not file.exists():
                await asyncio.sleep(0.01)
            time_is_over()
        await asyncio.sleep(1_000_000)
    if what == "fork":
        if os.fork() == 0:
            return None
        os.wait()
    if what == "stray":
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.write(writes, str(os.getpid()).encode())
            time.sleep(1000)
        Path(item.prompt.split()[1]).write_bytes(os.read(reads, 20))
    if what == "copy":
        return await ask_often(ctx, item)
    if what == "thread":
        threading.Thread(target=time.sleep, args=(1000,)).start()
    if what == "print":
        print("said by the agent")
    if what == "nothing":
        return None
    if what == "empty":
        return []
    if what == "text":
        return "done"
    turn = await ask(ctx, item)
    if what == "many":
        return [AgentTrajectory([turn]), AgentTrajectory([turn])]
    if what == "foreign":
        turn.item = AgentItem("x", {}, [], 99, 0)
    if what == "bare":
        turn.response = {"choices": [{"message": {"role": "assistant", "content": "a"}}]}
    if what == "stolen":
        turn.response["areno"]["session"] = "other"
    if what == "edited":
        turn.messages[0] = {"role": "user", "content": "something else"}
    if what == "told":  # prompt: told, the place of a number in the response, another number
        *path, last = item.prompt.split()[1].split(".")
        numbers = turn.response["areno"]
        for name in path:
            numbers = numbers[int(name) if name.isdecimal() else name]
        numbers[int(last) if last.isdecimal() else last] = float(item.prompt.split()[2])
        if item.prompt.endswith(" whole"):
            numbers[int(last)] = int(numbers[int(last)])
    if what == "loose":
        return turn
    return AgentTrajectory(turns=[turn])


def run_plain(ctx, batch):
    [item] = batch.iter_samples()
    if item.prompt.startswith("sleep"):
        while not Path(item.prompt.split()[1]).exists():
            time.sleep(0.01)
        time_is_over()
        time.sleep(1000)
    return asyncio.run(ask(ctx, item))


_steps: list[str] = []


async def in_turns(ctx, batch):
    """Says in which order the three agents of this process began, and went on."""
    [item] = batch.iter_samples()
    _steps.append(f"{item.prompt} begins")
    await asyncio.sleep(0)  # as between the head and the body of a request
    _steps.append(f"{item.prompt} sends")
    while len(_steps) < 6:
        await asyncio.sleep(0.01)
    raise ValueError(", ".join(_steps))


async def run_whole(ctx, batch):
    """Says in each reward how many samples it got and of what kind. A prompt says what its sample lacks."""
    found = []
    for item in batch.iter_samples():
        if item.prompt == "die":
            os._exit(7)
        if item.prompt == "raise":
            raise ValueError("no luck")
        turn = await ask(ctx, item)
        if item.prompt == "two":
            found.append(AgentTrajectory([turn]))
        if item.prompt == "edited":
            turn.response["choices"] *= 2
        if item.prompt != "none":
            found.append(AgentTrajectory([turn], reward=100 * len(batch) + 10 * batch.n_samples + len(batch.prompts)))
    return found


async def run_group(ctx, batch):
    """Each sample asks in the session of its own. The prompt is the name of the result of the second sample."""
    results = []
    for item in batch:
        headers = {"Authorization": f"Bearer {ctx.session_of(item)}"}
        body = {"model": "policy", "messages": [{"role": "user", "content": f"{item.key}"}], "max_tokens": 4}
        async with (
            aiohttp.ClientSession(raise_for_status=True) as client,
            client.post(f"{ctx.base_url}/chat/completions", json=body, headers=headers),
        ):
            pass
        results.append({"reward": item.sample_index, "samples": len(batch)})
    results[1:2] = [{"none": None, "raise": ValueError("no luck"), "nan": float("nan")}[batch.prompts[0]]][
        : len(batch) - 1
    ]
    return results
