"""Compare a training by areno with the same training by TRL: rewards, solve rates and the time of a step.

Both libraries start from the same base model, draw the same prompts in the same order, and have the same settings,
which come from one YAML file. areno's evaluation measures the solve rates of the base model and of both trained models.
Each training and each evaluation is a process of its own, so that its memory is free for the next one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.bench.trl_contender import (
    Training,
    n_rows,
    prompts_of,
    smaller,
    train_with_trl,
    trl_problems,
    trl_settings,
    with_formulas_of_trl,
)
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.run import EvaluatorConfig, SaverConfig, StatsLoggerConfig
from areno.errors import ArenoError, ConfigError, Problem
from areno.files.durable import atomic_write_text
from areno.launch.compose import load
from areno.recipes import grpo, gspo
from areno.report.picture import svg
from areno.tracking.tracker import END_OF_STEP, Tracker
from areno.trainers.loop import PolicyEvaluation
from areno.types import PromptItem
from areno.version import __version__

T = TypeVar("T")

_ALGORITHMS = {"grpo": grpo.ALGORITHM, "gspo": gspo.ALGORITHM}
POINTS = 0.03
"""Solve rates that are no further apart count as equal, even if the spread of seeds is smaller."""
_WARM_UP = 3  # steps that are left out of the medians, if others are left
_FIXED = {
    "seed": "; use --seeds",
    "engine.device": "; use --device",
    "engine.world_size": ", which compares one device",
    "actor.path": "; use --model",
    "total_train_steps": "; use --steps",
    "total_train_n_seqs": "; use --steps",
    "trial_name": "; use --folder",
    "cluster.fileroot": "; use --folder",
    "actor.adv_norm.std_unbiased": " as TRL computes it",
    "actor.adv_norm.eps": " as TRL has it",
}
"""Settings that the user cannot give -> what to do instead."""


def run_parity(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train by areno and by TRL with each seed, and measure the solve rates of the models.

    `runs` has the rewards, seconds and solve rates of each seed; medians leave out the first steps. `solve_rate` has
    means over the seeds. `apart` is the distance of both libraries, `spread` the largest distance between two seeds of
    one, and `is_equal` whether apart is at most 0.03 or spread. `ratio` is the seconds of a step of TRL / those of
    areno.
    """
    configs = {seed: config_of(settings, seed) for seed in settings.seeds}
    config = configs[settings.seeds[0]]
    n_steps, rows_at_once = config.total_train_steps or 0, n_rows(config)
    items = {seed: prompts_of(config, n_steps) for seed, config in configs.items()}
    out = folder if settings.folder is None else Path(settings.folder).absolute()
    found: dict[str, Any] = {
        "config": settings.config,
        "algo": settings.algo,
        "steps": n_steps,
        "samples": [config.train_dataset.batch_size, config.gconfig.n_samples],
        "device": _device_name(settings.device),
        "versions": {"areno": __version__} | {name: version(name) for name in ("trl", "transformers", "torch")},
        "runs": [],
    }
    for seed, config in configs.items():
        place = out / time.strftime(f"seed-{seed}-%Y%m%d-%H%M%S")
        place.mkdir()
        log_progress(f"trl: seed {seed}, {n_steps} steps by areno, results in {place}")
        ours = _in_a_process(train_with_areno, settings.algo, config, place / "areno")
        log_progress(f"trl: seed {seed}, {n_steps} steps by TRL")
        theirs = _trained_by_trl(config, items[seed], rows_at_once, settings.device, ours.n_threads, place / "trl")
        rows_at_once = theirs.rows_at_once or rows_at_once  # what ran out of memory once would again
        found["runs"].append(_measured(config, ours, theirs, place) | {"seed": seed})
        found |= compare(found["runs"]) | {"trl_settings": trl_settings(config, n_steps, rows_at_once, settings.device)}
        if settings.folder is not None:  # after each seed, so that an interruption leaves results
            atomic_write_text(out / "result.json", json.dumps(found, indent=2) + "\n")
            atomic_write_text(out / "curves.svg", picture(found))
    return found


