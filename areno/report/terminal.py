"""Printing of tables to a terminal."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Column

_WIDE = 250  # columns without a terminal, such as in a pipe, so that each run has one line


def right_aligned(title: str) -> Column:
    return Column(title, justify="right")


def print_tables(*tables: Any) -> None:
    """Print rich tables in the width of the terminal, or 250 columns wide if the output is not a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    for each in tables:
        console.print(each)


def cell_text(value: Any) -> str:
    """Return the text of a value in a table: floats with four significant digits, `-` for None."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
