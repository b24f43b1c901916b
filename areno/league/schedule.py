"""The league: which runs are missing and may start, and the processes that make them, several at a time."""

from __future__ import annotations

import functools
import os
import queue
import shlex
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, ConfigError, Problem
from areno.files.interrupts import Terminated
from areno.league.results import CONTROLS, LeagueRun, Result, best_rate, by_name, read_results
from areno.league.runs import LeagueRuns, as_values, digest, task_of

BEST = {"arithmetic": 8, "staleness": 6}  # number of algorithms that a stage has
AGES = (2, 8)
CHOOSING_SEED = 100  # of the runs that choose a learning rate


@dataclass
class League:
    """The runs to make, and the results that are there."""

    size: str
    output: Path
    rows: Path
    stages: Sequence[str]
    names: Sequence[str]
    seeds: Sequence[int]
    parallel: int
    base_settings: Sequence[str]
    settings: Sequence[str]
    makes_runs: bool = True

    def __post_init__(self) -> None:
        self.runs = LeagueRuns(self.size, self.output)
        self.bed, self.contenders = self.runs.bed, self.runs.contenders
        self.results = read_results(self.rows)
        if others := {one.size for one in self.results.values()} - {self.size}:
            text = "{} holds results of the size {}; use another folder, or --size {}"
            raise ConfigError(Problem("--rows", text, self.rows, *(2 * [others.pop()])))
        for task in ("countdown", "arithmetic"):
            bases = {one.base for one in self.results.values() if task_of(one.run.stage) == task}
            if len(bases) > 1:
                text = "{} holds results of {} base models of {}, which are no table; keep those of one"
                raise ConfigError(Problem("--rows", text, self.rows, len(bases), task))
        if other := self.runs.other_setting(self.results.values(), self.settings, self.makes_runs):
            text = "{} holds results with other settings: {} has {}, and not {}; use another folder, or equal settings"
            raise ConfigError(Problem("--rows", text, self.rows, *other))
        self.begun, self.failed = set[str](), set[str]()
        self._n_begun, self._digests = 0, dict[str, str]()
        self._device = _device_name(self.size)

    def next_run(self) -> LeagueRun | None:
        """Return the next run that can start now. None if there is none, or if all others wait for runs in progress."""
        tasks = [task for task in ("countdown", "arithmetic") if any(task_of(stage) == task for stage in self.stages)]
        ready = [task for task in tasks if self.has_base(task)]
        for run in [*(LeagueRun("base", task, 1) for task in tasks if task not in ready), *self.possible_runs()]:
            is_ready = run.stage == "base" or task_of(run.stage) in ready
            if is_ready and run.file not in self.results and run.file not in self.begun:
                return run
        return None

    def has_base(self, task: str) -> bool:
        return self.runs.base_of(task).exists() and LeagueRun("base", task, 1).file not in self.begun

    def possible_runs(self) -> Iterator[LeagueRun]:
        """Yield the runs of all stages in their order, as far as earlier results decide them."""
        if "rates" in self.stages:
            for runs in zip(*map(self._runs_to_choose_rate, self.choosing()), strict=True):
                yield from runs
        if "countdown" in self.stages:
            yield from self._seeds_of("countdown", self.names)
        if "arithmetic" in self.stages:
            yield from self._seeds_of("arithmetic", self.best(BEST["arithmetic"]))
        if "staleness" in self.stages:
            for age in AGES:
                yield from self._seeds_of("staleness", self.best(BEST["staleness"]), age)

    def choosing(self) -> list[str]:
        """Return the algorithms whose learning rates the chosen ones need."""
        return list(dict.fromkeys(self.contenders[name].rate_of or name for name in self.names))

    def _seeds_of(self, stage: str, names: Sequence[str], age: int = 0) -> Iterator[LeagueRun]:
        for seed in self.seeds:
            for name in names:
                if rate := self.rate_of(name):
                    yield LeagueRun(stage, name, seed, rate, age)

    def rate_of(self, name: str) -> str | None:
        """Return the best learning rate on the validation problems. None until all are tried."""
        name = self.contenders[name].rate_of or name
        runs = self._runs_to_choose_rate(name)
        if not self._have_ended(runs):
            return None
        found = [self.results[run.file] for run in runs if run.file in self.results]
        return best_rate(found) if found else None

    def _runs_to_choose_rate(self, name: str) -> list[LeagueRun]:
        return [LeagueRun("rates", name, CHOOSING_SEED, rate) for rate in self.bed.rates]

    def best(self, n: int) -> list[str]:
        """Return the algorithms with the best mean solve rates on countdown. [] until all of their seeds have ended."""
        runs = self._runs_to_rank()
        if not self._have_ended(runs):
            return []
        names = {run.name for run in runs}
        return [name for name in by_name(self.results.values(), "countdown") if name in names][:n]

    def _runs_to_rank(self) -> list[LeagueRun]:
        names = [name for name in self.names if name not in CONTROLS]
        return [LeagueRun("countdown", name, seed) for name in names for seed in self.seeds]

    def _have_ended(self, runs: Sequence[LeagueRun]) -> bool:
        return all(run.file in self.results or run.file in self.failed for run in runs)

    def shares(self) -> list[dict[str, str]]:
        """Return the environment variables of each run that may be in progress: its device and its threads."""
        import torch

        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.parallel))}
        if self.size == "cpu":
            return [threads] * self.parallel
        n_devices = torch.cuda.device_count()
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(n_devices)))).split(",")
        return [threads | {"CUDA_VISIBLE_DEVICES": visible[slot % n_devices]} for slot in range(self.parallel)]

    def play(self, seconds: float | None) -> bool:
        """Make the runs, several at a time. Return whether none failed. With `seconds`, end after this time."""
        from areno.launch.side_by_side import ParallelJobs

        self._check_stages()
        if self.settings or self.base_settings:
            self._check_settings()
        self.output.mkdir(parents=True, exist_ok=True)
        deadline = None if seconds is None else time.monotonic() + seconds
        last_lines: dict[int, deque[str]] = {}
        ended: queue.SimpleQueue[tuple[int, float | None, str]] = queue.SimpleQueue()
        running: dict[int, LeagueRun] = {}
        with (
            Deadline(deadline) as wait,
            ParallelJobs(self.shares(), lambda n, line: last_lines[n].append(line)) as jobs,
        ):
            while True:
                run = self.next_run() if len(running) < self.parallel else None
                if run is not None and self._would_end(run, deadline):
                    self.begun.add(run.file)
                    self._n_begun += 1
                    number = self._n_begun
                    running[number], last_lines[number] = run, deque(maxlen=12)
                    tell = functools.partial(lambda n, *how: ended.put((n, *how)), number)
                    jobs.start(number, self._work(run), lambda: None, tell)
                elif running:
                    number, rate, reason = wait(ended)
                    run = running.pop(number)
                    self.begun.discard(run.file)
                    self._end(run, rate, reason, last_lines.pop(number))
                else:
                    break
        if not self._n_begun:
            print("no run is missing that earlier stages allow, or there is no time for one", flush=True)
        return not self.failed

    def _check_stages(self) -> None:
        """Raise ConfigError if a stage needs results that are not there and that no stage of this league makes."""
        tried = [run for name in self.choosing() for run in self._runs_to_choose_rate(name)]
        played = self._runs_to_rank()
        for stage in self.stages:
            if stage in BEST and not played and "countdown" not in self.stages:
                text = "has controls alone, and {} is for the best of the others; name one"
                raise ConfigError(Problem("--only", text, stage))
            needed = [*(tried if stage != "rates" else ()), *(played if stage in BEST else ())]
            for run in needed:
                if run.stage not in self.stages and run.file not in self.results:
                    text = "{} needs the results of the stage {}, and {} lacks some, such as {}; add this stage"
                    raise ConfigError(Problem("--stage", text, stage, run.stage, self.rows, run.file))

    def _check_settings(self) -> None:
        """Raise ConfigError if a base model or a recipe has no such setting as the user gave, or not such a value."""
        from areno.api import get_algorithm
        from areno.launch.compose import load

        if "staleness" in self.stages and (key := "train_dataset.batch_size") in as_values(self.settings):
            text = (
                "is set, but the stage staleness samples ahead by batches of {}; leave it out, or this stage (--stage)"
            )
            raise ConfigError(Problem(key, text, self.bed.batch[0]))
        name_of = {self.contenders[name].recipe: name for name in self.names}
        runs = [LeagueRun(self.stages[0], name, CHOOSING_SEED, self.bed.rates[0]) for name in name_of.values()]
        tasks = dict.fromkeys(map(task_of, self.stages))
        for run in [*(LeagueRun("base", task, 1) for task in tasks if not self.has_base(task)), *runs]:
            recipe, words = self._command(run)
            load(get_algorithm(recipe).config, words[0].partition("=")[2], words[1:])

    def _command(self, run: LeagueRun) -> tuple[str, list[str]]:
        """Return the recipe of a run and the words of its command, with the user's settings."""
        recipe, words = self.runs.command(run)
        return recipe, [*words, *(self.base_settings if run.stage == "base" else self.settings)]

    def _would_end(self, run: LeagueRun, deadline: float | None) -> bool:
        """Return whether a run would end in time, if it takes as long as the longest of its stage."""
        times = [one.wall_seconds for one in self.results.values() if one.run.stage == run.stage]
        return deadline is None or time.monotonic() + max(times, default=0.0) < deadline

    def _work(self, run: LeagueRun) -> functools.partial[tuple[float | None, str]]:
        recipe, words = self._command(run)
        print(f"runs: {shlex.join(['python', '-m', f'areno.recipes.{recipe}', *words])}", flush=True)
        about = {"size": self.size, "device": self._device, "at_once": self.parallel}
        if run.stage != "base":
            about["base"] = self._checked_digest(task_of(run.stage))
            about["settings"] = [*self.runs.told_settings(run), *self.settings]
        return functools.partial(_make_run, run, recipe, words, self.runs.folder(run), self.rows, about)

    def _checked_digest(self, task: str) -> str:
        """Return the digest of a base model. Raises ArenoError if the task has results of another base model."""
        if task not in self._digests:
            self._digests[task] = digest(self.runs.base_of(task))
        others = {one.base for one in self.results.values() if task_of(one.run.stage) == task} - {self._digests[task]}
        if others:
            text = "{} has results of another base model of {} than {}; bring that model, or name another folder"
            raise ArenoError(text, self.rows, task, self.runs.base_of(task))
        return self._digests[task]

    def _end(self, run: LeagueRun, rate: float | None, reason: str, lines: Sequence[str]) -> None:
        if rate is None:
            self.begun.add(run.file)  # it is not tried again
            self.failed.add(run.file)
            print("\n".join([*lines, f"FAILED: {run.file.removesuffix('.json')}: {reason}"]), flush=True)
            if run.stage == "base":
                raise ArenoError("the base model of {} failed; its messages are above", run.name)
            return
        if run.stage != "base":
            self.results |= {run.file: read_results(self.rows)[run.file]}
        print(f"done: {run.file.removesuffix('.json')}: {rate:.3f}", flush=True)


