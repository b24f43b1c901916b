"""The summary of a run's trace: where the time of each step went, its critical path, idle devices, slowest samples.

`areno trace` prints it. The trace is read from traces/trace-*.json in the folder of the run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappush
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from areno.errors import ArenoError
from areno.report.terminal import right_aligned
from areno.tracking.trace_file import FOLDER, read_trace, trace_files

DRIVER, STEP, DEVICE, COMMANDS, SAMPLES, SAMPLE = "driver", "step", "device", "commands", "samples", "sample"
_SAMPLED = ("queued", "prefill", "decode", "preempted", "agent")  # phases of a sample that the summary adds up
_SHOWN_STEPS = 20
_SHOWN_PARTS = 12


class Span(NamedTuple):
    """An event with a duration in the trace. Times are in nanoseconds since the beginning of its file."""

    process: str  # such as "rank 0"
    track: str  # such as "device"; "" for events of an object, such as a sample
    name: str
    start: int
    end: int


@dataclass(kw_only=True)
class SampleTimes:
    """How long it took to sample one sample."""

    step: int
    prompt: int  # its index in the step
    sample: int  # its index among those of the prompt
    tokens: int
    seconds: float = 0.0  # from the request to the last token
    phases: dict[str, float] = field(default_factory=dict)  # seconds of queued, prefill, decode, preempted, agent


@dataclass(kw_only=True)
class StepTimes:
    """Where the time of one step went, in seconds."""

    step: int
    seconds: float
    phases: dict[str, float]  # of the driver; "other" is the rest of the step
    idle: dict[str, float]  # by rank: its device had no work
    critical_path: dict[str, float]  # work, such as "rank 0: decode", for which the step waited


@dataclass(kw_only=True)
class TraceSummary:
    """The summary of the trace of a run. If a step was repeated after a resume, only the last repetition counts."""

    steps: list[StepTimes]
    samples: list[SampleTimes]  # those that took longest, the slowest first

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: str | Path, n_samples: int = 5) -> TraceSummary:
    files = trace_files(Path(run).expanduser() / FOLDER)
    if not Path(run).expanduser().is_dir():
        raise ArenoError("there is no folder {}", run)
    if not files:
        raise ArenoError("{} has no trace; set perf_tracer.enabled=true to write one", run)
    steps: dict[int, StepTimes] = {}
    samples: dict[tuple[int, int, int], SampleTimes] = {}
    for path in files:
        events = read_trace(path)
        bars = _duration_spans(events)
        found = _step_times(
            bars, {_us_to_ns(event["ts"]): event["args"]["step"] for event in events if _is_step(event)}
        )
        steps |= {step.step: step for step in found}
        samples |= {(each.step, each.prompt, each.sample): each for each in _sample_times(events)}
    if not steps:
        raise ArenoError("the trace of {} has no whole step; let the run end a step first", run)
    slowest = sorted(samples.values(), key=lambda sample: -sample.seconds)[:n_samples]
    return TraceSummary(steps=[steps[number] for number in sorted(steps)], samples=slowest)


def _is_step(event: dict[str, Any]) -> bool:
    return event["ph"] == "X" and event["name"] == STEP and "step" in event.get("args", {})


def _duration_spans(events: Sequence[dict[str, Any]]) -> list[Span]:
    """Return bars for the events with a duration and for the begin-end pairs of concurrent calls."""
    processes, tracks = {}, {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
    bars = [
        Span(
            processes[each["pid"]],
            tracks[each["tid"]],
            each["name"],
            start := _us_to_ns(each["ts"]),
            start + _us_to_ns(each["dur"]),
        )
        for each in events
        if each["ph"] == "X"
    ]
    calls = [(begin, end) for begin, end in _begin_end_pairs(events) if begin["cat"].endswith(" calls")]
    return bars + [
        Span(processes[one["pid"]], "", one["name"], _us_to_ns(one["ts"]), _us_to_ns(end["ts"])) for one, end in calls
    ]


def _begin_end_pairs(events: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (begin, end) for each pair of begin and end events. An event whose end is missing is left out."""
    running: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            running[event["cat"], event["id"]].append(event)
        elif event["ph"] == "e" and running[event["cat"], event["id"]]:
            yield running[event["cat"], event["id"]].pop(), event


