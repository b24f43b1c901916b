"""The command `areno trace`, which summarises the trace of a run."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Summarises the trace of a run, which perf_tracer.enabled=true writes: the seconds of each step by phase, the "
        "time in which a device was idle, the work that the steps waited for, and the slowest samples."
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON, with every step, instead of tables")
    parser.add_argument(
        "--samples", type=int, default=5, metavar="N", help="number of slowest samples to list (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    from areno.errors import ConfigError, Problem
    from areno.report.terminal import print_tables
    from areno.report.trace_summary import summarise, summary_tables

    if arguments.samples < 0:
        raise ConfigError(Problem("--samples", f"is {arguments.samples}; it must be at least 0"))
    summary = summarise(arguments.run, arguments.samples)
    if arguments.json:
        print(json.dumps(summary.as_dict(), indent=2))
    else:
        print_tables(*summary_tables(summary))
    return 0
