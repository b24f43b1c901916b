"""The records of steps: exact, within their budget, and never half-written."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areno.config.run import RecorderConfig
from areno.errors import ArenoError
from areno.files.durable import UNFINISHED
from areno.run.flight_recorder import FlightRecorder, KeptRollout
from areno.tracking.recorded_samples import samples_from_tree, samples_to_tree
from areno.tracking.step_records import RecordFolder
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample, TokenRow, TrainSequence, Trajectory
from tests.helpers.started_runs import start

ENGINE: Any = SimpleNamespace(device_names=["cpu"], state_digests=lambda: {"actor.master": [3, -(2**63)]})


def bits(value: Any) -> Any:
    """A tree in which arrays and floats are replaced by their bits, for comparisons."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, (list, tuple)):
        return type(value), [bits(each) for each in value]
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    return value


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    tree = {
        "step": 3,
        "numbers": [1, 2**80, -0.0, math.inf, 0.1, True, None],
        "many": [float(k) / 7 for k in range(20)],
        "large": [2**62 + k for k in range(10)],
        "too large": [2**64 + k for k in range(10)],
        "mixed": [1, 2.0] * 8,
        "nan": math.nan,
        "arrays": [
            np.arange(6, dtype=np.uint8).reshape(1, 3, 2),
            np.array([math.nan, 1], np.float32),
            np.zeros(0, bool),
        ],
        "tuple": (1, [2], {"a": ()}),
        "$dollar": {7: "seven", "b": "\ud800 ü"},
        "empty": [[], {}, ""],
    }
    records = RecordFolder(tmp_path / "recorder")
    records.write(3, tree)
    assert bits(records.read(3)) == bits(tree)
    assert records.steps() == [3]


def sample(item: PromptItem, number: int, **more: Any) -> ScoredSample:
    sequence = RolloutSequence(
        resp_tokens=np.array([4, 5 + number], np.int32),
        resp_logprobs=np.array([-0.1, -1 / 3], np.float32),
        resp_versions=[0, number],
        routes=np.full((3, 2, 2), number, np.uint8),
        finish_reason="length",
    )
    outcome = RewardOutcome(0.1 + number, parts={"a": 0.1})
    return ScoredSample(item=item, sequence=sequence, completion="ü", outcome=outcome, group=1, **more)


def test_samples_are_restored_with_the_rows_of_the_data() -> None:
    items = [PromptItem(prompt="1", text="1", tokens=[1, 2], index=5, record={"any": object()})]
    row = TokenRow(
        tokens=[1, 2, 3],
        sources=np.zeros(3, np.uint8),
        sampled=np.array([False, True, True]),
        trained=np.array([False, True, True]),
        logprobs=np.array([0, -0.5, -0.25]),
        versions=np.zeros(3, np.int64),
        temperature=None,
        turns=np.zeros(3, np.int64),
    )
    trajectory = Trajectory(
        rows=[row],
        turns=[{"messages": [{"role": "user", "content": "x"}]}],
        turn_rewards=[0.5],
        messages=[],
        tool_calls=[],
        tool_results=[],
        reward=(0.5, {"b": 1.0}),
    )
    samples = [sample(items[0], 0), sample(items[0], 1), sample(items[0], 2, trajectory=trajectory, over_budget=True)]
    tree = samples_to_tree(samples[:2])
    assert len(tree["prompts"]) == 1
    found = samples_from_tree(tree, lambda places: items)
    assert found[0].item is items[0]
    for one, other in zip(samples, found, strict=False):
        assert bits(vars(one.sequence)) == bits(vars(other.sequence))
        assert (one.outcome, one.group, one.completion) == (other.outcome, other.group, other.completion)
    [agent] = samples_from_tree(samples_to_tree(samples[2:]), lambda places: items)
    assert agent.trajectory == trajectory
    assert agent.over_budget
    changed = [PromptItem(prompt="2", text="2", tokens=[1, 3], index=5)]
    with pytest.raises(ArenoError, match="row 5 has another prompt than the one that the run recorded"):
        samples_from_tree(tree, lambda places: changed)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "step"])
def test_a_damaged_record_is_an_error_by_name(damage: str, tmp_path: Path) -> None:
    records = RecordFolder(tmp_path)
    records.write(1, {"step": 1, "tokens": np.random.default_rng(0).integers(0, 9, 5000)})
    path = records.path_of(1)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:-30], "empty": b""}.get(damage, bytes(content)))
    if damage == "step":
        path = path.rename(records.path_of(2))
    with pytest.raises(ArenoError, match=f"the record {path} is damaged"):
        records.read(2 if damage == "step" else 1)


def test_a_missing_record_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArenoError, match="there is no record of step 4"):
        RecordFolder(tmp_path).read(4)


