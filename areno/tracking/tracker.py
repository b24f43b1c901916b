"""Trackers follow a run: they get its scalars and its samples, and show them or write them somewhere.

To add one, derive a class from `Tracker` in a file of its own and add a line to `open_trackers` in recorder.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from areno.types import ScoredSample

END_OF_STEP = "time/step"
"""The scalar that comes last in a step."""


class Tracker:
    """Something that follows a run. This one ignores everything. An error that a tracker raises ends the run."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take scalars of a step, named <namespace>/<name>. A step may come in several calls."""

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        """Take all samples of a step, with their rewards."""

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        """Take all samples of an evaluation set after a step. name: of the set; "" if there is only one."""

    def resume(self, step: int) -> None:
        """The run goes on behind this step. What came of later steps, in a session that ended, will come again."""

    def finish(self) -> None:
        """Close what is open. Nothing is logged after this. A second call does nothing."""


class Trackers(Tracker):
    """Several trackers used as one. Each call goes to all of them, in order."""

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

    def resume(self, step: int) -> None:
        for tracker in self._trackers:
            tracker.resume(step)

    def finish(self) -> None:
        """Finish all of them, also where one raises. What is logged after this goes nowhere."""
        trackers, self._trackers = self._trackers, []
        with ExitStack() as stack:
            for tracker in reversed(trackers):
                stack.callback(tracker.finish)
