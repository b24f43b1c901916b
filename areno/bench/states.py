"""Measure the cost of saving and loading a run's state, which holds everything that a resumed run needs.

A step during which a state is copied and written is compared with a step during which no state is saved. Then the
state is loaded in a new engine.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areno.bench.areno_contender import ArenoContender
from areno.bench.arguments import Settings
from areno.bench.timing import log_progress, repeat_name


def run_states(settings: Settings, model: str, random_init: bool, folder: Path) -> dict[str, float]:
    """Time steps with and without a state being saved, then the resume of the state in a new engine.

    Steps of the two kinds alternate, so that a change of the device's speed affects both alike. Times are medians in
    seconds. `first_save_s` also allocates host memory. `written_s` ends when the state is on the disk, without a step
    at the same time. `load_s` reads files that are not in the page cache.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ("step", "state_step", "save")}
    path = folder / "state"
    ours = ArenoContender(settings, model, random_init)
    with ours.engine:
        n_params = ours.engine.info.n_params
        for repeat in range(-1, settings.repeats):
            shutil.rmtree(path, ignore_errors=True)
            taken = _repeat(ours, settings, repeat, path)
            shown = ", ".join(f"{name} {value:.3f} s" for name, value in taken.items())
            log_progress(f"state, {repeat_name(repeat, settings.repeats)}: {shown}")
            if repeat < 0:
                first_save_s = taken["save"]
            else:
                for name, value in taken.items():
                    seconds[name].append(value)
        shutil.rmtree(path)
        written_s = _timed(lambda: (ours.engine.save_state(path), ours.engine.state_written(wait=True)))
    n_bytes = sum(file.stat().st_size for file in path.iterdir())
    resumed = _resumed(settings, model, random_init, path)
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    return {
        **medians,
        "slowdown": medians["state_step_s"] / medians["step_s"] - 1,
        "step_spread": (max(seconds["step"]) - min(seconds["step"])) / medians["step_s"],
        "first_save_s": first_save_s,
        "gigabytes": n_bytes / 1e9,
        "bytes_per_parameter": n_bytes / n_params,
        "written_s": written_s,
        "written_gb_s": n_bytes / 1e9 / written_s,
        **resumed,
    }


def _repeat(ours: ArenoContender, settings: Settings, repeat: int, path: Path) -> dict[str, float]:
    """Time a step alone, and then a call of `save_state` followed by another step, without the rest of the write."""
    taken = {"step": _timed(lambda: _step(ours, settings, 2 * repeat))}
    started = time.perf_counter()
    taken["save"] = _timed(lambda: ours.engine.save_state(path))
    _step(ours, settings, 2 * repeat + 1)
    taken["state_step"] = time.perf_counter() - started
    ours.engine.state_written(wait=True)
    return taken


def _resumed(settings: Settings, model: str, random_init: bool, path: Path) -> dict[str, float]:
    for file in path.iterdir():
        _evict_from_page_cache(file)
    started = time.perf_counter()
    ours = ArenoContender(settings, model, random_init)
    with ours.engine:
        load_s = _timed(lambda: ours.engine.load_state(path))
        resume_s = time.perf_counter() - started
        return {"load_s": load_s, "resume_s": resume_s, "resumed_step_s": _timed(lambda: _step(ours, settings, -9))}


def _step(ours: ArenoContender, settings: Settings, seed: int) -> None:
    """Run a rollout of prompts drawn from `seed`, and an optimizer step on the samples."""
    ours.train(ours.rollout(settings.work, settings.work.prompts(ours.vocab_size, seed)))


def _timed(body: Callable[[], Any]) -> float:
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


def states_page(found: dict[str, float]) -> str:
    size = f"{found['gigabytes']:,.3f} GB, {found['bytes_per_parameter']:.2f} bytes for each parameter"
    lines = {
        "step": f"{found['step_s']:.3f} s (spread {100 * found['step_spread']:.1f} %)",
        "step with a state": f"{found['state_step_s']:.3f} s: {100 * found['slowdown']:+.1f} %",
        "call of save_state": f"{found['save_s']:.3f} s, the first time {found['first_save_s']:.3f} s",
        "on the disk after": f"{found['written_s']:.3f} s ({found['written_gb_s']:.2f} GB/s)",
        "size": size,
        "load_state": f"{found['load_s']:.3f} s",
        "from nothing to the first step": f"{found['resume_s']:.3f} s, that step {found['resumed_step_s']:.3f} s",
    }
    return "\n".join(f"{name:<32} {text}" for name, text in lines.items())
