"""Reader for the folder of a run: its settings, scalars, samples and checkpoints.

Reports, plots and tests use it, as in this example:

    run = RunReader("outputs/quickstart/trial0")
    run.series("train/loss").values
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from areno.errors import ArenoError
from areno.files.paths import list_folder, read_if_exists
from areno.schema.values import value_at
from areno.tracking.check_result import result_of
from areno.tracking.console import DONE, RESUMED, STARTED, STOPPED
from areno.tracking.metrics_file import MetricsFile, parse_lines
from areno.tracking.run_folder import (
    FORECAST,
    has_description,
    is_sweep,
    overrides_of,
    settings_of,
    start_time,
    versions_of,
)
from areno.tracking.series import NOTHING, Curves, Series, drop_meaningless_accuracy

logger = logging.getLogger(__name__)
Status = Literal["completed", "stopped", "unfinished"]


class RunReader:
    """Reads the folder of a run, which may still be in progress.

    Each method reads its files again at every call, and raises ArenoError for a damaged file, with the file and the
    line. `config`, `overrides` and `versions` are read once.
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
        self.file = MetricsFile(self.path / "logs" / "metrics.jsonl")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings as nested dictionaries, {} without a config.yaml."""
        return settings_of(self.path)

    @cached_property
    def overrides(self) -> list[str]:
        """The settings given on the command line, such as "seed=2"."""
        return overrides_of(self.path)

    @cached_property
    def versions(self) -> dict[str, str | None]:
        """The version of each package, and the git commit of areno, by name. {} without versions.json."""
        return versions_of(self.path)

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that the run belongs to."""
        return self.path.parent if is_sweep(self.path.parent) else None

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of logs/metrics.jsonl: "step", "time" (in seconds since 1970) and the scalars by name.

        A scalar that was NaN or infinite is None. An incomplete last line is left out.
        """
        return list(self.file.records())

    def metrics(self) -> dict[str, Series]:
        """Return all recorded values of every scalar."""
        found: dict[str, Series] = {}
        for step, scalars in self._iter_scalars():
            for name, value in scalars.items():
                series = found.setdefault(name, Series([], []))
                series.steps.append(step)
                series.values.append(value)
        return found

    def curves(self) -> dict[str, Series]:
        """Return the values of every scalar for plots, thinned as in `Curves`.

        If a reward was above 1, metrics that count right answers are left out, because a reward of 1 then does not mean
        a right answer.
        """
        found = Curves()
        for record in self.file.records():
            found.add(record)
        return drop_meaningless_accuracy(found.series_by_name())

    def series(self, name: str) -> Series:
        """Return the values of one scalar, such as "train/loss". An ArenoError lists the scalars that exist."""
        metrics = self.metrics()
        if name not in metrics:
            raise ArenoError("{} has no scalar {}; it has {}", self.path, name, ", ".join(sorted(metrics)) or "none")
        return metrics[name]

    def steps(self) -> dict[int, dict[str, float]]:
        """Return step -> scalar -> value."""
        found: dict[int, dict[str, float]] = {}
        for step, scalars in self._iter_scalars():
            found.setdefault(step, {}).update(scalars)
        return found

    def forecast(self) -> list[dict[str, Any]]:
        """Return "name", "seconds" and "gib" of each phase, and of the whole step as the last entry.

        "seconds" and "gib" are [predicted, measured]. The list is empty if the run has not ended.
        """
        content = read_if_exists(self.path / FORECAST)
        try:
            return [] if content is None else json.loads(content)
        except ValueError as error:
            raise ArenoError("{} is not valid JSON: {}", self.path / FORECAST, error) from error

    def check(self) -> dict[str, Any] | None:
        """Return the result of `areno check --` for this run, with "differs": what has changed since. None without."""
        return result_of(self.path)

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Return the recorded samples of a training step as written to rollouts/<step>.jsonl, with their rewards.

        An incomplete last line is skipped with a warning. Raises ArenoError if the step has no recorded samples, see
        rollout.dump_n_samples.
        """
        path = self.path / "rollouts" / f"{step:06d}.jsonl"
        content = read_if_exists(path)
        if content is None:
            text = "{} has no samples of step {}; it has {}"
            raise ArenoError(text, self.path, step, _steps_text(self.sampled_steps()))
        return _parse_samples(path, content)

    def sampled_steps(self) -> list[int]:
        """Return the training steps that have recorded samples, ascending."""
        names = (name.removesuffix(".jsonl") for name in list_folder(self.path / "rollouts") if name.endswith(".jsonl"))
        return sorted(int(name) for name in names if name.isdecimal())

    def eval_samples(self, step: int, name: str | None = None) -> list[dict[str, Any]]:
        """Return the samples of the evaluation after `step`, of one validation set or of all, with their rewards."""
        found = [path for at, path in self._evaluations(name) if at == step]
        if not found:
            raise ArenoError("{} has no evaluation of step {}{}", self.path, step, f" on {name}" if name else "")
        return [sample for path in found for sample in _parse_samples(path, read_if_exists(path) or b"")]

    def evaluated_steps(self) -> list[int]:
        """Return the steps after which the run was evaluated, ascending."""
        return sorted({step for step, _ in self._evaluations()})

    def _evaluations(self, name: str | None = None) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.path.glob(f"eval/{name or '**'}/*.jsonl")):
            if path.stem.isdecimal():
                yield int(path.stem), path

    def checkpoints(self) -> dict[int, Path]:
        """Return the folder of each checkpoint by its step, ascending."""
        given = value_at(self.config, "saver.path")
        folder = Path(given if isinstance(given, str) else self.path / "checkpoints").expanduser()
        numbers = (name.removeprefix("step-") for name in list_folder(folder) if name.startswith("step-"))
        return {step: folder / name for step, name in sorted((int(n), f"step-{n}") for n in numbers if n.isdecimal())}

    def latest_checkpoint(self) -> Path | None:
        """Return the folder of the last checkpoint, if there is one."""
        return next(reversed(self.checkpoints().values()), None)

    def _log_lines(self) -> list[str]:
        content = read_if_exists(self.path / "logs" / "run.log") or b""
        return content.decode("utf-8", "replace").splitlines()

    def warnings(self) -> list[str]:
        """Return the warnings about steps in logs/run.log, such as "step 7: ...", in their order."""
        said = (line[len("HH:MM:SS ") :] for line in self._log_lines())
        return list(dict.fromkeys(text.removeprefix("warning: ") for text in said if text.startswith("warning: step ")))

    def status(self) -> Status | None:
        """Return the status according to logs/run.log, None if it has none.

        "stopped": an error or the user ended the run. "unfinished": the run is in progress or was killed.
        """
        told: dict[str, Status] = {STARTED: "unfinished", RESUMED: "unfinished", DONE: "completed", STOPPED: "stopped"}
        for line in reversed(self._log_lines()):
            for beginning, status in told.items():
                if line[len("HH:MM:SS ") :].removeprefix("warning: ").startswith(beginning):
                    return status
        return None

    def _iter_scalars(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, scalars) of each record. A value of null becomes NaN."""
        for record in self.file.records():
            scalars = ((name, value) for name, value in record.items() if name not in ("step", "time"))
            yield record["step"], {name: math.nan if value is None else value for name, value in scalars}


def list_runs(root: str | Path) -> list[RunReader]:
    """Return the runs in a folder and all folders below it, sorted by path. Numbers are sorted by value."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise ArenoError("{} {}", root, "is not a folder" if os.path.exists(root) else "does not exist")
    found = []
    for folder, names, _ in os.walk(root):
        if is_run(Path(folder)):
            found.append(RunReader(folder))
            names.clear()  # no run contains another
        names.sort(key=lambda name: (int(name) if name.isdecimal() else -1, name))
    return found


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return the folders of the runs that a user has named, without duplicates.

    A path stands for all runs below it, such as those of a sweep. A path without any run stays in the list.
    """
    found: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        found += ([run.path for run in list_runs(path)] if path.is_dir() and not is_run(path) else []) or [path]
    return list(dict.fromkeys(found))


def is_run(folder: Path) -> bool:
    described = has_description(folder) and os.path.exists(folder / "versions.json")
    return described or os.path.exists(folder / "logs" / "metrics.jsonl")


def _steps_text(steps: Sequence[int]) -> str:
    if not steps:
        return "none of any step (rollout.dump_n_samples)"
    if len(steps) <= 8:
        return f"those of {', '.join(map(str, steps))}"
    return f"those of {len(steps)} steps, from {steps[0]} to {steps[-1]}"


def _parse_samples(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Return the samples in a file. An incomplete last line is skipped with a warning."""
    *lines, last = content.split(b"\n")
    samples = list(parse_lines(path, lines))
    if last:
        try:
            samples += parse_lines(path, [last], len(lines) + 1)
        except ArenoError:
            logger.warning("%s ends in half a line, which is left out", path)
    return samples


