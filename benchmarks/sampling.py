"""The cost of sampling settings, such as top_p: a rollout with each of them, relative to plain sampling.

With --tokenizer, a stop string is one of the settings.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from areno.bench.__main__ import checked_model
from areno.bench.areno_contender import ArenoContender
from areno.bench.arguments import Settings
from benchmarks.turns import speeds, time_interleaved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kind="rollout")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer folder, to measure a stop string as well")


def run(settings: Settings, folder: Path) -> dict[str, dict[str, float]]:
    ours = ArenoContender(settings, *checked_model(settings, folder))
    work = settings.work
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "min_new_tokens": {"min_new_tokens": max(work.new_lens), "ignore_eos": False},
        "frequency_penalty 0.5": {"frequency_penalty": 0.5},
        "top_p 0.95": {"top_p": 0.95},
        "top_k 20": {"top_k": 20},
        # what the model card of Qwen3 recommends
        "temperature 0.6, top_p 0.95, top_k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    }
    if settings.tokenizer is not None:
        kinds["stop string"] = {"stop": ["</answer>"]}

    def rollout(params: dict[str, Any], repeat: int) -> Any:
        return partial(ours.rollout, work, work.random_prompts(ours.vocab_size, repeat), **params)

    with ours.engine:
        seconds = time_interleaved({name: partial(rollout, params) for name, params in kinds.items()}, settings.repeats)
    return speeds(work.n_new_tokens, seconds)
