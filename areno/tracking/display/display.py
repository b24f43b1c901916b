"""The live display of a run: a panel at the start, a few lines that are kept up to date, and a table at the end."""

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

from areno import __version__
from areno.config.experiments import ExperimentConfig
from areno.schema.fields import changed
from areno.schema.values import show
from areno.tracking.display.board import Board, Warnings
from areno.tracking.display.screen import Line, Screen, can_draw
from areno.tracking.display.view import draw
from areno.tracking.reader import RunReader, headlines
from areno.tracking.run_log import Console, RunLog, host_listens
from areno.tracking.tracker import Tracker
from areno.types import ScoredSample

logger = logging.getLogger("areno")

_SETTINGS_LINES = 4  # of the panel at the start


def chosen_console(setting: str) -> Console:
    """Return the console of a setting on the current stderr.

    Args:
        setting: The value of stats_logger.console.
    """
    if setting in ("auto", "live"):
        return "live" if can_draw(sys.stderr) and (setting == "live" or not host_listens()) else "lines"
    return setting  # type: ignore[return-value]


class Display(Tracker):
    """Shows a run on the terminal of stderr. If drawing fails, the lines of the log appear instead.

    Args:
        folder: The folder of the run.
        log: The log of the run. Its console is "live".
        total_steps: Returns the number of steps of the run, as far as it is known.
        seconds: Returns how long the run has taken so far.
    """

    def __init__(self, folder: Path, log: RunLog, total_steps: Callable[[], int], seconds: Callable[[], float]):
        self.board = Board(total_steps, seconds)
        self._folder, self._log = folder, log
        self._title = f"{folder.parent.name} / {folder.name}"
        self._stream = sys.stderr
        self._screen = Screen(self._stream, self._lines, self._failed)
        self._handler = Warnings(self.board)
        self._shows = False

    def start(self, facts: Mapping[str, str]) -> None:
        """Show a panel, and start the display below it.

        Args:
            facts: The lines of the panel, by name.
        """
        with self._harmless():
            self._screen.start()
            self._shows = True
            logger.addHandler(self._handler)
            self._screen.print(self._rendered(start_panel(facts, self._width)))

    def begin(self, step: int) -> None:
        """Note that the step after `step` starts.

        Args:
            step: The last completed step; 0 before the first.
        """
        self.board.begin(step)

    def tell(self, text: bytes) -> None:
        """Show a message of a signal handler.

        Args:
            text: The message, in UTF-8.
        """
        self.board.note = text.decode().strip()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show scalars of a step."""
        with self._harmless():
            self.board.log(step, scalars)

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Show some samples of a step."""
        with self._harmless():
            self.board.samples(step, samples)

    def resume(self, step: int) -> None:
        """Show the scalars of the earlier session up to a step."""
        with self._harmless():
            self.board.forget()
            for name, (steps, values) in RunReader(self._folder).metrics().items():
                for value in values[: bisect_right(steps, step)]:
                    self.board.recall(name, value)

    def finish(self) -> None:
        """Replace the display by a table of the most important scalars."""
        with self._harmless():
            if self._shows:
                self._stop(self._final_text() if self.board.has_steps else "")

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Turn an error of the display into its end, so that the run continues."""
        try:
            yield
        except Exception as error:
            self._stop()
            self._failed(error)

    def _stop(self, last: str = "") -> None:
        """Remove the display, and print `last` in its place."""
        self._shows = False
        logger.removeHandler(self._handler)
        self._screen.close(last)

    def _failed(self, error: Exception) -> None:
        """Show lines from now on, and warn once."""
        self._shows = False
        self._log.console = "lines"
        logger.removeHandler(self._handler)
        logger.warning("the live display failed, and lines follow: %s: %s", type(error).__name__, error)

    @property
    def _width(self) -> int:
        return min(os.get_terminal_size(self._stream.fileno()).columns or 80, 120) - 1

    def _lines(self, width: int, height: int) -> list[Line]:
        return draw(self.board.snapshot(), self._title, width, height)

    def _final_text(self) -> str:
        """Return the table and the last checkpoint as text."""
        run = RunReader(self._folder)
        checkpoint = run.latest_checkpoint()
        said = f"checkpoint:   {os.path.relpath(checkpoint)}\n" if checkpoint else "no checkpoint was saved\n"
        return self._rendered(end_table(run, self._title)) + said

    def _rendered(self, part: Panel | Table) -> str:
        """Return a panel or a table as text for the terminal."""
        console = RichConsole(file=self._stream, width=self._width)
        with console.capture() as capture:
            console.print(part)
        return capture.get()


def settings_shown(config: ExperimentConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Return the settings that differ from the defaults: those of the command line, and the others.

    Args:
        config: The settings of the run.
        overrides: The settings of its command line.

    Returns:
        "given" and "settings", each if there are any.
    """
    known = {"experiment_name", "trial_name", "actor.path", "train_dataset.path"}  # other lines of the panel show them
    known |= {line.partition("=")[0].lstrip("+") for line in overrides}
    settings = [f"{key}={show(value)}" for key, value in changed(config) if key not in known]
    told = {"given": " ".join(overrides), "settings": " ".join(settings)}
    return {name: text for name, text in told.items() if text}


def start_panel(facts: Mapping[str, str], width: int) -> Panel:
    """Return a panel with the facts of a run.

    Args:
        facts: The facts by name. A long one takes at most a few lines.
        width: The width of the panel, in cells.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    room = width - max(map(len, facts), default=0) - 6
    for name, fact in facts.items():
        cut = {"max_lines": _SETTINGS_LINES, "placeholder": " ... (all: config.yaml)"}
        grid.add_row(name, Text("\n".join(textwrap.wrap(fact, room, break_on_hyphens=False, **cut))))
    return Panel(grid, title=f"areno {__version__}", title_align="left", border_style="bright_black", width=width)


def end_table(run: RunReader, title: str) -> Table:
    """Return a table of the headline numbers. Equal series, such as accuracy and a reward of 0 or 1, are one row.

    Args:
        run: The run.
        title: The title of the table.
    """
    table = Table(title=title, title_justify="left", border_style="bright_black")
    table.add_column("")
    for heading in ("first", "best", "last"):
        table.add_column(heading, justify="right")
    metrics, shown = run.metrics(), set[tuple[float, ...]]()
    for name, line in headlines(metrics).items():
        values = tuple(metrics[name].values)
        if line.best is not None and values in shown:
            continue
        shown.add(values)
        best = "" if line.best is None else f"{line.best:.4g} (step {line.step})"
        table.add_row(line.title, f"{line.first:.4g}", best, f"{line.last:.4g}")
    return table
