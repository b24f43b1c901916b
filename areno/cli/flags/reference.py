"""Generates the tables of flags in docs/reference/cli.md: python -m areno.cli.flags.reference prints them."""

from __future__ import annotations

from areno.cli.flags.of_train import HEADINGS, Flag, flags
from areno.launch.elsewhere import RECIPES


def markdown() -> str:
    """A table for each heading of `areno train --help`."""
    found = flags().values()
    return "\n".join(_table(heading, [flag for flag in found if flag.heading == heading]) for heading in HEADINGS)


def _table(heading: str, found: list[Flag]) -> str:
    lines = [f"### {heading}", "", "| flag | setting | default | meaning |", "|---|---|---|---|"]
    if heading == "Basic":
        about = "gspo; with `--resume`, that of the run | sft, dpo, grpo, gspo, ppo, or one of another package"
        lines.append(f"| `--algo TEXT` | the recipe | {about} |")
    return "\n".join([*lines, *map(_line, found)]) + "\n"


def _line(flag: Flag) -> str:
    name = f"{flag.name} {flag.type_text}".strip() + (f", --no-{flag.name[2:]}" if flag.negative else "")
    keys = dict.fromkeys(row.key for rows in flag.keys.values() for row in rows)
    only = "" if len(flag.keys) == len(RECIPES) else f" *{', '.join(flag.keys)}*"
    cells = [f"`{name}`", ", ".join(f"`{key}`" for key in keys), flag.default, f"{flag.about}.{only}"]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(markdown(), end="")
