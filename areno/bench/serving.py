"""Measure sampling over HTTP, by clients of the server (`run_serving`) and by agents (`run_agents`).

Both functions also time the same work sampled directly on the engine, for comparison. The clients run in separate
processes (`Clients`), so that they do not slow down the server's process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from areno.agents.pool import AgentPool
from areno.agents.proxy import SessionProxy
from areno.agents.trajectories import AgentBatch, AgentContext
from areno.bench.areno_contender import ArenoContender, requests, sampling_page, speeds
from areno.bench.arguments import Settings
from areno.bench.timing import log_progress, repeat_name
from areno.bench.work import Texts
from areno.config.rollout import AgentConfig
from areno.server.app import build_server
from areno.server.sampling import ServerLimits
from areno.server.threads import ServerThread
from areno.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ClientLoad:
    """A set of prompts to send to a server, by several clients at the same time.

    Each client sends its next request when the previous one is answered.
    """

    url: str
    model: str
    prompts: Sequence[str]
    new_lens: Sequence[int]
    n_clients: int
    stream: bool


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """The measured times of a ClientLoad."""

    seconds: float  # from the first request to the last answer
    first_s: list[float]  # from each streamed request to its first token
    tokens: int  # in all answers, by their `usage`


class Clients(AbstractContextManager["Clients"]):
    """Client processes that send requests to a server. Use it in a `with` block."""

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
            pipe.recv()  # the process has finished its imports

    def run(self, load: ClientLoad) -> LoadResult:
        """Send all requests of a load, split over the processes, and wait for all answers."""
        n = min(len(self._pipes), load.n_clients)
        shares = [
            replace(
                load,
                prompts=load.prompts[rank::n],
                new_lens=load.new_lens[rank::n],
                n_clients=len(range(rank, load.n_clients, n)),
            )
            for rank in range(n)
        ]
        started = time.perf_counter()
        for pipe, share in zip(self._pipes, shares, strict=False):
            pipe.send(share)
        found = [pipe.recv() for pipe in self._pipes[:n]]
        seconds = time.perf_counter() - started
        if failed := [each for each in found if isinstance(each, str)]:
            raise RuntimeError(f"a client failed: {failed[0]}")
        return LoadResult(
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
    """Run each load that arrives on the pipe, until the pipe is closed. Runs in a client process."""
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


_MAX_PROCESSES = 8
_N_ALONE = 8  # requests of one client, for the time to its first token


def run_serving(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """Time three ways of sampling: directly on the engine, by HTTP clients, and by streaming HTTP clients.

    Each request has its own text, with about as many tokens as `--prompt-len`. `--clients` requests are in progress at
    a time. "1 client" and "N clients" have the times to the first token.
    """
    from transformers import AutoTokenizer

    work, tokenizer = settings.work, AutoTokenizer.from_pretrained(settings.tokenizer or folder)
    ours, n_clients = ArenoContender(settings, folder, random_init), settings.clients
    processes = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 2) // 2, n_clients))
    with ours.engine as engine, Clients(processes) as clients:
        limits = ours.begin_rollout(n_clients, 2 * max(work.row_lens) + 64)  # a text may have more tokens than words
        server = build_server(
            engine, limits, tokenizer, models=["bench"], keys=[], defaults=SamplingParams(), limits=ServerLimits()
        )
        thread = ServerThread(server.application)
        url = thread.start()

        def direct(texts: list[str]) -> None:
            engine.generate(requests(work, [tokenizer.encode(text) for text in texts]))

        def ask(texts: list[str], n_clients: int, stream: bool) -> LoadResult:
            found = clients.run(
                ClientLoad(
                    url=url,
                    model="bench",
                    prompts=texts,
                    new_lens=work.new_lens[: len(texts)],
                    n_clients=n_clients,
                    stream=stream,
                )
            )
            assert found.tokens == sum(work.new_lens[: len(texts)])
            return found

        try:
            figures = _measure(settings, Texts(tokenizer), direct, ask)
        finally:
            thread.stop()
    return figures


def _measure(
    settings: Settings, drawn: Texts, direct: Callable[..., None], ask: Callable[..., LoadResult]
) -> dict[str, dict[str, float]]:
    work, n_clients = settings.work, settings.clients
    seconds: dict[str, list[float]] = {"direct": [], "answers": [], "streams": []}
    firsts: dict[str, list[float]] = {"1 client": [], f"{n_clients} clients": []}
    for repeat in range(-1, settings.repeats):
        # Each way gets prompts of its own, so that none finds another's in the prefix cache.
        texts = {name: drawn.draw(work, name, repeat) for name in [*seconds, "alone"]}
        started = time.perf_counter()
        direct(texts["direct"])
        taken = {"direct": time.perf_counter() - started}
        taken["answers"] = ask(texts["answers"], n_clients, stream=False).seconds
        streamed = ask(texts["streams"], n_clients, stream=True)
        taken["streams"] = streamed.seconds
        alone = ask(texts["alone"][:_N_ALONE], 1, stream=True)
        title = repeat_name(repeat, settings.repeats)
        log_progress(f"{title}: " + ", ".join(f"{name} {value:.3f} s" for name, value in taken.items()))
        if repeat < 0:
            continue
        for name, value in taken.items():
            seconds[name].append(value)
        firsts["1 client"] += alone.first_s
        firsts[f"{n_clients} clients"] += streamed.first_s
    return speeds(work, seconds, "direct") | {name: _first_token(values) for name, values in firsts.items()}


def _first_token(seconds: list[float]) -> dict[str, float]:
    median, late = np.percentile(seconds, [50, 99])
    return {"first_token_median_s": float(median), "first_token_p99_s": float(late)}


def serving_page(found: dict[str, dict[str, float]]) -> str:
    timed = {name: value for name, value in found.items() if "tok_s" in value}
    lines = [sampling_page(timed, title="serve", base="direct"), "time to the first token, streamed: median, 99 %"]
    for name, value in found.items():
        if name not in timed:
            median, late = (value[f"first_token_{which}_s"] * 1000 for which in ("median", "p99"))
            lines.append(f"{name:<12}{median:8.1f} ms{late:10.1f} ms")
    return "\n".join(lines)


_TIMEOUT_S = 600.0


def run_agents(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """Time two ways of sampling: directly on the engine, and by agents over HTTP."""
    from transformers import AutoTokenizer

    work, tokenizer = settings.work, AutoTokenizer.from_pretrained(settings.tokenizer or folder)
    words = Texts(tokenizer)
    ours = ArenoContender(settings, folder, random_init)
    agent = AgentConfig(fn=str(Path(__file__).with_name("one_turn_agent.py")), timeout_s=_TIMEOUT_S)
    seconds: dict[str, list[float]] = {"direct": [], "agents": []}
    with ours.engine as engine, AgentPool(agent, settings.world_size) as pool:
        pool.wait_ready()
        limits = ours.begin_rollout(work.n_rows, 2 * max(work.row_lens) + 64)  # a text may have more tokens than words
        proxy = SessionProxy(engine, limits, tokenizer, SamplingParams(), timeout_s=_TIMEOUT_S, seed=0, thinking=None)
        context = AgentContext(proxy.base_url, proxy.api_key, proxy.session, _TIMEOUT_S)
        conversations = proxy.server.chat.prompts
        gc.freeze()  # as runs do; otherwise a garbage collection scans all imported modules for 0.1 s
        for repeat in range(-1, settings.repeats):
            # Each way gets prompts of its own, so that neither finds the other's in the prefix cache.
            texts = {name: words.draw(work, name, repeat) for name in seconds}
            prompts = [conversations.prompt([{"role": "user", "content": text}]).tokens for text in texts["direct"]]
            batch = AgentBatch([{"new_tokens": new} for new in work.new_lens], texts["agents"], prompts, work.n_samples)
            started = time.perf_counter()
            engine.generate(requests(work, prompts))
            direct_ended = time.perf_counter()
            proxy.prefetch(batch)
            outcomes = pool.run(list(batch), context)
            ended = time.perf_counter()
            if failed := [outcome.message for outcome in outcomes if outcome.status != "ok"]:
                raise RuntimeError(f"{len(failed)} agents failed; the first: {failed[0]}")
            taken = {"direct": direct_ended - started, "agents": ended - direct_ended}
            title = repeat_name(repeat, settings.repeats)
            log_progress(f"{title}: direct {taken['direct']:.3f} s, agents {taken['agents']:.3f} s")
            for name, value in taken.items() if repeat >= 0 else ():
                seconds[name].append(value)
        proxy.stop()
    return speeds(work, seconds, "direct")
