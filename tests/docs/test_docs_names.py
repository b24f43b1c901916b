"""Settings and metrics that the documentation names exist, and the values that it gives to settings are possible."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_docs import ROOT, documented_metrics

from areno.api import get_algorithm
from areno.config.fields import Row, rows
from areno.config.values import InvalidValue
from areno.launch.hints import RECIPES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


@cache
def known(recipe: str) -> dict[str, Row]:
    """The settings of a recipe."""
    return {row.key: row for row in rows(get_algorithm(recipe).config)}


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
    tops = {key.partition(".")[0] for recipe in RECIPES for key in known(recipe)}
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_on_the_page_exist(page: Path) -> None:
    problems = [problem_of(code, list(RECIPES)) for code in codes(text_of(page)) if is_setting(code)]
    assert not any(problems), "\n".join(problem for problem in problems if problem)


@pytest.mark.parametrize("name", ["watching.md", "troubleshooting.md", "resuming.md", "data.md", "recipes.md"])
def test_metrics_on_the_page_exist(name: str) -> None:
    found = {code for code in codes(text_of(ROOT / "docs" / name)) if re.fullmatch(r"(rollout|train|eval)/\w+", code)}
    assert found <= documented_metrics(), found - documented_metrics()
