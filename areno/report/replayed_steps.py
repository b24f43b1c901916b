"""Recorded steps of a run, computed again and compared with their records bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from areno.launch.compose import mention_version
from areno.run.recorded_run import Base, RecordedRun, compute_steps, scratch_folder
from areno.tracking.reader import RunReader

_MEASURED = ("time/", "memory/", "rollout/draft", "rollout/accepted_tokens", "rollout/frac_steps_drafted")
_MEASURED_ENDS = ("tokens_per_second", "memory_gib", "_time_s")


@dataclass(frozen=True)
class Difference:
    """A part of a step in which the replay differs from the record. `largest` is None if it is not a number."""

    name: str
    n_different: int
    n: int
    largest: float | None


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was computed again."""

    step: int
    differences: list[Difference]
    n_compared: int
    devices: list[str]  # of the replay
    recorded_devices: list[str]
    error: str | None = None  # that ended the step in the replay
    recorded_error: str | None = None  # that ended the step, and the run

    @property
    def has_equal_end(self) -> bool:
        """Whether neither ended with an error, or both with one of the same kind. Texts may have folders and times."""
        kinds = {text and text.partition(":")[0] for text in (self.error, self.recorded_error)}
        return len(kinds) == 1

    @property
    def is_equal(self) -> bool:
        return not self.differences and self.has_equal_end


def replay_steps(run: RunReader, step: int, device: str = "auto") -> tuple[Base, list[ReplayedStep]]:
    """Compute all steps from the nearest state up to `step` again, and compare each with its record."""
    recorded = RecordedRun(run.path)
    base = recorded.base_of(step)
    with mention_version(run.path), scratch_folder() as scratch:
        found, _ = compute_steps(recorded, base, step, scratch, device)
    return base, [compare_records(recorded.read(number), tree) for number, tree in sorted(found.items())]


def compare_records(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> ReplayedStep:
    """Compare a step in a replay with its record. Times and memory are not compared."""
    before, now = dict(values_of(recorded)), dict(values_of(replayed))
    names = list(dict.fromkeys([*before, *now]))
    differences = [found for name in names if (found := _difference(name, before.get(name), now.get(name)))]
    return ReplayedStep(
        step=recorded["step"],
        differences=differences,
        n_compared=len(names),
        devices=replayed["devices"],
        recorded_devices=recorded["devices"],
        error=replayed.get("error"),
        recorded_error=recorded.get("error"),
    )


def values_of(tree: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the values of each result of a step, in the order in which the step computes them."""
    for number, update in enumerate(tree["updates"]):
        role = update["role"] if number == 0 or update["role"] != tree["updates"][number - 1]["role"] else f"{number}"
        for name, values in update.items():
            if name != "role":
                yield f"{role}: {name}", np.atleast_1d(np.asarray(values))
    for name, value in tree["metrics"].items():
        if not name.startswith(_MEASURED) and not name.endswith(_MEASURED_ENDS):
            yield name, np.array([math.nan if math.isnan(value) else value])  # a record has one kind of NaN
    for name, parts in tree["digests"].items():
        yield f"digest of {name}", parts


def _difference(name: str, before: np.ndarray | None, now: np.ndarray | None) -> Difference | None:
    if before is None or now is None or before.shape != now.shape or before.dtype != now.dtype:
        n = max(0 if values is None else len(values) for values in (before, now))
        return Difference(name, n, n, None)
    bits = [np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1) for values in (before, now)]
    differs = (bits[0] != bits[1]).any(axis=1)
    if not differs.any():
        return None
    is_number = before.dtype.kind == "f"
    largest = None
    if is_number:
        with np.errstate(invalid="ignore"):
            sizes = np.abs(before[differs] - now[differs])
        largest = float(np.max(sizes[~np.isnan(sizes)], initial=0.0)) if not np.isnan(sizes).all() else math.nan
    return Difference(name, int(differs.sum()), len(before), largest)
