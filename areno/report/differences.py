"""What differs between runs: their names, their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("trial_name", "experiment_name")  # they tell runs apart and say nothing about them


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dictionary with dotted keys. A list is one value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


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
