"""Measure areno's speed: `python -m areno.bench WORK`. `--help` lists the kinds of work.

One engine does the work of a GSPO step on random prompts. Depending on WORK, this is a rollout, an optimizer step, or
a rollout followed by an optimizer step. Results are medians of several repeats after a warm-up, compared with the
least time that the device needs. `--json` prints one line of JSON. Progress goes to stderr. On a CPU, compare only
results of the same call.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areno.bench.ahead import ahead_page, run_ahead
from areno.bench.areno_contender import adapters_of, run_areno, run_sampling, sampling_page
from areno.bench.arguments import PLAIN, Settings, parse
from areno.bench.device import measured_rates
from areno.bench.driver import driver_page, run_driver
from areno.bench.grid import grid_page, run_grid
from areno.bench.host import host_page, run_host
from areno.bench.other_contenders import TransformersContender, VllmContender
from areno.bench.parity import run_parity, trl_page
from areno.bench.report import page, record
from areno.bench.rows import run_sft, sft_page
from areno.bench.serving import run_agents, run_serving, serving_page
from areno.bench.speculation import run_speculation, speculation_page
from areno.bench.states import run_states, states_page
from areno.bench.timing import log_progress, measure
from areno.bench.work import model_folder
from areno.cost.flops import Cost
from areno.errors import ArenoError, ConfigError, Problem
from areno.files import interrupts
from areno.models.registry import load_config

_STANDALONE = {
    "sampling": run_sampling,
    "agents": run_agents,
    "serve": run_serving,
    "driver": run_driver,
    "host": run_host,
    "sft": run_sft,
    "grid": run_grid,
    "ahead": run_ahead,
}
_OTHERS = {"transformers": TransformersContender, "vllm": VllmContender}


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark and print its results or its error.

    Return 0, 2 for a wrong argument, 1 for a failure, 130 for Ctrl-C.
    """
    interrupts.end()
    try:
        show(parse(argv))
    except ArenoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def show(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run(settings, Path(folder))
    agents_page = partial(sampling_page, title="rollout", base="direct")
    pages = {"sampling": sampling_page, "state": states_page, "agents": agents_page, "serve": serving_page}
    pages |= {"driver": driver_page, "host": host_page, "sft": sft_page, "grid": grid_page, "trl": trl_page}
    pages |= {"ahead": ahead_page, "speculation": speculation_page}
    to_text = pages.get(settings.kind, page)
    print(json.dumps(found) if settings.json else to_text(found))


def configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="bench: %(message)s", stream=sys.stderr)


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Run one benchmark, and return its results, which `report.record` or the function of the work describes.

    Most kinds of work measure the device first, then areno, then each library that `--against` names. For the name of a
    shape, such as "qwen3-4b", the configuration of such a model is written to `folder`.
    """
    if settings.kind == "trl":
        return run_parity(settings, folder)
    path, random_init = model_folder(settings.shape, folder)
    config = load_config(path)
    if settings.kind == "speculation":  # whose prompts may come from --config
        return run_speculation(settings, path, random_init)
    longest = max(settings.work.row_lens)
    if longest > config.max_position_embeddings:
        option = "--uniform" if "uniform" in settings.work.name else "--new-tokens"
        message = f"makes rows of {longest} tokens, the model's context is {config.max_position_embeddings}"
        raise ConfigError([Problem(option, message)])
    if settings.kind in _STANDALONE:
        return _STANDALONE[settings.kind](settings, path, random_init)
    if settings.kind == "state":
        with tempfile.TemporaryDirectory(prefix="areno-bench-", dir=settings.folder) as states:
            return run_states(settings, path, random_init, Path(states))
    dtype = getattr(torch, settings.dtype)
    cost = Cost.of(config, dtype.itemsize, adapters_of(settings, config))
    log_progress(f"measuring {settings.device}")
    rates = measured_rates(settings.device, dtype)
    results = {"areno": run_areno(settings, path, random_init, cost)}
    for name in settings.against:
        if name == PLAIN:
            plain = replace(
                settings, exact=False, deterministic=False, share_prefixes="off", teacher=None, profile=None
            )
            results[name] = run_areno(plain, path, random_init, cost)
            continue
        results[name] = _run_other(name, settings, path, random_init)
    return record(settings, cost, rates, results)


def _run_other(name: str, settings: Settings, folder: str, random_init: bool) -> dict[str, Any]:
    """Run the work with another library, whose memory is free afterwards, and return its figures."""
    log_progress(f"{name}: starting {settings.shape} on {settings.device}")
    other = _OTHERS[name](settings, folder, random_init)
    timed = measure(other, settings.kind, settings.work, settings.against_repeats, other.warm_up)
    return {"start_s": other.start_s, **timed.figures(settings.work), "repeats_s": timed.seconds, **other.figures()}


if __name__ == "__main__":
    configure_logging()
    sys.exit(main())
