"""The trace of a run: starts and ends recording, and adds the steps, samples and sessions that the driver sees.

areno/trace.py records events in each process, areno/engine/profiling.py profiles the devices, and
areno/tracking/trace_file.py writes the files.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno import trace
from areno.config.experiments import ExperimentConfig
from areno.engine.requests import version_range
from areno.specs.engine import ProfilingSpec
from areno.tracking.trace_file import FOLDER, SessionFile, TraceFile, make_trace_folder
from areno.types import ScoredSample

if TYPE_CHECKING:
    from areno.engine.engine import Engine

logger = logging.getLogger("areno")


class RunTracer(AbstractContextManager["RunTracer"]):
    """Traces a run as the settings perf_tracer and memory_profiler ask for. Does nothing without them.

    `engine` is a function, called only during steps, because the engine does not exist when the run is opened. `spec`
    says what the workers record, or is None if they record nothing.
    """

    def __init__(self, config: ExperimentConfig, folder: Path, engine: Callable[[], Engine]):
        tracer, memory, folder = config.perf_tracer, config.memory_profiler, (folder / FOLDER).absolute()
        self._engine, self._began = engine, 0
        self.weights_version = 0
        self._interval = tracer.save_interval
        self._kernel_steps = frozenset(tracer.profile_steps or ())
        self._memory_steps = frozenset(() if memory is None else memory.profile_steps)
        self._file = TraceFile(folder) if tracer.enabled else None
        sessions = tracer.session_tracer
        self._sessions = SessionFile(folder, sessions.flush_threshold) if sessions.enabled else None
        self.spec: ProfilingSpec | None = None
        if tracer.enabled or memory is not None:
            entries = None if memory is None else memory.max_entries
            with make_trace_folder(folder):
                self.spec = ProfilingSpec(folder=str(folder), events=tracer.enabled, memory_entries=entries)
        if self._file is not None:
            trace.begin()
            logger.info("the trace is in %s; open it at https://ui.perfetto.dev", os.path.relpath(folder))

    def before_step(self, step: int) -> None:
        """Start to record kernels if the settings ask for it in this step. The first time takes seconds."""
        if step in self._kernel_steps:
            self._engine().begin_kernel_profile()

    def begin_step(self, began: float) -> None:
        """Start the trace of a step, whose batch has been read. `began`: when reading began (time.perf_counter)."""
        if self._file is not None:
            self._began = trace.from_perf_counter(began)
            trace.add(trace.DRIVER, "data", self._began, trace.now())

    def end_step(self, step: int) -> None:
        """End the trace of a step, and write the profiles, snapshots and events that are due after it."""
        if self._file is not None:
            trace.add(trace.DRIVER, "step", self._began, trace.now(), step=step)
        name = f"step{step}"
        if step in self._kernel_steps:
            with trace.span(trace.DRIVER, "write kernels"):
                self._engine().end_kernel_profile(name)
        if step in self._memory_steps:
            with trace.span(trace.DRIVER, "write memory snapshot"):
                self._engine().write_memory_snapshots(name)
        if self._file is not None and step % self._interval == 0:
            self._file.write(trace.drain_events())

    @contextmanager
    def training(self, step: int, samples: Sequence[ScoredSample], keep: Sequence[bool]) -> Iterator[None]:
        """Trace the samples of a step, which is trained inside the `with` block. `keep`: which samples it trains on."""
        start = trace.now()
        yield
        if self._file is not None:
            end = trace.now()
            for sample, is_kept in zip(samples, keep, strict=True):
                sample.spans += [("trained", start, end)] if is_kept else []
            self.add_samples(f"{step}", samples)

    def add_samples(self, name: str, samples: Sequence[ScoredSample]) -> None:
        """Add a lane for each sample to the trace. `name`: the number of the step, or the name of an evaluation."""
        if self._file is None:
            return
        for sample, number in _with_sample_numbers(samples):
            if not sample.spans:
                continue
            lane = f"samples#{name}.{sample.group}.{number}"
            starts, ends = zip(*((start, end) for _, start, end in sample.spans), strict=True)
            arguments = _sample_to_json(sample, number) | {"finish_reason": sample.sequence.finish_reason}
            versions = vars(sample.sequence)["resp_versions"]
            arguments |= version_range(() if versions is None else versions)
            trace.add(lane, "sample", min(starts), max(ends), of=name, **arguments)
            for phase, start, end in sample.spans:
                more = {"weights_version": self.weights_version} if phase == "trained" else {}
                trace.add(lane, phase, start, end, **more)

    def add_sessions(self, step: int, title: str, samples: Sequence[ScoredSample]) -> None:
        """Add a line per agent session to traces/sessions.jsonl, if perf_tracer.session_tracer is enabled."""
        if self._sessions is None:
            return
        for sample, number in _with_sample_numbers(samples):
            record = {"step": step, "phase": title, **_sample_to_json(sample, number)}
            for phase, start, end in sample.spans:
                record |= {f"{phase}_began": start / 1e9, f"{phase}_seconds": (end - start) / 1e9}
            if (trajectory := sample.trajectory) is not None:
                record["turns"] = len(trajectory.turns)
                record["tool_calls"] = len(trajectory.tool_calls)
                record["rows"] = len(trajectory.rows)
            versions = vars(sample.sequence)["resp_versions"]
            self._sessions.add(record | version_range(() if versions is None else versions))

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.write(trace.drain_events())
            self._file.close()
            trace.end()
        if self._sessions is not None:
            self._sessions.flush()


def _with_sample_numbers(samples: Sequence[ScoredSample]) -> Iterator[tuple[ScoredSample, int]]:
    seen: Counter[int] = Counter()
    for sample in samples:
        yield sample, seen[sample.group]
        seen[sample.group] += 1


def _sample_to_json(sample: ScoredSample, number: int) -> dict[str, Any]:
    outcome = sample.outcome
    return {
        "prompt": sample.group,
        "sample": number,
        "tokens": sample.sequence.n_tokens,
        "reward": outcome.value,
        "status": outcome.status,
    }
