"""The flight recorder: keeps what each step received and computed, so that `areno replay` can recompute the step.

A record has the samples of the rollout with their rewards, the results of the step (advantages, log-probabilities,
metrics), and a digest of all weights and optimizer moments after it. The record of a step that ended with an error has
the error instead of the digests, and what the step had received and computed until then. Records and pinned states
together take at most recorder.max_gib: the oldest are dropped. areno/tracking/step_records.py describes the files.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areno.config.run import RecorderConfig
from areno.files.durable import BackgroundCall, atomic_remove
from areno.run.resume import STATE
from areno.run.states import StateFolder
from areno.tracking.recorded_samples import samples_to_tree
from areno.tracking.step_records import FOLDER, RecordFolder
from areno.types import ScoredSample, TrainSequence

if TYPE_CHECKING:
    from areno.engine.engine import Engine

logger = logging.getLogger("areno.recorder")

_STATE_SHARE = 0.5  # of the budget, which pinned states may take
_PER_TOKEN = (*("old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "advantages", "returns", "weights"),)


@dataclass
class KeptRollout:
    """The rollout of a step, as the training loop received it."""

    samples: list[ScoredSample]
    keep: np.ndarray
    skipped_long: int
    total_skipped_long: int
    scalars: Mapping[str, float]

    def to_tree(self) -> dict[str, Any]:
        return {
            **samples_to_tree(self.samples),
            "keep": self.keep,
            "skipped_long": self.skipped_long,
            "total_skipped_long": self.total_skipped_long,
            "scalars": dict(self.scalars),
        }


@dataclass
class KeptStep:
    """What a step has received and computed so far."""

    rollout: KeptRollout | None = None
    updates: list[tuple[str, list[TrainSequence]]] = field(default_factory=list)  # (role, rows)
    metrics: dict[str, float] = field(default_factory=dict)

    def to_tree(self, step: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **facts,
            "step": step,
            "rollout": None if self.rollout is None else self.rollout.to_tree(),
            "updates": [{"role": role, **rows_to_tree(rows)} for role, rows in self.updates],
            "metrics": self.metrics,
        }


def facts_at_end(progress: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return what a record has of the end of its step: the position in the data, the devices and the digests."""
    digests = {name: np.array(parts, np.int64) for name, parts in engine.state_digests().items()}
    return {"progress": dict(progress), "devices": engine.device_names, "digests": digests}


def facts_at_error(progress: Mapping[str, Any], engine: Callable[[], Engine], error: Exception) -> dict[str, Any]:
    """Return what a record has of the end of a step that failed. The workers may be lost, so they are asked nothing."""
    try:
        devices = engine().device_names
    except Exception:  # the models may not have been loaded
        devices = []
    text = f"{type(error).__name__}: {error}"
    return {"progress": dict(progress), "devices": devices, "digests": {}, "error": text}


def _trained_mask(row: TrainSequence) -> np.ndarray:
    if row.prompt_mask is None:
        return np.ones(0 if row.tokens is None else len(row.tokens), bool)
    return ~np.asarray(row.prompt_mask, bool)


def rows_to_tree(rows: Sequence[TrainSequence]) -> dict[str, Any]:
    """Return what an update trained on: lengths, rewards, and the arrays of all rows, one after another."""
    found: dict[str, Any] = {
        "lengths": np.array([0 if row.tokens is None else len(row.tokens) for row in rows]),
        "reward": np.array([row.reward for row in rows], np.float64),
        "tokens": zlib.crc32(np.concatenate([np.asarray(row.tokens, np.int64) for row in rows] or [[]]).tobytes()),
        "trained": np.concatenate([_trained_mask(row) for row in rows] or [[]]),
    }
    for name in _PER_TOKEN:
        arrays = [vars(row)[name] for row in rows]
        if arrays and all(array is not None for array in arrays):
            found[name] = np.concatenate([np.asarray(array) for array in arrays])
    return found


class StepKeeper:
    """Collects what a step receives and computes. This class forgets it at the end of the step."""

    is_on = False

    def __init__(self) -> None:
        self._step = KeptStep()
        self._is_in_step = False

    def recorded_rollout(self, step: int) -> Mapping[str, Any] | None:
        """Return the record of a step that takes its rollout from there. None if it samples."""
        return None

    def keep_rollout(self, rollout: KeptRollout) -> None:
        if self.is_on:
            self._step.rollout = rollout

    def keep_update(self, role: str, rows: Sequence[TrainSequence]) -> None:
        """Keep the rows of an update, which are read at the end of the step."""
        if self.is_on:
            self._step.updates.append((role, list(rows)))

    def keep_metrics(self, scalars: Mapping[str, float]) -> None:
        if self.is_on:
            self._step.metrics.update(scalars)

    def can_replay(self, step: int) -> bool:
        """Return whether the current step can be computed again once it has ended."""
        return False

    def begin_step(self) -> None:
        self._step, self._is_in_step = KeptStep(), True

    def end_step(self, step: int, progress: Mapping[str, Any], engine: Callable[[], Engine]) -> None:
        """Take the results of a step. `progress` is the position in the data after it."""

    def fail_step(self, step: int, progress: Mapping[str, Any], engine: Callable[[], Engine], error: Exception) -> None:
        """Take what a step has received and computed until the error that ended the run."""

    def begin_after(self, step: int) -> None:
        """Remove everything of steps after `step`, which the run repeats."""

    def close(self) -> None: ...


