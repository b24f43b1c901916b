"""The live display of a run: a panel at the start, a few lines that are updated in place, and a table at the end."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areno.config.experiments import ExperimentConfig
from areno.schema.fields import changed_settings
from areno.schema.values import format_value
from areno.tracking.display.board import Board, WarningHandler
from areno.tracking.display.screen import Line, Screen, can_draw
from areno.tracking.display.view import render_lines
from areno.tracking.reader import RunReader, headlines
from areno.tracking.run_log import Console, RunLog, has_host_handler
from areno.tracking.tracker import Tracker
from areno.types import ScoredSample
from areno.version import __version__

logger = logging.getLogger("areno")

_SETTINGS_LINES = 4  # of the panel at the start


def chosen_console(setting: str) -> Console:
    """Return the console of a run: "live", "lines", "full" or "quiet".

    "auto" and "live" become "live" if stderr can show the live display, and "lines" otherwise. "auto" also becomes
    "lines" if a program that imports areno handles areno's log records.
    """
    if setting in ("auto", "live"):
        return "live" if can_draw(sys.stderr) and (setting == "live" or not has_host_handler()) else "lines"
    return setting  # type: ignore[return-value]


class Display(Tracker):
    """A tracker that shows a run on the terminal of stderr. If drawing fails, log lines are shown from then on."""

    def __init__(self, folder: Path, log: RunLog, total_steps: Callable[[], int], seconds: Callable[[], float]):
        self.board = Board(total_steps, seconds)
        self._folder, self._log = folder, log
        self._title = f"{folder.parent.name} / {folder.name}"
        self._stream = sys.stderr
        self._screen = Screen(self._stream, self._lines, self._turn_off)
        self._handler = WarningHandler(self.board)
        self._shows = False

    def start(self, facts: Mapping[str, str]) -> None:
        """Print the start panel with texts by name, and start the live display below it."""
        with self._errors_suppressed():
            self._screen.start()
            self._shows = True
            logger.addHandler(self._handler)
            self._screen.print(self._rendered(make_start_panel(facts, self._width)))

    def begin_training(self, step: int) -> None:
        self.board.begin_training(step)

    def show_message(self, text: bytes) -> None:
        """Show a message from a signal handler, in UTF-8."""
        self.board.note = text.decode().strip()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._errors_suppressed():
            self.board.log(step, scalars)

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        with self._errors_suppressed():
            self.board.samples(step, samples)

    def resume(self, step: int) -> None:
        """Replace the shown scalars by the values that the run recorded up to and including `step`."""
        with self._errors_suppressed():
            self.board.clear()
            for name, (steps, values) in RunReader(self._folder).curves().items():
                for value in values[: bisect_right(steps, step)]:
                    self.board.add_recorded(name, value)

    def finish(self) -> None:
        """Replace the live display by a table with the most important scalars and the last checkpoint."""
        with self._errors_suppressed():
            if self._shows:
                self._stop(self._final_text() if self.board.has_steps else "")

    @contextmanager
    def _errors_suppressed(self) -> Iterator[None]:
        """Catch exceptions: the live display ends, log lines are shown, and the run continues."""
        try:
            yield
        except Exception as error:
            self._stop()
            self._turn_off(error)

    def _stop(self, last: str = "") -> None:
        self._shows = False
        logger.removeHandler(self._handler)
        self._screen.close(last)

    def _turn_off(self, error: Exception) -> None:
        self._shows = False
        self._log.console = "lines"
        logger.removeHandler(self._handler)
        logger.warning("the live display failed, and lines follow: %s: %s", type(error).__name__, error)

    @property
    def _width(self) -> int:
        return min(os.get_terminal_size(self._stream.fileno()).columns or 80, 120) - 1

    def _lines(self, width: int, height: int) -> list[Line]:
        return render_lines(self.board.snapshot(), self._title, width, height)

    def _final_text(self) -> str:
        run = RunReader(self._folder)
        checkpoint = run.latest_checkpoint()
        said = f"checkpoint:   {os.path.relpath(checkpoint)}\n" if checkpoint else "no checkpoint was saved\n"
        return self._rendered(make_end_table(run, self._title)) + said

    def _rendered(self, part: Panel | Table) -> str:
        """Convert a panel or a table to text with the terminal's control sequences."""
        console = RichConsole(file=self._stream, width=self._width)
        with console.capture() as capture:
            console.print(part)
        return capture.get()


def start_panel_facts(config: ExperimentConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Return texts by name for the start panel: "given" and "settings". An empty text is left out.

    "given" has the settings on the command line, "settings" has the other settings that differ from their defaults.
    """
    known = {"experiment_name", "trial_name", "actor.path", "train_dataset.path"}  # other lines of the panel show them
    known |= {line.partition("=")[0].lstrip("+") for line in overrides}
    settings = [f"{key}={format_value(value)}" for key, value in changed_settings(config) if key not in known]
    told = {"given": " ".join(overrides), "settings": " ".join(settings)}
    return {name: text for name, text in told.items() if text}


def make_start_panel(facts: Mapping[str, str], width: int) -> Panel:
    """Return the start panel. A text of more than _SETTINGS_LINES lines is cut."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    room = width - max(map(len, facts), default=0) - 6
    for name, fact in facts.items():
        cut = {"max_lines": _SETTINGS_LINES, "placeholder": " ... (all: config.yaml)"}
        grid.add_row(name, Text("\n".join(textwrap.wrap(fact, room, break_on_hyphens=False, **cut))))
    return Panel(grid, title=f"areno {__version__}", title_align="left", border_style="bright_black", width=width)


def make_end_table(run: RunReader, title: str) -> Table:
    """Return a table with the first, the best and the last value of the most important scalars.

    A scalar with a best value is left out if an earlier row has the same values, such as accuracy if rewards are 0 or
    1.
    """
    table = Table(title=title, title_justify="left", border_style="bright_black")
    table.add_column("")
    for heading in ("first", "best", "last"):
        table.add_column(heading, justify="right")
    metrics, shown = run.curves(), set[tuple[float, ...]]()
    for name, line in headlines(metrics).items():
        values = tuple(metrics[name].values)
        if line.best is not None and values in shown:
            continue
        shown.add(values)
        best = "" if line.best is None else f"{line.best:.4g} (step {line.step})"
        table.add_row(line.title, f"{line.first:.4g}", best, f"{line.last:.4g}")
    return table
