"""What differs between runs: their names, their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areno.config.schema.values import flat
from areno.tracking.reader import RunReader

_LONGEST = 48  # characters of what a name says about a run of a sweep
NAMES = ("trial_name", "experiment_name")  # they tell runs apart and say nothing about them


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each of the configurations, for the keys whose values are not all equal.

    A key that a configuration does not have is None there. The names of the runs do not count.
    """
    settings = [flat(config) for config in configs]
    keys = dict.fromkeys(key for one in settings for key in one if key not in NAMES)
    values = {key: [one.get(key) for one in settings] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell them apart."""
    parts = [path.absolute().parts for path in paths]
    names = [str(path) for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of[-length:]) for of in parts]
        if len(set(names)) == len(names):
            break
    return names


def run_names(runs: Sequence[RunReader]) -> list[str]:
    """Short names. A run of a sweep is also called by the settings that not all of these runs were given.

    These are cut off where they are long; the number of the run in front of them tells it apart.
    """
    names = short_names([run.path for run in runs])
    given = [set(run.overrides) for run in runs if run.sweep]
    common = set.intersection(*given) if given else set()
    for place, run in enumerate(runs):
        own = [line for line in run.overrides if line not in common] if run.sweep else []
        about = " ".join(map(_in_short, own))
        about = about if len(about) <= _LONGEST else f"{about[: _LONGEST - 3]}..."
        names[place] = f"{names[place]} {about}".rstrip()
    return names


def _in_short(override: str) -> str:
    """`lr=0.1` of `actor.optimizer.lr=0.1`, and `path=rows.jsonl` of `train_dataset.path=/data/rows.jsonl`."""
    key, equals, value = override.partition("=")
    return key.rpartition(".")[2] + equals + value.rstrip("/").rpartition("/")[2]
