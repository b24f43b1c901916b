"""Environments of the verifiers package: their own loop and rubric, through agent.fn=verifiers:NAME."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.config.datasets import DatasetConfig
from areno.data.sources import load_rows
from areno.environments.packages import package_of
from areno.errors import ArenoError, ConfigError
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import Played, play

needs_verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="needs the verifiers extra")

SINGLE = '''
import verifiers as vf
from datasets import Dataset


def length(completion, answer):
    """Long answers, and a little for the number that was asked for."""
    said = completion[-1]["content"]
    return len(said) / 10 + (answer in said)


def load_environment(count: int = 8):
    rows = [{"question": f"Say {n}.", "answer": str(n), "info": {"number": n}} for n in range(count)]
    rubric = vf.Rubric(funcs=[length], weights=[0.5])
    held_out = Dataset.from_list(rows[:2])
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), eval_dataset=held_out, system_prompt="Answer.", rubric=rubric
    )
'''
TOOLS = '''
import json

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Talk(vf.ToolEnv):
    """Goes on for three turns, and answers a text as if it had called the tool."""

    @vf.stop
    async def no_tools_called(self, state):
        return len(state["trajectory"]) >= 3

    async def env_response(self, messages, state, **kwargs):
        if "tool_calls" in messages[-1]:
            return await super().env_response(messages, state, **kwargs)
        result = await self.call_tool("add", {"a": len(messages), "b": state["info"]["number"]}, "call")
        return [{"role": "user", "content": result["content"]}]


def letters(completion):
    return float(sum(len(message["content"]) for message in completion if message["role"] == "assistant"))


def load_environment():
    rows = [{"question": f"What is 1 + {n}?", "answer": str(n + 1), "info": {"number": n}} for n in range(8)]
    return Talk(tools=[add], max_turns=5, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[letters]))
'''
BROKEN = {
    "toy_group": "def together(completions):\n    return [0.0] * len(completions)\n\n"
    "def load_environment():\n    rows = Dataset.from_list([{'question': 'a', 'answer': 'b'}] * 4)\n"
    "    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[together]))\n",
    "toy_completions": "def load_environment():\n    rows = Dataset.from_list([{'prompt': 'a', 'answer': 'b'}] * 4)\n"
    "    return vf.SingleTurnEnv(dataset=rows, message_type='completion')\n",
    "toy_raises": "def load_environment():\n    raise OSError('no key for the judge')\n",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are installed, as far as Python is concerned."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "toy_single.py").write_text(SINGLE)
    (folder / "toy_tools.py").write_text(TOOLS)
    for name, text in BROKEN.items():
        (folder / f"{name}.py").write_text(f"import verifiers as vf\nfrom datasets import Dataset\n\n{text}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    for name in ("toy_single", "toy_tools", *BROKEN):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def run(folder: Path, name: str, *overrides: str, **given: Any) -> Played:
    settings = [
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        f"agent.fn=verifiers:{name}",
        "agent.workers=1",
        "train_dataset.loader=null",
        "train_dataset.path=null",
        "reward.fn=null",
        "train_dataset.max_length=400",
        "gconfig.max_tokens=900",
        "gconfig.temperature=1",
        "saver.freq_steps=null",
        "total_train_steps=1",
    ]
    return play("gspo", folder / "run", *settings, *overrides, **given)


@needs_verifiers
@pytest.mark.slow
def test_one_word_trains_on_an_environment(packages: Path, tmp_path: Path) -> None:
    played = run(tmp_path, "toy-single", "rollout.dump_to_file=true")
    samples = played.samples(1)
    assert len(played.rows[0]) == len(samples) == 16
    for sample in samples:
        turns = sample["trajectory"]["turns"]
        asked, said = turns[0]["messages"], turns[0]["message"]["content"] or ""
        assert asked[0] == {"role": "system", "content": "Answer."}
        number = asked[1]["content"].removeprefix("Say ").removesuffix(".")
        assert sample["reward"] == pytest.approx(0.5 * (len(said) / 10 + (number in said)))
    assert played.series("rollout/reward/length") == pytest.approx([2 * np.mean([s["reward"] for s in samples])])
    assert played.series("rollout/reward/num_turns") == [1.0]
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4
    assert max(played.series("train/grad_norm")) > 0


@needs_verifiers
@pytest.mark.slow
def test_turns_with_tools_are_one_row(packages: Path, tmp_path: Path) -> None:
    played = run(tmp_path, "toy_tools", "rollout.dump_to_file=true")
    assert played.series("rollout/agent_turns_mean") == [3.0]
    assert played.series("rollout/agent_rows_mean")[0] < 1.3  # where a random model reasons, the next turn loses it
    assert played.series("rollout/agent_errors") == [0.0]
    assert played.series("train/logp_abs_diff_max")[0] < 1e-4
    for sample in played.samples(1):
        turns = sample["trajectory"]["turns"]
        assert turns[0]["tools"][0]["function"]["name"] == "add"
        assert turns[1]["messages"][-1]["content"].isdigit()
        letters = sum(len(turn["message"].get("content") or "") for turn in turns)
        assert sample["reward"] == letters


@needs_verifiers
@pytest.mark.slow
def test_rows_and_rewards_of_ones_own(packages: Path, tmp_path: Path) -> None:
    """Rows of the run take the place of the environment's; a reward function is added to the rubric."""
    (tmp_path / "reward.py").write_text("def reward_fn(record):\n    return 1000.0\n")
    rows = [{"prompt": f"Say {n}00.", "solutions": f"{n}00"} for n in range(1, 5)]
    settings = ["rollout.dump_to_file=true", f"reward.fn={tmp_path / 'reward.py'}", "reward.workers=1"]
    played = run(tmp_path, "toy_single", *settings, train_dataset=rows)
    asked = {sample["trajectory"]["turns"][0]["messages"][1]["content"] for sample in played.samples(1)}
    assert asked == {row["prompt"] for row in rows}
    assert played.series("rollout/reward/fn") == [1000.0]
    [mean] = played.series("rollout/rewards_mean")
    assert mean == pytest.approx(1000.0 + played.series("rollout/reward/agent")[0], rel=1e-5)


