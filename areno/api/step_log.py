"""What a Trainer remembers of the step under way: the time of its phases, and the scalars it writes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from areno.api.metrics import MetricsRecorder, row_metrics, step_scalars, step_times
from areno.data.loader import BatchLoader
from areno.tracking.stopwatch import Stopwatch
from areno.types import PromptBatch, PromptItem, TrainSequence


class StepLog:
    """Steps as a script makes them. A step is a round in which no model is trained twice; steps count from 1."""

    def __init__(self, clock: Stopwatch):
        self.clock = clock  # of the phases since the policy was last trained
        self.recorder: MetricsRecorder | None = None  # None: nothing is written
        self._step = 1
        self._trained: set[str] = set()  # models trained in it
        self._skipped: tuple[int, int] | None = None  # prompts passed over: since the policy was last trained, in all

    def counting_skipped(self, loader: BatchLoader[PromptItem]) -> Iterator[PromptBatch]:
        """One pass over the batches, while the rows that are skipped are counted."""
        counted = 0
        for batch in loader.batches():
            counted += self._count_skipped(loader.total_skipped_long - counted)
            yield batch
        self._count_skipped(loader.total_skipped_long - counted)

    def _count_skipped(self, n: int) -> int:
        now, total = self._skipped or (0, 0)
        self._skipped = now + n, total + n
        return n

    def trained(self, role: str, rows: Sequence[TrainSequence], stats: Mapping[str, float]) -> dict[str, float]:
        """Write what a training call tells, and return its statistics with those of the step."""
        if role in self._trained:
            self._trained.clear()
            self._step += 1
        self._trained.add(role)
        stats = dict(stats)
        if role != "actor":
            scalars = {f"train/{role}_{name}": value for name, value in stats.items()}
        else:
            stats |= step_times(self.clock)
            scalars = step_scalars(stats, self.clock)
            self.clock.reset()
            if self.recorder is not None:
                scalars |= row_metrics(rows) | self._skipped_scalars()
        if self.recorder is not None:
            self.recorder.record(self._step, scalars)
        return stats

    def _skipped_scalars(self) -> dict[str, float]:
        if self._skipped is None:
            return {}
        now, total = self._skipped
        self._skipped = 0, total
        return {"rollout/skipped_long": float(now), "rollout/total_skipped_long": float(total)}
