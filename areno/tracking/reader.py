"""Reads what runs left in their folders: settings, scalars, samples, checkpoints. For reports, plots and tests.

run = RunReader("outputs/quickstart/trial0")
run.series("train/loss").values

The numbers that say how a run went: the first, the best and the last value of each.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from areno.errors import ArenoError
from areno.files.paths import content_of, names_in
from areno.schema.values import show, value_at
from areno.tracking.console import DONE, RESUMED, STARTED, STOPPED
from areno.tracking.run_folder import is_described, is_sweep, overrides_of, settings_of, versions_of

logger = logging.getLogger(__name__)
Status = Literal["completed", "stopped", "unfinished"]


class Series(NamedTuple):
    """One scalar of a run, in the order of recording. A value that was not finite is NaN."""

    steps: list[int]
    values: list[float]


class RunReader:
    """The folder of one run, which may still be going on. Methods read their files each time they are called.

    Raises ArenoError if `path` is not the folder of a run. A damaged file is an ArenoError with file and line.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        if not is_run(self.path):
            text = "is not the folder of a run: it has neither config.yaml and versions.json nor logs/metrics.jsonl"
            if not os.path.exists(self.path):
                text = "does not exist"
            elif not self.path.is_dir():
                text = "is not a folder"
            elif not os.access(self.path, os.R_OK | os.X_OK):
                text = "cannot be read: Permission denied"
            elif is_sweep(self.path):
                text = f"holds the runs of a sweep; read one of them, such as {self.path / '0'}"
            raise ArenoError("{} {}", self.path, text)

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings of the run, as nested dictionaries. {} if a script gave the run a folder of its own."""
        return settings_of(self.path)

    @cached_property
    def overrides(self) -> list[str]:
        """The settings of its command line, such as "seed=2"."""
        return overrides_of(self.path)

    @cached_property
    def versions(self) -> dict[str, str | None]:
        """Package -> version, and the git revision of areno."""
        return versions_of(self.path)

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that the run is a part of."""
        return self.path.parent if is_sweep(self.path.parent) else None

    def records(self) -> list[dict[str, Any]]:
        """The lines of logs/metrics.jsonl: {"step", "time" (seconds since 1970), and the scalars}."""
        path = self.path / "logs" / "metrics.jsonl"
        content = content_of(path)
        if content is None:
            return []
        *lines, _ = content.split(b"\n")  # a last line without its end: the run is about to write the rest
        records = list(_parsed(path, lines))
        for number, record in enumerate(records, 1):
            if not _is_step(record.get("step")):
                raise ArenoError("{}, line {}: has no step", path, number)
            if wrong := [name for name, value in record.items() if value is not None and not _is_number(value)]:
                text = "{}, line {}: {} is {}; a number is expected"
                raise ArenoError(text, path, number, wrong[0], show(record[wrong[0]]))
        return records

    def metrics(self) -> dict[str, Series]:
        """Name -> values of each scalar."""
        found: dict[str, Series] = {}
        for step, scalars in self._scalars():
            for name, value in scalars.items():
                series = found.setdefault(name, Series([], []))
                series.steps.append(step)
                series.values.append(value)
        return found

    def series(self, name: str) -> Series:
        """One scalar. Raises ArenoError, with the names that there are, if the run has not recorded it."""
        metrics = self.metrics()
        if name not in metrics:
            raise ArenoError("{} has no scalar {}; it has {}", self.path, name, ", ".join(sorted(metrics)) or "none")
        return metrics[name]

    def steps(self) -> dict[int, dict[str, float]]:
        """Step -> all scalars of it."""
        found: dict[int, dict[str, float]] = {}
        for step, scalars in self._scalars():
            found.setdefault(step, {}).update(scalars)
        return found

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Return the samples of a step that were kept, with their rewards.

        Raises ArenoError if there are none: see rollout. Half a line at the end is left out with a warning.
        """
        path = self.path / "rollouts" / f"{step:06d}.jsonl"
        content = content_of(path)
        if content is None:
            text = "{} has no samples of step {}; it has {}"
            raise ArenoError(text, self.path, step, _told_steps(self.sampled_steps()))
        return _samples(path, content)

    def sampled_steps(self) -> list[int]:
        """The steps that `samples` has."""
        names = (name.removesuffix(".jsonl") for name in names_in(self.path / "rollouts") if name.endswith(".jsonl"))
        return sorted(int(name) for name in names if name.isdecimal())

    def eval_samples(self, step: int, name: str | None = None) -> list[dict[str, Any]]:
        """The answers of the evaluation after a step, with their rewards: of the set `name`, or of all sets."""
        found = [path for at, path in self._evaluations(name) if at == step]
        if not found:
            raise ArenoError("{} has no evaluation of step {}{}", self.path, step, f" on {name}" if name else "")
        return [sample for path in found for sample in _samples(path, content_of(path) or b"")]

    def evaluated_steps(self) -> list[int]:
        """The steps that `eval_samples` has."""
        return sorted({step for step, _ in self._evaluations()})

    def _evaluations(self, name: str | None = None) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.path.glob(f"eval/{name or '**'}/*.jsonl")):
            if path.stem.isdecimal():
                yield int(path.stem), path

    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder, in order of steps."""
        given = value_at(self.config, "saver.path")
        folder = Path(given if isinstance(given, str) else self.path / "checkpoints").expanduser()
        numbers = (name.removeprefix("step-") for name in names_in(folder) if name.startswith("step-"))
        return {step: folder / name for step, name in sorted((int(n), f"step-{n}") for n in numbers if n.isdecimal())}

    def latest_checkpoint(self) -> Path | None:
        """The folder of the last step that was saved."""
        return next(reversed(self.checkpoints().values()), None)

    def status(self) -> Status | None:
        """completed; stopped, by an error or the user; unfinished: still going on, or killed; None: no log says it."""
        path = self.path / "logs" / "run.log"
        lines = (content_of(path) or b"").decode("utf-8", "replace").splitlines()
        told: dict[str, Status] = {STARTED: "unfinished", RESUMED: "unfinished", DONE: "completed", STOPPED: "stopped"}
        for line in reversed(lines):
            for beginning, status in told.items():
                if line[len("HH:MM:SS ") :].removeprefix("warning: ").startswith(beginning):
                    return status
        return None

    def _scalars(self) -> Iterator[tuple[int, dict[str, float]]]:
        for record in self.records():
            scalars = ((name, value) for name, value in record.items() if name not in ("step", "time"))
            yield record["step"], {name: math.nan if value is None else value for name, value in scalars}


