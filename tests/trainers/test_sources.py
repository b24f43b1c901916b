"""Runs on several sources of prompts: their shares, limits, agents and rewards, and what is measured of each."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.api.trainer import Trainer
from areno.config.datasets import DatasetConfig
from areno.data.curriculum import Curriculum, GroupResult
from areno.errors import ArenoError, ConfigError, DataError
from areno.launch.compose import load
from areno.recipes.grpo import ALGORITHM as GRPO
from areno.recipes.gspo import GSPOConfig
from areno.run.run import Run
from areno.tracking.run_folder import rewrite_description
from areno.types import RewardRecord
from tests.helpers.agent_runs import AGENTS, run
from tests.helpers.policy_runs import SMALL, Played, other_actor, play, trained, watched

THREE = "train_dataset.sources={a: {weight: 50}, b: {weight: 30, max_new_tokens: 3}, c: {weight: 20, n_samples: 2}}"
TEN = [THREE, "total_train_steps=10", "total_train_epochs=1000"]


def reward_of(record: RewardRecord) -> float:
    """Rewards that differ in scale between the sources."""
    return {"a": 1.0, "b": 10.0, "c": 100.0}[record.source] * (sum(record.tokens) % 5)


def counts(played: Played, n_steps: int) -> Counter[str]:
    return Counter(name for step in range(1, n_steps + 1) for name, _ in groups_of(played, step))


def groups_of(played: Played, step: int) -> list[tuple[str, int]]:
    """(source, row) of each group of a step."""
    found = {sample["group"]: (sample["source"], sample["row"]) for sample in played.samples(step)}
    return [found[group] for group in sorted(found)]


def rows_of(played: Played, source: str, n_steps: int = 10) -> list[int]:
    groups = [group for step in range(1, n_steps + 1) for group in groups_of(played, step)]
    return [row for name, row in groups if name == source]


def test_each_source_has_its_share_limits_and_scale(tmp_path: Path) -> None:
    norm = "actor.adv_norm={mean_level: batch, std_level: batch}"
    played = play("grpo", tmp_path, *TEN, norm, reward_fn=reward_of)
    assert counts(played, 10) == {"a": 20, "b": 12, "c": 8}
    for step in range(1, 11):
        samples = played.samples(step)
        prompts = Counter(name for name, _ in groups_of(played, step))
        sizes = Counter(sample["source"] for sample in samples)
        assert sizes == {name: n * (2 if name == "c" else 4) for name, n in prompts.items()}
        for name in prompts:
            mine = [sample for sample in samples if sample["source"] == name]
            rewards = np.array([sample["reward"] for sample in mine])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6) if np.ptp(rewards) else 0 * rewards
            assert np.array([sample["advantage"] for sample in mine]) == pytest.approx(expected, abs=2e-6)
            assert all(sample["response_tokens"] <= (3 if name == "b" else 8) for sample in mine)
    assert any(sample["response_tokens"] > 3 for sample in played.samples(1))
    for name in "abc":
        values = {sample["reward"] for step in range(1, 11) for sample in played.samples(step)}
        assert len(values) > 3
        per_step = [groups_of(played, step) for step in range(1, 11)]
        expected = [sum(each == name for each, _ in groups) for groups in per_step]
        assert played.series(f"rollout/{name}/prompts") == [n for n in expected if n]


def test_a_source_that_is_added_leaves_the_order_of_the_others(tmp_path: Path) -> None:
    three = play("gspo", tmp_path / "three", *TEN)
    four = play("gspo", tmp_path / "four", *TEN, "train_dataset.sources.d={weight: 40, split: test}")
    assert counts(four, 10) == {"a": 14, "b": 9, "c": 6, "d": 11}
    for name in "abc":
        rows = rows_of(four, name)
        assert rows == rows_of(three, name)[: len(rows)]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["rollout.max_head_offpolicyness=2"],
        ["rollout.prompts_ahead=2"],
        ["rollout.dynamic_sampling=true"],
        ["train_dataset.curriculum={type: bandit, temperature: 0.3, rest_epochs: 1}", "train_dataset.split=test"],
        ["train_dataset.curriculum={type: bandit, temperature: 0.3}", "rollout.max_head_offpolicyness=3"],
    ],
    ids=["waiting", "stale", "postponed", "dynamic", "curriculum", "stale curriculum"],
)
def test_a_resumed_run_trains_the_same_rows(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*TEN, *settings, "total_train_steps=6", "recover.mode=auto", "recover.freq_steps=1"]
    whole = play("gspo", tmp_path / "whole", *settings)
    end, n_calls = Run.end_step, itertools.count(1)

    def interrupted(self: Run, *args: Any) -> Any:
        if next(n_calls) == 4:
            raise ArenoError("the machine stops")
        return end(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "end_step", interrupted)
        with pytest.raises(ArenoError, match="stops"):
            play("gspo", tmp_path / "run", *settings)
    rest = play("gspo", tmp_path / "run", *settings)
    drawn = [[(np.asarray(row.tokens).tolist(), trained(row, "logprobs")) for row in rows] for rows in whole.rows]
    n_rest = len(rest.rows)  # the last state may not have been written yet
    assert 3 <= n_rest <= 5
    assert [
        [(np.asarray(row.tokens).tolist(), trained(row, "logprobs")) for row in rows] for rows in rest.rows
    ] == drawn[-n_rest:]
    files = [folder / "checkpoints/latest/model.safetensors" for folder in (whole.folder, rest.folder)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_source_can_be_added_when_a_run_resumes(tmp_path: Path) -> None:
    settings = ["train_dataset.batch_size=4", *TEN, "recover.mode=auto", "recover.freq_steps=1"]
    three = play("gspo", tmp_path / "three", *TEN)
    play("gspo", tmp_path / "run", *settings, "total_train_steps=4")
    more = [*settings, "train_dataset.sources.d={weight: 100, split: test}"]
    with pytest.raises(ConfigError, match=r"train_dataset\.sources\.d: differs from the run"):
        play("gspo", tmp_path / "run", *more)
    rewrite_description(tmp_path / "run", load(GSPOConfig, "quickstart", [*SMALL, *more]))  # as --resume does
    run = play("gspo", tmp_path / "run", *more)
    assert counts(run, 4) == {"a": 8, "b": 5, "c": 3}
    assert counts(run, 10) == {"a": 14, "b": 8, "c": 6, "d": 12}
    for name in "abc":
        rows = rows_of(run, name)
        assert rows == rows_of(three, name)[: len(rows)]


SOURCES = {
    "plain": {"weight": 2, "max_new_tokens": 5},
    "turns": {"agent": AGENTS / "two_turns.py", "reward": AGENTS / "reward.py"},
    "late": {"agent": AGENTS / "late.py", "n_samples": 2, "timeout_s": 60},
}


def with_agents(folder: Path, *settings: str) -> Played:
    """Train on sources with and without agents. The agent of `late` gives the reward."""
    rows = {name: [{"prompt": f"{name} {number}", "solutions": number} for number in range(6)] for name in SOURCES}
    sources = [
        f"train_dataset.sources.{name}.{key}={value}" for name, of in SOURCES.items() for key, value in of.items()
    ]
    more = ["total_train_steps=6", "total_train_epochs=100", "gconfig.n_samples=3", "agent.fn=null"]
    return run(folder, "two_turns.py", *more, *sources, *settings, rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 4])
def test_sources_with_agents_train_beside_one_without(limit: int, tmp_path: Path) -> None:
    more = [
        "reward.fn=null",
        "train_dataset.sources.plain.reward=length",
        "valid_dataset={sets: {late: {}, plain: {}}}",
    ]
    played = with_agents(tmp_path, f"rollout.max_head_offpolicyness={limit}", *more)
    for step in range(1, 7):
        assert Counter(name for name, _ in groups_of(played, step)) == {"plain": 2, "turns": 1, "late": 1}
        samples = played.samples(step)
        assert {sample["status"] for sample in samples} == {"ok"}
        mine = {name: [sample for sample in samples if sample["source"] == name] for name in SOURCES}
        assert {name: len(each) for name, each in mine.items()} == {"plain": 6, "turns": 3, "late": 2}
        assert [sample["reward"] for sample in mine["late"]] == [0.0, 0.25]
        assert {sample["reward"] for sample in mine["turns"]} <= {0.0, 1.0, 2.0}
        for sample in mine["plain"]:  # as in a run without agents
            assert "trajectory" not in sample
            assert len(sample["token_ids"]) == len(sample["tokens"]) == sample["response_tokens"] <= 5
            assert len(sample["train_logprobs"]) == sample["response_tokens"]
            assert sample["logprobs"] == pytest.approx(sample["train_logprobs"], abs=1e-3 if not limit else 1)
        assert all(len(sample["trajectory"]["turns"]) == 2 for sample in mine["turns"])
    n_rows = [sum(len(sample.get("trajectory", {}).get("rows", [0])) for sample in played.samples(1))]
    assert [len(played.rows[0])] == n_rows
    assert played.series("rollout/late/rewards_mean") == [0.125] * 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train_dataset.sources={a: {}}", "train_dataset.loader=null"], r"sources\.a\.path: missing"),
        (["train_dataset.sources={a: {weight: 0}, b: {weight: 0}}"], "sources: all have weight 0"),
        (["train_dataset.sources={a: {n_samples: 9}}"], r"sources\.a\.n_samples: is 9, more than gconfig.n_samples=4"),
        (["train_dataset.sources={a: {n_samples: 1}}"], r"sources\.a\.n_samples: is 1; a group advantage needs"),
        (["train_dataset.sources={a: {max_new_tokens: 9}}"], r"a\.max_new_tokens: is 9, more than .*max_new_tokens=8"),
        (["train_dataset.sources={a: {final_weight: 0}}"], "sources: all have weight 0 at the end of their schedule"),
        (["train_dataset.sources={a: null, b: {}}"], r"sources\.a: is null; a section is expected, with keys path,"),
        (["train_dataset.sources={a: {n_samples: x}, b: {}}"], r"sources\.a\.n_samples: is 'x'; an integer is exp"),
        (["train_dataset.sources={a: {n_samples: 2}}", "gconfig.n_samples=x"], r"gconfig\.n_samples: is 'x'; an int"),
        (["train_dataset.sources={a: {agent: x.py, timeout_s: 2}}", "agent.timeout_s=x"], r"agent\.timeout_s: is 'x'"),
        (["train_dataset.sources={a: {agent: command}}"], r"sources\.a\.agent: is command, but agent\.command is not"),
        (["train_dataset.sources={a: {agent: online}}"], r"sources\.a\.agent: is online, but agent\.mode is not set"),
        (
            [
                "train_dataset.sources={a: {max_new_tokens: 3}}",
                "actor.overlong_reward_penalty=true",
                "actor.overlong_penalty_factor=1",
                "actor.overlong_tokens=4",
            ],
            r"sources\.a\.max_new_tokens: is 3, less than actor\.overlong_tokens=4; raise this, or lower that",
        ),
        (["train_dataset.sources={a b: {}}"], "sources: has the name 'a b'"),
        (["train_dataset.sources={}"], "sources: is empty"),
        (["train_dataset.sources={a: {timeout_s: 5}}"], r"sources\.a\.timeout_s: is 5.0, but .* no agent"),
        (["train_dataset.sources={a: {batch_size: 5}}"], r"sources\.a\.batch_size: unknown key"),
        (["train_dataset.sources={a: {agent: x.py}}", "agent.whole_batch=true"], r"agent\.whole_batch: is true, but"),
        (["train_dataset.sources={a: {reward: maths}}"], r"sources\.a\.reward: is 'maths'; .*did you mean math"),
        (["train_dataset.sources={a: {agent: no.py}}"], r"sources\.a\.agent: .*no\.py"),
    ],
)
def test_wrong_sources_are_named(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPO.trainer(load(GRPO.config, "quickstart", [*SMALL, *settings], sources=True), tmp_path)


def test_settings_of_reward_processes_need_a_function_of_the_run_or_of_a_source() -> None:
    shared = ["reward.fn=null", "reward.path=model", "reward.workers=2"]
    own = [*shared, "train_dataset.sources={a: {reward: length}, b: {}}"]
    assert load(GRPO.config, "quickstart", [*SMALL, *own], sources=True).reward.workers == 2
    with pytest.raises(ConfigError, match=r"reward\.workers: is 2, but reward\.fn is null, so no function is called"):
        load(GRPO.config, "quickstart", [*SMALL, *shared], sources=True)


def test_a_source_has_samples_for_its_pairs(tmp_path: Path) -> None:
    sources = "train_dataset.sources={a: {n_samples: 3}, b: {n_samples: 4}}"
    with pytest.raises(
        ConfigError, match=r"sources\.a\.n_samples: is 3, but the pairs of a prompt need 4 samples"
    ) as found:
        play("online_dpo", tmp_path, sources, "pairs_per_prompt=2")
    assert len(found.value.problems) == 1


def test_a_source_has_samples_for_a_judge_that_compares(tmp_path: Path) -> None:
    settings = [
        "train_dataset.sources={a: {n_samples: 1}}",
        "reward.judge={base_url: http://127.0.0.1:1/v1, model: x, compare: true}",
    ]
    with pytest.raises(ConfigError, match=r"sources\.a\.n_samples: is 1, but reward\.judge\.compare compares"):
        play("ppo", tmp_path, *settings)


def test_an_evaluation_set_of_a_source_keeps_its_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, at_once = Trainer.rollout_token_batch, []

    def spy(self: Trainer, prompts: Any, n_samples: int, params: Any, **how: Any) -> Any:
        at_once.append((len(prompts), n_samples, params.max_new_tokens, how["at_once"]))
        return sample(self, prompts, n_samples, params, **how)

    monkeypatch.setattr(Trainer, "rollout_token_batch", spy)
    small = [setting for setting in SMALL if setting != "valid_dataset=null"]
    sources = "train_dataset.sources={a: {}, b: {n_samples: 2, max_new_tokens: 3}}"
    sets = "valid_dataset={sets: {b: {}}, max_rows: 4, batch_size: 2}"
    config = load(GRPO.config, "quickstart", [*small, sources, sets, "eval_gconfig=null", "recover.mode=off"])
    watched(tmp_path, lambda: GRPO.trainer(config, tmp_path, reward_fn=reward_of))
    assert at_once
    assert at_once == [(4, 2, 3, 2)] * len(at_once)


def test_the_bandit_does_not_learn_from_samples_whose_reward_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, results = Curriculum.learn, list[GroupResult]()

    def spy(self: Curriculum, found: Iterable[GroupResult], *args: Any) -> None:
        results.extend(found := list(found))
        learn(self, found, *args)

    monkeypatch.setattr(Curriculum, "learn", spy)

    def fails(record: RewardRecord) -> float:
        if record.source == "b" or sum(record.tokens) % 3 == 0:
            raise ValueError
        return reward_of(record)

    sources = "train_dataset.sources={a: {}, b: {}}"
    played = play("gspo", tmp_path, sources, "train_dataset.curriculum.type=bandit", reward_fn=fails)
    failed = Counter(sample["source"] for step in (1, 2) for sample in played.samples(step) if sample["reward"] is None)
    assert failed["b"] == 16
    assert 0 < failed["a"] < 16
    assert sum(len(result.advantages) for result in results if result.source == "a") == 16 - failed["a"]
    assert not any(result.advantages for result in results if result.source == "b")


def test_a_row_that_names_no_teacher_is_named_with_its_source(tmp_path: Path) -> None:
    rows = {"a": [{"prompt": "1+1=", "kind": "x"}], "b": [{"prompt": "3+4=", "kind": "x"}, {"prompt": "5+6="}]}
    teacher = ["teacher.by=kind", f"teacher.models={{x: {other_actor(tmp_path / 'teacher')}}}"]
    with pytest.raises(DataError, match=r"^train_dataset\.sources\.b row 1: field kind is missing"):
        play("distill", tmp_path / "run", "train_dataset.sources={a: {}, b: {}}", *teacher, train_dataset=rows)


def test_a_script_may_describe_one_source_as_for_other_algorithms() -> None:
    config = load(GRPO.config, "quickstart", SMALL)
    made = dataclasses.replace(config, train_dataset=DatasetConfig(path="a.jsonl", batch_size=3))  # type: ignore[arg-type]
    assert (made.train_dataset.path, made.train_dataset.batch_size, made.train_dataset.sources) == ("a.jsonl", 3, None)
