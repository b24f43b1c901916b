"""Tables for the terminal: differences between runs (`areno compare`), and rewards of samples (`areno reward`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box, markup, table
from rich.table import Table
from rich.text import Text

from areno.report.terminal import cell_text, right_aligned
from areno.report.verdict import differences, differing_settings, run_names
from areno.tracking.reader import RunReader, headlines


def compare_tables(paths: Sequence[str | Path]) -> list[Table | Text]:
    """Return tables of the settings that differ, of the package versions that differ, and of the results."""
    runs = [RunReader(path) for path in paths]
    names = run_names(runs)
    tables: list[Table | Text] = []
    unknown = [name for name, run in zip(names, runs, strict=True) if not run.config]
    if unknown:
        tables.append(Text(f"The settings of {', '.join(unknown)} are not known: there is no config.yaml."))
    known = [(name, run) for name, run in zip(names, runs, strict=True) if run.config]
    settings = differences([run for _, run in known])
    versions = differing_settings([run.versions for _, run in known])
    if not settings and len(known) > 1:
        tables.append(Text("All settings are equal."))
    for what, title, of_runs in (("setting", "settings", settings), ("package", "versions", versions)):
        table = Table(what, *(name for name, _ in known), title=f"{title} that differ")
        for key, values in of_runs.items():
            table.add_row(key, *map(cell_text, values))
        if of_runs:
            tables.append(table)
    results = Table("result", "", *map(right_aligned, names), title="results")
    found = [headlines(run.curves()) for run in runs]
    for name in dict.fromkeys(name for of_run in found for name in of_run):
        lines = [of_run.get(name) for of_run in found]
        title = next(line.title for line in lines if line)
        for kind in ("first", "best", "last"):
            values = [None if line is None else line._asdict()[kind] for line in lines]
            if any(value is not None for value in values):
                results.add_row(title if kind == "first" else "", kind, *map(cell_text, values))
    return [*tables, results]


_SHOWN_CHARS = 48


def _reward_component_names(outcomes: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome.parts))


def samples_table(rows: Sequence[Any], records: Sequence[Any], outcomes: Sequence[Any], most: int) -> table.Table:
    """Return a table of the first `most` samples: reward, its parts, recorded reward and completion."""
    names, recorded = _reward_component_names(outcomes[:most]), any("reward" in row for row in rows[:most])
    shown = table.Table(box=box.SIMPLE)
    for name in ["sample", "reward", *names, *(["recorded"] if recorded else [])]:
        shown.add_column(name, justify="right")
    shown.add_column("completion", no_wrap=True)
    for number, (row, record, outcome) in enumerate(zip(rows[:most], records, outcomes, strict=False)):
        reward = outcome.status if outcome.value is None else f"{outcome.value:.4g}"
        parts = (f"{outcome.parts[name]:.4g}" if name in outcome.parts else "" for name in names)
        before = ["" if (value := _recorded_reward(row)) is None else f"{value:.4g}"] if recorded else []
        text = " ".join(record.completion.split())[:_SHOWN_CHARS]
        shown.add_row(str(number), reward, *parts, *before, markup.escape(text))
    return shown


def _recorded_reward(row: Mapping[str, Any]) -> float | None:
    value = row.get("reward")
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def summary_table(outcomes: Sequence[Any]) -> table.Table:
    """Return a table with mean, standard deviation, minimum and maximum of the rewards and of each reward component."""
    shown = table.Table("", "mean", "std", "min", "max", "samples", box=box.SIMPLE)
    values: dict[str, list[float]] = {"reward": [each.value for each in outcomes if each.value is not None]}
    for name in _reward_component_names(outcomes):
        values[f"  {name}"] = [each.parts[name] for each in outcomes if name in each.parts]
    for name, of in values.items():
        numbers = [np.mean(of), np.std(of), np.min(of), np.max(of)] if of else []
        shown.add_row(name, *(f"{number:.4g}" for number in numbers), *[""] * (4 - len(numbers)), str(len(of)))
    return shown


def agreement_lines(rows: Sequence[Any], outcomes: Sequence[Any]) -> Iterator[str]:
    """Yield sentences: how many rewards are at least 1, and how many differ from the recorded ones."""
    right = sum(each.value is not None and each.value >= 1.0 - 1e-6 for each in outcomes)
    yield f"{right} of {len(outcomes)} rewards are at least 1 (accuracy)"
    pairs = [(_recorded_reward(row), each.value) for row, each in zip(rows, outcomes, strict=True)]
    pairs = [pair for pair in pairs if None not in pair]
    if pairs:
        differ = sum(abs(before - now) > 1e-6 for before, now in pairs)
        yield f"{differ} of {len(pairs)} rewards differ from those that were recorded"
