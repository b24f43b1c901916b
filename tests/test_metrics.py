"""rollout/* against numbers worked by hand; what is written can be read back."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from areno.api.metrics import MetricsRecorder, accuracy, rollout_metrics, with_prefix
from areno.api.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample


def sample(n_prompt, logprobs, reward, status="ok", finish_reason="stop"):
    return ScoredSample(
        item=PromptItem(prompt="p", text="p", tokens=[0] * n_prompt),
        sequence=RolloutSequence(resp_tokens=[1] * len(logprobs), resp_logprobs=logprobs, finish_reason=finish_reason),
        completion="c",
        outcome=RewardOutcome(reward, status),
    )


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
        "skipped_long": 2,
        "total_skipped_long": 7,
    }
    assert stats == pytest.approx({f"rollout/{name}": value for name, value in expected.items()})


def test_nothing_to_average_is_left_out():
    stats = rollout_metrics(SAMPLES[3:], [0.0, 0.0])
    assert not any("rewards_mean" in name or "accuracy" in name for name in stats)
    assert all(math.isfinite(value) for value in stats.values())
    assert rollout_metrics([], [])["rollout/num_sequences"] == 0


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


def test_module_imports_no_torch():
    modules = "areno.api.metrics, areno.api.rewards, areno.api.data, areno.api.saver"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
