"""Tasksets of verifiers: their own programs and rewards, each trace in the session of its sample."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem
from areno.config.datasets import DatasetConfig
from areno.data.sources import load_rows
from areno.environments import verifiers
from areno.environments.package import EnvironmentPackage
from areno.environments.packages import package_of
from areno.errors import ConfigError, DataError
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.server.sample_sessions import SampleSession
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import Played, play
from tests.helpers.scripted_engine import scripted_server

needs_verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="needs the verifiers extra")

TASKS = """
import verifiers.v1 as vf

__all__ = ["Numbers"]


class Data(vf.TaskData):
    number: int


class TaskConfig(vf.TaskConfig):
    broken: int = -1


class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()
    count: int = 8


def said(trace):
    return str(trace.nodes[-1].message.content or "")


class Number(vf.Task[Data, vf.State, TaskConfig]):
    @vf.reward(weight=0.5)
    async def length(self, trace: vf.Trace) -> float:
        if self.data.number == self.config.broken:
            raise OSError("no key for the judge")
        return len(said(trace)) / 10

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(said(trace)))


class Numbers(vf.Taskset[Number, Config]):
    def load(self):
        for n in range(self.config.count):
            yield Number(Data(prompt=f"Say {n}.", system_prompt="Answer.", number=n), self.config.task)
"""
PAIR = """
import verifiers.v1 as vf

from toy_numbers import Numbers

__all__ = ["Numbers", "Pair"]


class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judged: bool = False


class Pair(vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.second.trainable = not self.config.judged

    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)
"""
# verifiers starts its programs by uv, which would download their packages. This interpreter has them.
UV = f"""#!/bin/sh
case "$*" in
    *--help) echo --script ;;
    "python find "*) echo {sys.executable} ;;
