"""The command `areno compare`, which prints the differences between runs."""

from __future__ import annotations

import argparse

from areno.report.terminal import print_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints the algorithms, settings and versions of packages in which runs differ, and the first, the best and "
        "the last value of each of their results."
    )
    help = "folders of runs, or folders that stand for all runs below them"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=help)


def run(arguments: argparse.Namespace) -> int:
    from areno.errors import ConfigError
    from areno.report.tables import compare_tables
    from areno.tracking.reader import run_folders

    folders = run_folders(arguments.runs)
    if len(folders) < 2:
        raise ConfigError("RUN: is one run; name at least two to compare")
    print_tables(*compare_tables(folders))
    return 0
