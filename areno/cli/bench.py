"""areno bench: measure speed, as python -m areno.bench does."""

from __future__ import annotations

import argparse

from areno.bench import arguments as of_bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    of_bench.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the results, and return the exit code."""
    from areno.bench.__main__ import configure_logging, show

    configure_logging()
    show(of_bench.settings_of(arguments))
    return 0
