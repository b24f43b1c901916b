"""A training by areno, against the same training by TRL: rewards, solve rates and the time of a step.

Both libraries start from the same base model, draw the same prompts in the same order, and have the same settings,
which come from one YAML file. areno's evaluation measures the solve rates of the base model and of both trained models.
Each training and each evaluation is a process of its own, so that its memory is free for the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from areno.bench.arguments import Settings, positive_int
from areno.bench.timing import log_progress
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
from benchmarks.trl_contender import (
    Training,
    n_rows,
    prompts_of,
    smaller_divisor,
    train_with_trl,
    trl_problems,
    trl_settings,
    with_formulas_of_trl,
)

T = TypeVar("T")

_ALGORITHMS = {"grpo": grpo.ALGORITHM, "gspo": gspo.ALGORITHM}
_WARM_UP = 3  # steps that are left out of the medians, if others are left
_FIXED = {"seed", "engine.device", "engine.world_size", "actor.path", "total_train_steps", "total_train_n_seqs"}
_FIXED |= {"trial_name", "cluster.fileroot", "actor.adv_norm.std_unbiased", "actor.adv_norm.eps"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", dest="shape", required=True, help="folder of a base model with weights, as areno reproduce makes")
    add("--config", metavar="NAME", required=True, help="name of the YAML file with the settings, as --config-name")
    add("--device", choices=["cpu", "cuda:0"], help="device (default: cuda:0, or cpu without a GPU)")
    add("--algo", choices=["grpo", "gspo"], default="grpo", help="the algorithm (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[1], metavar="N", help="seed of each pair of runs (default: 1)")
    add("--steps", type=positive_int, help="number of training steps (default: total_train_steps of --config)")
    other = "another setting of the runs, such as gconfig.n_samples=16. Repeat it for more settings"
    add("--set", dest="overrides", action="append", default=[], metavar="key=value", help=other)
    add("--folder", help="folder to keep the curves (curves.svg), the numbers (result.json) and the runs in")
    add("--json", action="store_true", help="print one line of JSON")


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train by areno and by TRL with each seed, and measure the solve rates of the models.

    Medians of seconds leave out the first steps. `ratio` is the seconds of a step of TRL / those of areno.
    """
    if missing := [name for name in ("trl", "accelerate", "datasets") if find_spec(name) is None]:
        raise ConfigError([Problem("trl", f"needs packages that are not installed here: {' '.join(missing)}")])
    settings.device = settings.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    configs = {seed: config_of(settings, seed) for seed in settings.seeds}
    config = configs[settings.seeds[0]]
    n_steps, rows_at_once = config.total_train_steps or 0, n_rows(config)
    items = {seed: prompts_of(config, n_steps) for seed, config in configs.items()}
    out = folder if settings.folder is None else Path(settings.folder).absolute()
    found: dict[str, Any] = {
        "runs": f"{settings.config}, {settings.algo}: {n_steps} steps of {rows_at_once} samples",
        "device": torch.cuda.get_device_name() if settings.device != "cpu" else f"CPU ({platform.machine()})",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("areno", "trl", "transformers", "torch")),
    }
    trainings: dict[str, list[Training]] = {"areno": [], "trl": []}
    ratios: list[float] = []
    for seed, config in configs.items():
        place = out / time.strftime(f"seed-{seed}-%Y%m%d-%H%M%S")
        place.mkdir()
        log_progress(f"trl: seed {seed}, {n_steps} steps by areno, results in {place}")
        ours = _run_in_process(train_with_areno, settings.algo, config, place / "areno")
        log_progress(f"trl: seed {seed}, {n_steps} steps by TRL")
        theirs = _trained_by_trl(config, items[seed], rows_at_once, settings.device, ours.n_threads, place / "trl")
        rows_at_once = theirs.rows_at_once or rows_at_once  # what ran out of memory once would again
        before = _run_in_process(solve_rate, config, config.actor.path, place / "evaluation-base")
        for name, training in (("areno", ours), ("trl", theirs)):
            after = _run_in_process(solve_rate, config, training.model, place / f"evaluation-{name}")
            found[f"seed {seed}, {name}"] = training_figures(training, before, after)
            trainings[name].append(training)
        of_trl = trl_settings(config, n_steps, rows_at_once, settings.device)
        found["trl_settings"] = ", ".join(f"{name}={value}" for name, value in of_trl.items())
        ratios.append(found[f"seed {seed}, trl"]["step_s"] / found[f"seed {seed}, areno"]["step_s"])
        found["ratio"] = statistics.median(ratios)
        if settings.folder is not None:  # after each seed, so that an interruption leaves results
            atomic_write_text(out / "result.json", json.dumps(found, indent=2) + "\n")
            atomic_write_text(out / "curves.svg", reward_chart(found["runs"], trainings))
    return found


