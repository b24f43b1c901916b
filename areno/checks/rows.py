"""Checks of the rows of the run: their forms, and which are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from areno.checks.findings import Finding, green, red
from areno.checks.subject import Subject

_MOST_DROPPED = 0.5  # of the rows: more than that are hardly meant
_SHOWN = 60  # characters of a value


def forms_of_rows(subject: Subject) -> Iterator[Finding]:
    """Show an example of each form of row in the files, and what it becomes."""
    for dataset in subject.datasets:
        forms: dict[tuple[Any, ...], list[Any]] = {}
        for encoded in subject.rows_of(dataset):
            forms.setdefault(_form(encoded.given), []).append(encoded)
        details = []
        for rows in forms.values():
            first = next((row for row in rows if row.item is not None), rows[0])
            details.append(f"{len(rows)} rows such as row {first.index}: {_fields(first.given)}")
            if first.row is not first.given:
                details.append(f"    read as {_fields(first.row)}")
            made = "left out" if first.item is None else f"{first.n_tokens} tokens"
            details.append(f"    becomes {made}")
        n_rows = len(dataset.loader.rows)
        text = f"{dataset.key}: {n_rows:,} rows in {len(forms)} form{'s' * (len(forms) > 1)}"
        yield green("row-forms", text, details)


def dropped_rows(subject: Subject) -> Iterator[Finding]:
    """Count the rows that the run leaves out."""
    for dataset in subject.datasets:
        rows = subject.rows_of(dataset)
        dropped = [row for row in rows if row.item is None]
        if not dropped:
            longest = max(row.n_tokens for row in rows)
            yield green("dropped-rows", f"{dataset.key}: no row is left out; the longest has {longest} tokens")
            continue
        reasons = Counter(row.dropped for row in dropped)
        details = [
            f"{count} rows: {reason}, the first is row {next(row.index for row in dropped if row.dropped == reason)}"
            for reason, count in reasons.most_common()
        ]
        share = len(dropped) / len(rows)
        verdict = red if share > _MOST_DROPPED else green
        yield verdict("dropped-rows", f"{dataset.key}: {share:.1%} of the rows are left out", details)


def _form(row: Any) -> tuple[Any, ...]:
    """Return what rows of one form share: the names and types of their fields."""
    if not isinstance(row, Mapping):
        return (type(row).__name__,)
    return tuple(sorted((str(name), _kind(value)) for name, value in row.items() if value is not None))


def _kind(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return f"list of {', '.join(sorted(map(str, value[0])))}"
    return type(value).__name__


def _fields(row: Any) -> str:
    if not isinstance(row, Mapping):
        return _shown(row)
    return ", ".join(f"{name}: {_shown(value)}" for name, value in row.items() if value is not None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