esac
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with installed tasksets, and a home with `uv`."""
    folder, home = tmp_path / "packages", tmp_path / "home"
    folder.mkdir()
    (folder / "toy_numbers.py").write_text(TASKS)
    (folder / "toy_pair.py").write_text(PAIR)
    (folder / "toy_raises.py").write_text("raise OSError('no licence')\n")
    uv = home / ".local/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    for name in ("toy_numbers", "toy_pair", "toy_raises"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    verifiers._environment.cache_clear()
    return folder


def taskset(name: str) -> EnvironmentPackage:
    found = package_of(f"verifiers:{name}", "train_dataset.path")
    assert found is not None
    return found


def episodes(name: str, options: dict[str, Any], say: Callable[[str], str], n_samples: int = 1) -> Any:
    """Run an episode of the first row. Returns (what the agent returns, the recorded turns of each sample)."""
    row = taskset(name).rows("train", options)[0]
    items = [AgentItem(row["prompt"], row, [1], 0, sample) for sample in range(n_samples)]
    with scripted_server(say) as (server, _):
        sessions = [SampleSession(max_requests=20) for _ in items]
        for session in sessions:
            server.open_sample(session)
        ids = {item.key: session.id for item, session in zip(items, sessions, strict=True)}
        url = f"{server.url}/v1"
        ctx = AgentContext(url, "", "session", 60.0, None, ids, url)
        returned: Any = taskset(name).agent()(ctx, AgentBatch.of_items(items))
        return asyncio.run(returned), [session.turns for session in sessions]


@needs_verifiers
@pytest.mark.slow
def test_the_check_and_the_rows(packages: Path) -> None:
    taskset("toy_numbers").check()
    given = {"taskset": {"count": 5}, "select": {"limit": 3}}
    rows: Any = load_rows(DatasetConfig(path="verifiers:toy_numbers", dataset_kwargs=given), "prompt")
    assert [row["prompt"] for row in rows] == ["Say 0.", "Say 1.", "Say 2."]
    for wrong, name in (
        ({"colour": 3}, "colour"),
        ({"taskset": {"size": 3}}, "taskset.size"),
        ({"select": {"limt": 3}}, "select.limt"),
    ):
        with pytest.raises(ConfigError, match=rf"dataset_kwargs\.{name}: Extra inputs are not permitted"):
            taskset("toy_numbers").rows("train", wrong)
    with pytest.raises(ConfigError, match="does not load: ValueError: retries are set, but the session of a sample"):
        taskset("toy_numbers").rows("train", {"agent": {"retries": {"max_retries": 2}}})
    with pytest.raises(ConfigError, match="does not load: ValueError: Harness 'codex' needs a container runtime"):
        taskset("toy_numbers").rows("train", {"agent": {"harness": {"id": "codex"}}})
    with pytest.raises(ConfigError, match=r"train_dataset\.path: verifiers:toy_raises does not load: OSError: no lice"):
        taskset("toy_raises").check()


@needs_verifiers
@pytest.mark.slow
def test_the_attempts_of_an_episode_are_the_samples_of_a_group(packages: Path) -> None:
    lengths = iter([1, 2, 3])
    options = {"id": "best-of-n", "n": 3}
    returned, turns = episodes("toy_numbers", options, lambda prompt: "a" * next(lengths), 3)
    assert [len(each) for each in turns] == [1, 1, 1]
    for result, [turn] in zip(returned, turns, strict=True):
        n = len(turn["message"]["content"])
        assert result["reward"] == pytest.approx(n / 20)
        assert (result["letters"], result["best"]) == (n, n == 3)
    with pytest.raises(DataError, match=r"compares the 3 attempts \(n\) of an episode, but gets 1 .*whole_group=true"):
        episodes("toy_numbers", options, lambda prompt: "a")


@needs_verifiers
@pytest.mark.slow
def test_several_agents_are_conversations_of_one_sample(packages: Path) -> None:
    lengths = iter([2, 6, 1])
    returned, [turns] = episodes("toy_pair", {}, lambda prompt: "a" * next(lengths))
    assert [len(turn["message"]["content"]) for turn in turns] == [2, 6]
    assert returned["reward"] == pytest.approx((0.1 + 0.3) / 2)
    with pytest.raises(DataError, match=r"the agent second is not trained; .* second\.client"):
        episodes("toy_pair", {"judged": True}, lambda prompt: "a")


def train(folder: Path, name: str, *overrides: str) -> Played:
    settings = [
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        f"train_dataset.path=verifiers:{name}",
        "train_dataset.loader=null",
        "reward.fn=null",
        "agent.workers=1",
        "train_dataset.max_length=400",
        "gconfig.max_tokens=900",
        "gconfig.temperature=1",
        "saver.freq_steps=null",
        "total_train_steps=1",
        "train_dataset.batch_size=2",
    ]
    return play("gspo", folder / "run", *settings, *overrides)


@needs_verifiers
@pytest.mark.slow
def test_a_taskset_trains_and_a_grader_that_fails_is_an_error(packages: Path, tmp_path: Path) -> None:
    """It is not a reward of 0."""
    given = "train_dataset.dataset_kwargs={taskset:{count:2,task:{broken:1}}}"
    played = train(tmp_path, "toy_numbers", given, "gconfig.n_samples=3")
    assert played.series("rollout/agent_errors") == [3.0]
    samples = [sample for sample in played.samples(1) if sample.get("trajectory")]
    assert len(samples) == len(played.rows[0]) == 3
    for sample in samples:
        [turn] = sample["trajectory"]["turns"]
        assert turn["messages"][0] == {"role": "system", "content": "Answer."}
        assert turn["messages"][1]["content"] == "Say 0."
        said = turn["message"].get("content") or ""
        assert sample["reward"] == pytest.approx(0.5 * len(said) / 10)
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4


def trace(**fields: Any) -> Any:
    given = {"ok": True, "rewards": {}, "metrics": {}, "errors": [], "stop_condition": "scoring_timeout", "reward": 0.0}
    return SimpleNamespace(**{**given, **fields})


def test_what_is_no_reward_of_0() -> None:
    failed = trace(ok=False, errors=[SimpleNamespace(type="TaskError", message="no key")])
    with pytest.raises(DataError, match="TaskError: no key"):
        verifiers._reward(failed)
    with pytest.raises(DataError, match=r"the reward length was not computed \(scoring_timeout\)"):
        verifiers._reward(trace(rewards={"length": None}))
    assert verifiers._reward(trace()) is None
    assert isinstance(verifiers._result(failed), DataError)
    assert isinstance(verifiers._result(None), DataError)


def test_the_mean_of_several_agents() -> None:
    assert verifiers._mean([{"reward": 1.0, "a": 2.0}, {"reward": 0.0}, None]) == {"reward": 0.5, "a": 2.0}
    assert verifiers._mean([None]) is None


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, r"verifiers:a needs the package verifiers: pip install 'areno\[verifiers\]'"),
        ({"verifiers": "0.1.14"}, r"verifiers:a needs verifiers>=0\.4,<0\.5, but version 0\.1\.14 is installed"),
        (
            {"verifiers": "0.4.0", "mcp": "1.30.0"},
            r"verifiers:a needs mcp==2\.0\.0, but version 1\.30\.0 is installed: ",
        ),
        ({"verifiers": "0.4.0"}, r"verifiers:a needs mcp==2\.0\.0, but none is installed: "),
    ],
)
def test_what_has_to_be_installed(installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise verifiers.PackageNotFoundError(name)
        return installed[name]

    for module in ("package", "verifiers"):
        monkeypatch.setattr(f"areno.environments.{module}.version", version)
    monkeypatch.setattr(verifiers, "requires", lambda name: ["rich>=11", "mcp==2.0.0", 'nltk; extra == "ta"'])
    with pytest.raises(ConfigError, match=rf"^train_dataset\.path: {message}"):
        taskset("a").check()


def test_what_the_settings_need() -> None:
    given = ["actor.path=folder", "agent.fn=verifiers:wordle", "train_dataset.path=null", "reward.fn=null"]
    config = load(GSPOConfig, "prompts", given)
    assert config.train_dataset.path == "verifiers:wordle"
    with pytest.raises(ConfigError, match=r"reward\.workers: is 3, but reward\.fn is null, so no function is called"):
        load(GSPOConfig, "prompts", [*given, "reward.workers=3"], sources=True)
    with pytest.raises(ConfigError, match=r"train_dataset\.path: missing"):
        load(GSPOConfig, "prompts", [*given, "agent.fn=agent.py"], sources=True)
