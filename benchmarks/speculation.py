"""Rollouts with drafts (rollout.speculation=on) and without, in turn, with the same prompts and seeds.

Before the timed rollouts, rollouts with other seeds sample the prompts of a whole training step three times, as earlier
epochs would, and fill the table of drafts. The weights stay the same, so drafts are right more often than in a training
with large updates.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from areno.bench.__main__ import checked_model
from areno.bench.areno_contender import ArenoContender
from areno.bench.arguments import Settings, positive_int
from areno.bench.work import Workload, model_folder
from areno.engine.reports import DraftCounts
from areno.launch.compose import load
from areno.plan.plan import sampling_params
from areno.recipes import grpo
from areno.types import GenerationRequest, SamplingParams
from benchmarks.trl_contender import prompts_of
from benchmarks.turns import time_interleaved

_EPOCHS = 3  # rollouts of all prompts before the timed ones
_WARM_UP = 7  # further rollouts of each number of samples, which capture the CUDA graphs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kind="rollout")
    at_once = "numbers of samples that are decoded at once, rounded up to whole prompts (default: 8 32 256)"
    parser.add_argument("--batches", type=positive_int, nargs="+", default=[8, 32, 256], metavar="N", help=at_once)
    named = "name of the YAML file with prompts and sampling settings (default: prompts are random tokens)"
    parser.add_argument("--config", metavar="NAME", help=named)
    other = "another setting of --config, such as gconfig.n_samples=16. Repeat it for more settings"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="key=value", help=other)


def run(settings: Settings, folder: Path) -> dict[str, dict[str, Any]]:
    """Return figures for each number of samples at once.

    On a CPU, the engine is always exact, because otherwise it would keep no samples of earlier rollouts. `off` and `on`
    are tokens per second, and `same` is the share of completions that are equal with and without drafts. The counts are
    those of the last rollout with drafts.
    """
    if settings.config is None:
        path, random_init = checked_model(settings, folder)
    else:
        path, random_init = model_folder(settings.shape, folder)
    settings.exact = settings.exact or settings.device == "cpu"
    ours = ArenoContender(settings, path, random_init)
    with ours.engine:
        requests = _requests(settings, path, ours.vocab_size)
        for epoch in range(_EPOCHS):
            _roll_out(ours, requests, "on", seed=epoch)
        return {f"{n_rows} samples": _compare(ours, requests, n_rows, settings.repeats) for n_rows in settings.batches}


def _requests(settings: Settings, folder: str, vocab_size: int) -> list[GenerationRequest]:
    """Return requests of the prompts of --config, or of random ones, for the largest number of samples at once."""
    if settings.config is None:
        n_samples = settings.work.n_samples
        params = SamplingParams(max_new_tokens=settings.new_tokens, ignore_eos=True)
        n_prompts = -(-max(settings.batches) // n_samples)
        work = Workload.fixed(n_prompts, n_samples, settings.prompt_len, settings.new_tokens)
        prompts = work.random_prompts(vocab_size, 0)
    else:
        model = str(Path(folder).absolute()).replace('"', '\\"')
        config: Any = load(grpo.ALGORITHM.config, settings.config, [f'actor.path="{model}"', *settings.overrides])
        n_samples, params = config.gconfig.n_samples, sampling_params(config.gconfig)
        n_prompts = -(-max(settings.batches) // n_samples)
        items = prompts_of(config, -(-n_prompts // config.train_dataset.batch_size))
        prompts = [list(map(int, item.tokens)) for item in items]
    return [
        GenerationRequest(request_id=index, prompt=prompt, n_samples=n_samples, params=params)
        for index, prompt in enumerate(prompts)
    ]


def _compare(ours: ArenoContender, requests: list[GenerationRequest], n_rows: int, repeats: int) -> dict[str, Any]:
    n_samples = min(n_rows, requests[0].n_samples)
    chosen = [replace(request, n_samples=n_samples) for request in requests[: -(-n_rows // n_samples)]]
    for number in range(_WARM_UP):
        _roll_out(ours, chosen, "on", seed=_EPOCHS + number)
    found: dict[str, list[tuple[list[list[int]], DraftCounts]]] = {"off": [], "on": []}

    def rollout(mode: str, repeat: int) -> Any:
        seed = _EPOCHS + _WARM_UP + 1 + repeat
        return lambda: found[mode].append(_roll_out(ours, chosen, mode, seed))

    seconds = time_interleaved({mode: partial(rollout, mode) for mode in found}, repeats)
    off, on = (
        statistics.median(
            sum(map(len, tokens)) / taken for (tokens, _), taken in zip(found[mode][1:], times, strict=True)
        )
        for mode, times in seconds.items()
    )
    pairs = [
        with_drafts == without
        for (one, _), (other, _) in zip(found["on"], found["off"], strict=True)
        for with_drafts, without in zip(one, other, strict=True)
    ]
    counts = found["on"][-1][1]
    shares = {
        "acceptance": counts.acceptance_rate,
        "step_share": counts.drafted_step_share,
        "same": sum(pairs) / len(pairs),
    }
    return {"rows": len(chosen) * n_samples, "off": off, "on": on, "ratio": on / off, **shares, **asdict(counts)}


def _roll_out(
    ours: ArenoContender, requests: list[GenerationRequest], mode: str, seed: int
) -> tuple[list[list[int]], DraftCounts]:
    """Return the completions of a rollout, and the counts of its drafts."""
    longest = max(len(request.prompt) + request.params.max_new_tokens for request in requests)
    ours.begin_rollout(len(requests) * requests[0].n_samples, longest, speculation=mode)
    outputs = ours.engine.generate([replace(each, seed=(seed << 32) + each.request_id) for each in requests])
    counts = ours.engine.draft_counts()
    ours.engine.end_rollout()
    return [output.tokens for of_prompt in outputs.values() for output in of_prompt], counts
