"""The pages of the documentation: their code blocks, tables, settings and metrics."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from areno.api import get_algorithm
from areno.api.algorithms import built_in_algorithms
from areno.cli.__main__ import main
from areno.launch.command import run as run_recipe
from areno.schema.fields import SettingRow, setting_rows
from areno.schema.values import InvalidValue

ROOT = Path(__file__).parents[2]


BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def run_here(command: str, *more: str) -> int:
    """The exit code of a command for a recipe, without a new process that imports everything again."""
    words = [*shlex.split(command, comments=True), *more]
    if words[0] == "areno":
        return main(words[1:])
    module = words[2].removeprefix("areno.recipes.")
    return run_recipe(get_algorithm(module), f"python -m {words[2]}", words[3:])


def documented_metrics() -> set[str]:
    """The names in the table of docs/runs.md."""
    names = set()
    for cell in re.findall(r"^\| `(\w+/[^`]+)`", (ROOT / "docs" / "runs.md").read_text(encoding="utf-8"), re.M):
        namespace, rest = cell.split("/", 1)
        first, *others = rest.split()
        names.add(f"{namespace}/{first}")
        for name in others:
            names.add(f"{namespace}/{first.rsplit('_', 1)[0]}{name}" if name[0] == "_" else f"{namespace}/{name}")
    return names


WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


@cache
def known(recipe: str) -> dict[str, SettingRow]:
    """The settings of a recipe."""
    return {row.key: row for row in setting_rows(get_algorithm(recipe).config)}


def text_of(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def codes(text: str) -> list[str]:
    """What is written as `code`."""
    return re.findall(r"`([^`\n]+)`", text)


def value_of(text: str) -> Any:
    """The value of a setting that is written as on the command line, or in Python."""
    try:
        return WORDS[text] if text in WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def is_setting(code: str) -> bool:
    """Whether code means to be a setting: `section.key`, `section.key=value` or `key=value`."""
    key = code.partition("=")[0]
    tops = {key.partition(".")[0] for recipe in built_in_algorithms() for key in known(recipe)}
    is_written_so = re.fullmatch(r"\w+(\.\w+)*(=\S+)?", code) is not None and ("." in key or "=" in code)
    return is_written_so and "…" not in code and key.split(".")[0] in tops


def problem_of(code: str, recipes: list[str]) -> str | None:
    """What is wrong with a setting as it is written. recipes: one of them must have it."""
    key, _, text = code.partition("=")
    having = [known(recipe)[key] for recipe in recipes if key in known(recipe)]
    if not having:
        return f"{key} is no setting of {' or '.join(recipes)}"
    if not text or (ROOT / "conf" / key / f"{text}.yaml").exists():
        return None
    try:
        having[0].setting.convert(value_of(text))
    except InvalidValue as error:
        return f"{code}: {error}"
    return None


def sections(page: Path) -> list[tuple[str, str]]:
    """(recipe, or "" for any; text without code blocks) of each section of a page."""
    parts = re.split(r"^## (.*)$", text_of(page), flags=re.M)
    recipes = [heading.split()[0].lower() for heading in parts[1::2]]
    return [
        ("", parts[0]),
        *zip((name if name in built_in_algorithms() else "" for name in recipes), parts[2::2], strict=True),
    ]


def of_tables(text: str) -> list[list[str]]:
    """The cells of each row of the tables in a text."""
    return [line[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")]
