"""How the commands print tables."""

from __future__ import annotations

from typing import Any

_WIDE = 250  # columns of what is no terminal, such as a pipe, so that every run has one line


def show(*tables: Any) -> None:
    """Print tables of rich, as wide as the terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    for table in tables:
        console.print(table)
