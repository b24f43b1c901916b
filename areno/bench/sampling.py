"""What each kind of sampling setting costs: the same rollout with it, against plain sampling at temperature 1."""

from __future__ import annotations

import statistics
import time
from typing import Any

from areno.bench.arguments import Settings
from areno.bench.ours import Ours
from areno.bench.timing import repeat_name, tell
from areno.bench.work import Work

_QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # what the model card of Qwen3 recommends


def run_sampling(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """Name of the setting -> median seconds, tokens per second, and the speed relative to plain sampling.

    The settings take turns, so that a change of the device's speed meets all of them alike.
    """
    work = settings.work
    ours = Ours(settings, folder, random_init)
    kinds = _kinds(work, settings.tokenizer is not None)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with ours.engine:
        for repeat in range(-1, settings.repeats):
            for name, params in kinds.items():
                prompts = work.prompts(ours.vocab_size, repeat)
                started = time.perf_counter()
                ours.rollout(work, prompts, **params)
                taken = time.perf_counter() - started
                tell(f"{name}, {repeat_name(repeat, settings.repeats)}: {taken:.3f} s")
                if repeat >= 0:
                    seconds[name].append(taken)
    return speeds(work, seconds, "plain")


def speeds(work: Work, seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Of each way to do the work: the median of its seconds, tokens per second, and the speed relative to `base`.

    fastest_s, slowest_s: of its repeats.
    """
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        name: {
            "rollout_s": value, "tok_s": work.n_new / value, "relative": medians[base] / value,
            "fastest_s": min(seconds[name]), "slowest_s": max(seconds[name]),
        }
        for name, value in medians.items()
    }  # fmt: skip


def _kinds(work: Work, has_tokenizer: bool) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "min_new_tokens": {"min_new_tokens": max(work.new_lens), "ignore_eos": False},
        "frequency_penalty 0.5": {"frequency_penalty": 0.5},
        "top_p 0.95": {"top_p": 0.95},
        "top_k 20": {"top_k": 20},
        "temperature 0.6, top_p 0.95, top_k 20": _QWEN,
    }
    if has_tokenizer:
        kinds["stop string"] = {"stop": ["</answer>"]}
    return kinds


def sampling_page(found: dict[str, dict[str, float]], title: str = "sampling", base: str = "plain") -> str:
    """The table as text. base: the line that the speed of the others is relative to."""
    width = max(map(len, [title, *found]))
    rows = [
        f"{name:<{width}}  {value['rollout_s']:8.3f} s  {value['fastest_s']:8.3f} to {value['slowest_s']:.3f} s"
        f"  {value['tok_s']:10,.0f} tokens/s  {value['relative']:5.2f}"
        for name, value in found.items()
    ]
    heading = f"{title:<{width}}  {'median':>10}  {'of all repeats':>19}  {'':>19}  speed against {base}"
    return "\n".join([heading, *rows])
