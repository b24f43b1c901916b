"""Sampling over HTTP by clients of the server, whole and streamed, against sampling directly on the engine.

Each request has its own text, with about as many tokens as --prompt-len. --clients requests are in progress at a time,
sent by separate processes, which do not slow down that of the server. "1 client" and "N clients" have the times to the
first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from areno.bench.__main__ import checked_model
from areno.bench.areno_contender import ArenoContender, requests
from areno.bench.arguments import Settings, positive_int
from areno.server.app import build_server
from areno.server.sampling import EngineClient, ServerLimits
from areno.server.threads import ServerThread
from areno.types import SamplingParams
from benchmarks.texts import RandomTexts, add_tokenizer_argument
from benchmarks.turns import speeds, time_interleaved

_MAX_PROCESSES = 8
_N_ALONE = 8  # requests of one client, for the time to its first token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_tokenizer_argument(parser)
    parser.set_defaults(kind="rollout", prompts=256, samples=1)
    parser.add_argument("--clients", type=positive_int, default=64, help="clients that send requests at the same time")


@dataclass(frozen=True)
class ClientLoad:
    """Prompts for a server. Each client sends its next request when the previous one is answered."""

    url: str
    prompts: Sequence[str]
    new_lens: Sequence[int]
    n_clients: int
    stream: bool

    def share(self, rank: int, n: int) -> ClientLoad:
        n_clients = len(range(rank, self.n_clients, n))
        return replace(self, prompts=self.prompts[rank::n], new_lens=self.new_lens[rank::n], n_clients=n_clients)


def _send(load: ClientLoad) -> tuple[list[float], int]:
    """Send all requests of a load. Runs in a client process."""
    return asyncio.run(_send_all(load))


async def _send_all(load: ClientLoad) -> tuple[list[float], int]:
    """Return (seconds to the first token of each streamed answer, number of generated tokens in all answers)."""
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


async def _ask(session: aiohttp.ClientSession, load: ClientLoad, prompt: str, new_len: int) -> tuple[float, int]:
    """Return (seconds to the first token, 0 if not streamed; number of generated tokens) of a request."""
    body: dict[str, Any] = {"model": "bench", "prompt": prompt, "max_tokens": new_len, "ignore_eos": True}
    if load.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    started, first_s, usage = time.perf_counter(), 0.0, {"completion_tokens": 0}
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
    return first_s, usage["completion_tokens"]


def run(settings: Settings, folder: Path) -> dict[str, dict[str, float]]:
    from transformers import AutoTokenizer

    ours = ArenoContender(settings, *checked_model(settings, folder))
    work, tokenizer, n_clients = settings.work, AutoTokenizer.from_pretrained(settings.tokenizer), settings.clients
    words = RandomTexts(tokenizer)
    n_processes = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 2) // 2, n_clients))
    firsts: dict[int, list[float]] = {1: [], n_clients: []}  # seconds to the first token
    with ours.engine as engine, get_context("spawn").Pool(n_processes) as processes:
        limits = ours.begin_rollout(n_clients, 2 * max(work.row_lens) + 64)  # a text may have more tokens than words
        sampler = EngineClient(engine, limits, SamplingParams(), ServerLimits(), seed=0)
        sampler = EngineClient(engine, limits, SamplingParams(), ServerLimits(), seed=0)
        server = build_server(sampler, tokenizer, models=["bench"], keys=[])
        thread = ServerThread(server.application)
        url = thread.start()

        def ask(texts: list[str], n_clients: int, stream: bool) -> None:
            n = min(n_processes, n_clients)
            load = ClientLoad(url, texts, work.new_lens[: len(texts)], n_clients, stream)
            found = processes.map(_send, [load.share(rank, n) for rank in range(n)], chunksize=1)
            firsts[n_clients] += [value for seconds, _ in found for value in seconds]
            assert sum(n_tokens for _, n_tokens in found) == sum(load.new_lens)

        # Each way gets prompts of its own, so that none finds another's in the prefix cache.
        def direct(repeat: int) -> Any:
            texts = words.draw(work, "direct", repeat)
            return lambda: engine.generate(requests(work, [tokenizer.encode(text) for text in texts]))

        def answers(repeat: int) -> Any:
            return partial(ask, words.draw(work, "answers", repeat), n_clients, stream=False)

        def streams(repeat: int) -> Any:
            if repeat == 0:  # the warm-up has ended
                firsts.update({1: [], n_clients: []})
            ask(words.draw(work, "alone", repeat)[:_N_ALONE], 1, stream=True)
            return partial(ask, words.draw(work, "streams", repeat), n_clients, stream=True)

        try:
            seconds = time_interleaved({"direct": direct, "answers": answers, "streams": streams}, settings.repeats)
        finally:
            thread.stop()
    found = speeds(work.n_new_tokens, seconds)
    for n, values in firsts.items():
        median, late = np.percentile(values, [50, 99]).tolist()
        found[f"{n} client{'s'[: n > 1]}"] = {"first_token_median_s": median, "first_token_p99_s": late}
    return found