def _step_times(bars: Sequence[Span], numbers: dict[int, int]) -> list[StepTimes]:
    """Summarise each step of a file. `numbers` maps the start time of a step to its number."""
    by_lane: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for bar in sorted(bars, key=lambda bar: bar.start):
        by_lane[bar.process, bar.track].append(bar)
    lanes = {lane: _LaneSpans(of_lane) for lane, of_lane in by_lane.items()}
    found = []
    for step in (bar for (process, _), of_lane in by_lane.items() if process == DRIVER for bar in of_lane):
        if step.name != STEP:
            continue
        inside = {lane: of_lane.within(step) for lane, of_lane in lanes.items()}
        of_driver = [bar for (process, _), of_lane in inside.items() if process == DRIVER for bar in of_lane]
        phases = _phase_seconds(step, [bar for bar in of_driver if bar.name != STEP])
        devices = {process: of_lane for (process, track), of_lane in inside.items() if track == DEVICE}
        found.append(
            StepTimes(
                step=numbers[step.start],
                seconds=_ns_to_seconds(step.end - step.start),
                phases=phases,
                idle={
                    rank: _ns_to_seconds(step.end - step.start - _busy_ns(of_rank)) for rank, of_rank in devices.items()
                },
                critical_path=_critical_path(step, inside),
            )
        )
    return found


class _LaneSpans:
    """The bars of one lane (a track of a process), sorted by start. A step's bars are found by binary search."""

    def __init__(self, bars: Sequence[Span]):
        self._bars = bars
        self._starts = [bar.start for bar in bars]
        self._reached = list(accumulate((bar.end for bar in bars), max))  # latest end of a bar and all before it

    def within(self, step: Span) -> list[Span]:
        """Return the bars that overlap with a step, clipped to its time."""
        first, stop = bisect_right(self._reached, step.start), bisect_left(self._starts, step.end)
        return [
            bar._replace(start=max(bar.start, step.start), end=min(bar.end, step.end))
            for bar in self._bars[first:stop]
            if bar.end > step.start
        ]


