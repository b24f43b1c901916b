"""The flight recorder in a benchmark: records each timed step, as a run does, while the next step runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from areno.config.run import RecorderConfig
from areno.engine.engine import Engine
from areno.files.durable import BackgroundCall
from areno.run.flight_recorder import FlightRecorder, KeptRollout
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample, TrainSequence


class StepRecording:
    """Records steps below `folder`. Close it at the end.

    A run writes a record during the rollout after the step. Here, other work may be timed in between. So the record of
    a step is written when the next step begins.
    """

    def __init__(self, engine: Engine, folder: Path):
        self._engine, self._step = engine, 0
        self._recorder = FlightRecorder(RecorderConfig(), folder, {"config": {}})
        self._due: partial[None] | None = None  # writes the record of the step before
        self._writer = BackgroundCall("areno-bench")
        self.written_s: list[float] = []

    def begin_step(self) -> None:
        self._start_writing()
        self._recorder.begin_step()
        self._step += 1

    def end_step(self, rows: Sequence[TrainSequence], stats: Mapping[str, float]) -> None:
        rollout = KeptRollout([], np.ones(len(rows), bool), 0, 0, {})
        self._recorder.keep_rollout(rollout)
        self._recorder.keep_update("actor", rows)
        self._recorder.keep_metrics(stats)
        write = self._recorder.finished_step(self._step, {}, lambda: self._engine)
        self._due = partial(_write_record, rollout, rows, write)

    def _start_writing(self) -> None:
        if self._due is not None:
            self._writer.start(self._write, self._due)
            self._due = None

    def _write(self, due: partial[None]) -> None:
        started = time.perf_counter()
        due()
        self.written_s.append(time.perf_counter() - started)

    @property
    def record_bytes(self) -> int:
        """Size of the last record."""
        return list(self._recorder.records.sizes().values())[-1]

    def close(self) -> None:
        self._start_writing()
        self._writer.close()
        self._recorder.close()


def _write_record(rollout: KeptRollout, rows: Sequence[TrainSequence], write: Callable[[], None]) -> None:
    """Write a record. The samples are made here, in the writer's thread, because a run has them already."""
    rollout.samples.extend(map(_sample_of, rows))
    write()


def _sample_of(row: TrainSequence) -> ScoredSample:
    tokens, prompt_mask, logprobs = (vars(row)[name] for name in ("tokens", "prompt_mask", "logprobs"))
    n_prompt = int(np.argmin(prompt_mask))
    sequence = RolloutSequence(
        resp_tokens=tokens[n_prompt:],
        resp_logprobs=logprobs[n_prompt:],
        resp_versions=np.zeros(len(tokens) - n_prompt, np.int64),
        routes=row.routes,
        finish_reason="length",
    )
    item = PromptItem(prompt="", text="", tokens=tokens[:n_prompt].tolist())
    return ScoredSample(item=item, sequence=sequence, completion="", outcome=RewardOutcome(1.0))
