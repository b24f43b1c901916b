"""The summary of a trace, against one that was made by hand."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest

from areno import trace
from areno.cli import trace as trace_command
from areno.cli.__main__ import main
from areno.errors import ArenoError, ConfigError
from areno.report.trace_summary import SampleTimes, Span, StepTimes, _LaneSpans, summarise, summary_tables
from areno.tracking.trace_file import TraceFile

S = 10**9
ROUNDED = 1e-5


def a_trace(run: Path, *steps: int) -> None:
    """Steps of ten seconds. Two ranks decode for 4 and 3 s, rewards take 2 s longer, the ranks train for 2 and 3 s."""
    start = trace.now() + S
    trace.begin()
    file = TraceFile(run / "traces")

    def add(lane: str, name: str, begin: float, end: float, **more: Any) -> None:
        trace.add(lane, name, start + round(begin * S), start + round(end * S), **more)

    for step in steps:
        add("driver/main", "data", 0, 0.5)
        add("driver/main", "rollout", 0.5, 5)
        add("driver/main", "rollout", 1, 5)  # the inner one of the Trainer
        add("driver/main", "reward", 5, 7)
        add("driver/main", "train", 7, 10)
        add("driver/main", "step", 0, 10, step=step)
        for rank, decodes, trains in ((0, 4, 2), (1, 3, 3)):
            add(f"rank {rank}/commands", "begin_rollout", 0.5, 1)
            add(f"rank {rank}/commands", "train", 7, 10)
            for part in range(4 * decodes):
                add(f"rank {rank}/device", "decode", 1 + part / 4, 1 + (part + 1) / 4)
            add(f"rank {rank}/device", "forward", 7, 7 + trains)
        add("reward/process 0", "reward", 3, 7, sample=0)
        add("samples#0.0.1", "sample", 1, 10, of=f"{step}", prompt=0, sample=1, tokens=9)
        add("samples#0.0.1", "queued", 1, 1.5)
        add("samples#0.0.1", "prefill", 1.5, 2)
        add("samples#0.0.1", "decode", 2, 3)
        add("samples#0.0.1", "preempted", 3, 4)
        add("samples#0.0.1", "prefill", 4, 4.25)
        add("samples#0.0.1", "decode", 4.25, 5)
        add("samples#eval 0.0.0", "sample", 1, 90, of="eval test 0", prompt=0, sample=0, tokens=9)
        add("samples#eval 0.0.0", "decode", 1, 90)
        file.write(trace.drain_events())
        start += 20 * S
    trace.end()
    file.close()


def test_a_step_is_divided(tmp_path: Path) -> None:
    a_trace(tmp_path, 1, 2)
    summary = summarise(tmp_path)
    first, second = summary.steps
    assert (first.step, second.step) == (1, 2)
    assert first.seconds == pytest.approx(10, abs=ROUNDED)
    phases = {"data": 0.5, "rollout": 4.5, "reward": 2, "train": 3, "other": 0}
    assert second.phases == pytest.approx(phases, abs=ROUNDED)
    assert first.idle == pytest.approx({"rank 0": 10 - 4 - 2, "rank 1": 10 - 3 - 3}, abs=ROUNDED)
    path = {
        "rank 1: forward": 3,  # rank 0 ends earlier
        "reward processes: reward": 2,
        "rank 0: decode": 4,
        "rank 0: begin_rollout": 0.5,
        "driver: data": 0.5,
    }
    found = {name.replace("rank 1: begin", "rank 0: begin"): seconds for name, seconds in first.critical_path.items()}
    assert found == pytest.approx(path, abs=ROUNDED)
    assert sum(first.critical_path.values()) == pytest.approx(first.seconds, abs=ROUNDED)


def test_the_phases_of_a_sample_add_up(tmp_path: Path) -> None:
    a_trace(tmp_path, 1)
    [sample] = summarise(tmp_path).samples
    phases = {"queued": 0.5, "prefill": 0.75, "decode": 1.75, "preempted": 1}
    assert sample.phases == pytest.approx(phases, abs=ROUNDED)
    assert (sample.step, sample.prompt, sample.sample, sample.tokens) == (1, 0, 1, 9)
    assert sample.seconds == pytest.approx(4, abs=ROUNDED)


def test_a_step_that_was_repeated_counts_once(tmp_path: Path) -> None:
    a_trace(tmp_path, 1, 2, 3)
    a_trace(tmp_path, 3, 4)
    assert [step.step for step in summarise(tmp_path).steps] == [1, 2, 3, 4]


def test_a_sample_that_was_repeated_in_one_file_counts_once(tmp_path: Path) -> None:
    """As after a restart of the workers, which continues the file."""
    a_trace(tmp_path, 1, 1)
    [sample] = summarise(tmp_path).samples
    assert sample.seconds == pytest.approx(4, abs=ROUNDED)
    assert sum(sample.phases.values()) == pytest.approx(4, abs=ROUNDED)


def test_many_steps_are_quick(tmp_path: Path) -> None:
    a_trace(tmp_path, *range(1, 200))
    assert len(summarise(tmp_path).steps) == 199
    assert summary_tables(summarise(tmp_path))[0].row_count == 21  # the last twenty, and their share


def test_a_lane_finds_the_bars_of_a_step() -> None:
    """Also long ones that began before others which have ended, and none that only touch the step."""
    drawn = random.Random(0)
    for _ in range(200):
        starts = sorted(drawn.randrange(50) for _ in range(20))
        bars = [Span("rank 0", "device", "x", start, start + drawn.choice([0, 1, 3, 40])) for start in starts]
        step = Span("driver", "main", "step", start := drawn.randrange(50), start + drawn.randrange(1, 20))
        overlapping = [bar for bar in bars if bar.start < step.end and bar.end > step.start]
        cut = [bar._replace(start=max(bar.start, step.start), end=min(bar.end, step.end)) for bar in overlapping]
        assert _LaneSpans(bars).within(step) == cut


def test_the_command_prints_tables_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_trace(tmp_path, 1, 2)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [StepTimes(**step) for step in found["steps"]] == summarise(tmp_path).steps
    assert [SampleTimes(**sample) for sample in found["samples"]] == summarise(tmp_path).samples
    assert main(["trace", str(tmp_path), "--samples", "0"]) == 0
    shown = capsys.readouterr().out
    assert "rank 1: forward" in shown
    assert "slowest samples" not in shown
    assert "45.0 %" in shown  # the rollout
    with pytest.raises(ConfigError, match="--samples: is -1; it must be at least 0"):
        trace_command.run(argparse.Namespace(run=str(tmp_path), samples=-1, json=False))


def test_without_a_trace_the_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArenoError, match=r"has no trace; set perf_tracer\.enabled=true"):
        summarise(tmp_path)
    TraceFile(tmp_path / "traces").close()
    with pytest.raises(ArenoError, match="has no whole step"):
        summarise(tmp_path)