Names = Mapping[str, tuple[str, Callable[..., float] | None]]
# Scalar -> its title, and the function that chooses its best value; None if no value is better than another.
NAMES: Names = {
    "eval/accuracy": ("evaluation: accuracy", max),
    "eval/rewards_mean": ("evaluation: reward", max),
    "eval/loss": ("evaluation: loss", min),
    "rollout/rewards_mean": ("reward", max),
    "train/loss": ("loss", None),
    "train/explained_variance": ("critic: explained variance", None),
    "train/kl_loss": ("KL to the reference", None),
    "rollout/ref_kl": ("KL to the reference", None),
    "rollout/response_len_mean": ("response length", None),
    "train/entropy": ("entropy", None),
    "train/logp_abs_diff_mean": ("rollout against training", None),
    "time/step": ("seconds of a step", None),
}


NAMES_OF_TRAINING: Names = {"train/accuracy": ("accuracy", max), "train/loss": ("loss", min)}
"""The names for runs without rewards and evaluation."""


class Headline(NamedTuple):
    """A summary of the finite values of one scalar."""

    title: str  # in tables
    first: float
    best: float | None  # None: neither high nor low values are better
    last: float
    step: int | None  # of the best value


def headlines(metrics: Mapping[str, Series], names: Names = NAMES) -> dict[str, Headline]:
    """Return the first, the best and the last value of each scalar in `names` that has finite values.

    `names` has scalar -> (title, function that chooses the best value: `max` or `min`, or None).
    """
    names = {name: how for name, how in names.items() if name != "train/loss" or loss_is_meaningful(metrics)}
    found = {name: headline(metrics.get(name, NOTHING), *how) for name, how in names.items()}
    return {name: line for name, line in found.items() if line is not None}


