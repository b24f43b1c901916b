"""Trackio of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areno.config.tracking import TrackioConfig
from areno.tracking.services.service import RunAbout, Service


class Trackio(Service):
    """A run is known by its name, so that is its id, too."""

    package = "trackio"

    def __init__(self, config: TrackioConfig):
        self.config = config
        self._run: Any = None

    def start(self, about: RunAbout, run_id: str | None) -> str:
        import trackio

        name = run_id or self.config.name or about.name
        self._run = trackio.init(
            project=self.config.project or about.experiment, name=name, group=about.group,
            space_id=self.config.space_id, config=dict(about.settings), resume="allow" if run_id else "never",
            embed=False,
        )  # fmt: skip
        return self._run.name  # trackio changes one that is taken

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self) -> None:
        self._run.finish()