@needs_verifiers
@pytest.mark.slow
def test_its_rows_by_split(packages: Path) -> None:
    def rows(split: str, name: str = "toy_single") -> Any:
        return load_rows(DatasetConfig(path=f"verifiers:{name}", split=split), "prompt")

    assert (len(rows("train")), len(rows("test"))) == (8, 2)
    assert rows("train")[3]["solutions"] == "3"
    assert rows("train", "toy_tools")[0]["tools"][0]["function"]["name"] == "add"


def load_agent(name: str) -> None:
    environment = package_of(f"verifiers:{name}", "agent.fn")
    assert environment is not None
    environment.agent()


@needs_verifiers
@pytest.mark.slow
def test_signals_stay_what_they_were(packages: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    load_agent("toy_single")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@needs_verifiers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_env", r"no_such_env does not load: .*No module named 'no_such_env'.* installed"),
        ("toy_raises", "toy_raises does not load: OSError: no key for the judge"),
        ("toy_completions", "toy_completions uses text completions; only environments with chat messages"),
    ],
)
def test_environments_that_do_not_load(packages: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"agent.fn: verifiers:{message}"):
        load_agent(name)


@needs_verifiers
@pytest.mark.slow
def test_a_rubric_of_groups_is_told(packages: Path, tmp_path: Path) -> None:
    with pytest.raises(ArenoError, match=r"agent\.fn: no reward .* one that compares samples of a group"):
        run(tmp_path, "toy_group")


def test_what_the_settings_need() -> None:
    given = ["actor.path=folder", "agent.fn=verifiers:wordle", "train_dataset.path=null", "reward.fn=null"]
    config = load(GSPOConfig, "prompts", given)
    assert config.train_dataset.path == "verifiers:wordle"
    with pytest.raises(ConfigError, match=r"reward\.workers: is 3, but reward\.fn is null, so no function is called"):
        load(GSPOConfig, "prompts", [*given, "reward.workers=3"], sources=True)
    with pytest.raises(ConfigError, match=r"train_dataset\.path: missing"):
        load(GSPOConfig, "prompts", [*given, "agent.fn=agent.py"], sources=True)
