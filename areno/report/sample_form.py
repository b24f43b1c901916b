"""The form of a line of rollouts/<step>.jsonl. A run may come from another machine, or its files be damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areno.config.schema.values import show
from areno.errors import ArenoError

_MOST = 2**31  # of token ids, weight versions and lengths


def check_sample(sample: Mapping[str, Any], number: int) -> None:
    """Raise ArenoError if a field of the sample that areno reads does not have its form. number: of the sample."""
    _check(sample, _FORMS, f"sample {number}")
    trajectory = sample.get("trajectory")
    if trajectory is None:
        return
    rows = trajectory.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ArenoError("sample {}: trajectory.rows is {}; a list of rows is expected", number, show(rows))
    for place, row in enumerate(rows):
        where = f"sample {number}, row {place} of its trajectory"
        _check(row, _ROW_FORMS, where)
        if missing := [name for name in ("tokens", "sources", "trained") if row.get(name) is None]:
            raise ArenoError("{}: has no {}", where, missing[0])
        for name in ("sources", "trained"):
            if (n := sum(count for _, count in row[name])) != len(row["tokens"]):
                raise ArenoError("{}: {} are for {} tokens, and it has {}", where, name, n, len(row["tokens"]))


def _check(fields: Mapping[str, Any], forms: Mapping[str, tuple[Callable[[Any], bool], str]], where: str) -> None:
    for name, (is_fine, expected) in forms.items():
        if (value := fields.get(name)) is not None and not is_fine(value):
            raise ArenoError("{}: {} is {}; {} is expected", where, name, show(value), expected)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    # A larger integer, which JSON may have, is no float.
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or _is_number(one) for one in value)


def _are_runs(value: Any) -> bool:
    return isinstance(value, list) and all(_are_counts(pair) and len(pair) == 2 for pair in value)


_COUNT, _NUMBER = (_is_count, "a whole number"), (_is_number, "a number")
_COUNTS, _NUMBERS = (_are_counts, "a list of whole numbers"), (_are_numbers, "a list of numbers")
_RUNS = (_are_runs, "a list of [value, how many tokens]")
_TEXT = (lambda value: isinstance(value, str), "text")
_VERSIONS = (lambda value: _are_counts(value) or _are_runs(value), "a list of whole numbers or of pairs of them")
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": _TEXT,
    "completion": _TEXT,
    "reward": _NUMBER,
    "advantage": _NUMBER,
    "group": _COUNT,
    "row": _COUNT,
    "prompt_tokens": _COUNT,
    "response_tokens": _COUNT,
    "prompt_token_ids": _COUNTS,
    "token_ids": _COUNTS,
    "logprobs": _NUMBERS,
    "token_advantages": _NUMBERS,
    "loss_mask": _NUMBERS,
    "versions": _VERSIONS,
    "trajectory": (lambda value: isinstance(value, dict), "a mapping"),
}
_ROW_FORMS = {"tokens": _COUNTS, "sources": _RUNS, "trained": _RUNS, "logprobs": _NUMBERS, "versions": _VERSIONS}
