"""The command `areno bench`, which measures speed like `python -m areno.bench`."""

from __future__ import annotations

import argparse

from areno.bench.arguments import Settings, add_arguments, with_derived_settings

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    from areno.bench.__main__ import exit_code, run_and_print

    return exit_code(lambda: run_and_print(with_derived_settings(Settings(**vars(arguments)))))
