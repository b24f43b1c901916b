"""Rollout, training, a step or scoring, as `areno bench`, also by other libraries (--against) and with a --profile.

`--against transformers` and `vllm` measure other libraries after areno. `--profile FILE` traces one more repeat on a
CUDA device, and writes the time of each group of kernels to a file.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areno.bench.__main__ import Model, checked_model
from areno.bench.__main__ import run as run_phases
from areno.bench.areno_contender import ArenoContender
from areno.bench.arguments import PLAIN, Settings, add_phase_arguments, raise_problems
from areno.bench.report import text_page
from areno.bench.timing import PhaseTimes, log_progress, measure
from benchmarks.contenders import TransformersContender, VllmContender
from benchmarks.profile import busy_s, idle_share, phase_table, trace

__all__ = ["add_arguments", "run", "text_page"]

_OTHERS: dict[str, Any] = {"transformers": TransformersContender, "vllm": VllmContender}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_phase_arguments(parser, [PLAIN, *_OTHERS])
    parser.add_argument(
        "--profile", metavar="FILE", help="write the time of each kernel, and how long the device idles"
    )


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    _check_settings(settings)
    profile = partial(_profile, settings) if settings.profile else None
    return run_phases(settings, checked_model(settings, folder), _run_other, profile)


def _check_settings(settings: Settings) -> None:
    kind, device, world_size, file = settings.kind, settings.device, settings.world_size, settings.profile
    others = [name for name in settings.against if name != PLAIN]
    vllm = "vllm" in others
    not_installed = [name for name in others if find_spec(name) is None]
    raise_problems(
        [
            (others and world_size > 1, "--world-size", "starts several processes of areno alone"),
            (not_installed, "--against", f"{' '.join(not_installed)} is not installed here"),
            (others and kind == "logprob", "--against", "is for rollout, train and step, not for logprob"),
            (vllm and kind != "rollout", "--against", f"vllm does rollout only, not {kind}"),
            (vllm and device != "cuda:0", "--against", f"vllm takes the first GPU, cuda:0, and --device is {device}"),
            (file and world_size > 1, "--profile", "traces one process, and --world-size starts several"),
            (file and not device.startswith("cuda"), "--profile", f"traces a CUDA device, and --device is {device}"),
            (file and not Path(file).parent.is_dir(), "--profile", f"is {file}, in a folder that does not exist"),
        ]
    )


def _run_other(name: str, settings: Settings, model: Model) -> dict[str, Any]:
    """Run the work with another library, whose memory is free afterwards, and return its figures."""
    log_progress(f"{name}: starting {settings.shape} on {settings.device}")
    other = _OTHERS[name](settings, *model)
    timed = measure(other, settings.kind, settings.work, settings.repeats, other.warm_up)
    return {
        "start_s": other.start_s,
        **timed.phase_figures(settings.work),
        "repeats_s": timed.seconds,
        **other.figures(),
    }


def _profile(settings: Settings, ours: ArenoContender, timed: PhaseTimes) -> dict[str, float]:
    """Trace each timed phase once, write the kernel tables to the file of `--profile`, and return the idle shares."""
    prompts, figures = settings.work.random_prompts(ours.vocab_size, -3), timed.phase_figures(settings.work)
    bodies: dict[str, Any] = {
        "rollout": lambda: ours.rollout(settings.work, prompts),
        "train": lambda: ours.train(timed.rows),
        "logprob": lambda: ours.logprobs(timed.rows),
    }
    out: dict[str, float] = {}
    text = f"{settings.kind} {settings.shape} {settings.work.name}, {settings.dtype}\n"
    for phase, body in bodies.items():
        if phase in timed.seconds:
            log_progress(f"tracing {phase}")
            spans, plain_s = trace(body), figures[f"{phase}_s"]
            text += phase_table(phase, spans, plain_s)
            out[f"{phase}_idle_share"] = idle_share(busy_s(spans), plain_s)
    Path(settings.profile).write_text(text, encoding="utf-8")
    log_progress(f"kernels by group are in {settings.profile}")
    return out