def _measured(config: PolicyExperimentConfig, ours: Training, theirs: Training, place: Path) -> dict[str, Any]:
    models = {"base": config.actor.path, "areno": ours.model, "trl": theirs.model}
    rates = {
        name: _in_a_process(solve_rate, config, model, place / f"evaluation-{name}") for name, model in models.items()
    }
    of_both = {"areno": _figures(ours, rates["areno"]), "trl": _figures(theirs, rates["trl"])}
    return {"solve_rate": rates["base"], **of_both}


def config_of(settings: Settings, seed: int) -> PolicyExperimentConfig:
    """Compose and check the settings of a run of areno, from which those of TRL are derived."""
    keys = [text.partition("=")[0].lstrip("+") for text in settings.overrides]
    if given := [Problem(key, f"is set by the comparison with TRL{_FIXED[key]}") for key in keys if key in _FIXED]:
        raise ConfigError(given)
    model = str(Path(settings.shape).expanduser().absolute()).replace('"', '\\"')
    own = [f'actor.path="{model}"', f"seed={seed}", "engine.world_size=1", "total_train_n_seqs=null"]
    own += [f"engine.device={settings.device.partition(':')[0]}"]
    own += [f"total_train_steps={settings.steps}"] if settings.steps else []
    config: Any = load(_ALGORITHMS[settings.algo].config, settings.config or "", [*own, *settings.overrides])
    problems = list(trl_problems(config))
    if config.total_train_steps is None:
        problems.append(Problem("--steps", f"is missing; {settings.config} sets no total_train_steps"))
    if problems:
        raise ConfigError(problems)
    return with_formulas_of_trl(config)


def _only(config: PolicyExperimentConfig, **changes: Any) -> PolicyExperimentConfig:
    """Return settings that write a checkpoint at the end and nothing else that takes time."""
    return replace(
        config,
        evaluator=EvaluatorConfig(),
        recover=replace(config.recover, mode="off"),
        saver=SaverConfig(freq_steps=None),
        stats_logger=StatsLoggerConfig(console="lines"),
        **changes,
    )


class _Steps(Tracker):
    """Measures the steps of a run, from the end of a step to the end of the next one. Call `begin` before the first."""

    def __init__(self, found: Training):
        self._found, self._end = found, 0.0

    def begin(self) -> None:
        self._end = time.perf_counter()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        found = self._found
        found.rewards += [value for name, value in scalars.items() if name == "rollout/rewards_mean"]
        if END_OF_STEP in scalars:
            now = time.perf_counter()
            found.step_s.append(now - self._end)
            found.rollout_s.append(scalars["time/rollout"])
            self._end = now


def train_with_areno(algo: str, config: PolicyExperimentConfig, folder: Path) -> Training:
    """Train by a recipe of areno, without evaluation."""
    found = Training(str(folder / "checkpoints" / "latest"))
    steps = _Steps(found)
    config = _only(config, valid_dataset=None, eval_gconfig=None)
    with _ALGORITHMS[algo].loop()(config, run_dir=folder, trackers=[steps]) as trainer:
        steps.begin()
        trainer.fit()
        found.n_threads = torch.get_num_threads()  # on a CPU, the engine is in this process
    return found


def _trained_by_trl(
    config: PolicyExperimentConfig,
    items: Sequence[PromptItem],
    rows_at_once: int,
    device: str,
    n_threads: int,
    folder: Path,
) -> Training:
    """Train by TRL with micro-batches that fit into memory, beginning with `rows_at_once` rows."""
    size: int | None = rows_at_once
    while size is not None:
        log_progress(f"trl: micro-batches of {size} rows")
        if (found := _in_a_process(train_with_trl, config, items, size, device, n_threads, folder)) is not None:
            return found
        log_progress("trl: out of device memory; training begins again with smaller micro-batches")
        size = smaller(n_rows(config), size)
    raise ArenoError("TRL runs out of device memory even with one row at a time")


def solve_rate(config: PolicyExperimentConfig, model: str, folder: Path) -> float:
    """Return the share of sampled answers to the validation set that are right."""
    config = _only(config, actor=replace(config.actor, path=model))
    with PolicyEvaluation(config, run_dir=folder) as evaluation:
        return evaluation.evaluate()["accuracy"]


