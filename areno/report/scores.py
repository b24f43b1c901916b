"""Rewards of samples as tables in a terminal: `areno reward`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box, markup, table

_SHOWN_CHARS = 48


def _part_names(outcomes: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome.parts))


def samples_table(rows: Sequence[Any], records: Sequence[Any], outcomes: Sequence[Any], most: int) -> table.Table:
    """Return a line for each of the first samples: its reward, the parts of it, and what was recorded before.

    Args:
        rows: The samples as they were recorded, with the reward that they were given then.
        records: The same samples as reward functions get them.
        outcomes: What the functions made of them.
        most: How many samples are shown.
    """
    names, recorded = _part_names(outcomes[:most]), any("reward" in row for row in rows[:most])
    shown = table.Table(box=box.SIMPLE)
    for name in ["sample", "reward", *names, *(["recorded"] if recorded else [])]:
        shown.add_column(name, justify="right")
    shown.add_column("completion", no_wrap=True)
    for number, (row, record, outcome) in enumerate(zip(rows[:most], records, outcomes, strict=False)):
        reward = outcome.status if outcome.value is None else f"{outcome.value:.4g}"
        parts = (f"{outcome.parts[name]:.4g}" if name in outcome.parts else "" for name in names)
        before = ["" if (value := _recorded(row)) is None else f"{value:.4g}"] if recorded else []
        text = " ".join(record.completion.split())[:_SHOWN_CHARS]
        shown.add_row(str(number), reward, *parts, *before, markup.escape(text))
    return shown


def _recorded(row: Mapping[str, Any]) -> float | None:
    """Return the reward that a row was given before; None if there is no such number."""
    value = row.get("reward")
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def summary_table(outcomes: Sequence[Any]) -> table.Table:
    """Return mean, spread and bounds of the rewards and of each part."""
    shown = table.Table("", "mean", "std", "min", "max", "samples", box=box.SIMPLE)
    values: dict[str, list[float]] = {"reward": [each.value for each in outcomes if each.value is not None]}
    for name in _part_names(outcomes):
        values[f"  {name}"] = [each.parts[name] for each in outcomes if name in each.parts]
    for name, of in values.items():
        numbers = [np.mean(of), np.std(of), np.min(of), np.max(of)] if of else []
        shown.add_row(name, *(f"{number:.4g}" for number in numbers), *[""] * (4 - len(numbers)), str(len(of)))
    return shown


def count_lines(rows: Sequence[Any], outcomes: Sequence[Any]) -> Iterator[str]:
    """Yield how many rewards are at least 1, and how many differ from those that were recorded."""
    right = sum(each.value is not None and each.value >= 1.0 - 1e-6 for each in outcomes)
    yield f"{right} of {len(outcomes)} rewards are at least 1 (accuracy)"
    pairs = [(_recorded(row), each.value) for row, each in zip(rows, outcomes, strict=True)]
    pairs = [pair for pair in pairs if None not in pair]
    if pairs:
        differ = sum(abs(before - now) > 1e-6 for before, now in pairs)
        yield f"{differ} of {len(pairs)} rewards differ from those that were recorded"
