"""Curves are thinned while they are read, and the lists of runs read little of a long file."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
import tracemalloc
from pathlib import Path

import pytest

from areno.errors import ArenoError
from areno.report.runs import main_headline, runs_table
from areno.tracking.metrics_file import MetricsFile
from areno.tracking.reader import RunReader, headlines, run_seconds
from areno.tracking.series import MAX_POINTS, Curves, Series, drop_meaningless_accuracy
from tests.helpers.made_up_runs import make_run


def thinned(values: list[float], every: int = 1) -> Series:
    curves = Curves()
    for step, value in enumerate(values, 1):
        curves.add({"step": step, "time": 1.0, "a": value} if step % every == 0 else {"step": step, "b": 0.0})
    return curves.series_by_name()["a"]


@pytest.mark.parametrize("n", [1, 5, 1_023, 1_024, 1_025, MAX_POINTS])
def test_a_short_curve_keeps_all_points(n):
    assert thinned([float(step) for step in range(n)]) == (list(range(1, n + 1)), [float(step) for step in range(n)])


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    values = [math.sin(step / 500) for step in range(50_000)]
    values[0], values[31_415], values[42_000], values[20_000] = 0.125, 9.0, -9.0, math.nan
    steps, kept = thinned(values)
    assert MAX_POINTS / 4 < len(kept) <= MAX_POINTS + 1_024
    assert steps == sorted(set(steps))
    assert all(values[step - 1] == value for step, value in zip(steps, kept, strict=True))
    assert (kept[0], kept[-5:]) == (0.125, values[-5:])
    assert {31_416: 9.0, 42_001: -9.0}.items() <= dict(zip(steps, kept, strict=True)).items()
    assert not any(map(math.isnan, kept))
    # No part of the curve is missing: its largest gap is that of the widest intervals.
    assert max(later - one for one, later in itertools.pairwise(steps)) <= 2 * 50_000 / (MAX_POINTS / 4)


def test_a_scalar_of_several_kinds_of_lines_keeps_its_order():
    curves = Curves()
    for step in range(1, 3_000):
        curves.add({"step": step, "a": float(step)} | ({"b": 1.0} if step % 3 == 0 else {}))
    assert curves.series_by_name()["a"].steps == list(range(1, 3_000))


def test_only_what_is_asked_for_is_read(tmp_path):
    run = RunReader(make_run(tmp_path, "a", 1, 40))
    file = run.path / "logs/metrics.jsonl"
    assert run.file.series("train/loss") == run.series("train/loss")
    assert [line["step"] for line in run.file.first_and_last_records()] == [1, 40]
    assert run_seconds(run) == 80.0
    assert run.file.series("train") == run.file.series("nothing") == Series([], [])
    with file.open("a") as lines:
        lines.write('{"step": 41, "train/loss": 1.0')  # the run writes this line at the moment
    assert run.file.series("train/loss").steps == list(range(1, 41))
    assert MetricsFile(tmp_path / "none").first_and_last_records() == []
    (tmp_path / "odd").write_text('{"time": 1.0, "step": 3, "a": null}\n{"step": 4, "a": 1e-5}\n{"step": 5, "b": 2}\n')
    odd = MetricsFile(tmp_path / "odd").series("a")
    assert (odd.steps, math.isnan(odd.values[0]), odd.values[1]) == ([3, 4], True, 1e-5)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'\x00{"step": 3, "a": 1.0}', "line 2: is not JSON"),
        (b'{"time": 1.0, "step": 3, "a": 1.0', "line 2: is not JSON"),
        (b'[{"step": 3, "a": 1.0}]', "line 2: is not a JSON object"),
        (b'{"time": 1.0, "a": 1.0}', "line 2: has no step"),
        (b'{"time": 1.0, "step": [3], "a": 1.0}', "line 2: has no step"),
        (b'{"step": 3, "a": [1.0]}', "a is"),
    ],
)
def test_a_damaged_line_with_the_scalar_is_named(tmp_path, line, reason):
    (tmp_path / "file").write_bytes(b'{"step": 1, "a": 1.0}\n' + line + b"\n")
    with pytest.raises(ArenoError, match=reason):
        MetricsFile(tmp_path / "file").series("a")


def long_run(folder: Path, n_steps: int, n_scalars: int) -> Path:
    (folder / "logs").mkdir(parents=True)
    values = [random.random() for _ in range(n_scalars)]
    rest = json.dumps({f"train/number_{place}": value for place, value in enumerate(values)})[1:]
    with (folder / "logs/metrics.jsonl").open("w") as file:
        for step in range(1, n_steps + 1):
            file.write(f'{{"step": {step}, "time": {step}.0, "rollout/rewards_mean": {step / n_steps}, {rest}\n')
    return folder


@pytest.mark.slow
def test_the_memory_of_reading_a_long_run_is_that_of_its_curves(tmp_path):
    path = long_run(tmp_path / "run", 40_000, 40)
    size = (path / "logs/metrics.jsonl").stat().st_size
    tracemalloc.start()
    curves = RunReader(path).curves()
    assert tracemalloc.get_traced_memory()[1] < size
    tracemalloc.stop()
    assert max(len(series.steps) for series in curves.values()) < 2 * MAX_POINTS
    assert headlines(curves)["rollout/rewards_mean"][1:] == (1 / 40_000, 1.0, 1.0, 40_000)


@pytest.mark.slow
def test_a_list_of_runs_takes_a_small_part_of_the_time_of_reading_them(tmp_path):
    for number in range(20):
        long_run(tmp_path / str(number), 400, 40)
    started = time.process_time()
    table = runs_table(tmp_path)
    listed = time.process_time() - started
    started = time.process_time()
    for number in range(20):
        RunReader(tmp_path / str(number)).records()
    assert listed < (time.process_time() - started) / 2
    assert table.row_count == 20


def lines(*records: dict[str, float]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for step, record in enumerate(records, 1):
        for name, value in record.items():
            series = found.setdefault(name, Series([], []))
            series.steps.append(step)
            series.values.append(value)
    return found


RIGHT = {"rollout/rewards_mean": 0.5, "rollout/accuracy": 0.5, "rollout/rewards_max": 1.0, "eval/pass@4": 0.5}


def test_accuracy_says_nothing_once_a_reward_was_above_one(tmp_path):
    assert drop_meaningless_accuracy(lines(RIGHT, RIGHT)).keys() == RIGHT.keys()
    left = {"rollout/rewards_mean", "rollout/rewards_max", "train/accuracy"}
    recorded = lines(RIGHT | {"train/accuracy": 0.5}, RIGHT | {"rollout/rewards_max": 1.5})  # by an earlier version
    assert drop_meaningless_accuracy(recorded).keys() == left
    stopped = {"rollout/rewards_mean": 0.5, "rollout/rewards_max": 1.0}
    assert drop_meaningless_accuracy(lines(RIGHT | {"train/accuracy": 0.5}, stopped)).keys() == left
    evaluated = [{"eval/rewards_mean": 0.5, "eval/accuracy": 0.5}, {"eval/rewards_mean": 0.5}]
    assert drop_meaningless_accuracy(lines(*evaluated)).keys() == {"eval/rewards_mean"}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/metrics.jsonl").write_text(
        "".join(json.dumps({"step": 1, **line}) + "\n" for line in evaluated[:1])
    )
    run = RunReader(tmp_path)
    assert main_headline(run) == ("evaluation: accuracy", 0.5, 0.5, 0.5, 1)
    with (tmp_path / "logs/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, **evaluated[1]}) + "\n")
    assert main_headline(run) == ("evaluation: reward", 0.5, 0.5, 0.5, 1)
    assert run.curves().keys() == {"eval/rewards_mean"}
    assert run.metrics().keys() == {"eval/rewards_mean", "eval/accuracy"}
