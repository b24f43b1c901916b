"""The base class of trackers, which receive the scalars and samples of a run to show or write them.

A script passes its own tracker to a training loop with `trackers=`. A service that many runs use is a file in
areno/services.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from areno.types import ScoredSample

END_OF_STEP = "time/step"  # the scalar that is logged last in a step


class Tracker:
    """Base class of trackers. Its methods do nothing, so a subclass overrides only the methods that it needs.

    An exception in a tracker ends the run.
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Receive scalars of a step by name. One step may take several calls. The last call has time/step.

        Step 0 is an evaluation before the first step.
        """

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Receive all samples of a training step. Samples of the same prompt are adjacent."""

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        """Receive all samples of an evaluation after `step`. `name` is the validation set, "" if there is only one."""

    def numbers_of(self, step: int, indices: Sequence[int]) -> list[int]:
        """Return the numbers by which `areno replay --sample` knows samples of the latest step.

        Empty if the tracker writes no samples for it.
        """
        return []

    def resume(self, step: int) -> None:
        """Prepare for a resumed run, which repeats the steps after `step`. Anything recorded for them is outdated."""

    def finish(self) -> None:
        """Close files and connections at the end of the run. A second call must do nothing."""


class Trackers(Tracker):
    """A tracker that passes each call to several trackers, in their order."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = trackers

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        for tracker in self._trackers:
            tracker.samples(step, samples)

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        for tracker in self._trackers:
            tracker.eval_samples(step, samples, name)

    def numbers_of(self, step: int, indices: Sequence[int]) -> list[int]:
        return next(filter(None, (tracker.numbers_of(step, indices) for tracker in self._trackers)), [])

    def resume(self, step: int) -> None:
        for tracker in self._trackers:
            tracker.resume(step)

    def finish(self) -> None:
        """Finish each tracker, even if another tracker raises an exception."""
        trackers, self._trackers = self._trackers, []
        with ExitStack() as stack:
            for tracker in reversed(trackers):
                stack.callback(tracker.finish)
