"""Run one benchmark: `python -m benchmarks NAME`. `--help` lists them, and README.md says what they measure.

A benchmark is a module with the functions `add_arguments(parser)` and `run(settings, folder)`, which returns figures by
name. `--json` prints them as one line of JSON. Progress goes to stderr.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from areno.bench.__main__ import exit_code
from areno.bench.arguments import Kind, Parser, Settings, add_work_arguments, with_derived_settings
from benchmarks import agents, ahead, driver, grid, phases, sampling, serve, speculation, state, trl

BENCHMARKS: dict[str, Any] = dict.fromkeys(get_args(Kind), phases) | {
    "sampling": sampling,
    "state": state,
    "agents": agents,
    "serve": serve,
    "driver": driver,
    "grid": grid,
    "ahead": ahead,
    "speculation": speculation,
    "trl": trl,
}


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(parser().parse_args(argv, Settings())))


def parser() -> Parser:
    top = Parser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, module in BENCHMARKS.items():
        command = commands.add_parser(name, help=str(module.__doc__).partition("\n")[0], description=module.__doc__)
        command.set_defaults(kind=name)
        if module is not trl:
            add_work_arguments(command)
        module.add_arguments(command)
    return top


def _run(settings: Settings) -> None:
    module = BENCHMARKS[settings.benchmark]
    with tempfile.TemporaryDirectory() as folder:
        found = module.run(settings if module is trl else with_derived_settings(settings), Path(folder))
    text = phases.text_page(found) if module is phases else figures_page(found)
    print(json.dumps(found) if settings.json else text)


def figures_page(found: dict[str, Any]) -> str:
    """Format figures as text. Dictionaries become table rows, without their lists. Each other figure gets a line."""
    rows = {name: value for name, value in found.items() if isinstance(value, dict)}
    columns = list(dict.fromkeys(name for row in rows.values() for name in row if not isinstance(row[name], list)))
    width = max(map(len, found))
    lines = [" " * width + "".join(f"  {column:>10}" for column in columns)] * bool(rows)
    for name, row in rows.items():
        cells = (f"  {_value_text(row.get(column, '')):>{max(10, len(column))}}" for column in columns)
        lines.append(f"{name:<{width}}{''.join(cells)}")
    return "\n".join([*lines, *(f"{name:<{width}}  {_value_text(found[name])}" for name in found if name not in rows)])


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
