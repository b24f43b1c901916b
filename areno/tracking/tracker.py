"""The base class of trackers, which receive the scalars and samples of a run to show or write them.

A script passes its own tracker to a training loop with `trackers=`. A service that many runs use is a file in
areno/services.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from areno.types import ScoredSample

END_OF_STEP = "time/step"
"""The scalar that is logged last in a step."""


class Tracker:
    """Base class of trackers. Its methods do nothing, so a subclass overrides only the methods that it needs.

    An exception in a tracker ends the run.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Receive scalars of a step. One step may take several calls; the last one has the scalar time/step.

        Args:
            step: The number of the step, from 1 on. 0 is an evaluation before the first step.
            scalars: Values by name, such as "train/loss".
        """

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Receive all samples of a training step, with their rewards.

        Args:
            step: The number of the step.
            samples: The scored samples. Samples of the same prompt are adjacent.
        """

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        """Receive all samples of an evaluation, with their rewards.

        Args:
            step: The last training step before the evaluation.
            samples: The scored samples.
            name: The name of the validation set, or "" if there is only one set.
        """

    def resume(self, step: int) -> None:
        """Prepare for the resumed run, which continues from a training state and repeats the steps after it.

        Args:
            step: The last step that the training state contains. Anything recorded for later steps is outdated.
        """

    def finish(self) -> None:
        """Close files and connections at the end of the run. No other method is called after that.

        A second call of `finish` must do nothing.
        """


class Trackers(Tracker):
    """A tracker that passes each call to several trackers.

    Args:
        trackers: The trackers, in the order in which they are called.
    """

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = trackers

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass the scalars of a step to each tracker."""
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Pass the samples of a step to each tracker."""
        for tracker in self._trackers:
            tracker.samples(step, samples)

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        """Pass the samples of an evaluation to each tracker."""
        for tracker in self._trackers:
            tracker.eval_samples(step, samples, name)

    def resume(self, step: int) -> None:
        """Call `resume` of each tracker."""
        for tracker in self._trackers:
            tracker.resume(step)

    def finish(self) -> None:
        """Finish each tracker, even if another tracker raises an exception. Later calls do nothing."""
        trackers, self._trackers = self._trackers, []
        with ExitStack() as stack:
            for tracker in reversed(trackers):
                stack.callback(tracker.finish)
