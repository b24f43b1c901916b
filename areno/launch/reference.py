"""Generates the configuration reference from the dataclasses.

python -m areno.launch.reference > docs/reference/config.md
"""

from __future__ import annotations

from collections.abc import Iterator

from areno.api.algorithms import get_algorithm
from areno.config.schema.fields import Row, rows
from areno.launch.elsewhere import RECIPES

_HEAD = """\
# Configuration reference

This page lists every setting of every recipe. Set it on the command line (`actor.optimizer.lr=2e-6`) or in a YAML file.
Types and bounds are checked before a run starts, and all problems are reported at once. *Recipes* names the recipes
that have a setting, unless all of them do. If a default differs between recipes, each one is given. The page is
generated from the dataclasses in `areno/config/` and `areno/recipes/`, and a test checks that it is up to date.
"""


def markdown() -> str:
    """The whole page."""
    merged: dict[str, dict[str, Row]] = {}
    for recipe in RECIPES:
        for row in rows(get_algorithm(recipe).config):
            merged.setdefault(row.key, {})[recipe] = row
    sections = dict.fromkeys(key.rpartition(".")[0] for key in merged)
    return _HEAD + "".join(_section(name, merged) for name in sections)


def _section(name: str, merged: dict[str, dict[str, Row]]) -> str:
    lines = ["", f"## {name or 'Top level'}", ""]
    if name:
        by_recipe = merged[name]
        row = next(iter(by_recipe.values()))
        absent = [recipe for recipe, other in by_recipe.items() if other.default == "null"]
        where = "" if len(absent) == len(by_recipe) else f" ({', '.join(absent)})"
        optional = f" Optional, default null{where}." if absent else ""
        lines += [f"{row.setting.help}.{optional}{_recipes(by_recipe)}", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, by_recipe in merged.items():
        row = next(iter(by_recipe.values()))
        if key.rpartition(".")[0] == name and not row.setting.section:
            lines.append(f"| {' | '.join(_cells(row, by_recipe))} |")
    return "\n".join(lines) + "\n"


def _cells(row: Row, by_recipe: dict[str, Row]) -> Iterator[str]:
    yield f"`{row.key}`"
    yield _escape(row.setting.type_text)
    defaults = {recipe: other.default for recipe, other in by_recipe.items()}
    if len(set(defaults.values())) == 1:
        yield _escape(row.default)
    else:
        yield _escape(", ".join(f"{default} ({recipe})" for recipe, default in defaults.items()))
    yield _escape(row.setting.help) + (_recipes(by_recipe) if "." in row.key else "")


def _recipes(by_recipe: dict[str, Row]) -> str:
    return "" if len(by_recipe) == len(RECIPES) else f" *Recipes: {', '.join(by_recipe)}.*"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
