"""The base class of experiment trackers, and the description of a run that they receive.

areno calls the trackers services.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from areno.schema.fields import Section
from areno.schema.values import flat


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for an experiment tracker.

    Attributes:
        folder: Folder of the run.
        experiment: The setting `experiment_name`.
        name: Name of the run's folder. In a sweep, the name of the sweep, "-" and the name of the folder.
        group: Name of the sweep, or None outside of a sweep.
        settings: All settings of the run, nested as in config.yaml.
        fileroot: The setting `cluster.fileroot`, the folder that contains all runs.
    """

    folder: Path
    experiment: str
    name: str
    group: str | None
    settings: Mapping[str, Any]
    fileroot: Path

    def flat(self) -> dict[str, Any]:
        """Return the settings as one dictionary with dotted keys, such as "actor.optimizer.lr"."""
        return flat(self.settings)


class Service:
    """Connection of one run to one experiment tracker, such as Weights & Biases.

    To add a service, derive a class in a file of its own, see areno/services/__init__.py. All calls of an instance come
    from one thread. If a call raises an exception, the exception is logged, the service is not called again, and the
    run continues.

    Attributes:
        settings: Dataclass of the settings. A service in areno/services has the setting `mode`, whose value "disabled"
            turns the service off. A service of another package is on if `stats_logger.trackers` names it.
        title: Name of the service in help texts.
        package: Name of the Python module that the service needs.
        install: Argument of `pip install` that installs this module, such as "areno[wandb]".
        config: The values of the settings, an instance of `settings`.
    """

    settings: ClassVar[type[Section]]
    title: ClassVar[str]
    package: ClassVar[str]
    install: ClassVar[str]
    config: Any

    def __init__(self, config: Any):
        self.config = config

    def start(self, run: RunInfo, run_id: str | None) -> str:
        """Begin the run at the service, or continue it.

        Args:
            run: Description of the run.
            run_id: Id that `start` returned before the run was resumed. None for a new run.

        Returns:
            The id of the run at the service. It is kept in trackers.json in the run's folder.
        """
        raise NotImplementedError

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the scalars of a step.

        Args:
            step: Number of the step. Steps ascend, except that a resumed run repeats the steps after its last saved
                state.
            scalars: Finite values by name, such as "train/loss".
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Send the remaining data and end the run at the service."""
        raise NotImplementedError
