"""The base class of services, and the description of a run that they receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from areno.schema.fields import Section
from areno.schema.values import flat


@dataclass(frozen=True)
class RunAbout:
    """A run, as a service shows it.

    Attributes:
        folder: The folder of the run.
        experiment: `experiment_name`.
        name: The name of the folder. A run of a sweep has the name of the sweep before it.
        group: The name of the sweep; None outside of a sweep.
        settings: All settings of the run, nested as in config.yaml.
        fileroot: `cluster.fileroot`, the folder of all runs.
    """

    folder: Path
    experiment: str
    name: str
    group: str | None
    settings: Mapping[str, Any]
    fileroot: Path

    def flat(self) -> dict[str, Any]:
        """Return the settings under dotted keys."""
        return flat(self.settings)


class Service:
    """One run at one service. To add a service, derive a class in a file of its own, see areno/services/__init__.py.

    All calls of an instance come from one thread. An exception in any of them is logged once and ends the calls, but
    not the run.

    Attributes:
        settings: The dataclass of the settings. A service of this folder has a setting `mode`, and "disabled" turns it
            off. A service of another package is on if `stats_logger.trackers` names it.
        title: The name of the service in help texts.
        package: The module that has to be installed.
        install: What `pip install` needs for it, such as "areno[wandb]".
        config: An instance of `settings`.
    """

    settings: ClassVar[type[Section]]
    title: ClassVar[str]
    package: ClassVar[str]
    install: ClassVar[str]
    config: Any

    def __init__(self, config: Any):
        self.config = config

    def start(self, about: RunAbout, run_id: str | None) -> str:
        """Begin the run, or continue it.

        Args:
            about: The run.
            run_id: The id that an earlier session of the run returned. None in the first session.

        Returns:
            The id of the run at the service. The folder of the run keeps it, in trackers.json.
        """
        raise NotImplementedError

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send scalars of a step.

        Args:
            step: The number of the step. Steps ascend, but a resumed run repeats the steps after its state.
            scalars: Finite numbers by name, such as "train/loss".
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Send what is left, and end the run."""
        raise NotImplementedError