def _in_a_process(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function that runs in a new process, whose output goes to stderr."""
    with _first_gpu(), ProcessPoolExecutor(1, get_context("spawn"), _print_to_stderr) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise ArenoError("the process of {} ended without a result", work.__name__) from error


@contextmanager
def _first_gpu() -> Iterator[None]:
    """Show only the first GPU to processes that start in a `with` block, because TRL would use all that it sees."""
    name, before = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ[name] = "0" if before is None else before.partition(",")[0]
    try:
        yield
    finally:
        del os.environ[name]
        os.environ |= {} if before is None else {name: before}


def _print_to_stderr() -> None:
    os.dup2(2, 1)


def _figures(training: Training, rate: float) -> dict[str, Any]:
    first = min(_WARM_UP, (len(training.step_s) - 1) // 2)
    medians = {"median_s": training.step_s, "rollout_s": training.rollout_s}
    return {
        "rewards": training.rewards,
        "step_s": training.step_s,
        **{name: statistics.median(values[first:]) for name, values in medians.items()},
        "solve_rate": rate,
        "model": training.model,
    }


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rates = {name: [run[name]["solve_rate"] for run in runs] for name in ("areno", "trl")}
    means = {"base": statistics.mean(run["solve_rate"] for run in runs)}
    means |= {name: statistics.mean(values) for name, values in rates.items()}
    apart, spread = abs(means["areno"] - means["trl"]), max(max(values) - min(values) for values in rates.values())
    ratio = statistics.median(run["trl"]["median_s"] / run["areno"]["median_s"] for run in runs)
    is_equal = apart <= max(POINTS, spread)
    return {"solve_rate": means, "apart": apart, "spread": spread, "is_equal": is_equal, "ratio": ratio}


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else f"CPU ({platform.machine()})"


def picture(found: Mapping[str, Any]) -> str:
    n_seeds = len(found["runs"])
    title = f"{found['config']}, {found['algo']}, {n_seeds} seed{'s'[: n_seeds > 1]}, {found['device']}"
    curves = {
        name: list(map(statistics.mean, zip(*(run[name]["rewards"] for run in found["runs"]), strict=True)))
        for name in ("areno", "trl")
    }
    return svg(title, range(1, found["steps"] + 1), curves)


def trl_page(found: dict[str, Any]) -> str:
    n_prompts, n_samples = found["samples"]
    names = ", ".join(f"{name} {of}" for name, of in found["versions"].items())
    lines = [
        f"{found['config']}, {found['algo']}: {found['steps']} steps of {n_prompts} x {n_samples} samples",
        f"{found['device']}; {names}",
        "",
        f"{'':<14}{'mean reward, steps':^24}{'solve rate':^20}{'median seconds of a':^30}",
        f"{'seed':<6}{'':<8}{'first tenth':>12}{'last tenth':>12}{'before':>10}{'after':>10}"
        f"{'step':>10}{'rollout':>10}{'rest':>10}",
    ]
    for run in found["runs"]:
        lines += [_line(run, name) for name in ("areno", "trl")]
    rates = found["solve_rate"]
    verdict = "equal within" if found["is_equal"] else "further apart than"
    return "\n".join(
        [
            *lines,
            "",
            f"solve rate: base model {rates['base']:.3f}, areno {rates['areno']:.3f}, TRL {rates['trl']:.3f}",
            f"apart by {found['apart']:.3f}: {verdict} {POINTS} or the spread of seeds, {found['spread']:.3f}",
            f"a step of TRL takes {found['ratio']:.2f} times as long",
        ]
    )


def _line(run: Mapping[str, Any], name: str) -> str:
    of = run[name]
    size = max(1, len(of["rewards"]) // 10)
    ends = _columns(12, (statistics.mean(of["rewards"][:size]), statistics.mean(of["rewards"][-size:])))
    rates = _columns(10, (run["solve_rate"], of["solve_rate"]))
    times = _columns(10, (of["median_s"], of["rollout_s"], of["median_s"] - of["rollout_s"]))
    return f"{run['seed']:<6}{name:<8}{ends}{rates}{times}"


def _columns(width: int, values: Iterable[float]) -> str:
    return "".join(f"{value:>{width}.3f}" for value in values)
