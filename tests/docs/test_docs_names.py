"""Settings and metrics that the documentation names exist, and the values that it gives to settings are possible."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areno.api.algorithms import built_in_algorithms
from tests.helpers.pages import ROOT, codes, documented_metrics, is_setting, problem_of, text_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_on_the_page_exist(page: Path) -> None:
    problems = [problem_of(code, built_in_algorithms()) for code in codes(text_of(page)) if is_setting(code)]
    assert not any(problems), "\n".join(problem for problem in problems if problem)


@pytest.mark.parametrize("name", ["watching.md", "troubleshooting.md", "resuming.md", "data.md", "recipes.md"])
def test_metrics_on_the_page_exist(name: str) -> None:
    found = {code for code in codes(text_of(ROOT / "docs" / name)) if re.fullmatch(r"(rollout|train|eval)/\w+", code)}
    assert found <= documented_metrics(), found - documented_metrics()
