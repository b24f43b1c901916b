"""What a model gives behind `areno serve`: the same prompts sampled directly, and asked for by clients over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from areno.bench.arguments import Settings
from areno.bench.ours import Ours, requests
from areno.bench.sampling import sampling_page, speeds
from areno.bench.serving.load import Answered, Clients, Load
from areno.bench.texts import Texts
from areno.bench.timing import repeat_name, tell
from areno.server.build import build_server
from areno.server.host import ServerThread
from areno.server.sampling import ServerLimits
from areno.types import SamplingParams

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
