"""The samples that a run keeps: which ones, and what is known of each."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from areno import Trainer
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.tracking.reader import RunReader
from areno.tracking.samples import EvalSampleFiles, SampleFiles, select_samples
from areno.types import PromptItem
from tests.helpers.policy_runs import classifier, play
from tests.helpers.samples import samples


def written(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_is_written_of_a_sample(tmp_path):
    given = samples()
    given[0].advantages, given[0].train_logprobs = np.array([0.5, -0.25]), np.array([-0.123456, -2.0])
    given[1].advantages = np.array([0.5])
    files = SampleFiles(tmp_path / "rollouts", None, lambda token: f"<{token}>")
    files.samples(12, given)
    files.log(12, {"time/step": 1.0})
    path = tmp_path / "rollouts/000012.jsonl"
    assert [p.name for p in path.parent.iterdir()] == ["000012.jsonl"]
    first, second = written(path)
    assert first == {
        "step": 12,
        "group": 0,
        "sample": 0,
        "row": 17,
        "task": "2+2?",
        "prompt": "<2+2?>",
        "completion": "four\n4 é",
        "reward": 1.0,
        "advantage": 0.125,
        "status": "ok",
        "message": "",
        "solutions": "{'4'}",
        "prompt_tokens": 3,
        "response_tokens": 2,
        "finish_reason": "stop",
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [5, 6],
        "tokens": ["<5>", "<6>"],
        "logprobs": [-0.1, -0.2],
        "versions": [],
        "train_logprobs": [-0.1235, -2.0],
        "token_advantages": [0.5, -0.25],
    }
    assert (second["reward"], second["status"], second["finish_reason"]) == (None, "timeout", "length")
    assert (second["sample"], second["advantage"]) == (1, 0.5)
    assert not second.keys() & {"token_advantages", "train_logprobs", "parts"}, "one value says it"
    EvalSampleFiles(tmp_path / "eval", str).eval_samples(3, given, "hard")
    assert [line["set"] for line in written(tmp_path / "eval/hard/000003.jsonl")] == ["hard", "hard"]


def test_samples_that_a_warning_names_are_added_to_the_file(tmp_path):
    given = [each for _ in range(6) for each in samples()]
    for index, each in enumerate(given):
        each.group = index // 2
    files = SampleFiles(tmp_path, 4, str)
    files.samples(3, given)
    files.log(3, {"time/step": 1.0})
    path = tmp_path / "000003.jsonl"
    before = [(line["group"], line["sample"]) for line in written(path)]
    assert len(before) == 4
    missing = next(index for index, each in enumerate(given) if (each.group, 0) not in before)
    there = next(index for index, each in enumerate(given) if (each.group, 0) == before[2])
    assert files.numbers_of(3, [there, missing, missing + 1]) == [2, 4, 5]
    assert files.numbers_of(3, [missing + 1]) == [5]
    after = [(line["group"], line["sample"]) for line in written(path)]
    assert after == [*before, (given[missing].group, 0), (given[missing].group, 1)]
    assert files.numbers_of(2, [0]) == [], "of another step"
    files.finish()


@pytest.mark.parametrize(
    ("messages", "task"),
    [
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
            "c",
        ),
        ([{"role": "user", "content": "long " * 200}], "long " * 100),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
        ([{"role": "system", "content": "a"}], None),
        (None, None),
    ],
)
def test_the_task_of_a_row_of_messages_is_what_it_asks(tmp_path, messages, task):
    given = samples()[:1]
    given[0].item = PromptItem(prompt="<c>", text="<c>", tokens=[1], messages=messages)
    EvalSampleFiles(tmp_path, str).eval_samples(1, given, "")
    (line,) = written(tmp_path / "000001.jsonl")
    assert line.get("task") == task


@pytest.mark.parametrize(
    ("sizes", "most", "kept"),
    [
        ([8] * 32, 8, [8]),
        ([8] * 32, 20, [8, 8]),
        ([8] * 2, 100, [8, 8]),
        ([16] * 4, 8, [8]),  # the first ones of a group
        ([1] * 1024, 8, [1] * 8),
        ([3, 8, 8, 3], 8, None),  # whole groups, whatever their order
        ([], 8, []),
    ],
)
def test_which_samples_are_kept(sizes, most, kept):
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    for step in range(20):
        found = [group for group, keep in zip(groups, select_samples(groups, most, step), strict=True) if keep]
        assert select_samples(groups, most, step) == select_samples(groups, most, step)
        assert len(found) <= most
        if kept is None:
            assert all(count == sizes[group] for group, count in Counter(found).items())
        else:
            assert list(Counter(found).values()) == kept


def test_every_group_is_drawn_some_time():
    groups = [group for group in range(8) for _ in range(4)]
    drawn = Counter(groups[select_samples(groups, 4, step).index(True)] for step in range(400))
    assert min(drawn.values()) > 25
    assert len(drawn) == 8


@pytest.mark.parametrize("count", [8, 16])
def test_a_run_keeps_some_samples_of_each_step_or_all(tmp_path, count):
    overrides = ["rollout.dump_to_file=false"] if count == 8 else []
    model = classifier(tmp_path / "reward")
    play("gspo", tmp_path / "run", "actor.recompute_logprob=true", "reward.fn=null", f"reward.path={model}", *overrides)
    run = RunReader(tmp_path / "run")
    assert run.sampled_steps() == [1, 2]
    kept = run.samples(2)
    assert len(kept) == count
    for line in kept:
        assert len(line["tokens"]) == len(line["logprobs"]) == len(line["token_ids"]) == line["response_tokens"]
        assert "".join(line["tokens"]).startswith(line["completion"])
        assert line["versions"] == [[1, line["response_tokens"]]]
        assert np.allclose(line["logprobs"], line["train_logprobs"], atol=2e-4)
    groups: dict[int, list[dict]] = {}
    for line in kept:
        groups.setdefault(line["group"], []).append(line)
    for group in groups.values():
        assert [line["sample"] for line in group] == list(range(4))
        rewards, advantages = (np.array([line[name] for line in group]) for name in ("reward", "advantage"))
        assert np.allclose(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-6), atol=1e-3)


def test_equal_answers_have_equal_rewards(tmp_path, monkeypatch):
    """Also where a reward model rounds differently at each place in a batch."""

    def score(self: Trainer, role: str, rows: list[Any]) -> list[float]:
        assert len(set(rows)) == len(rows)
        return [1.0 + 1e-7 * n for n in range(len(rows))]

    monkeypatch.setattr(Trainer, "score_rewards", score)
    judged = ["reward.fn=null", f"reward.path={classifier(tmp_path / 'reward')}", "total_train_steps=1"]
    play("gspo", tmp_path / "run", *judged)
    rewards: dict[tuple[int, str], set[float]] = {}
    lines = RunReader(tmp_path / "run").samples(1)
    for line in lines:
        rewards.setdefault((line["group"], line["completion"]), set()).add(line["reward"])
    assert len(rewards) < len(lines)  # some are equal
    assert [len(values) for values in rewards.values()] == [1] * len(rewards)


def test_settings_that_say_two_things():
    told = r"rollout\.dump_n_samples: is 4, but rollout\.dump_to_file is true, so all samples are kept"
    with pytest.raises(ConfigError, match=told):
        load(GSPOConfig, "quickstart", ["rollout.dump_to_file=true", "rollout.dump_n_samples=4"])
