"""Clients over HTTP, in processes of their own so that they do not slow the server's.

What a model gives behind `areno serve`: the same prompts sampled directly, and asked for by clients over HTTP.

What a rollout through agents costs: the same prompts sampled directly, and by agents over HTTP.
"""

from __future__ import annotations

import asyncio
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
from areno.bench.arguments import Settings
from areno.bench.ours import Ours, requests, sampling_page, speeds
from areno.bench.shapes import Texts
from areno.bench.timing import repeat_name, tell
from areno.config.rollout import AgentConfig
from areno.server.app import build_server
from areno.server.host import ServerThread
from areno.server.sampling import ServerLimits
from areno.types import SamplingParams


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


_MOST_PROCESSES = 8
_ALONE = 8  # requests of one client, for the time to its first token


def run_serving(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """direct, answers, streams -> median seconds, tokens per second and speed; then times to the first token.

    Each request has a text of its own, about as long as --prompt-len, and --clients of them are sampled at a time. The
    three take turns.
    """
    from transformers import AutoTokenizer

    work, tokenizer = settings.work, AutoTokenizer.from_pretrained(settings.tokenizer or folder)
    ours, n_clients = Ours(settings, folder, random_init), settings.clients
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) // 2, n_clients))
    with ours.engine as engine, Clients(processes) as clients:
        room = ours.begin(n_clients, 2 * max(work.row_lens) + 64)  # a text may have more tokens than words
        server = build_server(
            engine, room, tokenizer, models=["bench"], keys=[], defaults=SamplingParams(), limits=ServerLimits()
        )
        thread = ServerThread(server.application)
        url = thread.start()

        def direct(texts: list[str]) -> None:
            engine.generate(requests(work, [tokenizer.encode(text) for text in texts]))

        def ask(texts: list[str], n_clients: int, stream: bool) -> Answered:
            found = clients.run(
                Load(
                    url=url, model="bench", prompts=texts, new_lens=work.new_lens[: len(texts)], n_clients=n_clients,
                    stream=stream,
                )
            )  # fmt: skip
            assert found.tokens == sum(work.new_lens[: len(texts)])
            return found

        try:
            figures = _measure(settings, Texts(tokenizer), direct, ask)
        finally:
            thread.stop()
    return figures


def _measure(
    settings: Settings, drawn: Texts, direct: Callable[..., None], ask: Callable[..., Answered]
) -> dict[str, dict[str, float]]:
    work, n_clients = settings.work, settings.clients
    seconds: dict[str, list[float]] = {"direct": [], "answers": [], "streams": []}
    firsts: dict[str, list[float]] = {"1 client": [], f"{n_clients} clients": []}
    for repeat in range(-1, settings.repeats):
        # Other prompts for each, so that none finds those of another in the cache.
        texts = {name: drawn.of(work, name, repeat) for name in [*seconds, "alone"]}
        started = time.perf_counter()
        direct(texts["direct"])
        taken = {"direct": time.perf_counter() - started}
        taken["answers"] = ask(texts["answers"], n_clients, stream=False).seconds
        streamed = ask(texts["streams"], n_clients, stream=True)
        taken["streams"] = streamed.seconds
        alone = ask(texts["alone"][:_ALONE], 1, stream=True)
        title = repeat_name(repeat, settings.repeats)
        tell(f"{title}: " + ", ".join(f"{name} {value:.3f} s" for name, value in taken.items()))
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
    """The tables as text."""
    timed = {name: value for name, value in found.items() if "tok_s" in value}
    lines = [sampling_page(timed, title="serve", base="direct"), "time to the first token, streamed: median, 99 %"]
    for name, value in found.items():
        if name not in timed:
            median, late = (value[f"first_token_{which}_s"] * 1000 for which in ("median", "p99"))
            lines.append(f"{name:<12}{median:8.1f} ms{late:10.1f} ms")
    return "\n".join(lines)


_TIMEOUT_S = 600.0


def run_agents(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """direct, agents -> median seconds, tokens per second, and the speed relative to direct sampling.

    The prompts are texts in the chat template of --tokenizer, about as long as --prompt-len. The two take turns.
    """
    from transformers import AutoTokenizer

    work, tokenizer = settings.work, AutoTokenizer.from_pretrained(settings.tokenizer or folder)
    words = Texts(tokenizer)
    ours = Ours(settings, folder, random_init)
    agent = AgentConfig(
        fn=str(Path(__file__).with_name("one_turn.py")), timeout_s=_TIMEOUT_S,
        workers=max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) // 2)),
    )  # fmt: skip
    seconds: dict[str, list[float]] = {"direct": [], "agents": []}
    with ours.engine as engine, AgentPool(agent) as pool:
        pool.wait_ready()
        room = ours.begin(work.n_rows, 2 * max(work.row_lens) + 64)  # a text may have more tokens than words
        proxy = SessionProxy(engine, room, tokenizer, SamplingParams(), timeout_s=_TIMEOUT_S, seed=0, thinking=None)
        context = AgentContext(proxy.base_url, proxy.api_key, proxy.session, _TIMEOUT_S)
        conversations = proxy.server.chat.conversations
        for repeat in range(-1, settings.repeats):
            # Other prompts for each, so that neither finds those of the other in the cache.
            texts = {name: words.of(work, name, repeat) for name in seconds}
            prompts = [conversations.prompt([{"role": "user", "content": text}]).tokens for text in texts["direct"]]
            batch = AgentBatch([{"new_tokens": new} for new in work.new_lens], texts["agents"], prompts, work.n_samples)
            started = time.perf_counter()
            engine.generate(requests(work, prompts))
            middle = time.perf_counter()
            proxy.expect(batch)
            outcomes = pool.run(list(batch), context)
            ended = time.perf_counter()
            if failed := [outcome.message for outcome in outcomes if outcome.status != "ok"]:
                raise RuntimeError(f"{len(failed)} agents failed; the first: {failed[0]}")
            taken = {"direct": middle - started, "agents": ended - middle}
            title = repeat_name(repeat, settings.repeats)
            tell(f"{title}: direct {taken['direct']:.3f} s, agents {taken['agents']:.3f} s")
            for name, value in taken.items() if repeat >= 0 else ():
                seconds[name].append(value)
        proxy.stop()
    return speeds(work, seconds, "direct")