class FlightRecorder(StepKeeper):
    """Writes a record of each step in the background. `facts` are part of every record, such as the settings.

    If a record cannot be written, a warning is logged, and the run continues without records.
    """

    def __init__(self, config: RecorderConfig, run_folder: Path, facts: Mapping[str, Any]):
        super().__init__()
        self.is_on, self._facts = config.max_gib > 0, facts
        self._budget = int(config.max_gib * 2**30)
        self.records = RecordFolder(run_folder / FOLDER)
        self.states = StateFolder(run_folder / FOLDER / "state", keep=1)
        self._lock = threading.Lock()  # states are pinned in another thread than records are written
        self._writer = BackgroundCall("areno-recorder")

    def end_step(self, step: int, progress: Mapping[str, Any], engine: Callable[[], Engine]) -> None:
        if self.is_on:
            self._writer.start(self.finished_step(step, progress, engine))

    def finished_step(self, step: int, progress: Mapping[str, Any], engine: Callable[[], Engine]) -> partial[None]:
        """Take the results of a step, and return a function that writes its record. A thread may call it."""
        kept, self._step, self._is_in_step = self._step, KeptStep(), False
        return partial(self._write, step, kept, {**self._facts, **facts_at_end(progress, engine())})

    def can_replay(self, step: int) -> bool:
        recorded = {*self.records.steps(), step} if self.is_on else set()
        of_run = StateFolder(self.records.folder.parent / STATE, keep=1)
        bases = {0, *self.states.steps(), *of_run.steps()}
        while step in recorded and step - 1 not in bases:
            step -= 1
        return step in recorded

    def fail_step(self, step: int, progress: Mapping[str, Any], engine: Callable[[], Engine], error: Exception) -> None:
        if not (self.is_on and self._is_in_step):
            return
        self._writer.wait()
        self._write(step, self._step, {**self._facts, **facts_at_error(progress, engine, error)})
        self._is_in_step = False
        if self.is_on:
            folder = shlex.quote(os.path.relpath(self.records.folder.parent))
            text = "step %d is recorded up to its error. To compute it again: areno replay %s --step %d"
            logger.info(text, step, folder, step)

    def _write(self, step: int, kept: KeptStep, facts: Mapping[str, Any]) -> None:
        try:
            self.records.write(step, kept.to_tree(step, facts))
            with self._lock:
                self._keep_within_budget()
        except Exception as error:  # such as a full disk, or an object of a user's agent: no reason to end a run
            self.is_on = False
            text = "the record of step %d could not be written: %s. The run continues without records"
            logger.warning(text, step, error)

    def _keep_within_budget(self) -> None:
        """Drop the oldest records, except that of the newest step, and pinned states that no record follows."""
        sizes, states = self.records.sizes(), self._state_sizes()
        total, steps = sum(sizes.values()) + sum(states.values()), list(sizes)
        for step in steps[:-1]:
            if total <= self._budget:
                break
            self.records.remove(step)
            total -= sizes.pop(step)
            for older in [each for each in states if each <= step and each + 1 not in sizes]:
                self._unpin(older)
                total -= states.pop(older)

    def pin_state(self, step: int, folder: Path) -> bool:
        """Move a training state that the run no longer keeps into the recorder. Return False if it has no room."""
        size = _size_of(folder)
        if not self.is_on or size > self._budget * _STATE_SHARE:
            return False
        with self._lock:
            if step + 1 not in self.records.sizes():
                return False
            states = self._state_sizes()
            for older in sorted(states):
                if sum(states.values()) + size > self._budget * _STATE_SHARE:
                    self._unpin(older)
                    del states[older]
            self.states.folder.mkdir(parents=True, exist_ok=True)
            folder.rename(self.states.path_of(step))
            self._keep_within_budget()
        return True

    def _state_sizes(self) -> dict[int, int]:
        return {step: _size_of(self.states.path_of(step)) for step in sorted(self.states.steps())}

    def _unpin(self, step: int) -> None:
        atomic_remove(self.states.path_of(step))

    def begin_after(self, step: int) -> None:
        if self.is_on:
            self._writer.wait()
            self._step, self._is_in_step = KeptStep(), False
            with self._lock:
                self.records.remove_after(step)
                for later in (each for each in self.states.steps() if each > step):
                    self._unpin(later)

    def close(self) -> None:
        self._writer.close()


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
