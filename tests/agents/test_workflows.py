"""Agents that are classes with a method `run`, named by a file or by an import path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.agents.trajectories import BadTrajectory, recorded_result, with_rewards
from areno.agents.workflows import agent_function
from areno.errors import ConfigError
from areno.files.user_code import is_import_path, load_import_path
from tests.agents import areal_style
from tests.helpers.agent_runs import run

MODULE = "tests.agents.areal_style"


def test_import_paths_are_no_files() -> None:
    assert all(map(is_import_path, ("package.module.Agent", "package.module:Agent", "module.Agent")))
    assert not any(map(is_import_path, ("agent.py", "agent.py:Agent", "agents/agent.py", "verifiers:wordle", "agent")))


def test_a_wrong_class_is_told_with_its_setting() -> None:
    for name, words in (
        ("NoRun", r"agent\.fn: the class NoRun has no method run"),
        ("NeedsMore", r"agent\.fn: NeedsMore\(\) fails: TypeError"),
        ("OtherRun", r"agent\.fn: OtherRun\.run\(data, \*\*more\) cannot be called"),
    ):
        with pytest.raises(ConfigError, match=words):
            agent_function(load_import_path(f"{MODULE}.{name}", "agent.fn"), "agent.fn")
    for path in (f"{MODULE}.Missing", "no_such_package.Agent"):
        with pytest.raises(ConfigError, match=rf"agent\.fn: {path} cannot be imported"):
            load_import_path(path, "agent.fn")
    with pytest.raises(ConfigError, match=r"agent\.whole_batch: is true, but the class MathAgent"):
        agent_function(areal_style.MathAgent, "agent.fn", whole="whole_batch")


def test_rewards_of_responses_are_added() -> None:
    assert recorded_result({"a": 0.5, "b": np.float32(0.25)}) == ((0.75, {}), None, {"a": 0.5, "b": 0.25})
    assert recorded_result({}) == (None, None, None)
    turns = [{"choice": [f"chatcmpl-{name}", 0]} for name in ("one", "two", "three")]
    found = with_rewards(turns, {"chatcmpl-three": 3.0, "resp_one": 1.0})
    assert [turn["reward"] for turn in found] == [1.0, 0.0, 3.0]
    with pytest.raises(BadTrajectory, match="the response 'chatcmpl-four', which is not its own"):
        with_rewards(turns, {"chatcmpl-four": 1.0})
    with pytest.raises(BadTrajectory, match="the id of a response is expected"):
        recorded_result({1: 1.0})
    for wrong in (math.nan, "1", None):
        with pytest.raises(BadTrajectory, match="reward of the response 'a'"):
            recorded_result({"a": wrong})


@pytest.mark.slow
@pytest.mark.parametrize("named", ["file", "import path"])
def test_a_script_of_areal_trains(tmp_path: Path, named: str) -> None:
    def trained(name: str) -> Any:
        path = f"{MODULE}.{name}" if named == "import path" else f"{Path(areal_style.__file__)}:{name}"
        steps = ["total_train_steps=1", "reward.fn=null", "reward.workers=null"]
        return run(tmp_path / name, "two_turns.py", *steps, f"agent.fn={path}")

    single = trained("MathAgent")
    assert [len(rows) for rows in single.rows] == [16]
    assert {row.reward for row in single.rows[0]} <= {0.0, 1.0, 2.0}
    assert max(single.series("train/logp_abs_diff_max")) < 1e-4
    several = trained("MultiTurnMathAgent")
    assert several.series("rollout/agent_turns_mean") == [2.0]
    assert {row.reward % 0.5 for row in several.rows[0]} == {0.0}
    assert max(row.reward for row in several.rows[0]) > 2
    assert [len(rows) for rows in trained("Plain").rows] == [16]


@pytest.mark.slow
def test_a_configuration_of_areal_runs_its_script(tmp_path: Path) -> None:
    of_areal = {
        "mode": "inline",
        "tool_call_parser": "qwen",
        "reasoning_parser": "qwen3",
        "chat_template_type": "concat",
        "turn_discount": 0.5,
        "export_style": "individual",
        "session_timeout_seconds": 3600,
        "set_reward_finish_timeout": 0.0,
    }
    settings = [f"+rollout.agent.{name}={value}" for name, value in of_areal.items()]
    settings += [f"agent.fn={MODULE}.MultiTurnMathAgent", "agent.workers=null", "agent.turn_credit=return"]
    settings += ["reward.fn=null", "reward.workers=null", "total_train_steps=1", "actor.adv_norm=null"]
    played = run(tmp_path, "two_turns.py", *settings, recipe="grpo")
    assert len(played.rows[0]) == 32
    rewards = [[turn["reward"] for turn in sample["trajectory"]["turns"]] for sample in played.samples(1)]
    returns = sorted((first + 0.5 * last, last) for first, last in rewards)
    found = [set(np.asarray(row.advantages)[~np.asarray(row.prompt_mask)]) for row in played.rows[0]]
    assert all(len(values) == 1 for values in found)
    pairs = zip(found[::2], found[1::2], strict=True)
    np.testing.assert_allclose(sorted((first.pop(), last.pop()) for first, last in pairs), returns)
