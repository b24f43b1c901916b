"""The cost of saving and loading a run's state, which holds everything that a resumed run needs.

Steps with and without a state being saved alternate. Then the state is written alone, and loaded in a new engine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areno.bench.__main__ import checked_model
from areno.bench.areno_contender import ArenoContender
from areno.bench.arguments import Settings
from benchmarks.turns import time_interleaved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kind="step")
    parser.add_argument("--folder", help="folder on the disk to measure (default: a temporary folder)")


def run(settings: Settings, folder: Path) -> dict[str, float]:
    """Return medians in seconds.

    `written_s` ends when the state is on the disk, without a step at the same time. `load_s` reads files that are not
    in the page cache, and `resume_s` begins with the start of the new engine.
    """
    model = checked_model(settings, folder)
    with tempfile.TemporaryDirectory(prefix="areno-bench-", dir=settings.folder) as states:
        return _measure(settings, model, Path(states) / "state")


def _measure(settings: Settings, model: tuple[str, bool], path: Path) -> dict[str, float]:
    ours = ArenoContender(settings, *model)

    def step(seed: int) -> None:
        ours.train(ours.rollout(settings.work, settings.work.random_prompts(ours.vocab_size, seed)))

    def step_alone(repeat: int) -> Callable[[], None]:
        ours.engine.is_state_written(wait=True)
        return lambda: step(2 * repeat)

    def step_with_save(repeat: int) -> Callable[[], None]:
        shutil.rmtree(path, ignore_errors=True)

        def save_and_step() -> None:
            ours.engine.save_state(path)
            step(2 * repeat + 1)

        return save_and_step

    with ours.engine:
        n_params = ours.engine.info.n_params
        seconds = time_interleaved({"step": step_alone, "state_step": step_with_save}, settings.repeats)
        ours.engine.is_state_written(wait=True)
        shutil.rmtree(path)
        written_s = _seconds(lambda: (ours.engine.save_state(path), ours.engine.is_state_written(wait=True)))
    for file in path.iterdir():
        _evict_from_page_cache(file)
    started = time.perf_counter()
    ours = ArenoContender(settings, *model)
    with ours.engine:
        load_s = _seconds(lambda: ours.engine.load_state(path))
        resume_s = time.perf_counter() - started
        resumed_step_s = _seconds(lambda: step(-9))
    n_bytes = sum(file.stat().st_size for file in path.iterdir())
    step_s, state_step_s = map(statistics.median, seconds.values())
    return {
        "step_s": step_s,
        "state_step_s": state_step_s,
        "slowdown": state_step_s / step_s - 1,
        "gigabytes": n_bytes / 1e9,
        "bytes_per_parameter": n_bytes / n_params,
        "written_s": written_s,
        "written_gb_s": n_bytes / 1e9 / written_s,
        "load_s": load_s,
        "resume_s": resume_s,
        "resumed_step_s": resumed_step_s,
    }


def _seconds(body: Callable[[], Any]) -> float:
    started = time.perf_counter()
    body()
    return time.perf_counter() - started


def _evict_from_page_cache(file: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
