"""The service that sends scalars to Trackio of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from areno.errors import Problem
from areno.schema.fields import Section, check, setting
from areno.services.service import RunInfo, Service


@dataclass(kw_only=True)
class TrackioConfig(Section):
    """Settings of Trackio (pip install 'areno[trackio]')."""

    mode: Literal["disabled", "local", "online"] = setting(
        "disabled",
        help="disabled: off. local: keep metrics on this machine, for trackio show. online: also send them to the "
        "Space space_id",
    )
    project: str | None = setting(None, help="Name of the project. null: experiment_name")
    name: str | None = setting(None, help="Name of the run. null: that of its folder")
    space_id: str | None = setting(
        None, help="Space of the Hugging Face hub (owner/name) that mode=online sends the metrics to"
    )

    @check
    def check_space_id(self) -> Iterator[Problem]:
        """Yield a problem if mode=online is set without `space_id`, or if mode=local is set with it."""
        if self.mode == "online" and self.space_id is None:
            yield Problem("space_id", "is null, but mode is online; name the Space that gets the scalars")
        if self.mode == "local" and self.space_id is not None:
            yield Problem("space_id", f"is {self.space_id}, but mode=local sends nothing; set mode=online")


class Trackio(Service):
    """Trackio identifies runs by name, so the id of a run is its name.

    It changes the name of a new run if the name is taken.
    """

    settings, title, package, install = TrackioConfig, "Trackio", "trackio", "areno[trackio]"
    config: TrackioConfig
    _run: Any = None

    def start(self, run: RunInfo, run_id: str | None) -> str:
        import trackio

        self._run = trackio.init(
            project=self.config.project or run.experiment,
            name=run_id or self.config.name or run.name,
            group=run.group,
            space_id=self.config.space_id,
            config=dict(run.settings),
            resume="allow" if run_id else "never",
            embed=False,
        )
        return self._run.name  # trackio changes a name that is taken

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self) -> None:
        self._run.finish()