def list_runs(root: str | Path) -> list[RunReader]:
    """The runs below a folder, those of sweeps among them, sorted by path; numbers by value."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise ArenoError("{} {}", root, "is not a folder" if os.path.exists(root) else "does not exist")
    found = []
    for folder, names, _ in os.walk(root):
        if is_run(Path(folder)):
            found.append(RunReader(folder))
            names.clear()  # no run is inside another
        names.sort(key=lambda name: (int(name) if name.isdecimal() else -1, name))
    return found


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """The folders of runs that a user has named, each once. The folder of a sweep stands for all of its runs."""
    found: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        found += [run.path for run in list_runs(path)] if is_sweep(path) and not is_run(path) else [path]
    return list(dict.fromkeys(found))


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, which RunReader can read."""
    described = is_described(folder) and os.path.exists(folder / "versions.json")
    return described or os.path.exists(folder / "logs" / "metrics.jsonl")


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_number(value: Any) -> bool:
    # A larger integer, which JSON may have, is no float.
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300)


def _told_steps(steps: Sequence[int]) -> str:
    """Which steps have something, in words."""
    if not steps:
        return "none of any step (rollout.dump_n_samples)"
    if len(steps) <= 8:
        return f"those of {', '.join(map(str, steps))}"
    return f"those of {len(steps)} steps, from {steps[0]} to {steps[-1]}"


def _samples(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Return the samples of a file. A last line that is cut off, as by a full disk, is left out with a warning."""
    *lines, last = content.split(b"\n")
    samples = list(_parsed(path, lines))
    if last:
        try:
            samples += _parsed(path, [last], len(lines) + 1)
        except ArenoError:
            logger.warning("%s ends in half a line, which is left out", path)
    return samples


def _parsed(path: Path, lines: list[bytes], first: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of lines. first: the number of the first line in its file."""
    for number, line in enumerate(lines, first):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError also for bytes that are not UTF-8
            raise ArenoError("{}, line {}: is not JSON: {}", path, number, error) from error
        if not isinstance(record, dict):
            raise ArenoError("{}, line {}: is not a JSON object", path, number)
        yield record


# Scalar -> what it is called, and which of its values is the best; None where none is.
NAMES: dict[str, tuple[str, Callable[..., float] | None]] = {
    "eval/accuracy": ("evaluation: accuracy", max),
    "eval/rewards_mean": ("evaluation: reward", max),
    "eval/loss": ("evaluation: loss", min),
    "rollout/rewards_mean": ("reward", max),
    "train/loss": ("loss", None),
    "rollout/response_len_mean": ("response length", None),
    "train/entropy": ("entropy", None),
    "train/logp_abs_diff_mean": ("rollout against training", None),
    "time/step": ("seconds of a step", None),
}


class Headline(NamedTuple):
    """One number of a run. best: None where no value is better than another. step: at which it was best."""

    title: str
    first: float
    best: float | None
    last: float
    step: int | None


def headlines(metrics: Mapping[str, Series]) -> dict[str, Headline]:
    """Scalar -> its headline, for those of NAMES that a run has."""
    found: dict[str, Headline] = {}
    for name, (title, choose) in NAMES.items():
        series = metrics.get(name, Series([], []))
        finite = [(value, step) for step, value in zip(*series, strict=True) if math.isfinite(value)]
        if finite:
            best = choose(value for value, _ in finite) if choose else None
            step = next((step for value, step in finite if value == best), None)
            found[name] = Headline(title, finite[0][0], best, finite[-1][0], step)
    return found


def last_step(metrics: Mapping[str, Series]) -> int:
    """The last step that a run has recorded something of; 0 before the first."""
    return max((series.steps[-1] for series in metrics.values()), default=0)


def seconds(run: RunReader) -> float | None:
    """From the first to the last record of a run, with the first step; None without two records."""
    times = [record["time"] for record in run.records() if "time" in record]
    steps = run.metrics().get("time/step", Series([], []))[1]
    return times[-1] - times[0] + (steps[0] if steps else 0.0) if len(times) > 1 else None


def duration(taken: float | None) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    if taken is None:
        return "-"
    minutes, rest = divmod(round(taken), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
