"""The base class of experiment trackers, which areno calls services, and the description of a run that they receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from areno.schema.fields import Section
from areno.schema.values import flatten_settings


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for an experiment tracker."""

    folder: Path
    experiment: str
    name: str  # of the folder; in a sweep, the name of the sweep, "-" and that of the folder
    group: str | None  # name of the sweep
    settings: Mapping[str, Any]  # nested as in config.yaml
    fileroot: Path  # the folder that contains all runs

    def flat(self) -> dict[str, Any]:
        """Return the settings with dotted keys, such as "actor.optimizer.lr"."""
        return flatten_settings(self.settings)


class Service:
    """Connection of one run to one experiment tracker, such as Weights & Biases.

    To add a service, derive a class in a file of its own, as areno/services/__init__.py explains. All calls of an
    instance come from one thread. If a call raises an exception, the exception is logged, the service is not called
    again, and the run continues.

    A service in areno/services has the setting `mode`, whose value "disabled" turns it off. A service of another
    package is on if `stats_logger.trackers` names it.
    """

    settings: ClassVar[type[Section]]  # dataclass of the settings
    title: ClassVar[str]  # in help texts
    package: ClassVar[str]  # Python module that the service needs
    install: ClassVar[str]  # argument of `pip install`, such as "areno[wandb]"
    config: Any  # an instance of `settings`

    def __init__(self, config: Any):
        self.config = config

    def start(self, run: RunInfo, run_id: str | None) -> str:
        """Begin the run at the service, or continue the run `run_id`, and return its id there.

        The id is kept in trackers.json in the run's folder.
        """
        raise NotImplementedError

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the finite scalars of a step by name, such as "train/loss".

        Steps ascend, except that a resumed run repeats the steps after its last saved state.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Send the remaining data and end the run at the service."""
        raise NotImplementedError