def _device_name(size: str) -> str:
    import torch

    return torch.cuda.get_device_name() if size == "gpu" and torch.cuda.is_available() else "CPU"


class _TimeIsUp(Terminated):
    pass


class Deadline:
    """A block with `wait(queue)`, which returns the next entry. At the deadline, the block ends, and its runs do."""

    def __init__(self, deadline: float | None):
        self._deadline = deadline

    def __enter__(self) -> Any:
        return self._wait

    def _wait(self, entries: queue.SimpleQueue[Any]) -> Any:
        try:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            return entries.get(timeout=left)
        except queue.Empty:
            print("time is up: runs in progress end, and begin again with --resume", flush=True)
            raise _TimeIsUp from None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return isinstance(error, _TimeIsUp)


def _make_run(
    run: LeagueRun, recipe: str, words: Sequence[str], folder: Path, rows: Path, about: Mapping[str, Any]
) -> tuple[float | None, str]:
    """Make a run in this process, and write its result. Return its solve rate, or the reason of a failure."""
    from areno.api import get_algorithm
    from areno.launch import command

    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    started = time.monotonic()
    code = command.run(get_algorithm(recipe), f"python -m areno.recipes.{recipe}", words, greet=False)
    if code:
        return None, f"exit code {code}"
    if run.stage == "base":
        return 1.0, ""
    result = collect_result(run, folder, {**about, "wall_seconds": round(time.monotonic() - started, 1)})
    result.write(rows)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result.solve_rate, ""


