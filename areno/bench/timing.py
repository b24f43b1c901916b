"""Time the repeats of a batch of work by one contender, which is areno or another library.

`measure` runs a warm-up and then timed repeats. `PhaseTimes` holds the seconds of each phase and computes medians and
spread.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areno.bench.arguments import Kind
from areno.bench.recording import StepRecording
from areno.bench.work import Workload
from areno.types import TrainSequence


class Contender(Protocol):
    """The interface of a library that is timed. Every method returns after the device has finished."""

    name: str
    vocab_size: int

    def rollout(self, work: Workload, prompts: list[list[int]]) -> list[TrainSequence]:
        """Sample every prompt as often and as long as `work` says, and return a training row for each sample."""
        ...

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        """Run optimizer steps on the rows, and return statistics by name."""
        ...

    def logprobs(self, rows: Sequence[TrainSequence]) -> Sequence[Any]: ...


@dataclass
class PhaseTimes:
    """The measured times of a contender."""

    warm_up_s: float = 0.0
    # of each repeat of the phases rollout, prefill (one token a sample), train, logprob, record and step
    seconds: dict[str, list[float]] = field(default_factory=dict)
    stats: list[dict[str, float]] = field(default_factory=list)  # of training in each repeat
    rows: list[TrainSequence] = field(default_factory=list)  # of the last repeat

    def phase_figures(self, work: Workload) -> dict[str, float]:
        """Return `PHASE_s` (median), `PHASE_spread` ((longest - shortest) / median) and `PHASE_tok_s` of each phase.

        `decode_s` is the rollout without prefill, and `other_s` the part of a step outside of rollout and training.
        """
        out = {"warm_up_s": self.warm_up_s}
        for phase, seconds in self.seconds.items():
            median = statistics.median(seconds)
            out[f"{phase}_s"] = median
            out[f"{phase}_spread"] = (max(seconds) - min(seconds)) / median
            if phase not in ("prefill", "record"):
                tokens = work.n_new_tokens if phase == "rollout" else sum(work.row_lens)
                out[f"{phase}_tok_s"] = tokens / median
        if "prefill" in self.seconds:
            out["decode_s"] = max(0.0, out["rollout_s"] - out["prefill_s"])
        if "step" in self.seconds:
            out["other_s"] = max(0.0, out["step_s"] - out["rollout_s"] - out["train_s"])
        return out


def measure(
    contender: Contender,
    kind: Kind,
    work: Workload,
    repeats: int,
    warm_up: Workload | None = None,
    recording: StepRecording | None = None,
) -> PhaseTimes:
    """Run a warm-up, perhaps with a shorter batch, and then timed repeats of a batch of work.

    `recording` records each step, which is part of its time.
    """
    timed = PhaseTimes()
    for repeat in range(-1, repeats):
        started = time.perf_counter()
        seconds = _run_once(contender, kind, (warm_up or work) if repeat < 0 else work, repeat, timed, recording)
        if repeat < 0:
            timed.warm_up_s, timed.stats = time.perf_counter() - started, []
            gc.freeze()  # as runs do; otherwise a garbage collection scans all imported modules for 0.1 s
        else:
            for phase, value in seconds.items():
                timed.seconds.setdefault(phase, []).append(value)
        name = repeat_name(repeat, repeats)
        log_progress(
            f"{contender.name} {kind} {name}: " + ", ".join(f"{key} {value:.3f} s" for key, value in seconds.items())
        )
    return timed


def _run_once(
    contender: Contender,
    kind: Kind,
    work: Workload,
    repeat: int,
    timed: PhaseTimes,
    recording: StepRecording | None = None,
) -> dict[str, float]:
    seconds: dict[str, float] = {}
    if kind in ("rollout", "step"):
        prompts = work.random_prompts(contender.vocab_size, repeat)
        started = time.perf_counter()
        if recording is not None:
            recording.begin_step()
        timed.rows = contender.rollout(work, prompts)
        seconds["rollout"] = time.perf_counter() - started
    else:
        timed.rows = work.random_rows(contender.vocab_size, repeat)
        started = time.perf_counter()
    if kind in ("train", "step"):
        train_started = time.perf_counter()
        timed.stats.append(contender.train(timed.rows))
        seconds["train"] = time.perf_counter() - train_started
    if recording is not None:
        record_started = time.perf_counter()
        recording.end_step(timed.rows, timed.stats[-1])
        seconds["record"] = time.perf_counter() - record_started
    if kind == "step":
        seconds["step"] = time.perf_counter() - started
    if kind == "logprob":
        contender.logprobs(timed.rows)
        seconds["logprob"] = time.perf_counter() - started
    if "rollout" in seconds:  # with other prompts, since some libraries cache the prompts that they have seen
        prompts = work.random_prompts(contender.vocab_size, repeat + 1_000_000)
        started = time.perf_counter()
        contender.rollout(work.with_max_new_tokens(1), prompts)
        seconds["prefill"] = time.perf_counter() - started
    return seconds


def repeat_name(repeat: int, repeats: int) -> str:
    """Return "repeat 1/3" or, for -1, "warm-up"."""
    return "warm-up" if repeat < 0 else f"repeat {repeat + 1}/{repeats}"


def log_progress(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
