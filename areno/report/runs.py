"""The table of runs in a folder (`areno runs`), which reads as little of each run as it can."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from areno.errors import ArenoError
from areno.report.terminal import right_aligned
from areno.tracking.accuracy import is_accuracy_metric
from areno.tracking.reader import (
    NAMES,
    NAMES_OF_TRAINING,
    Headline,
    RunReader,
    begin_time,
    duration_text,
    headline,
    last_step,
    list_runs,
    run_seconds,
)
from areno.tracking.run_folder import algorithm_label
from areno.tracking.series import is_accuracy_meaningful

_COLOURS = {"completed": "green", "stopped": "red", "unfinished": "yellow"}


def runs_table(root: str | Path) -> Table:
    runs = list_runs(root)
    if not runs:
        raise ArenoError("there is no run below {}; the setting cluster.fileroot says where runs are", root)
    columns = ("run", "algorithm", "began", "state", right_aligned("steps"), "best", right_aligned("duration"))
    table = Table(*columns, title=f"runs in {root}")
    for run in runs:
        try:
            table.add_row(str(run.path.relative_to(Path(root).expanduser())), *_run_row(run))
        except ArenoError as error:  # a damaged run must not hide the others
            table.add_row(str(run.path), "", "", "[red]damaged[/]", "", escape(str(error)), "")
    return table


def _run_row(run: RunReader) -> list[str]:
    status, found = run.status(), main_headline(run)
    best = "" if found is None else f"{found.title} {found.best:.4g} at step {found.step}"
    state = f"[{_COLOURS[status]}]{status}[/]" if status else "-"
    algorithm = escape(algorithm_label(run.path))
    return [algorithm, begin_time(run), state, str(last_step(run)), best, duration_text(run_seconds(run))]


def main_headline(run: RunReader) -> Headline | None:
    """Return the first, best and last value of the main scalar of a run.

    The main scalar is the first of these that the run has recorded: accuracy, reward or loss of the evaluation, reward
    of the rollouts. If it has recorded none of them, as SFT or DPO without evaluation, it is the training accuracy or
    loss.
    """
    for name, how in [*NAMES.items(), *NAMES_OF_TRAINING.items()]:
        found = headline(run.file.series(name), *how) if how[1] else None
        if found is not None and (not is_accuracy_metric(name) or is_accuracy_meaningful(run.file.series)):
            return found
    return None
