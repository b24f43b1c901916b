"""Reads the files that describe a run or a sweep: settings, command line, versions and algorithm.

`new_run.py` writes them. They may come from another machine or another version, or be damaged, so each reader checks
the form of its file. All of them raise ArenoError with the name of the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areno.errors import ArenoError
from areno.files.reading import beginning_of, content_of
from areno.files.small_yaml import YamlFault, fault, plain_yaml

SETTINGS, OVERRIDES, VERSIONS = "config.yaml", "overrides.yaml", "versions.json"
SWEEP = "multirun.yaml"  # written by Hydra
RECIPE = "# Recipes: "  # as in the files of conf/


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a run as nested dictionaries; {} without config.yaml."""
    found = _mapping(folder / SETTINGS, _yaml(folder / SETTINGS))
    return {name: value for name, value in found.items() if name != "defaults"}  # Hydra's, not a setting


def overrides_of(folder: Path) -> list[str]:
    """Return the settings of the command lines that a run was started with, such as "seed=2"."""
    return _lines(folder / OVERRIDES, _yaml(folder / OVERRIDES))


def sweep_of(folder: Path) -> list[str]:
    """Return the settings of the command line that a sweep was started with, in the form that Hydra got them."""
    found = _yaml(folder / SWEEP)
    for name in ("hydra", "overrides", "task"):
        found = _mapping(folder / SWEEP, found).get(name)
    return _lines(folder / SWEEP, found)


def versions_of(folder: Path) -> dict[str, str | None]:
    """Return package -> version, and the git revision of areno; {} without versions.json."""
    path = folder / VERSIONS
    content = content_of(path)
    try:
        found = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArenoError("{} cannot be read: {}", path, fault(error)) from error
    return {name: None if value is None else str(value) for name, value in _mapping(path, found).items()}


def recipe_of(folder: Path) -> str:
    """Return the recipe that a command has written into config.yaml; "" for the run of a script."""
    first, _, _ = beginning_of(folder / SETTINGS).decode("utf-8", "replace").partition("\n")
    return first.removeprefix(RECIPE).strip() if first.startswith(RECIPE) else ""


def _yaml(path: Path) -> Any:
    try:
        return plain_yaml(path)
    except YamlFault as error:
        raise ArenoError("{} cannot be read: {}", path, error) from error


def _mapping(path: Path, found: Any) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ArenoError("{} cannot be read: it holds a {}, where a mapping is expected", path, _kind(found))
    return {str(name): value for name, value in found.items()}


def _lines(path: Path, found: Any) -> list[str]:
    if found is None:
        return []
    if not isinstance(found, list) or any(isinstance(line, (list, dict)) for line in found):
        raise ArenoError("{} cannot be read: it holds a {}, where a list of texts is expected", path, _kind(found))
    return [str(line) for line in found]


def _kind(value: Any) -> str:
    return {dict: "mapping", list: "list", str: "text"}.get(type(value), "single value")
