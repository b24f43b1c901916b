"""The replay of recorded steps: a run in a folder of its own, whose steps take their rollouts from records.

`areno.report.replayed_steps` starts the training loop of the recorded run inside `replaying`. The loop is unchanged: it
resumes from a training state and trains, but its rollouts are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areno import heartbeat
from areno.api.metrics import step_scalars, step_time_metrics
from areno.errors import ArenoError
from areno.run.flight_recorder import StepKeeper, facts_at_end, facts_at_error
from areno.run.progress import Name
from areno.run.run import Run
from areno.types import Batch, ScoredSample

if TYPE_CHECKING:
    from areno.engine.engine import Engine


@dataclass
class Replay:
    """Which steps are computed again, and what they compute.

    Attributes:
        until: The last step.
        record_of: Returns the record of a step, see `RecordFolder.read`.
        inputs: Fingerprints of the model and data files with which the recorded run began.
        resamples: Whether the last step draws samples instead of taking the recorded ones.
        saves: Steps after which a training state is written. 0: before the first step.
        found: Step -> its record in the replay.
    """

    until: int
    record_of: Callable[[int], Mapping[str, Any]]
    inputs: Mapping[str, str]
    resamples: bool = False
    saves: frozenset[int] = frozenset()
    found: dict[int, dict[str, Any]] = field(default_factory=dict)


# A loop of a user's own may construct its Setup with any arguments, so the replay does not come as an argument.
_current: ContextVar[Replay | None] = ContextVar("replay", default=None)


@contextmanager
def replaying(replay: Replay) -> Iterator[None]:
    """Make each run that is opened inside the `with` block a replay."""
    token = _current.set(replay)
    try:
        yield
    finally:
        _current.reset(token)


def has_failed_before_training(record: Mapping[str, Any]) -> bool:
    """Whether a step ended with an error before it had all samples and rewards, so that a replay draws them again."""
    return record.get("error") is not None and record["rollout"] is None


def samples_nothing() -> bool:
    """Return whether a replay is being opened that needs no rewards, agents or judges."""
    replay = _current.get()
    return replay is not None and not replay.resamples


def open_run(*args: Any, **given: Any) -> Run:
    """Open a Run or, inside `replaying`, a replay."""
    replay = _current.get()
    return Run(*args, **given) if replay is None else ReplayRun(replay, *args, **given)


class ReplayRun(Run):
    """A run that computes recorded steps again. It saves no checkpoints, and evaluates nothing."""

    def __init__(self, replay: Replay, *args: Any, inputs: Mapping[str, str], **given: Any):
        self._replay = replay
        changed = [key for key, known in replay.inputs.items() if inputs.get(key, known) != known]
        if changed:
            raise ArenoError("{} is not what the run began with, so that no step can be replayed", ", ".join(changed))
        super().__init__(*args, inputs=inputs, **given)

    def _open_recorder(self) -> StepKeeper:
        return _ReplayKeeper(self._replay)

    def steps(self) -> Iterator[Batch[Any]]:
        self.begin()
        self.recovery.keep_run_state(self.state_dict())
        self.progress.open_batches()
        while True:
            if self.step in self._replay.saves:
                self.recovery.write_now(self.step)
            if self.step >= self._replay.until:
                return
            self.clock.reset()
            self._peaks = {}
            batch = self.progress.next_step()
            if batch is None:
                raise ArenoError("the data ends before step {}: the run has recorded other data", self._replay.until)
            self.recorder.begin_step()
            self.outputs.begin_step()
            yield batch

    def log_samples(self, samples: Sequence[ScoredSample]) -> None:
        pass

    def give_warnings(self) -> None:
        pass

    def end_step(self, stats: Mapping[str, float]) -> None:
        self.clock.close_step()
        self.log(step_scalars({**stats, **step_time_metrics(self.clock)}, self.clock))
        self.recorder.end_step(self.step, self._position(), self._models.engine)
        for trigger in (self.saver.trigger, self.evaluator.trigger, self.recovery.trigger):
            trigger.is_due(self.step, self.progress.epoch_ended)  # they count epochs
        self.recovery.keep_run_state(self.state_dict())
        self.stop.raise_if_interrupted()

    @contextmanager
    def delay_interrupts(self) -> Iterator[None]:
        with self.stop, heartbeat.working("the replay"):
            try:
                yield
            except Exception as error:
                self._has_ended = True
                self.recorder.fail_step(self.step, self._position(), self._models.engine, error)
                raise

    def finish(self, numbers: Mapping[Name, int]) -> None:
        self.during_steps.close()
        self._has_ended = True

    def record_result(self, result: float) -> None:
        pass


class _ReplayKeeper(StepKeeper):
    is_on = True

    def __init__(self, replay: Replay):
        super().__init__()
        self._replay = replay

    def recorded_rollout(self, step: int) -> Mapping[str, Any] | None:
        if self._replay.resamples and step == self._replay.until:
            return None
        record = self._replay.record_of(step)
        if record["rollout"] is None and has_failed_before_training(record):
            return None
        if record["rollout"] is None:
            raise ArenoError("the record of step {} has no rollout, but the step needs one", step)
        return record

    def end_step(self, step: int, progress: Mapping[str, Any], engine: Callable[[], Engine]) -> None:
        self._replay.found[step] = self._step.to_tree(step, facts_at_end(progress, engine()))
        self._is_in_step = False

    def fail_step(self, step: int, progress: Mapping[str, Any], engine: Callable[[], Engine], error: Exception) -> None:
        if self._is_in_step:
            self._replay.found[step] = self._step.to_tree(step, facts_at_error(progress, engine, error))
