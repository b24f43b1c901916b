"""Settings of traces and profiles: the timeline of a run, the kernels of a step, and the memory of the devices.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areno.errors import Problem
from areno.schema.fields import Needs, Section, check, setting

_TRACED = Needs("enabled", so="no trace is written")


def _step_problems(name: str, steps: list[int] | None) -> Iterator[Problem]:
    """Yield a problem if a list of steps has a number below 1."""
    if wrong := [step for step in steps or () if step < 1]:
        yield Problem(name, "has {}, but steps are numbered from 1", wrong[0])


@dataclass(kw_only=True)
class SessionTracerConfig(Section):
    """Settings of traces/sessions.jsonl, which has the times, tokens, turns and reward of each agent session."""

    enabled: bool = setting(
        False,
        help="Write one line for each agent session (an agent's run for one sample) to traces/sessions.jsonl. Needs "
        "agent.fn",
    )
    flush_threshold: int = setting(
        256,
        help="Finished sessions whose lines are collected before they are written",
        gt=0,
        only_with=Needs("enabled", so="no sessions are written"),
    )


@dataclass(kw_only=True)
class PerfTracerConfig(Section):
    """Settings of the trace of a run, a timeline of the driver, of each device and of each sample.

    Perfetto and `areno trace` read the trace.
    """

    enabled: bool = setting(
        False, help="Write a trace to traces/ in the folder of the run, for https://ui.perfetto.dev and areno trace"
    )
    save_interval: int = setting(
        1, help="Write the trace to disk each time this many steps have ended", gt=0, only_with=_TRACED
    )
    profile_steps: list[int] | None = setting(
        None,
        help="Steps at which torch.profiler records operators and kernels, into one file per rank in traces/. They "
        "are slower, and the files large. null: none",
        only_with=_TRACED,
    )
    session_tracer: SessionTracerConfig = setting(
        factory=SessionTracerConfig, help="A line for each agent session, in traces/sessions.jsonl"
    )

    @check
    def check_profiled_steps(self) -> Iterator[Problem]:
        """Report a number below 1 in profile_steps, which is no step."""
        yield from _step_problems("profile_steps", self.profile_steps)


@dataclass(kw_only=True)
class MemoryProfilerConfig(Section):
    """Settings of snapshots of the device memory, which list the allocations of torch's CUDA allocator."""

    profile_steps: list[int] = setting(
        factory=list,
        help="Steps at whose end each rank writes a snapshot of its device memory to traces/. A rank that runs out "
        "of memory always does",
    )
    max_entries: int = setting(100_000, help="Number of last allocations and frees in a snapshot", gt=0)

    @check
    def check_snapshot_steps(self) -> Iterator[Problem]:
        """Report a number below 1 in profile_steps, which is no step."""
        yield from _step_problems("profile_steps", self.profile_steps)
