"""Settings of what the console shows of a run, and of where its metrics go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from areno.errors import ConfigError, Problem, did_you_mean
from areno.schema.build import build
from areno.schema.fields import Section, check, forbid, setting, with_sections
from areno.schema.values import is_no_folder, show
from areno.services import GROUP, SERVICES, installed_service, installed_services
from areno.services.service import Service


@dataclass(kw_only=True)
class TensorBoardConfig(Section):
    """TensorBoard event files."""

    path: str | None = setting(
        None,
        help="Folder of the event files. In a sweep, each run has a subfolder. null: tensorboard/ in the run's folder",
        flag="--metrics-log-dir",
    )

    @forbid("path", "is {self.path!r}; the path of a folder is expected")
    def no_path(self) -> bool:
        """Return whether no folder can have this name."""
        return is_no_folder(self.path)


@dataclass(kw_only=True)
@with_sections({name: (service.settings, service.title) for name, service in SERVICES.items()})
class StatsLoggerConfig(Section):
    """What the console shows, and where metrics go besides logs/metrics.jsonl.

    Each service of areno/services has a section with the settings that its own file declares.
    """

    console: Literal["auto", "live", "lines", "full", "quiet"] = setting(
        "auto",
        help="What stderr shows. live: a display that is kept up to date on a terminal. lines: one line for each step. "
        "full: all lines of logs/run.log. quiet: only warnings and errors. auto is live on a terminal, lines elsewhere",
    )
    tensorboard: TensorBoardConfig = setting(factory=TensorBoardConfig, help="TensorBoard")
    trackers: dict[str, Any] = setting(
        factory=dict,
        help="Trackers of other installed packages (entry points of the group areno.trackers): a name, and a mapping "
        "of the settings that the tracker declares",
    )

    @check
    def trackers_of_other_packages(self) -> Iterator[Problem]:
        """Report each name that no package declares, and what is wrong with the settings of the others."""
        for name in self.trackers:
            try:
                self._installed(name)
            except ConfigError as error:
                yield from (problem.under(f"trackers.{name}") for problem in error.problems)

    def services(self) -> dict[str, Service]:
        """Return the services that are on, by the name of their section. No call has been made to them yet."""
        found = {name: service(vars(self)[name]) for name, service in SERVICES.items()}
        found = {name: service for name, service in found.items() if service.config.mode != "disabled"}
        return found | {f"trackers.{name}": self._installed(name) for name in self.trackers}

    def _installed(self, name: str) -> Service:
        """Make a service of another package with its settings. Raises ConfigError, with keys below its own."""
        if name not in installed_services():
            known = did_you_mean(name, installed_services())
            text = f"is no installed tracker{known}; its package declares it as an entry point of the group {GROUP}"
            raise ConfigError(Problem("", text))
        given = self.trackers[name]
        try:
            service = installed_service(name)
        except Exception as error:
            raise ConfigError(Problem("", f"does not import: {type(error).__name__}: {error}")) from error
        if given is not None and not isinstance(given, dict):
            raise ConfigError(Problem("", f"is {show(given)}; a mapping of its settings is expected"))
        return service(build(service.settings, given or {}))
