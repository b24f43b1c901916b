"""Reads what runs left in their folders: settings, scalars, samples, checkpoints. For reports, plots and tests.

run = RunReader("outputs/quickstart/trial0")
run.series("train/loss").values
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

from areno.errors import ArenoError
from areno.tracking.console import DONE, RESUMED, STARTED, STOPPED
from areno.tracking.new_run import is_described, is_sweep

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
        if not _is_run(self.path):
            text = "is not the folder of a run: it has neither config.yaml and versions.json nor logs/metrics.jsonl"
            if not self.path.is_dir():
                text = "is not a folder"
            elif is_sweep(self.path):
                text = f"holds the runs of a sweep; read one of them, such as {self.path / '0'}"
            raise ArenoError("{} {}", self.path, text)

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings of the run, as nested dictionaries. {} if a script gave the run a folder of its own."""
        settings = self._yaml("config.yaml") or {}
        return {name: value for name, value in settings.items() if name != "defaults"}  # Hydra's, not a setting

    @cached_property
    def overrides(self) -> list[str]:
        """The settings of its command line, such as "seed=2"."""
        return self._yaml("overrides.yaml") or []

    @cached_property
    def versions(self) -> dict[str, str | None]:
        """Package -> version, and the git revision of areno."""
        return self._yaml("versions.json") or {}  # JSON is YAML

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that the run is a part of."""
        return self.path.parent if is_sweep(self.path.parent) else None

    def records(self) -> list[dict[str, Any]]:
        """The lines of logs/metrics.jsonl: {"step", "time" (seconds since 1970), and the scalars}."""
        path = self.path / "logs" / "metrics.jsonl"
        if not path.exists():
            return []
        *lines, _ = path.read_bytes().split(b"\n")  # a last line without its end: the run is about to write the rest
        records = list(_parsed(path, lines))
        for number, record in enumerate(records, 1):
            if not isinstance(record.get("step"), int):
                raise ArenoError("{}, line {}: has no step", path, number)
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
        """The samples of a step that were kept, with their rewards. ArenoError if there are none: see rollout."""
        path = self.path / "rollouts" / f"{step:06d}.jsonl"
        if not path.exists():
            raise ArenoError("{} has no samples of step {}: there is no {}", self.path, step, path)
        return list(_parsed(path, path.read_bytes().splitlines()))

    def sampled_steps(self) -> list[int]:
        """The steps that `samples` has."""
        names = (path.stem for path in self.path.glob("rollouts/*.jsonl"))
        return sorted(int(name) for name in names if name.isdecimal())

    def eval_samples(self, step: int, name: str | None = None) -> list[dict[str, Any]]:
        """The answers of the evaluation after a step, with their rewards: of the set `name`, or of all sets."""
        found = [path for at, path in self._evaluations(name) if at == step]
        if not found:
            raise ArenoError("{} has no evaluation of step {}{}", self.path, step, f" on {name}" if name else "")
        return [line for path in found for line in _parsed(path, path.read_bytes().splitlines())]

    def evaluated_steps(self) -> list[int]:
        """The steps that `eval_samples` has."""
        return sorted({step for step, _ in self._evaluations()})

    def _evaluations(self, name: str | None = None) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.path.glob(f"eval/{name or '**'}/*.jsonl")):
            if path.stem.isdecimal():
                yield int(path.stem), path

    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder, in order of steps."""
        folder = self.config.get("saver", {}).get("path") or self.path / "checkpoints"
        found = Path(folder).expanduser().glob("step-*")
        return dict(sorted((int(path.name[5:]), path) for path in found if path.name[5:].isdecimal()))

    def latest_checkpoint(self) -> Path | None:
        """The folder of the last step that was saved."""
        return next(reversed(self.checkpoints().values()), None)

    def status(self) -> Status | None:
        """completed; stopped, by an error or the user; unfinished: still going on, or killed; None: no log says it."""
        path = self.path / "logs" / "run.log"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
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

    def _yaml(self, name: str) -> Any:
        path = self.path / name
        if not path.exists():
            return None
        try:
            return OmegaConf.to_container(OmegaConf.load(path))
        except Exception as error:  # of YAML or of OmegaConf
            raise ArenoError("{} cannot be read: {}", path, error) from error


def list_runs(root: str | Path) -> list[RunReader]:
    """The runs below a folder, those of sweeps among them, sorted by path; numbers by value."""
    root = Path(root).expanduser()
    if not root.is_dir():
        raise ArenoError("{} is not a folder", root)
    found = []
    for folder, names, _ in os.walk(root):
        if _is_run(Path(folder)):
            found.append(RunReader(folder))
            names.clear()  # no run is inside another
        names.sort(key=lambda name: (int(name) if name.isdecimal() else -1, name))
    return found


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """The folders of runs that a user has named, each once. The folder of a sweep stands for all of its runs."""
    found: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        found += [run.path for run in list_runs(path)] if is_sweep(path) and not _is_run(path) else [path]
    return list(dict.fromkeys(found))


def _is_run(folder: Path) -> bool:
    described = is_described(folder) and (folder / "versions.json").exists()
    return described or (folder / "logs" / "metrics.jsonl").exists()


def _parsed(path: Path, lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:  # also of bytes that are not UTF-8
            raise ArenoError("{}, line {}: is not JSON: {}", path, number, error) from error
        if not isinstance(record, dict):
            raise ArenoError("{}, line {}: is not a JSON object", path, number)
        yield record
