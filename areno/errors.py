"""What areno raises. A message says what was wrong, what was expected and which key to change.

ArenoError
├── ConfigError (ValueError)        a setting is missing, unknown, mistyped or does not fit the others
├── DataError (ValueError)          a dataset cannot be read or a row does not have the expected form
├── CheckpointError (OSError)       a model folder cannot be read or written
└── EngineError (RuntimeError)      a worker died, ran out of memory, or was used out of order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class ArenoError(Exception):
    """Base of every error meant for the user. `str(error)` is complete without a traceback."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: dotted key ("" for the whole) and message."""

    key: str
    message: str

    def under(self, prefix: str) -> Problem:
        """The same problem seen from the section that holds this one."""
        key = f"{prefix}.{self.key}" if self.key else prefix
        return Problem(key, self.message)

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(ArenoError, ValueError):
    """One or more settings are wrong; `problems` lists all of them."""

    def __init__(self, problems: Iterable[Problem] | str):
        self.problems = [Problem("", problems)] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            text = str(self.problems[0])
        else:
            text = f"{len(self.problems)} problems in the configuration:\n" + "\n".join(
                f"  {problem}" for problem in self.problems
            )
        super().__init__(text)


class DataError(ArenoError, ValueError):
    """A dataset, or a row of one, is not what the algorithm needs."""


class CheckpointError(ArenoError, OSError):
    """A model folder cannot be read or written."""


class EngineError(ArenoError, RuntimeError):
    """The engine cannot go on: a dead worker, no memory left, or a call out of order."""
