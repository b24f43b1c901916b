"""Write the generated parts of the documentation.

Run this module by `make reference` or `python -m areno.cli.reference docs`.

docs/reference/config.md is generated completely from the dataclasses of the recipes. In docs/reference/cli.md, the
tables of flags between two comments are generated, and the other text is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areno.api.algorithms import built_in_algorithms, get_algorithm
from areno.cli.train_flags import HEADINGS, TrainFlag, all_train_flags
from areno.launch.hints import join_by_and
from areno.schema.fields import SettingRow, setting_rows

_TABLES_START, _TABLES_END = "<!-- generated: tables of flags -->", "<!-- end of the generated tables -->"
_HEAD = """\
# Configuration reference

This page lists every setting of every recipe, that is, of every [training algorithm](../recipes.md). Give a setting on
the command line (`actor.optimizer.lr=2e-6`) or in a YAML file. Types and bounds are checked before a run starts, and
all problems are reported at once.

- If only some recipes have a setting, its row ends with their names, as in *Recipes: dpo.* Settings without such an
  ending belong to all recipes.
- If a default or a meaning differs between recipes, the table gives it for each recipe.
- The classes named after "In Python" hold the settings of a section [in a script](../recipes.md#from-python).
- The texts in the column "meaning" refer to other settings. A name with dots, such as `rollout.mem_fraction`, is the
  full name of a setting. A name without a dot, such as `lr`, is a setting of the same section. If the section has no
  setting of this name, it is a setting of the top level, such as `seed`.

The page is generated from the dataclasses in `areno/config/`, `areno/recipes/`, `areno/reward_fns/` and
`areno/services/`, and a test checks that it is up to date.
"""


def settings_page() -> str:
    merged: dict[str, dict[str, SettingRow]] = {}
    for recipe in built_in_algorithms():
        for row in setting_rows(get_algorithm(recipe).config):
            merged.setdefault(row.key, {})[recipe] = row
    sections = dict.fromkeys(key.rpartition(".")[0] for key in merged)
    return _HEAD + "".join(_section_text(name, merged) for name in sections)


def _section_text(name: str, merged: dict[str, dict[str, SettingRow]]) -> str:
    lines = ["", f"## {name or 'Top level'}", ""]
    if name:
        by_recipe = merged[name]
        row = next(iter(by_recipe.values()))
        absent = [recipe for recipe, other in by_recipe.items() if other.default == "null"]
        where = "" if len(absent) == len(by_recipe) else f" ({', '.join(absent)})"
        optional = f" Optional, default null{where}." if absent else ""
        lines += [f"{_setting_help(by_recipe)}{optional}{_recipe_note(by_recipe)}", ""]
    of_section = merged.get(name, {})
    classes = {recipe: row.setting.section for recipe, row in of_section.items()}
    lines += [_class_line(classes or {recipe: get_algorithm(recipe).config for recipe in built_in_algorithms()}), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, by_recipe in merged.items():
        row = next(iter(by_recipe.values()))
        if key.rpartition(".")[0] == name and not row.setting.section:
            lines.append(f"| {' | '.join(_setting_cells(row, by_recipe))} |")
    return "\n".join(lines) + "\n"


def _setting_cells(row: SettingRow, by_recipe: dict[str, SettingRow]) -> Iterator[str]:
    yield f"`{row.key}`"
    yield _escape(row.setting.type_text)
    defaults = {recipe: other.default for recipe, other in by_recipe.items()}
    if len(set(defaults.values())) == 1:
        yield _escape(row.default)
    else:
        yield _escape(", ".join(f"{default} ({recipe})" for recipe, default in defaults.items()))
    yield _escape(_setting_help(by_recipe)) + (_recipe_note(by_recipe) if "." in row.key else "")


def _setting_help(by_recipe: dict[str, SettingRow]) -> str:
    """Return the help text of a setting.

    If recipes have different texts, each text follows the names of its recipes.
    """
    recipes: dict[str, list[str]] = {}
    for recipe, row in by_recipe.items():
        recipes.setdefault(row.setting.help, []).append(recipe)
    if len(recipes) == 1:
        return f"{next(iter(recipes))}."
    return " ".join(f"*With {join_by_and(names)}:* {help}." for help, names in recipes.items())


def _recipe_note(by_recipe: dict[str, SettingRow]) -> str:
    return "" if len(by_recipe) == len(built_in_algorithms()) else f" *Recipes: {', '.join(by_recipe)}.*"


def _class_line(of_recipes: Mapping[str, Any]) -> str:
    """Return a line that names the Python class of a section. If recipes have different classes, it names each."""
    recipes: dict[str, list[str]] = {}
    for recipe, cls in of_recipes.items():
        recipes.setdefault(f"`{cls.__module__}.{cls.__qualname__}`", []).append(recipe)
    if len(recipes) == 1:
        return f"In Python: {next(iter(recipes))}."
    return f"In Python: {', '.join(f'{name} ({join_by_and(names)})' for name, names in recipes.items())}."


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def flag_tables() -> str:
    found = all_train_flags().values()
    return "\n".join(
        _flag_table(heading, [flag for flag in found if flag.row.heading == heading]) for heading in HEADINGS
    )


def _flag_table(heading: str, found: list[TrainFlag]) -> str:
    lines = [f"### {heading}", "", "| flag | setting that the flag sets | default | meaning |", "|---|---|---|---|"]
    if heading == "Basic":
        names = ", ".join(built_in_algorithms())
        about = f"Algorithm: {names}, or one of another installed package."
        default = "gspo; with `--resume`, the algorithm of the run"
        lines.append(f"| `--algo TEXT` | the recipe | {default} | {about} |")
    return "\n".join([*lines, *map(_flag_row, found)]) + "\n"


def _flag_row(flag: TrainFlag) -> str:
    name = f"{flag.name} {flag.type_text}".strip() + (f", --no-{flag.name[2:]}" if flag.negative else "")
    keys = dict.fromkeys(row.key for rows in flag.keys.values() for row in rows)
    only = "" if len(flag.keys) == len(built_in_algorithms()) else f" *Algorithms: {', '.join(flag.keys)}.*"
    cells = [f"`{name}`", ", ".join(f"`{key}`" for key in keys), flag.default, f"{flag.description}.{only}"]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def generated_pages(docs: Path) -> dict[Path, str]:
    """Return the current text of each page that has generated parts."""
    page = docs / "reference/cli.md"
    before, start, rest = page.read_text(encoding="utf-8").partition(_TABLES_START)
    _, end, after = rest.partition(_TABLES_END)
    if not start or not end:
        raise ValueError(f"{page} lacks {_TABLES_START if not start else _TABLES_END}")
    return {
        docs / "reference/config.md": settings_page(),
        page: f"{before}{start}\n\n{flag_tables()}\n{end}{after}",
    }


if __name__ == "__main__":
    for file, text in generated_pages(Path(sys.argv[1])).items():
        file.write_text(text, encoding="utf-8")
