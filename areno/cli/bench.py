"""The command `areno bench`, which measures speed like `python -m areno.bench`."""

from __future__ import annotations

import argparse

from areno.bench.arguments import Settings, add_arguments, completed

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    from areno.bench.__main__ import exit_code, show

    return exit_code(lambda: show(completed(Settings(**vars(arguments)))))