def _phase_seconds(step: Span, inside: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each outermost phase of the driver in a step. "other" is the rest of the step."""
    phases: dict[str, float] = defaultdict(float)
    reached = step.start
    for bar in sorted(inside, key=lambda bar: (bar.start, -bar.end)):
        if bar.start >= reached:  # not inside of the phase before it
            phases[bar.name] += _ns_to_seconds(bar.end - bar.start)
            reached = bar.end
    phases["other"] = max(0.0, _ns_to_seconds(step.end - step.start) - sum(phases.values()))
    return dict(phases)


def _busy_ns(bars: Sequence[Span]) -> int:
    busy, reached = 0, 0
    for bar in sorted(bars, key=lambda bar: bar.start):
        busy += max(0, bar.end - max(bar.start, reached))
        reached = max(reached, bar.end)
    return busy


def _critical_path(step: Span, inside: dict[tuple[str, str], list[Span]]) -> dict[str, float]:
    """Return the seconds of each kind of work on the critical path of a step, the longest first.

    The path is followed backwards from the end of the step. At each moment it takes work of a device if there is any,
    else a command of a rank, else a call of a reward or agent process, else the driver alone. Among several bars of the
    same kind it takes the one that ends last, and then the one that starts first.
    """
    kinds: list[list[Span]] = [[], [], [], []]
    for (process, track), bars in inside.items():
        kind = 3 if process == DRIVER else 0 if track == DEVICE else 1 if track == COMMANDS else 2
        kinds[kind] += [bar for bar in bars if bar.name != STEP]
    path: dict[str, float] = defaultdict(float)
    gaps = [(step.start, step.end)]
    for bars in kinds:
        gaps = _walk_back(gaps, bars, path)
    for start, end in gaps:
        path[f"{DRIVER}: other"] += _ns_to_seconds(end - start)
    return dict(sorted(path.items(), key=lambda pair: -pair[1]))


def _walk_back(gaps: list[tuple[int, int]], bars: list[Span], path: dict[str, float]) -> list[tuple[int, int]]:
    """Walk backwards through `gaps`, the times that `path` lacks. Add to `path` the seconds that `bars` cover.

    Returns the parts of the gaps in which no bar runs, the last one first.
    """
    waiting = sorted(bars, key=lambda bar: bar.end)  # the last one is the next to be met
    running: list[tuple[int, int, Span]] = []  # a heap: of several bars, the path takes the one that began first
    left = []
    for first, last in gaps:
        at = last
        while at > first:
            while waiting and waiting[-1].end >= at:
                bar = waiting.pop()
                heappush(running, (bar.start, len(waiting), bar))
            if running and running[0][0] < at:
                bar = running[0][2]
                until = max(bar.start, first)
                path[f"{bar.process}: {bar.name}"] += _ns_to_seconds(at - until)
            else:
                running.clear()  # they all begin later
                until = max(first, waiting[-1].end) if waiting else first
                left.append((until, at))
            at = until
    return left


def _sample_times(events: Sequence[dict[str, Any]]) -> list[SampleTimes]:
    """Return the times of the samples of training steps. If a step was repeated, only its last repetition counts."""
    found: dict[str, SampleTimes] = {}
    running: dict[str, dict[str, float]] = defaultdict(dict)  # phases of samples whose end has not been reached
    for begin, end in _begin_end_pairs(events):
        if begin["cat"] != SAMPLES:
            continue
        phases, name, given = running[begin["id"]], begin["name"], begin.get("args", {})
        if name in _SAMPLED:
            phases[name] = phases.get(name, 0.0) + _ns_to_seconds(_us_to_ns(end["ts"]) - _us_to_ns(begin["ts"]))
        elif name == SAMPLE:
            del running[begin["id"]]
            if given["of"].isdigit():  # samples of an evaluation are named after it
                facts = {name: given[name] for name in ("prompt", "sample", "tokens")}
                seconds = sum(phases.values())
                found[begin["id"]] = SampleTimes(step=int(given["of"]), **facts, seconds=seconds, phases=phases)
    return list(found.values())


def _us_to_ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _ns_to_seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9


def summary_tables(summary: TraceSummary) -> list[Table]:
    steps = summary.steps[-_SHOWN_STEPS:]
    names = list(dict.fromkeys(name for step in steps for name in step.phases))
    names = [name for name in names if name != "other"] + ["other"]
    ranks = list(dict.fromkeys(rank for step in steps for rank in step.idle))
    title = "seconds of each step, by phase, and in which a device was idle"
    if len(steps) < len(summary.steps):
        title += f" (the last {len(steps)} of {len(summary.steps)} steps)"
    by_step = Table(
        right_aligned("step"),
        *map(right_aligned, ("seconds", *names)),
        *(right_aligned(f"{rank} idle") for rank in ranks),
    )
    by_step.title = title
    for step in steps:
        seconds = [step.seconds, *(step.phases.get(name, 0.0) for name in names)]
        by_step.add_row(
            str(step.step), *map(_seconds_text, seconds), *(_seconds_text(step.idle.get(rank)) for rank in ranks)
        )
    total = sum(step.seconds for step in steps)
    shares = [sum(step.phases.get(name, 0.0) for step in steps) / total for name in names]
    idle = [sum(step.idle.get(rank, 0.0) for step in steps) / total for rank in ranks]
    by_step.add_section()
    by_step.add_row("share", "100 %", *(f"{100 * share:.1f} %" for share in (*shares, *idle)))

    path: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, seconds in step.critical_path.items():
            path[name] += seconds
    critical = Table(
        "critical path", right_aligned("seconds"), right_aligned("share"), title="what the steps waited for"
    )
    for name, seconds in sorted(path.items(), key=lambda pair: -pair[1])[:_SHOWN_PARTS]:
        critical.add_row(name, _seconds_text(seconds), f"{100 * seconds / total:.1f} %")
    if not summary.samples:
        return [by_step, critical]
    phases = [name for name in _SAMPLED if any(name in sample.phases for sample in summary.samples)]
    slowest = Table(
        *map(right_aligned, ("step", "prompt", "sample", "tokens", "seconds", *phases)), title="slowest samples"
    )
    for sample in summary.samples:
        numbers = (sample.step, sample.prompt, sample.sample, sample.tokens)
        seconds = (sample.seconds, *(sample.phases.get(name) for name in phases))
        slowest.add_row(*map(str, numbers), *map(_seconds_text, seconds))
    return [by_step, critical, slowest]


def _seconds_text(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"
