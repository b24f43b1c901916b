"""What is left and said of a run whose reward function fails: in its first step, or for some samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areno.cli.__main__ import main
from areno.errors import EngineError
from areno.trainers import policy_only
from tests import kill_runs
from tests.helpers.resumed import folder_of, go, log

REWARD = """
def inner(record):
    if {condition}:
        raise KeyError("answer")
    return float(len(record.completion) % 2)


def reward_fn(record):
    return inner(record)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows("gspo", tmp_path)
    return tmp_path


def reward(condition):
    Path("mine.py").write_text(REWARD.format(condition=condition))
    return ["reward.fn=mine.py", "total_train_steps=2", "rollout.dynamic_sampling=false", "evaluator.freq_steps=null"]


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_run_that_fails_in_its_first_step_keeps_its_log(work, monkeypatch):
    def lost(*arguments):
        raise EngineError("out of device memory")

    settings = [*reward("False"), "evaluator.eval_before_train=false"]
    with monkeypatch.context() as patch:
        patch.setattr(policy_only, "make_training_rows", lost)
        assert go("gspo", *settings) == 1
    folder = folder_of("gspo")
    assert "stopped in step 1" in (folder / "logs/run.log").read_text()
    assert {"config.yaml", "overrides.yaml", "versions.json"} < set(everything(folder))
    assert main(["runs", "outputs"]) == 0
    # The next attempt takes its place, also with other settings, since nothing has been trained.
    assert go("gspo", *settings, "actor.optimizer.lr=2e-3") == 0
    assert "it begins again" in log()


@pytest.mark.slow
def test_a_run_without_rewards_says_how_to_see_why(work, capsys):
    assert go("gspo", *reward("True"), "actor.max_skipped_steps=1") == 1
    hint = r"Where it fails: areno reward mine.py --data outputs/\S+"
    assert re.search(rf"error: reward\.fn: no reward could be .*KeyError: 'answer'.*{hint}", capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_that_fails_before_its_first_step_leaves_nothing(work):
    assert go("gspo", *reward("True"), "valid_dataset.path=nothing.jsonl") != 0
    assert not list(work.glob("outputs/*/*"))


@pytest.mark.slow
def test_the_end_says_how_many_samples_had_no_reward_and_how_to_see_why(work, capsys):
    assert go("gspo", *reward("int(record.prompt[:2]) % 3 == 0")) == 0
    said = capsys.readouterr().err
    [[n, total, command]] = re.findall(r"(\d+) of (\d+) samples of this run have no reward .*: areno (reward .*)", said)
    assert 0 < int(n) < int(total) == 2 * 8 * 4
    capsys.readouterr()
    main(command.split())
    assert 'in inner\n    raise KeyError("answer")' in capsys.readouterr().err