def training_figures(training: Training, before: float, after: float) -> dict[str, Any]:
    """Return the figures of a training, which changes the solve rate from `before` to `after`."""
    first, tenth = min(_WARM_UP, (len(training.step_s) - 1) // 2), max(1, len(training.rewards) // 10)
    return {
        "first_rewards": statistics.mean(training.rewards[:tenth]),
        "last_rewards": statistics.mean(training.rewards[-tenth:]),
        "base_rate": before,
        "solve_rate": after,
        "step_s": statistics.median(training.step_s[first:]),
        "rollout_s": statistics.median(training.rollout_s[first:]),
        "rewards": training.rewards,
    }


def reward_chart(title: str, trainings: Mapping[str, Sequence[Training]]) -> str:
    """Draw the rewards of each library, as means over the seeds."""
    curves = {
        name: list(map(statistics.mean, zip(*(training.rewards for training in each), strict=True)))
        for name, each in trainings.items()
    }
    return svg(title, range(1, len(curves["trl"]) + 1), curves)


def config_of(settings: Settings, seed: int) -> PolicyExperimentConfig:
    """Compose and check the settings of a run of areno, from which those of TRL are derived."""
    keys = {text.partition("=")[0].lstrip("+") for text in settings.overrides}
    if given := [Problem(key, "is set by the comparison with TRL") for key in sorted(keys & _FIXED)]:
        raise ConfigError(given)
    model = str(Path(settings.shape).expanduser().absolute()).replace('"', '\\"')
    own = [f'actor.path="{model}"', f"seed={seed}", "engine.world_size=1", "total_train_n_seqs=null"]
    own += [f"engine.device={settings.device.partition(':')[0]}"]
    own += [f"total_train_steps={settings.steps}"] if settings.steps else []
    config: Any = load(_ALGORITHMS[settings.algo].config, settings.config, [*own, *settings.overrides])
    problems = list(trl_problems(config))
    if config.total_train_steps is None:
        problems.append(Problem("--steps", f"is missing; {settings.config} sets no total_train_steps"))
    if problems:
        raise ConfigError(problems)
    return with_formulas_of_trl(config)


def _only_training(config: PolicyExperimentConfig, **changes: Any) -> PolicyExperimentConfig:
    """Return settings that write a checkpoint at the end and nothing else that takes time."""
    return replace(
        config,
        evaluator=EvaluatorConfig(),
        recover=replace(config.recover, mode="off"),
        saver=SaverConfig(freq_steps=None),
        stats_logger=StatsLoggerConfig(console="lines"),
        **changes,
    )


class _StepTimer(Tracker):
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
    steps = _StepTimer(found)
    config = _only_training(config, valid_dataset=None, eval_gconfig=None)
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
        if (found := _run_in_process(train_with_trl, config, items, size, device, n_threads, folder)) is not None:
            return found
        log_progress("trl: out of device memory; training begins again with smaller micro-batches")
        size = smaller_divisor(n_rows(config), size)
    raise ArenoError("TRL runs out of device memory even with one row at a time")


def solve_rate(config: PolicyExperimentConfig, model: str, folder: Path) -> float:
    """Return the share of sampled answers to the validation set that are right."""
    config = _only_training(config, actor=replace(config.actor, path=model))
    with PolicyEvaluation(config, run_dir=folder) as evaluation:
        return evaluation.evaluate()["accuracy"]


def _run_in_process(work: Callable[..., T], *arguments: Any) -> T:
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
