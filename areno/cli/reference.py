"""Write the generated parts of the documentation.

Run this module by `make reference` or `python -m areno.cli.reference docs`.

docs/reference/config.md is generated completely from the dataclasses of the recipes. In docs/reference/cli.md, the
tables of flags between two comments are generated, and the other text is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from areno.api.algorithms import built_in_algorithms, get_algorithm
from areno.cli.train_flags import HEADINGS, TrainFlag, all_train_flags
from areno.launch.hints import join_by_and
from areno.schema.fields import SettingRow, setting_rows, settings

_TABLES_START, _TABLES_END = "<!-- generated: tables of flags -->", "<!-- end of the generated tables -->"
_HEAD = """\
# Configuration reference

Every setting of every [recipe](../recipes.md). Give a setting on the command line (`actor.optimizer.lr=2e-6`) or in a
YAML file. Types and bounds are checked before a run starts, and all problems are reported at once.

- A row or section in which names of recipes stand in italics, as in *dpo, kto*, is in these recipes only. *RL* stands
  for distill, grpo, gspo, online_dpo and ppo.
- `float in (0, 1]`: more than 0, at most 1.
- "In Python" is the class of a section [in a script](../recipes.md#from-python). Where a section has settings of
  another one, with the same meaning and default, it names them and links to it.
- A name in a text, such as `rollout.mem_fraction`, is that of a setting. Without a dot it is one of the same section or
  else of the top level.

This page is generated from `areno/config/`, `areno/recipes/`, `areno/reward_fns/` and `areno/services/`.
"""
_FEW = 2
"""A nested section with at most this many settings has its rows in the table of the section around it."""
_SIGNS = {"ge": "[", "gt": "(", "le": "]", "lt": ")"}
_ALONE = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_OR_NULL = " or null"
Merged = dict[str, dict[str, SettingRow]]  # key -> recipe -> row


def settings_page() -> str:
    merged: Merged = {}
    for recipe in built_in_algorithms():
        for row in setting_rows(get_algorithm(recipe).config):
            merged.setdefault(row.key, {})[recipe] = row
    tables: dict[str, list[str]] = {}  # section -> keys of its table
    inner = {_section_of(key) for key in merged}
    for key, by_recipe in merged.items():
        if not _row(by_recipe).setting.section:
            tables.setdefault(_section_of(key), []).append(key)
    for name, keys in list(tables.items()):
        around = _section_of(name)
        if around and len(keys) <= _FEW and not any(_section_of(each) == name for each in inner):
            tables[around] += [name, *tables.pop(name)]
    return _HEAD + "".join(_section_text(name, merged, tables) for name in tables)


def _section_of(key: str) -> str:
    return key.rpartition(".")[0]


def _row(by_recipe: dict[str, SettingRow]) -> SettingRow:
    return next(iter(by_recipe.values()))


def _section_text(name: str, merged: Merged, tables: dict[str, list[str]]) -> str:
    of_section = merged.get(name, {})
    classes = {recipe: row.setting.section for recipe, row in of_section.items()}
    about = _class_text(classes or {recipe: get_algorithm(recipe).config for recipe in built_in_algorithms()})
    lines = ["", f"## {name or 'Top level'}", "", f"{_section_help(of_section)} {about}".strip(), ""]
    twin, shared = _twin(name, merged, tables)
    own = [key for key in tables[name] if key.rpartition(".")[2] not in shared or _section_of(key) != name]
    if shared:
        link = f"[{twin}](#{twin.replace('.', '')})"
        names = ", ".join(f"`{each}`" for each in shared)
        lines += [f"As in {link}: {names}." if own else f"The settings of {link}.", ""]
    if own:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [_setting_line(key, name, merged) for key in own]
    return "\n".join(lines).rstrip("\n") + "\n"


def _setting_line(key: str, section: str, merged: Merged) -> str:
    by_recipe = merged[key]
    is_section = bool(_row(by_recipe).setting.section)
    note = "" if list(by_recipe) == list(merged.get(_section_of(key), {})) else _recipe_note(by_recipe)
    if is_section:
        classes = {recipe: row.setting.section for recipe, row in by_recipe.items()}
        default = "`null`" if _row(by_recipe).default == "null" else ""
        cells = ["section", default, f"{_setting_help(by_recipe)} {_class_text(classes)}{note}"]
    else:
        cells = [_type(_row(by_recipe)), _default(by_recipe), f"{_setting_help(by_recipe)}{note}"]
    return f"| `{key}` | {' | '.join(map(_escape, cells))} |"


def _twin(name: str, merged: Merged, tables: dict[str, list[str]]) -> tuple[str, list[str]]:
    """Return the earlier section that has the most equal settings, and their names."""
    best: tuple[str, list[str]] = ("", [])
    for other in tables:
        if other == name:
            break
        equal = [key.rpartition(".")[2] for key in tables[name] if _is_equal(key, name, other, merged)]
        if name and other and len(equal) > len(best[1]):
            best = (other, equal)
    return best if len(best[1]) > _FEW else ("", [])


def _is_equal(key: str, name: str, other: str, merged: Merged) -> bool:
    there = merged.get(f"{other}.{key.rpartition('.')[2]}")
    if _section_of(key) != name or there is None or _row(merged[key]).setting.section:
        return False
    return _cells(merged[key]) == _cells(there)


def _cells(by_recipe: dict[str, SettingRow]) -> tuple[str, str, str]:
    return _type(_row(by_recipe)), _default(by_recipe), _setting_help(by_recipe)


def _type(row: SettingRow) -> str:
    """Return the type with its bounds as an interval: `int > 0 or null`, `float in (0, 1]`."""
    setting, bounds = row.setting, row.setting.bounds
    low = next((name for name in ("ge", "gt") if name in bounds), "")
    high = next((name for name in ("le", "lt") if name in bounds), "")
    plain = setting.plain_type_text
    if low and high:
        words = f" in {_SIGNS[low]}{bounds[low]}, {bounds[high]}{_SIGNS[high]}"
    elif low or high:
        words = f" {_ALONE[low or high]} {bounds[low or high]}"
    else:
        words = ""
    return f"{plain.removesuffix(_OR_NULL)}{words}{_OR_NULL}" if plain.endswith(_OR_NULL) else plain + words


def _default(by_recipe: dict[str, SettingRow]) -> str:
    recipes: dict[str, list[str]] = {}
    for recipe, row in by_recipe.items():
        default = row.default.strip("'") or row.default
        recipes.setdefault(default if default in ("", "required") else f"`{default}`", []).append(recipe)
    if len(recipes) == 1:
        return next(iter(recipes))
    return ", ".join(f"{default} ({join_by_and(names)})" for default, names in recipes.items())


def _section_help(by_recipe: dict[str, SettingRow]) -> str:
    if not by_recipe:
        return ""
    absent = [recipe for recipe, row in by_recipe.items() if row.default == "null"]
    where = "" if len(absent) == len(by_recipe) else f" ({', '.join(absent)})"
    optional = f" Default: null{where}." if absent else ""
    return f"{_setting_help(by_recipe)}{optional}{_recipe_note(by_recipe)}"


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


def _recipe_note(by_recipe: Iterable[str]) -> str:
    names = list(by_recipe)
    if names == built_in_algorithms():
        return ""
    return f" *{'RL' if names == _rl() else ', '.join(names)}*"


@cache
def _rl() -> list[str]:
    """Return the recipes that sample."""
    return [name for name in built_in_algorithms() if "gconfig" in settings(get_algorithm(name).config)]


def _class_text(of_recipes: Mapping[str, Any]) -> str:
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
    lines = [f"### {heading}", "", "| flag | setting | default | remarks |", "|---|---|---|---|"]
    if heading == "Basic":
        names = ", ".join(built_in_algorithms())
        about = f"{names}, or one of another installed package"
        lines.append(f"| `--algo TEXT` | the recipe | gspo; with `--resume`, the algorithm of the run | {about} |")
    return "\n".join([*lines, *map(_flag_row, found)]) + "\n"


def _flag_row(flag: TrainFlag) -> str:
    name = f"{flag.name} {flag.type_text.replace('|', ', ')}".strip() + (
        f", --no-{flag.name[2:]}" if flag.negative else ""
    )
    keys = dict.fromkeys(row.key for rows in flag.keys.values() for row in rows)
    about = f"{flag.declared.help}." if flag.declared.help else ""
    cells = [
        f"`{name}`",
        ", ".join(f"`{key}`" for key in keys),
        flag.default,
        f"{about}{_recipe_note(flag.keys)}".strip(),
    ]
    return f"| {' | '.join(map(_escape, cells))} |"


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
