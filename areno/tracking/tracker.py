"""Trackers follow a run: they receive its scalars and samples, and show them or write them.

A script passes its own tracker to a loop by `trackers=`. A service that many runs use is a file of areno/services.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from areno.types import ScoredSample

END_OF_STEP = "time/step"
"""The scalar that comes last in a step."""


class Tracker:
    """Base class of trackers. Its methods do nothing: override those that you need.

    An exception in a tracker ends the run.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Receive scalars of a step. One step may take several calls.

        Args:
            step: The number of the step, from 1 on. 0 is an evaluation before the first step.
            scalars: Numbers by name, such as "train/loss".
        """

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Receive all samples of a step, with their rewards.

        Args:
            step: The number of the step.
            samples: The samples, those of a prompt next to each other.
        """

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        """Receive all samples of an evaluation.

        Args:
            step: The last step before the evaluation.
            samples: The samples, with their rewards.
            name: The name of the validation set; "" if there is only one.
        """

    def resume(self, step: int) -> None:
        """Note that the run resumes from the state of an earlier session. The steps after it are repeated.

        Args:
            step: The last step that the state contains.
        """

    def finish(self) -> None:
        """Close files and connections. Nothing is logged afterwards, and a second call does nothing."""


class Trackers(Tracker):
    """Several trackers used as one.

    Args:
        trackers: Each call goes to all of them, in this order.
    """

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = trackers

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Give scalars to all trackers."""
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Give samples to all trackers."""
        for tracker in self._trackers:
            tracker.samples(step, samples)

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        """Give samples of an evaluation to all trackers."""
        for tracker in self._trackers:
            tracker.eval_samples(step, samples, name)

    def resume(self, step: int) -> None:
        """Tell all trackers that the run resumes after a step."""
        for tracker in self._trackers:
            tracker.resume(step)

    def finish(self) -> None:
        """Finish all trackers, even if one raises. Later calls are ignored."""
        trackers, self._trackers = self._trackers, []
        with ExitStack() as stack:
            for tracker in reversed(trackers):
                stack.callback(tracker.finish)
