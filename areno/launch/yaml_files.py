"""Find the YAML files that a run can use: tasks, experiments and choices of config groups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from areno.api.algorithms import built_in_algorithms
from areno.files.paths import data_root

_RECIPES = "# Recipes: "


def task_files(config_dir: Path | None = None) -> dict[str, Path]:
    """Return {name for --config-name: path} of the files of conf/ and of the user's folder, which has priority."""
    return _yaml_files([data_root() / "conf", *([config_dir] if config_dir else [])])


def experiment_files() -> dict[str, Path]:
    """Return the configurations of tested runs, the files of recipes/, as {name for --config-name: path}."""
    return _yaml_files([data_root() / "recipes"])


def config_groups(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Return the choices of each config group, such as {"actor": ["qwen3-0.6b", ...], "actor/adv_norm": [...]}."""
    found: dict[str, set[str]] = {}
    for base in (data_root() / "conf", data_root() / "recipes", *([config_dir] if config_dir else [])):
        # Sections have at most three levels. A full search of the user's folder could take long.
        for file in (file for pattern in ("*/*.yaml", "*/*/*.yaml", "*/*/*/*.yaml") for file in base.glob(pattern)):
            found.setdefault(file.parent.relative_to(base).as_posix(), set()).add(file.stem)
    return {group: sorted(choices) for group, choices in sorted(found.items())}


def variant_files(config_dir: Path | None = None) -> dict[str, Path]:
    """Return the choices of the config group `variant`, which are named methods of the literature."""
    return _yaml_files([base / "variant" for base in (data_root() / "conf", *([config_dir] if config_dir else []))])


def headline(file: Path) -> str:
    """Return the first comment line of a YAML file, which says what the file is for. "" without a comment."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next(
        (line.lstrip("# ").rstrip() for line in lines if line.startswith("#") and not line.startswith("# @")), ""
    )


def recipes_of(file: Path) -> list[str]:
    """Return the recipes of the line `# Recipes: grpo, gspo` of a YAML file. `all` stands for all of areno."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    told = next((line.removeprefix(_RECIPES) for line in lines if line.startswith(_RECIPES)), "")
    names = [name.strip() for name in told.split(",") if name.strip()]
    return built_in_algorithms() if names == ["all"] else names


def _yaml_files(folders: Iterable[Path]) -> dict[str, Path]:
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
