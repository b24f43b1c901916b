"""Clients over HTTP, in processes of their own so that they do not slow the server's."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp


@dataclass(frozen=True, kw_only=True)
class Load:
    """Prompts that clients send one after the other. n_clients: at the same time.

    new_lens: of the answer to each prompt, in tokens.
    """

    url: str
    model: str
    prompts: Sequence[str]
    new_lens: Sequence[int]
    n_clients: int
    stream: bool


@dataclass(frozen=True, kw_only=True)
class Answered:
    """first_s: until the first token of each answer, of streams only. tokens: of all answers, by their `usage`."""

    seconds: float
    first_s: list[float]
    tokens: int


class Clients(AbstractContextManager["Clients"]):
    """Processes that send requests."""

    def __init__(self, n_processes: int):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(n_processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True, name="bench-clients")
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()  # it has imported what it needs

    def run(self, load: Load) -> Answered:
        """All requests of a load, dealt out over the processes. RuntimeError where one is not answered."""
        n = min(len(self._pipes), load.n_clients)
        shares = [
            replace(
                load, prompts=load.prompts[rank::n], new_lens=load.new_lens[rank::n],
                n_clients=len(range(rank, load.n_clients, n)),
            )
            for rank in range(n)
        ]  # fmt: skip
        started = time.perf_counter()
        for pipe, share in zip(self._pipes, shares, strict=False):
            pipe.send(share)
        found = [pipe.recv() for pipe in self._pipes[:n]]
        seconds = time.perf_counter() - started
        if failed := [each for each in found if isinstance(each, str)]:
            raise RuntimeError(f"a client failed: {failed[0]}")
        return Answered(
            seconds=seconds,
            first_s=[value for firsts, _ in found for value in firsts],
            tokens=sum(tokens for _, tokens in found),
        )

    def __exit__(self, *exc: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()


def _serve(pipe: Any) -> None:
    pipe.send("ready")
    while True:
        try:
            load = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(asyncio.run(_send_all(load)))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


async def _send_all(load: Load) -> tuple[list[float], int]:
    waiting = iter(zip(load.prompts, load.new_lens, strict=True))
    firsts: list[float] = []
    n_tokens = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal n_tokens
        for prompt, new_len in waiting:
            first_s, tokens = await _ask(session, load, prompt, new_len)
            n_tokens += tokens
            if load.stream:
                firsts.append(first_s)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(client(session) for _ in range(load.n_clients)))
    return firsts, n_tokens


async def _ask(session: aiohttp.ClientSession, load: Load, prompt: str, new_len: int) -> tuple[float, int]:
    """Seconds until the first token, and how many came."""
    body: dict[str, Any] = {"model": load.model, "prompt": prompt, "max_tokens": new_len, "ignore_eos": True}
    if load.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    started, first_s, usage = time.perf_counter(), 0.0, None
    async with session.post(f"{load.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        if not load.stream:
            usage = json.loads(await response.read())["usage"]
        else:
            async for line in response.content:
                first_s = first_s or time.perf_counter() - started
                if line.startswith(b"data: {") and b'"usage":{' in line:
                    usage = json.loads(line.removeprefix(b"data: "))["usage"]
    if usage is None:
        raise RuntimeError("an answer has no usage")
    return first_s, usage["completion_tokens"]
