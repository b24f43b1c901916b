"""The sections of docs/algorithms.md and the commands in them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


TEXT = PAGE.read_text(encoding="utf-8")


SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M))


def blocks(section: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", SECTIONS[section], re.S | re.M)


def commands() -> list[tuple[str, str]]:
    return [
        (section, line) for section in SECTIONS for block in blocks(section, "bash keys") for line in block.splitlines()
    ]
