"""The command `areno bench`, which measures speed like `python -m areno.bench`."""

from __future__ import annotations

import argparse

from areno.bench import arguments as of_bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `areno bench` to its parser.

    Args:
        parser: Parser of `areno bench`, to which the arguments are added.
    """
    of_bench.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that the command line describes, and print its results.

    Args:
        arguments: The parsed command line.

    Returns:
        The exit code, 0.
    """
    from areno.bench.__main__ import configure_logging, show

    configure_logging()
    show(of_bench.settings_of(arguments))
    return 0
