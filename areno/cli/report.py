"""The command `areno report`, which writes one HTML page about runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes one HTML page that needs no network and no other file: the verdict, curves, samples with their tokens, "
        "settings and versions. Several runs are drawn over each other, with the settings in which they differ. "
        "Needs pip install 'areno[report]'."
    )
    help = "folders of runs, or folders that stand for all runs below them"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=help)
    parser.add_argument(
        "-o",
        "--output",
        default="report.html",
        metavar="FILE",
        help="file to write, in place of an earlier one (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    from areno.report.page import write_report
    from areno.tracking.reader import run_folders

    folders, is_again = run_folders(arguments.runs), Path(arguments.output).expanduser().is_file()
    path = write_report(folders, arguments.output)
    count = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    again = ", in place of the earlier file" if is_again else ""
    print(f"{path}: {count}, {path.stat().st_size / 2**20:.1f} MiB{again}; open it in a browser")
    return 0
