"""What a service has to be able to do, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.schema.values import flat


@dataclass(frozen=True)
class RunAbout:
    """A run, as a service is told of it. settings: all of its configuration. group: its sweep, None outside of one."""

    folder: Path
    experiment: str
    name: str
    group: str | None
    settings: Mapping[str, Any]
    fileroot: Path

    def flat(self) -> dict[str, Any]:
        """The settings under their dotted names."""
        return flat(self.settings)


class Service:
    """One run at one service. All calls come from one thread, and any of them may raise anything."""

    package: str
    """The module that has to be installed."""

    def start(self, about: RunAbout, run_id: str | None) -> str:
        """Begin the run or go on with it. run_id: that of an earlier session. Returns the id, to be kept."""
        raise NotImplementedError

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take finite scalars of a step. Steps come in order, but a resumed run repeats those after its state."""
        raise NotImplementedError

    def finish(self) -> None:
        """Send what is left, and end the run."""
        raise NotImplementedError
