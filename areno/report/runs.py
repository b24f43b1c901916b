"""The table of runs in a folder (`areno runs`), which reads as little of each run as it can."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from areno.errors import ArenoError
from areno.report.terminal import right
from areno.tracking.accuracy import counts_right
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
from areno.tracking.run_folder import algorithm_shown
from areno.tracking.series import right_answers_are_meaningful

_COLOURS = {"completed": "green", "stopped": "red", "unfinished": "yellow"}


def runs_table(root: str | Path) -> Table:
    runs = list_runs(root)
    if not runs:
        raise ArenoError("there is no run below {}; the setting cluster.fileroot says where runs are", root)
    columns = ("run", "algorithm", "began", "state", right("steps"), "best", right("duration"))
    table = Table(*columns, title=f"runs in {root}")
    for run in runs:
        try:
            table.add_row(str(run.path.relative_to(Path(root).expanduser())), *_run_row(run))
        except ArenoError as error:  # a damaged run must not hide the others
            table.add_row(str(run.path), "", "", "[red]damaged[/]", "", escape(str(error)), "")
    return table


def _run_row(run: RunReader) -> list[str]:
    status, found = run.status(), best_of(run)
    best = "" if found is None else f"{found.title} {found.best:.4g} at step {found.step}"
    state = f"[{_COLOURS[status]}]{status}[/]" if status else "-"
    algorithm = escape(algorithm_shown(run.path))
    return [algorithm, begin_time(run), state, str(last_step(run)), best, duration_text(run_seconds(run))]


def best_of(run: RunReader) -> Headline | None:
    """Return the first, best and last value of the main scalar of a run.

    The main scalar is the first of these that the run has recorded: accuracy, reward or loss of the evaluation, reward
    of the rollouts. If it has recorded none of them, as SFT or DPO without evaluation, it is the training accuracy or
    loss.
    """
    for name, how in [*NAMES.items(), *NAMES_OF_TRAINING.items()]:
        found = headline(run.file.series(name), *how) if how[1] else None
        if found is not None and (not counts_right(name) or right_answers_are_meaningful(run.file.series)):
            return found
    return None
