"""rollout/* against numbers worked by hand; what is written can be read back."""

from __future__ import annotations

import json
import math

import pytest

from areno.api.metrics import MetricsRecorder, accuracy, rollout_metrics, row_metrics, with_prefix
from areno.trainers.rollout import group_metrics
from areno.types import TrainSequence
from tests.helpers.samples import sample

SAMPLES = [
    sample(3, [-1.0, -2.0], 1.0),
    sample(3, [-3.0], 0.0),
    sample(5, [-0.5, -0.5, -0.5], 0.5, finish_reason="length"),
    sample(5, [-4.0, -1.0], None, "timeout"),
    sample(5, [], None, "error"),
]


def test_rollout_metrics():
    stats = rollout_metrics(SAMPLES, [1.0, -1.0, 0.5, 9.0, 9.0], skipped_long=2, total_skipped_long=7)
    expected = {
        "rewards_mean": 0.5,
        "rewards_std": math.sqrt((0.25 + 0.25 + 0.0) / 3),
        "rewards_max": 1.0,
        "rewards_min": 0.0,
        "accuracy": 1 / 3,
        "advantages_mean": 0.5 / 3,
        "advantages_std": math.sqrt(((1 - 1 / 6) ** 2 + (-1 - 1 / 6) ** 2 + (0.5 - 1 / 6) ** 2) / 3),
        "logprobs_mean": -12.5 / 8,
        "seq_len_mean": (5 + 4 + 8 + 7 + 5) / 5,
        "prompt_len_mean": 21 / 5,
        "response_len_mean": 8 / 5,
        "num_sequences": 5,
        "truncated": 1 / 5,
        "reward_timeouts": 1,
        "reward_errors": 1,
        "reward_not_finite": 0,
        "skipped_long": 2,
        "total_skipped_long": 7,
    }
    assert stats == pytest.approx({f"rollout/{name}": value for name, value in expected.items()})


def test_the_share_of_groups_without_a_difference():
    def share(*groups):
        samples = [sample(1, [-1.0], reward) for group in groups for reward in group]
        numbers = [number for number, group in enumerate(groups) for _ in group]
        for one, number in zip(samples, numbers, strict=True):
            one.group = number
        return group_metrics(samples).get("rollout/frac_groups_zero_std")

    assert share([1.0, 1.0], [0.0, 1.0], [0.5, 0.5, 0.5], [0.0, 0.0, 1e-9]) == 0.5
    assert share([1.0, None], [None], [0.0, 0.0, None]) == 1.0, "a reward alone is no group"
    assert share([1.0], [0.0]) is None


def test_nothing_to_average_is_left_out():
    stats = rollout_metrics(SAMPLES[3:], [0.0, 0.0])
    assert not any("rewards_mean" in name or "accuracy" in name for name in stats)
    assert all(math.isfinite(value) for value in stats.values())
    assert rollout_metrics([], [])["rollout/num_sequences"] == 0


def test_rows_tell_the_same_as_samples():
    """Of a step in which every sample has a reward."""
    samples = SAMPLES[:3]
    advantages = [1.0, -1.0, 0.5]
    rows = [
        TrainSequence(
            prompt_mask=[True] * len(s.item.tokens) + [False] * len(s.sequence.resp_tokens),
            tokens=s.item.tokens + s.sequence.resp_tokens,
            logprobs=[0.0] * len(s.item.tokens) + s.sequence.resp_logprobs,
            advantages=[7.0] * len(s.item.tokens) + [advantage] * len(s.sequence.resp_tokens),
            reward=s.outcome.value,
        )
        for s, advantage in zip(samples, advantages, strict=True)
    ]
    expected = rollout_metrics(samples, advantages)
    of_samples_only = {"truncated", "reward_timeouts", "reward_errors", "reward_not_finite", "skipped_long"}
    expected = {k: v for k, v in expected.items() if k.split("/")[1] not in of_samples_only}
    assert row_metrics(rows) == pytest.approx(expected)


def test_rows_with_tool_spans_and_without_a_rollout():
    row = TrainSequence(
        prompt_mask=[True, False, True, True, False, True],
        tokens=[1] * 6,
        logprobs=[0.0, -1.0, -9.0, -9.0, -3.0, 0.0],
        advantages=[0.0, 1.0, 9.0, 9.0, 2.0, 0.0],
    )
    stats = row_metrics([row])
    names = ("seq_len_mean", "prompt_len_mean", "response_len_mean", "logprobs_mean", "advantages_mean")
    assert [stats[f"rollout/{name}"] for name in names] == [6, 1, 2, -2.0, 1.5]
    assert row_metrics([TrainSequence(prompt_mask=[True, False], tokens=[1, 2])]) == {}
    masked = TrainSequence(prompt_mask=[True, True], tokens=[1, 2], logprobs=[0.0, 0.0], advantages=[1.0, 1.0])
    assert row_metrics([masked])["rollout/response_len_mean"] == 0
    assert "rollout/advantages_mean" not in row_metrics([masked])


def test_accuracy_counts_whole_rewards_only():
    assert accuracy([1.0, 0.99, 0.0, -1.0, 2.0]) == 0.4
    assert math.isnan(accuracy([]))


def test_what_is_written_can_be_read(tmp_path):
    with MetricsRecorder(tmp_path / "tb", tmp_path / "logs/metrics.jsonl") as recorder:
        recorder.record(1, with_prefix("train", {"loss": 0.5}))
        recorder.record(2, {"train/loss": math.nan, "time/rollout": 3.0})
    lines = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "time"} for line in lines] == [
        {"step": 1, "train/loss": 0.5},
        {"step": 2, "train/loss": None, "time/rollout": 3.0},
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["time/rollout", "train/loss"]
    (event,) = events.Scalars("time/rollout")
    assert (event.step, event.value) == (2, 3.0)


def test_a_recorder_without_places_writes_nothing(tmp_path):
    recorder = MetricsRecorder()
    recorder.record(1, {"train/loss": 1.0})
    recorder.close()
    recorder.close()
