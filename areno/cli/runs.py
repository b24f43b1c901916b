"""The command `areno runs`, which lists the runs below a folder."""

from __future__ import annotations

import argparse

from areno.report.terminal import print_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the runs below a folder, those of sweeps among them: their algorithm, when they began, whether they are "
        "completed, how many steps they have, their best number and how long they took."
    )
    parser.add_argument(
        "folder", nargs="?", default="outputs", metavar="FOLDER", help="folder that holds runs (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    from areno.report.runs import runs_table

    print_tables(runs_table(arguments.folder))
    return 0
