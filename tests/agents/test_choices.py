"""Which sampled choice a turn trains: the one that the agent returned, found by real clients of a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from areno import SamplingParams
from areno.agents.proxy import SessionProxy
from areno.agents.trajectories import (
    AgentItem,
    AgentTrajectory,
    AgentTrajectoryTurn,
    BadTrajectory,
    LossMaskPolicy,
    plain_results,
)
from areno.agents.turns_to_rows import RowBuilder
from areno.server.returned_responses import changed_parts, message_digest
from areno.types import Trajectory
from tests.helpers.agent_model import VOCAB, made
from tests.helpers.conversations import USER

ITEM = AgentItem("hello", {}, [5])


@pytest.fixture(scope="module")
def proxy() -> Iterator[SessionProxy]:
    with (
        made() as trainer,
        trainer.rollout_session(sampling_params=SamplingParams(max_new_tokens=6), max_running_prompts=16) as session,
    ):
        yield session.proxy


@pytest.fixture
def client(proxy: SessionProxy) -> OpenAI:
    return OpenAI(base_url=proxy.base_url, api_key=proxy.api_key, max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=[USER], **fields)  # type: ignore[list-item]


def turn(response: Any) -> AgentTrajectoryTurn:
    return AgentTrajectoryTurn(ITEM, [USER], response)


def trajectory(proxy: SessionProxy, *turns: AgentTrajectoryTurn) -> Trajectory:
    [plain] = plain_results(AgentTrajectory(list(turns)), [ITEM])
    if isinstance(plain, BadTrajectory):
        raise plain
    conversations = proxy.server.chat.prompts
    return RowBuilder(conversations, LossMaskPolicy(), VOCAB, proxy.session).build_trajectory(plain)


def sampled(found: Trajectory) -> list[list[int]]:
    return [[token for token, own in zip(row.tokens, row.sampled, strict=True) if own] for row in found.rows]


@pytest.mark.parametrize("copies", [False, True])
def test_the_best_of_n_is_trained(client: OpenAI, proxy: SessionProxy, copies: bool) -> None:
    response = ask(client, n=4, seed=1)
    told = [choice["token_ids"] for choice in response.areno["choices"]]
    assert len({tuple(tokens) for tokens in told}) == 4
    for index in (3, 1, 0):
        best = response.choices[index]
        kept = response.model_copy(update={"choices": [best]}) if copies else json.loads(response.to_json())
        if not copies:
            kept["choices"] = [kept["choices"][index]]
        found = trajectory(proxy, turn(kept))
        assert sampled(found) == [told[index]]
        assert found.messages[-1]["content"] == best.message.content


def test_the_best_of_a_stream_is_trained(client: OpenAI, proxy: SessionProxy) -> None:
    chunks = list(ask(client, n=3, seed=2, stream=True))
    told = next(chunk.areno for chunk in chunks if hasattr(chunk, "areno"))["choices"]
    for index in range(3):
        kept = [
            chunk.model_copy(update={"choices": [one for one in chunk.choices if one.index == index]})
            for chunk in chunks
        ]
        assert sampled(trajectory(proxy, turn(kept))) == [told[index]["token_ids"]]
    with pytest.raises(BadTrajectory, match=r"has 3 choices; keep only the one .* the chunks of one index"):
        trajectory(proxy, turn(chunks))


def test_several_choices_are_refused_and_how_to_name_one_is_said(client: OpenAI, proxy: SessionProxy) -> None:
    response = ask(client, n=4)
    with pytest.raises(BadTrajectory, match=r"has 4 choices; .* response.choices = \[response.choices\[2\]\]"):
        trajectory(proxy, turn(response))
    response.choices = [response.choices[2]]
    assert sampled(trajectory(proxy, turn(response))) == [response.areno["choices"][2]["token_ids"]]
    response.choices[0].index = 9
    with pytest.raises(BadTrajectory, match="index 9, and the server sent no such choice"):
        trajectory(proxy, turn(response))


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda choice, other: setattr(choice.message, "content", other.message.content), "content"),
        (lambda choice, other: setattr(choice, "index", other.index), "content"),
        (lambda choice, other: setattr(choice.message, "content", choice.message.content + " "), "content"),
        (lambda choice, other: setattr(choice.message, "content", None), "content"),
        (lambda choice, other: setattr(choice.message, "reasoning_content", "I thought"), "reasoning_content"),
        (lambda choice, other: setattr(choice.message, "reasoning", "I thought"), "reasoning_content"),
    ],
)
def test_an_edited_message_is_an_error(
    client: OpenAI, proxy: SessionProxy, edit: Callable[[Any, Any], object], part: str
) -> None:
    response = ask(client, n=2, seed=3)
    edit(response.choices[0], response.choices[1])
    response.choices = response.choices[:1]
    with pytest.raises(BadTrajectory, match=rf"turn 0: the message of its response was changed .*'{part}'"):
        trajectory(proxy, turn(response))


def test_a_response_is_returned_once_and_equal_samples_are_two(client: OpenAI, proxy: SessionProxy) -> None:
    first, second = (ask(client, n=2, seed=7) for _ in range(2))
    both = [first.model_copy(update={"choices": [choice]}) for choice in first.choices]
    again = second.model_copy(update={"choices": second.choices[:1]})
    assert first.areno["choices"][0]["token_ids"] == again.areno["choices"][0]["token_ids"]
    assert len(trajectory(proxy, turn(both[0]), turn(both[1]), turn(again)).rows) == 3
    with pytest.raises(BadTrajectory, match="turn 2 has the response of turn 0 again; return each response once"):
        trajectory(proxy, turn(both[0]), turn(both[1]), turn(both[0].model_copy()))


CALL: dict[str, Any] = {
    "id": "c",
    "type": "function",
    "function": {"name": "f", "arguments": '{"b": [1], "a": "\u00e9"}'},
}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": "f", "arguments": arguments}, **more}]}


@pytest.mark.parametrize(
    ("sampled", "returned", "changed"),
    [
        ({"content": None}, {}, []),
        ({}, {"content": "", "tool_calls": None, "reasoning_content": ""}, []),
        ({"content": "a"}, {"content": "a", "tool_calls": [], "refusal": None, "parsed": {"a": 1}}, []),
        ({"content": "a", "reasoning_content": "b"}, {"content": "a"}, []),
        ({"content": "a", "reasoning_content": "b"}, {"content": "a", "reasoning": "b"}, []),
        ({"content": "a", "reasoning_content": "b"}, {"content": "a", "reasoning": "c"}, ["reasoning_content"]),
        ({"content": "a"}, {"content": "A"}, ["content"]),
        ({"content": "a" * 5000}, {"content": "a" * 4999 + "b"}, ["content"]),
        ({"tool_calls": [CALL]}, call('{"a":"\\u00e9","b":[1]}', id="other"), []),
        ({"tool_calls": [CALL]}, call({"a": "\u00e9", "b": [1]}), []),
        ({"tool_calls": [CALL]}, call({"a": "\u00e9", "b": [2]}), ["tool_calls"]),
        ({"tool_calls": [CALL]}, {}, ["tool_calls"]),
        ({"tool_calls": [CALL]}, {"tool_calls": [CALL, CALL]}, ["tool_calls"]),
        (call("{}"), call(None), []),
        (call("{}"), call(""), []),
        (call('{"a": '), call('{"a": '), []),
        (call('{"a": '), call('{"a":'), ["tool_calls"]),
        (call("[" * 2000 + "]" * 2000), call("[" * 2000 + "]" * 2000), []),
        (call('"\\ud83d"'), call('"\\ud83d"'), []),
        (call("{}"), {"tool_calls": ["f"]}, ["tool_calls"]),
    ],
)
def test_parts_of_a_message_are_compared_by_their_meaning(
    sampled: dict[str, Any], returned: dict[str, Any], changed: list[str]
) -> None:
    assert changed_parts(returned, message_digest(sampled)) == changed
