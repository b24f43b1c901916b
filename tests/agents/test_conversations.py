"""The kinds of an agent's conversations, by requests as programs send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest

from areno.agents.trajectories import LossMaskPolicy, with_rewards
from areno.agents.turns_to_rows import RowBuilder, train_sequences
from areno.errors import ArenoError
from areno.server.errors import BadTrajectory
from areno.server.sample_sessions import SampleSession
from areno.types import Trajectory
from tests.helpers.scripted_engine import scripted_server

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
SUMMARY = "So far I have looked at the cat, and it was asleep."
SYSTEM: Any = {"role": "system", "content": "You are an agent."}


def say(prompt: str) -> str:
    if "Summarise" in prompt:
        return SUMMARY
    return "A title" if "title" in prompt else CALL


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def trajectory(script: Callable[[Callable[..., Any]], object], rewards: Any = None, **builder: Any) -> Trajectory:
    """Let a script ask, and return the trajectory of its session."""
    with scripted_server(say) as (server, _):
        session = SampleSession(max_requests=50, uses_run_sampling=True, returns_tokens=False)
        url = server.open_sample(session)

        def ask(messages: list[Any], tools: Any = TOOLS) -> list[Any]:
            """The messages with the answer and the results of its calls."""
            body = {"model": "any", "messages": messages} | ({"tools": tools} if tools else {})
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
            calls = answer.get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "a cat"} for call in calls]
            return [*messages, answer, *results]

        script(ask)
        server.end_sample(session)
        prompts = server.server.chat.prompts
        turns = with_rewards(session.turns, rewards)
        return RowBuilder(prompts, LossMaskPolicy(), len(prompts.tokenizer), **builder).build_trajectory(turns)


def test_a_title_is_no_part_of_the_agent() -> None:
    def script(ask: Any) -> None:
        ask([user("Write a title.")], None)
        talk = ask(ask([SYSTEM, user("Begin.")]))
        ask([user("Write another title.")], None)
        assert len(talk) == 6

    for kinds, n_rows in ((("main", "subagent", "compaction"), 1), (("main", "auxiliary"), 3)):
        found = trajectory(script, conversations=kinds)
        assert found.conversations == {"main": 1, "auxiliary": 2}
        assert len(found.rows) == n_rows
        assert found.messages[0] == SYSTEM
        assert len(found.turns) == 4
    with pytest.raises(BadTrajectory, match=r"conversations \(auxiliary, main, auxiliary\) are none that agent\.train"):
        trajectory(script, conversations=("subagent",))


def test_a_sub_agent_is_a_conversation_of_its_own_and_does_not_end_the_main_one() -> None:
    def script(ask: Any) -> None:
        talk = ask([SYSTEM, user("Begin.")])
        ask(ask([{"role": "system", "content": "You are a sub-agent."}, user("Look at it.")]))
        ask(talk)

    found = trajectory(script)
    assert found.conversations == {"main": 1, "subagent": 1}
    assert found.messages[0] == SYSTEM


def test_a_summary_and_what_begins_with_it_are_a_compaction() -> None:
    def script(ask: Any) -> None:
        talk = ask(ask([SYSTEM, user("Begin.")]))
        ask([*talk, user("Summarise.")], None)
        talk = ask(ask([SYSTEM, user(f"Go on. Summary: {SUMMARY}")]))
        ask([*talk, user("Summarise.")], None)
        ask([SYSTEM, user("Begin."), user(f"Summary: {SUMMARY}")])

    found = trajectory(script)
    assert found.conversations == {"main": 1, "compaction": 4}
    assert SUMMARY in found.messages[2]["content"]


def test_turns_of_other_conversations_are_parts_of_the_turn_before() -> None:
    """Two turns with a title before and a sub-agent after the first, a summary, and two turns that go on with it."""

    def script(ask: Any) -> None:
        ask([user("Write a title.")], None)
        talk = ask([SYSTEM, user("Begin.")])
        ask(ask([{"role": "system", "content": "You are a sub-agent."}, user("Look at it.")]))
        talk = ask(talk)
        ask([*talk, user("Summarise.")], None)
        ask(ask([SYSTEM, user(f"Go on. Summary: {SUMMARY}")]))

    found = trajectory(script, rewards=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    assert found.conversations == {"main": 1, "auxiliary": 1, "subagent": 1, "compaction": 2}
    assert [turn["turn"] for turn in found.turns] == [0, 0, 0, 0, 1, 2, 3, 4]
    assert found.turn_rewards == [1.0 + 2.0 + 4.0 + 8.0, 16.0, 32.0, 64.0, 128.0]
    assert found.turns[5]["reward"] == 32.0
    by_row = [np.unique(row.turns[row.sampled]).tolist() for row in found.rows]
    assert by_row == [[0], [0, 1], [0], [2], [3, 4]]
    main = found.rows[1]
    starts = np.flatnonzero(np.diff(main.turns)) + 1
    assert (main.sampled[starts - 1].all(), main.sampled[starts].any()) == (True, False), "a tool result begins a turn"
    rows = train_sequences(found, reward=1000.0)
    assert rows[2].turn_rewards.tolist() == [15.0, 16.0, 32.0, 64.0, 1000.0 - 127.0]  # type: ignore[union-attr]


def test_an_edited_history_is_the_same_conversation() -> None:
    def script(ask: Any) -> None:
        ask([SYSTEM, user("Begin.")])
        ask([SYSTEM, user("Begin."), {"role": "assistant", "content": "I looked."}, user("Go on.")])

    assert trajectory(script).conversations == {"main": 2}


def test_a_conversation_that_gets_tools_later_is_the_main_one() -> None:
    def script(ask: Any) -> None:
        ask([SYSTEM, user("Begin.")], None)
        ask([SYSTEM, user("Begin.")])

    found = trajectory(script)
    assert found.conversations == {"auxiliary": 1, "main": 1}
    assert found.finish_reason == "tool_calls"


def test_without_tools_each_first_request_is_an_agent() -> None:
    def script(ask: Any) -> None:
        ask([user("Begin.")], None)
        ask([user("Something else.")], None)

    assert trajectory(script).conversations == {"main": 1, "subagent": 1}


def test_a_session_without_a_turn_is_an_error() -> None:
    with pytest.raises((BadTrajectory, ArenoError), match="turns"):
        trajectory(lambda ask: None)
