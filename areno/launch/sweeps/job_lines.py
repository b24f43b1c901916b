"""What is shown of runs that go on side by side: on a terminal one line for each, kept up to date; else all lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from areno.tracking.display.screen import Line, Screen

_TIME = len("hh:mm:ss ")
_STEP = "step="


class JobLines:
    """As a context manager, shows the runs on the terminal of stderr if `live`. objective: what they come to."""

    def __init__(self, live: bool, objective: str):
        self._objective = objective
        self._told: dict[int, str] = {}  # the last line of each run
        self._latest: dict[int, str] = {}  # of the runs that go on
        self._names: dict[int, str] = {}
        self._n_ended = 0
        self._screen = Screen(sys.stderr, self._lines, self._failed) if live else None

    def __enter__(self) -> JobLines:
        if self._screen is not None:
            self._screen.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._screen is not None:
            self._screen.close()

    def begin(self, number: int, overrides: Sequence[str]) -> None:
        """A run has a process now. overrides: what it has of its own."""
        self._names[number], self._latest[number] = f"[{number}] {' '.join(overrides)}", "starts"
        self._print(self._names[number])

    def tell(self, number: int, line: str) -> None:
        """A line that a run has written."""
        is_of_log = line[:_TIME:3].isdigit() and line[2:_TIME:3] == ":: "
        if self._screen is None or not is_of_log or line.startswith(("warning", "error"), _TIME):
            self._print(f"[{number}] {line}" if line else "")
            self._told[number] = line
        elif line.startswith(_STEP, _TIME) or not self._latest[number].startswith(_STEP):
            self._latest[number] = line[_TIME:]

    def end(self, number: int, objective: float | None, reason: str) -> None:
        """A run has ended, with its objective or for this reason."""
        self._n_ended += 1
        self._latest.pop(number, None)
        result = "failed" if objective is None else f"{self._objective}: {objective:.6g}"
        if reason and not self._told.get(number, "").endswith(reason):
            result += f": {reason}"
        self._print(f"[{number}] {result}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # above the lines of the screen, if there is one

    def _lines(self, width: int, height: int) -> list[Line]:
        latest = sorted(dict(self._latest).items())  # other threads change it
        shown = latest[: height - 2]
        more = f", {len(latest) - len(shown)} of them not shown" if len(shown) < len(latest) else ""
        lines: list[Line] = [[(f"{self._n_ended} runs done, {len(latest)} going on{more}"[: width - 1], "bold")]]
        for number, text in shown:
            name = self._names[number][: (width - 1) // 2]
            lines.append([(name, "cyan"), (f"  {text}"[: width - 1 - len(name)], "")])
        return lines

    def _failed(self, error: Exception) -> None:
        """The lines of the log take the place of a display that fails."""
        self._screen = None
        print(f"the live display failed, and lines follow: {type(error).__name__}: {error}", file=sys.stderr)
