"""The results of a sweep: a table for people, sweep.json and sweep.csv for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from areno.files.durable import atomic_write_text

_SEED = "seed"
_MAX_SETTINGS = 4  # in the title of a setting
_MAX_NAME_CHARS = 200  # characters of a folder's name


@dataclass
class Outcome:
    number: int
    overrides: dict[str, str]
    objective: float | None  # None if the run failed
    folder: Path
    reason: str = ""  # of a failure


@dataclass
class SeedAverage:
    """The average over runs whose overrides differ only in the seed."""

    overrides: dict[str, str]
    mean: float
    std: float | None  # sample standard deviation; None for a single run
    runs: list[int]  # their numbers


def title_of_overrides(overrides: Mapping[str, str]) -> str:
    """Return overrides as a title, such as `actor.optimizer.lr=0.1 gconfig.n_samples=8`, with at most 4 of them."""
    given = [f"{key}={value}" for key, value in overrides.items()]
    more = f" and {len(given) - _MAX_SETTINGS} more" if len(given) > _MAX_SETTINGS else ""
    return " ".join(given[:_MAX_SETTINGS]) + more


Result = tuple[str, float, float | None]
"""(title of a setting, result, standard deviation over seeds or None for a single run)."""


def describe_lead(first: Result, second: Result) -> tuple[str, bool]:
    """Return (text about the lead of the best setting, whether the lead is within the spread over seeds)."""
    lead = abs(first[1] - second[1])
    if lead == 0:
        return f"Equal to {second[0]}.", True
    better = f"Better than {second[0]} by {lead:.4g}"
    if not (spreads := [std for _, _, std in (first, second) if std is not None]):
        return f"{better}. Without several seeds, the spread of a result is not known.", False
    is_inside = lead <= max(spreads) * (1 + 1e-9)
    more = "not more" if is_inside else "more"
    return f"{better}, {more} than the standard deviation over seeds ({max(spreads):.2g}).", is_inside


@dataclass
class Sweep:
    """The results of a sweep, which may still be in progress."""

    folder: Path
    objective: str
    mode: Literal["max", "min"]
    outcomes: list[Outcome] = field(default_factory=list)

    def add(
        self, number: int, overrides: Sequence[str], objective: float | None, folder: Path, reason: str = ""
    ) -> None:
        """Add the result of a run that has ended, and rewrite sweep.json and sweep.csv."""
        pairs = (line.lstrip("+").partition("=") for line in overrides)
        self.outcomes.append(Outcome(number, {key: value for key, _, value in pairs}, objective, folder, reason))
        self.outcomes.sort(key=lambda one: one.number)  # side by side they end in any order
        atomic_write_text(self.folder / "sweep.json", json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n")
        atomic_write_text(self.folder / "sweep.csv", self._csv())
        self._link_events()

    @property
    def ranked(self) -> list[Outcome]:
        """The results, the best first. Runs without an objective, or with NaN, come last."""
        return sorted(self.outcomes, key=lambda one: (self._sort_key(one.objective), one.number))

    @property
    def best(self) -> Outcome | None:
        return next((one for one in self.ranked if self._sort_key(one.objective) < math.inf), None)

    @property
    def swept_keys(self) -> list[str]:
        """The settings whose overrides are not the same in all runs."""
        keys = dict.fromkeys(key for one in self.outcomes for key in one.overrides)
        return [key for key in keys if len({one.overrides.get(key) for one in self.outcomes}) > 1]

    def averages(self) -> list[SeedAverage]:
        """Return the averages over seeds, the best first. Empty if no two runs differ only in the seed.

        If runs have equal overrides, seed included, only the first counts.
        """
        groups: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
        repeated = self.duplicates()
        for one in self.outcomes:
            if self._sort_key(one.objective) < math.inf and one.number not in repeated:
                rest = tuple(
                    (key, one.overrides[key]) for key in self.swept_keys if key in one.overrides and key != _SEED
                )
                groups.setdefault(rest, []).append(one)
        if not any(len(group) > 1 for group in groups.values()):
            return []
        found = []
        for rest, group in groups.items():
            values = [float(one.objective or 0.0) for one in group]
            std = statistics.stdev(values) if len(values) > 1 else None
            found.append(SeedAverage(dict(rest), statistics.fmean(values), std, [one.number for one in group]))
        return sorted(found, key=lambda one: self._sort_key(one.mean))

    def duplicates(self) -> dict[int, int]:
        """Return number of a run -> number of the first run with the same overrides, for runs with an objective."""
        first: dict[frozenset[tuple[str, str]], int] = {}
        found: dict[int, int] = {}
        for one in self.outcomes:
            if self._sort_key(one.objective) < math.inf:
                number = first.setdefault(frozenset(one.overrides.items()), one.number)
                found |= {one.number: number} if number != one.number else {}
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "mode": self.mode,
            "best": None if self.best is None else self.best.number,
            "runs": [
                {
                    "run": one.number,
                    "objective": None if self._sort_key(one.objective) == math.inf else one.objective,
                    "status": "failed" if one.objective is None else "completed",
                    "overrides": one.overrides,
                }
                for one in self.ranked
            ],
            "averages": [vars(one) for one in self.averages()],
        }

    def text(self) -> str:
        """Return tables for a terminal.

        A star marks the best setting, unless its lead is inside the spread of seeds.
        """
        from areno.run.resume import shown_path  # its imports take long, and --help does not need them

        good, averages = "more" if self.mode == "max" else "less", self.averages()
        parts = [f"{len(self.outcomes)} runs in {shown_path(self.folder)}, by {self.objective} ({good} is better)"]
        rows = [
            [
                "*" if one is self.best and not averages else "",
                str(one.number),
                *(one.overrides.get(key, "") for key in self.swept_keys),
                "failed" if one.objective is None else f"{one.objective:.6g}",
            ]
            for one in self.ranked
        ]
        parts.append(_aligned_table([["", "run", *self.swept_keys, "objective"], *rows]))
        if averages:
            keys = [key for key in self.swept_keys if key != _SEED]
            results = [(title_of_overrides(one.overrides), one.mean, one.std) for one in averages]
            lead, is_inside = describe_lead(*results[:2]) if len(results) > 1 else ("", True)
            rows = [
                [
                    "*" if index == 0 and not is_inside else "",
                    *(one.overrides.get(key, "") for key in keys),
                    f"{one.mean:.6g}",
                    "" if one.std is None else f"{one.std:.2g}",
                    ", ".join(map(str, one.runs)),
                ]
                for index, one in enumerate(averages)
            ]
            parts.append("over seeds\n" + _aligned_table([["", *keys, "mean", "std", "runs"], *rows]))
            parts += [f"{results[0][0]}: {lead[0].lower()}{lead[1:]}"] if lead else []
        for again, number in self.duplicates().items():
            parts.append(f"run {again} has the settings of run {number}, so an average counts the two as one")
        if reasons := [f"  run {one.number}: {one.reason}" for one in self.ranked if one.reason]:
            parts.append("\n".join(["no result", *reasons]))
        if self.best is not None:
            single = "best single run" if averages else "best"
            parts.append(f"{single}: run {self.best.number}, in {shown_path(self.best.folder)}")
        return "\n\n".join(parts)

    def _sort_key(self, value: float | None) -> float:
        """Return the sort key of an objective: a smaller key is better, and infinity stands for no objective."""
        if value is None or math.isnan(value):
            return math.inf
        return -value if self.mode == "max" else value

    def _csv(self) -> str:
        keys = list(dict.fromkeys(key for one in self.outcomes for key in one.overrides))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["run", "objective", *keys])
        for one in self.ranked:
            writer.writerow([one.number, one.objective, *(one.overrides.get(key, "") for key in keys)])
        return text.getvalue()

    def _link_events(self) -> None:
        """Link `tensorboard/<number overrides>` to each run's event files. TensorBoard shows the link's name."""
        folder = self.folder / "tensorboard"
        links = {self._link_name(one): one.folder / "tensorboard" for one in self.outcomes}
        links = {name: events for name, events in links.items() if events.is_dir()}
        if links:
            folder.mkdir(exist_ok=True)
        for link in folder.glob("*"):
            if link.is_symlink() and link.name not in links:  # a new run may change the names of earlier links
                link.unlink()
        for name, events in links.items():
            if not os.path.lexists(folder / name):
                (folder / name).symlink_to(os.path.relpath(events, folder), target_is_directory=True)

    def _link_name(self, one: Outcome) -> str:
        given = (f"{key.rpartition('.')[2]}={one.overrides[key]}" for key in self.swept_keys if key in one.overrides)
        return " ".join([str(one.number), *given]).replace("/", "_")[:_MAX_NAME_CHARS]


def _aligned_table(rows: list[list[str]]) -> str:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(_aligned_row(row, widths).rstrip() for row in rows)


def _aligned_row(row: list[str], widths: list[int]) -> str:
    return "  ".join(["", *(cell.ljust(width) for cell, width in zip(row, widths, strict=True))])
