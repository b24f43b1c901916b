"""agent.mode=inline: agents in a thread of this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from areno.agents.inline import InlineAgents
from areno.agents.trajectories import AgentContext, AgentItem
from areno.config.agent import AgentConfig
from areno.errors import ConfigError
from tests.helpers.agent_runs import run
from tests.helpers.waiting import until

AGENT = """
import asyncio
import os
import threading
import time

SEEN = []


async def run_agent(ctx, batch):
    [item] = batch
    SEEN.append((os.getpid(), threading.current_thread().name))
    if item.prompt == "fail":
        raise ValueError("wrong")
    if item.prompt == "hang":
        await asyncio.sleep(60)
    return float(item.sample_index)


def run_plain(ctx, batch):
    [item] = batch
    time.sleep(0.01)
    return float(item.sample_index)
"""


def context(items: Any) -> AgentContext:
    return AgentContext("http://127.0.0.1:1/v1", "key", "session", 1.0)


def items_of(*prompts: str) -> list[AgentItem]:
    return [AgentItem(prompt, {}, [1], number) for number, prompt in enumerate(prompts)]


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    return file


def test_agents_run_in_this_process_and_fail_alone(agent: Path) -> None:
    done: list[int] = []
    with InlineAgents({"": AgentConfig(fn=str(agent), mode="inline", timeout_s=2.0)}) as agents:
        found = agents.run(
            items_of("a", "fail", "hang", "b"), context, on_done=lambda index, outcome: done.append(index)
        )
        seen = agents._agents[""].function.__globals__["SEEN"]
    assert [outcome.status for outcome in found] == ["ok", "error", "timeout", "ok"]
    assert found[0].reward == (0.0, {})
    assert found[1].message == "ValueError: wrong (agent.py:14)"
    assert found[2].message == "not finished within 2 s (agent.timeout_s)"
    assert sorted(done) == [0, 1, 2, 3]
    assert {process for process, _ in seen} == {os.getpid()}
    assert {name for _, name in seen} == {"areno-agents"}


def test_an_agent_that_is_cancelled_fails_alone(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import asyncio\n\n\nasync def run_agent(ctx, batch):\n    task = asyncio.ensure_future(asyncio.sleep(9))\n"
        "    task.cancel()\n    await task\n"
    )
    with InlineAgents({"": AgentConfig(fn=str(file), mode="inline", timeout_s=5)}) as agents:
        [found] = agents.run(items_of("a"), context)
    assert (found.status, found.message.startswith("CancelledError")) == ("error", True)


@pytest.mark.parametrize("stopped_before", [False, True])
def test_the_end_of_a_run_waits_for_agents_to_clean_up(tmp_path: Path, stopped_before: bool) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        f"import asyncio\nfrom pathlib import Path\n\nFOLDER = Path({str(tmp_path)!r})\n\n\n"
        "async def run_agent(ctx, batch):\n    (FOLDER / 'begun').touch()\n    try:\n        await asyncio.sleep(60)\n"
        "    finally:\n        (FOLDER / 'cleaning').touch()\n        await asyncio.sleep(0.1)\n"
        "        (FOLDER / 'ended').touch()\n"
    )
    with InlineAgents({"": AgentConfig(fn=str(file), mode="inline")}) as agents:
        agents.submit(items_of("a"), context, lambda index, outcome: None)
        until((tmp_path / "begun").exists)
        if stopped_before:  # what cleans up already is not cancelled once more
            agents.restart_busy_workers()
            until((tmp_path / "cleaning").exists)
    assert (tmp_path / "ended").exists()


def test_plain_functions_run_in_threads(agent: Path) -> None:
    with InlineAgents({"": AgentConfig(fn=f"{agent}:run_plain", mode="inline")}) as agents:
        assert [outcome.status for outcome in agents.run(items_of("a", "b"), context)] == ["ok"] * 2


def test_time_limits_are_paused_while_models_are_trained(agent: Path) -> None:
    with InlineAgents({"": AgentConfig(fn=str(agent), mode="inline", timeout_s=0.2)}) as agents:
        agents.suspend()
        found: list[str] = []
        agents.submit(items_of("hang"), context, lambda index, outcome: found.append(outcome.status))
        waiting = threading.Event()
        waiting.wait(0.5)
        agents.run_until(lambda: True, lambda: None)
        assert not found
        agents.resume()
        agents.run_until(lambda: bool(found), lambda: None)
        assert found == ["timeout"]


def test_an_error_of_the_run_stops_all_agents(agent: Path) -> None:
    def fail(index: int, outcome: Any) -> None:
        raise KeyError("of the run")

    late: list[int] = []
    with InlineAgents({"": AgentConfig(fn=str(agent), mode="inline")}) as agents:
        agents.submit(items_of("hang"), context, lambda index, outcome: late.append(index))
        with pytest.raises(KeyError, match="of the run"):
            agents.run(items_of("a"), context, on_done=fail)
        assert [outcome.status for outcome in agents.run(items_of("a"), context)] == ["ok"]
    assert not late


def test_what_does_not_go_together_is_told(agent: Path) -> None:
    for settings, words in (
        ({"mode": "inline", "fn": "agent.py", "workers": 2}, "workers: is 2, but with mode=inline no processes"),
        ({"mode": "online", "fn": "agent.py"}, "mode: is online, but the agent is agent.py"),
        ({"mode": "online", "command": "agent"}, "mode: is online, but the agent is command"),
        ({"mode": "online", "whole_batch": True}, "whole_batch: is true, but online runs one sample at a time"),
        ({"fn": "online"}, "fn: is online; set mode=online"),
    ):
        with pytest.raises(ConfigError) as caught:
            AgentConfig(**AgentConfig.canonical(settings))  # type: ignore[arg-type]
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"agent\.fn: .* has no function missing"):
        InlineAgents({"": AgentConfig(fn=f"{agent}:missing", mode="inline")}).__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_inline_agents_train_as_those_in_processes(tmp_path: Path, ahead: int) -> None:
    settings = ["engine.exact=true", "total_train_steps=1", f"rollout.max_head_offpolicyness={ahead}"]
    played = run(tmp_path, "two_turns.py", *settings, "agent.mode=inline", "agent.workers=null")
    assert len(played.rows[0]) == 16
    assert played.series("train/logp_abs_diff_max") == [0.0]
    assert played.series("rollout/agent_turns_mean") == [2.0]
    assert not [thread for thread in threading.enumerate() if thread.name == "areno-agents"]
