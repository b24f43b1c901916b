"""Measure areno's speed: `areno bench WORK`, or `python -m areno.bench WORK`. `--help` lists the kinds of work.

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from areno.bench.areno_contender import Profile, adapters_of, run_areno
from areno.bench.arguments import PLAIN, Settings, parse
from areno.bench.device import measured_rates
from areno.bench.report import result_record, text_page
from areno.bench.timing import log_progress
from areno.bench.work import model_folder
from areno.cost.flops import TokenCost
from areno.errors import ArenoError, ConfigError, Problem
from areno.files import interrupts
from areno.models.registry import load_config

Model = tuple[str, bool]
"""(model folder, whether its weights have to be drawn at random)"""

RunOther = Callable[[str, Settings, Model], dict[str, Any]]
"""Does the work with another library: (its name, settings, model) -> figures."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run_and_print(parse(argv)))


def exit_code(command: Callable[[], None]) -> int:
    """Run a command, and print its error. Return 0, 2 for a wrong argument, 1 for a failure, 130 for Ctrl-C."""
    interrupts.raise_on_interrupt()
    logging.basicConfig(level=logging.INFO, format="bench: %(message)s", stream=sys.stderr)
    try:
        command()
    except ArenoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def run_and_print(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run(settings, checked_model(settings, Path(folder)))
    print(json.dumps(found) if settings.json else text_page(found))


def run(
    settings: Settings, model: Model, run_other: RunOther | None = None, profile: Profile | None = None
) -> dict[str, Any]:
    """Measure the device, areno and all that --against names. Return the results, see `report.result_record`."""
    config, dtype = load_config(model[0]), getattr(torch, settings.dtype)

    def cost_of(settings: Settings) -> TokenCost:
        of_cache = replace(config, fp8_kv=settings.kv_cache_dtype == "fp8")
        return TokenCost.from_config(of_cache, dtype.itemsize, adapters_of(settings, config))

    cost = cost_of(settings)
    log_progress(f"measuring {settings.device}")
    rates = measured_rates(settings.device, dtype)
    results = {"areno": run_areno(settings, model, cost, profile)}
    for name in settings.against:
        if name == PLAIN:
            off: dict[str, Any] = {"share_prefixes": "off", "kv_cache_dtype": "auto", "fp8": None}
            plain = settings.replaced(exact=False, deterministic=False, teacher=None, record=False, **off)
            results[name] = run_areno(plain, model, cost_of(plain))
        elif run_other is not None:
            results[name] = run_other(name, settings, model)
    return result_record(settings, cost, rates, results)


def checked_model(settings: Settings, folder: Path) -> Model:
    """Return the model of the settings. Raises ConfigError if its context is too short for the batch.

    If the settings name a shape, such as "qwen3-4b", its configuration is written to `folder`.
    """
    path, random_init = model_folder(settings.shape, folder)
    longest, context_len = max(settings.work.row_lens), load_config(path).max_position_embeddings
    if longest > context_len:
        option = "--uniform" if settings.uniform else "--new-tokens"
        message = f"makes rows of {longest} tokens, the model's context is {context_len}"
        raise ConfigError([Problem(option, message)])
    return path, random_init


if __name__ == "__main__":
    sys.exit(main())
