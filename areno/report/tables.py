"""Runs as tables in a terminal: `areno runs` and `areno compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from areno.errors import ArenoError
from areno.report.differences import differing, run_names
from areno.tracking.headlines import duration, headlines, last_step, seconds
from areno.tracking.reader import RunReader, list_runs

_COLOURS = {"completed": "green", "stopped": "red", "unfinished": "yellow"}


def runs_table(root: str | Path) -> Table:
    """The runs below a folder: state, steps, best number, duration. ArenoError if there is none."""
    runs = list_runs(root)
    if not runs:
        raise ArenoError("there is no run below {}; the setting cluster.fileroot says where runs are", root)
    table = Table("run", "state", right("steps"), "best", right("duration"), title=f"runs in {root}")
    for run in runs:
        try:
            table.add_row(str(run.path.relative_to(Path(root).expanduser())), *_row(run))
        except ArenoError as error:  # a damaged one does not hide the others
            table.add_row(str(run.path), "[red]damaged[/]", "", escape(str(error)), "")
    return table


def _row(run: RunReader) -> list[str]:
    metrics, status = run.metrics(), run.status()
    best = next((line for line in headlines(metrics).values() if line.best is not None), None)
    told = "" if best is None else f"{best.title} {best.best:.4g} at step {best.step}"
    state = f"[{_COLOURS[status]}]{status}[/]" if status else "-"
    return [state, str(last_step(metrics)), told, duration(seconds(run))]


def compare_tables(paths: Sequence[str | Path]) -> list[Table | Text]:
    """What differs between the settings and versions of runs, and their results. ArenoError for what is no run."""
    runs = [RunReader(path) for path in paths]
    names = run_names(runs)
    told: list[Table | Text] = []
    unknown = [name for name, run in zip(names, runs, strict=True) if not run.config]
    if unknown:
        told.append(Text(f"The settings of {', '.join(unknown)} are not known: there is no config.yaml."))
    known = [(name, run) for name, run in zip(names, runs, strict=True) if run.config]
    settings = differing([run.config for _, run in known])
    versions = differing([run.versions for _, run in known])
    if not settings and len(known) > 1:
        told.append(Text("All settings are equal."))
    for what, title, of_runs in (("setting", "settings", settings), ("package", "versions", versions)):
        table = Table(what, *(name for name, _ in known), title=f"{title} that differ")
        for key, values in of_runs.items():
            table.add_row(key, *map(cell, values))
        if of_runs:
            told.append(table)
    results = Table("result", "", *map(right, names), title="results")
    found = [headlines(run.metrics()) for run in runs]
    for name in dict.fromkeys(name for of_run in found for name in of_run):
        lines = [of_run.get(name) for of_run in found]
        title = next(line.title for line in lines if line)
        for kind in ("first", "best", "last"):
            values = [None if line is None else line._asdict()[kind] for line in lines]
            if any(value is not None for value in values):
                results.add_row(title if kind == "first" else "", kind, *map(cell, values))
    return [*told, results]


def right(title: str) -> Column:
    """The heading of a column of numbers."""
    return Column(title, justify="right")


def cell(value: Any) -> str:
    """A value in a table: numbers with four digits, `-` for none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
