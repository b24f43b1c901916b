"""Hints about keys that a recipe does not have: keys of other recipes, and keys of AReaL without a counterpart."""

from __future__ import annotations

from pathlib import Path

from areno.api.algorithms import get_algorithm
from areno.config.schema.fields import rows
from areno.files.small_yaml import plain_yaml
from areno.launch.areal import NOT_HERE

RECIPES = ("sft", "dpo", "grpo", "gspo", "ppo")


def hint(key: str, variant: tuple[str, Path] | None = None) -> str:
    """Return the end of a message about the unknown setting `key`; "" where nothing is known of it.

    Args:
        key: the dotted name of the setting. `key=value` asks about a value that the setting does not take.
        variant: the chosen variant and its file, which may have set the key.
    """
    if key in NOT_HERE:
        return f"; {NOT_HERE[key]}"
    names = _recipes_with(key)
    told = f"; it is a setting of {listed(names)}" if names else ""
    section, _, name = key.partition(".")
    if not names and section in ("ref", "critic") and _recipes_with(f"actor.{name}"):
        told = f"; {section} has none of its own, see actor.{name}"
    return told + (f"; variant={variant[0]} sets it" if variant and _sets(variant[1], key) else "")


def _recipes_with(key: str) -> list[str]:
    """Return the recipes that have a setting."""
    return [name for name in RECIPES if any(row.key == key for row in rows(get_algorithm(name).config))]


def _sets(file: Path, key: str) -> bool:
    """Return whether a YAML file has a value for a dotted key."""
    value = plain_yaml(file)
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def listed(names: list[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