def collect_result(run: LeagueRun, folder: Path, about: Mapping[str, Any]) -> Result:
    """Return the result of a completed run from its metrics."""
    from itertools import accumulate

    from areno.tracking.reader import RunReader

    metrics = RunReader(folder).metrics()

    def curve(name: str, digits: int = 4) -> list[float]:
        return [round(value, digits) for value in metrics[name].values] if name in metrics else []

    lengths, counts = (metrics[f"rollout/{name}"].values for name in ("response_len_mean", "num_sequences"))
    evaluated = {name[5:]: series for name, series in metrics.items() if name.startswith("eval/")}
    has_before = evaluated["accuracy"].steps[0] == 0
    return Result(
        run=run,
        evaluation={name: round(series.values[-1], 5) for name, series in evaluated.items()},
        before={name: round(series.values[0], 5) for name, series in evaluated.items()} if has_before else {},
        tokens=[
            round(sum_, 1) for sum_ in accumulate(n * count / 1e3 for n, count in zip(lengths, counts, strict=True))
        ],
        seconds=[round(sum_, 1) for sum_ in accumulate(metrics["time/step"].values)],
        rewards=curve("rollout/rewards_mean"),
        lengths=curve("rollout/response_len_mean", 1),
        entropy=curve("train/entropy"),
        **about,
    )