def record_steps(recorder: FlightRecorder, steps: range, noise: int = 20_000) -> None:
    for step in steps:
        recorder.begin_step()
        numbers = np.random.default_rng(step).random(noise)
        row = TrainSequence(tokens=[1] * noise, prompt_mask=[False] * noise, advantages=numbers)
        recorder.keep_update("actor", [row])
        recorder.keep_metrics({"train/loss": 0.5})
        recorder.end_step(step, {}, lambda: ENGINE)
    recorder.close()


def test_the_oldest_records_are_dropped(tmp_path: Path) -> None:
    recorder = FlightRecorder(RecorderConfig(max_gib=0.5e6 / 2**30), tmp_path, {"config": {}})
    record_steps(recorder, range(1, 9))
    sizes = recorder.records.sizes()
    assert list(sizes) == list(range(9 - len(sizes), 9))
    assert 2 <= len(sizes) < 8
    assert sum(sizes.values()) <= 0.5e6
    [digest] = recorder.records.read(8)["digests"].values()
    assert digest.tolist() == [3, -(2**63)]


def state_of(folder: Path, step: int, n_bytes: int) -> Path:
    state = folder / "state" / f"step-{step:06d}"
    state.mkdir(parents=True)
    (state / "weights").write_bytes(b"x" * n_bytes)
    return state


def test_states_are_pinned_within_half_of_the_budget(tmp_path: Path) -> None:
    recorder = FlightRecorder(RecorderConfig(max_gib=1e6 / 2**30), tmp_path, {})
    record_steps(recorder, range(1, 4))
    assert not recorder.pin_state(1, state_of(tmp_path, 1, 600_000))
    assert not recorder.pin_state(7, state_of(tmp_path, 7, 10))  # no step after it is recorded
    assert recorder.pin_state(2, state_of(tmp_path, 2, 300_000))
    assert not (tmp_path / "state/step-000002").exists()
    assert recorder.states.steps() == [2]
    again = FlightRecorder(RecorderConfig(max_gib=1e6 / 2**30), tmp_path, {})
    record_steps(again, range(4, 6))
    assert again.pin_state(4, state_of(tmp_path, 4, 300_000))
    assert again.states.steps() == [4]
    again.begin_after(3)
    assert again.states.steps() == []
    assert max(again.records.steps()) == 3


def test_whether_a_step_can_be_computed_again(tmp_path: Path) -> None:
    recorder = FlightRecorder(RecorderConfig(), tmp_path, {})
    assert recorder.can_replay(1), "from the start of the run"
    assert not recorder.can_replay(2)
    record_steps(recorder, range(1, 6), noise=4)
    assert recorder.can_replay(6)
    recorder.records.remove(2)
    assert not recorder.can_replay(6)
    state_of(tmp_path, 3, 10)  # of the run
    assert recorder.can_replay(6)
    assert recorder.can_replay(4)
    assert not recorder.can_replay(3)
    recorder.is_on = False
    assert not recorder.can_replay(6)


def test_without_a_budget_nothing_is_kept(tmp_path: Path) -> None:
    def fail() -> Any:
        raise AssertionError("nothing is computed for a record")

    recorder = FlightRecorder(RecorderConfig(max_gib=0), tmp_path, {})
    item = PromptItem(prompt="", text="", tokens=[])
    recorder.keep_rollout(KeptRollout([sample(item, 0)], np.ones(1, bool), 0, 0, {}))
    recorder.end_step(1, {}, fail)
    recorder.close()
    assert recorder._step.rollout is None
    assert not list(tmp_path.iterdir())


def test_an_object_that_has_no_form_ends_the_records_and_not_the_run(tmp_path: Path, caplog: Any) -> None:
    recorder = FlightRecorder(RecorderConfig(), tmp_path, {"config": {"a": object()}})
    with caplog.at_level(logging.WARNING, "areno"):
        record_steps(recorder, range(1, 3), noise=2)
    assert "the record of step 1 could not be written: a object. The run continues without records" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_run_removes_unfinished_records_and_those_that_it_repeats(tmp_path: Path) -> None:
    run = start(tmp_path, recorder=RecorderConfig())
    for _ in run.steps():
        run.end_step({"loss": 0.5})
    run.close()
    records = RecordFolder(tmp_path / "recorder")
    assert records.steps() == list(range(1, 21))  # ten epochs of two rows
    assert records.read(2)["metrics"]["train/loss"] == 0.5
    assert json.dumps(records.read(1)["config"]["recorder"]) == '{"max_gib": 1.0}'
    (records.folder / f"{UNFINISHED}000003.zip").write_bytes(b"x")
    records.remove_after(1)
    assert [path.name for path in records.folder.iterdir()] == ["000001.zip"]