def loss_is_meaningful(names: Container[str]) -> bool:
    """Return whether train/loss says how good a model is, for a run with the scalars `names`.

    The loss of a policy says nothing: at the first update of a batch it is 0 up to rounding in GRPO and GSPO.
    """
    return "rollout/rewards_mean" not in names or "train/distill_loss" in names


def is_in_critic_warmup(names: Container[str]) -> bool:
    """Return whether a run with the scalars `names` has only trained its critic so far, see critic.warmup_steps."""
    return "train/critic_loss" in names and "train/loss" not in names


def headline(series: Series, title: str, choose: Callable[..., float] | None) -> Headline | None:
    """Return the summary of a scalar, None without a finite value."""
    finite = [(value, step) for step, value in zip(*series, strict=True) if math.isfinite(value)]
    if not finite:
        return None
    best = choose(value for value, _ in finite) if choose else None
    step = next((step for value, step in finite if value == best), None)
    return Headline(title, finite[0][0], best, finite[-1][0], step)


def last_step(run: RunReader) -> int:
    return max((record["step"] for record in run.file.first_and_last_records()), default=0)


def run_seconds(run: RunReader) -> float | None:
    """Return the seconds from the start of the first step to the last record, None with fewer than two records."""
    times = [record["time"] for record in run.file.first_and_last_records() if "time" in record]
    if len(times) < 2:
        return None
    _, first = next(run.file.points("time/step"), (0, 0.0))
    return times[-1] - times[0] + first


def begin_time(run: RunReader) -> str:
    """Return the local time at which a run began, such as "2025-01-31 09:30", or "-"."""
    times = [record["time"] for record in run.file.first_and_last_records() if "time" in record]
    if not times and not has_description(run.path):
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(times[0] if times else start_time(run.path)))


def duration_text(taken: float | None) -> str:
    """Format a duration in seconds as `1:02:03`, as `2:03` below an hour, or as `-` for None."""
    if taken is None:
        return "-"
    minutes, rest = divmod(round(taken), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
