"""What an agent returned, however it was changed: one error that names the place, and never another exception."""

from __future__ import annotations

import copy
import datetime
import json
import math
import re
from typing import Any

import numpy as np
import pytest

from areno.agents.trajectories import (
    AgentItem,
    AgentTrajectory,
    AgentTrajectoryTurn,
    BadTrajectory,
    LossMaskPolicy,
    plain_results,
    plain_turn,
    recorded_result,
    with_chosen_turns,
    with_rewards,
)
from areno.agents.turns_to_rows import RowBuilder, read_trajectories
from areno.errors import DataError
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import PromptBuilder
from areno.server.returned_responses import TurnTokens, message_digest
from tests.helpers.conversations import USER, turn_of
from tests.helpers.tokenizers import load_tokenizer

SAID = {"role": "assistant", "content": "a"}
TOLD: dict[str, Any] = {
    "session": "s",
    "conversation": "k",
    "temperature": 0.7,
    "prompt_token_ids": [5, 0, 99],
    "sources": [[0, 1], [2, 2]],
    "choices": [{"token_ids": [1, 2], "logprobs": [-0.5, 1e-7], "versions": [0, 3], "message": message_digest(SAID)}],
}
NO_LIST = (None, "5", {}, 5, [], [[5, 5]], np.array([5, 5]), (5, 5))
NO_IDS = (
    *NO_LIST,
    [5, 5.0],
    [5, "5"],
    [5, None],
    [5, math.nan],
    [-1, 5],
    [5, 100],
    [5, 2**70],
    [-(2**70), 5],
    [True, 5],
)
NO_LOGPROBS = (
    *NO_LIST,
    [-1.0],
    [-1.0] * 3,
    [-1.0, math.nan],
    [-1.0, math.inf],
    [-math.inf, -1.0],
    [-1e200, -1.0],
    [-1.0, 0.01],
    [-1.0, 10**400],
    [-(10**400), -1],
    [-1.0, True],
    [-1.0, None],
    [-1.0, "-1"],
)
NO_SOURCES = (
    *NO_LIST,
    [[0, 2]],
    [[0, 4]],
    [[5, 3]],
    [[-1, 3]],
    [[0, -1], [0, 4]],
    [[0, 1.5], [0, 1.5]],
    [[0, 3, 0]],
    [3],
    [[0, True], [0, 2]],
    [[0, 2**70]],
    [["0", 3]],
)
NO_TEMPERATURE = (None, "1", True, 0, 0.0, -1, math.nan, math.inf, 1e-40, 10**400, [1.0])


def wrong_fields() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [("prompt_token_ids", value) for value in NO_IDS]
    found += [("token_ids", value) for value in NO_IDS]
    found += [("versions", value) for value in (*NO_LIST, [0], [0, -1], [0, 2**70], [0, 1.0], [0, False])]
    found += [("logprobs", value) for value in NO_LOGPROBS]
    found += [("sources", value) for value in NO_SOURCES]
    found += [("temperature", value) for value in NO_TEMPERATURE]
    found += [("message", value) for value in (None, "a", {}, {"content": "a"}, [])]
    return found + [("choices", value) for value in (None, [], {}, [None], [[]], "a", 5)]


def changed(told: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    told = copy.deepcopy(told)
    place = told if name in told else told["choices"][0]
    place[name] = value
    return told


def test_the_tokens_of_a_response_are_read() -> None:
    tokens = TurnTokens.read(TOLD, 100)
    assert tokens.message == message_digest(SAID)
    assert (tokens.prompt, tokens.sources, tokens.temperature) == ([5, 0, 99], [(0, 1), (2, 2)], 0.7)
    assert (tokens.sampled, tokens.logprobs, tokens.versions) == ([1, 2], [-0.5, 1e-7], [0, 3])


def test_each_field_of_the_tokens_is_checked() -> None:
    for name, value in wrong_fields():
        with pytest.raises(BadTrajectory, match=name):
            TurnTokens.read(changed(TOLD, name, value), 100)
    for name in ("prompt_token_ids", "sources", "temperature", "choices"):
        with pytest.raises(BadTrajectory, match=name):
            TurnTokens.read({key: value for key, value in TOLD.items() if key != name}, 100)


def response_of(turn: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"message": turn["message"], "finish_reason": "stop"}], "areno": turn["tokens"]}


def test_a_script_is_told_which_trajectory_is_wrong() -> None:
    tokenizer = load_tokenizer("tiny")
    conversations = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))
    turn = turn_of(conversations, [USER], "a<|im_end|>", None)
    good = json.loads(json.dumps(response_of(turn)))
    builder = RowBuilder(conversations, LossMaskPolicy(), len(tokenizer))
    items = [AgentItem("a", {}, [5], index) for index in range(2)]

    def returned(response: Any) -> list[AgentTrajectory]:
        turns = (AgentTrajectoryTurn(item, [USER], each) for item, each in zip(items, (good, response), strict=True))
        return [AgentTrajectory([each]) for each in turns]

    assert len(read_trajectories(returned(good), builder)) == 2
    for name, value in (
        ("token_ids", [5, 10**6]),
        ("logprobs", [-1.0, math.nan]),
        ("prompt_token_ids", [-1]),
        ("sources", [[0, 2**70]]),
        ("versions", [0, -1]),
        ("temperature", None),
        ("session", object()),
    ):
        with pytest.raises(DataError, match=r"^trajectory 1: the response of turn 0 was changed|its tokens"):
            read_trajectories(returned(good | {"areno": changed(good["areno"], name, value)}), builder)


def test_a_row_longer_than_the_context_costs_its_sample() -> None:
    tokenizer = load_tokenizer("tiny")
    conversations = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))
    good = json.loads(json.dumps(response_of(turn_of(conversations, [USER], "a<|im_end|>", None))))
    n = len(good["areno"]["prompt_token_ids"]) + len(good["areno"]["choices"][0]["token_ids"])
    trajectory = AgentTrajectory([AgentTrajectoryTurn(AgentItem("a", {}, [5], 0), [USER], good)])
    read_trajectories([trajectory], RowBuilder(conversations, LossMaskPolicy(), len(tokenizer), context=n))
    with pytest.raises(DataError, match=f"has {n} tokens, more than the model's context of {n - 1}"):
        read_trajectories([trajectory], RowBuilder(conversations, LossMaskPolicy(), len(tokenizer), context=n - 1))


DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "change",
    [
        {"choices": "a"},
        {"choices": {"message": {}}},
        {"choices": [None]},
        {"choices": [{}]},
        {"choices": [{"message": "hi"}]},
        {"choices": [{"message": {"content": ["a"]}}]},
        {"choices": [{"message": {"content": "\ud800"}}]},
        {"choices": [{"message": {"content": datetime.date(2024, 1, 1)}}]},
        {"choices": [{"message": {"content": "a", "more": {("a",): 1}}}]},
        {"choices": [{"message": {"content": "a", "tool_calls": 5}}]},
        {"choices": [{"message": {"content": "a", "tool_calls": ["a"]}}]},
        {"choices": [{"message": {"content": "a"}, "finish_reason": 5}]},
        {"choices": [{"message": {"content": "a", "more": object()}}]},
        {"choices": [{"message": {"content": "a", "more": DEEP}}]},
        {"areno": []},
        {"areno": {"choices": [{"token_ids": [object()]}]}},
        {"areno": {"session": lambda: None}},
    ],
)
def test_a_response_of_another_form_is_told(change: dict[str, Any]) -> None:
    good = {"choices": [{"message": {"role": "assistant", "content": "a"}}], "areno": TOLD}
    item = AgentItem("a", {}, [5])
    assert plain_turn(AgentTrajectoryTurn(item, [USER], good))["tokens"] == TOLD
    with pytest.raises(BadTrajectory):
        plain_turn(AgentTrajectoryTurn(item, [USER], {**good, **change}))


@pytest.mark.parametrize("chunks", [[5], [None], ["a"], [{"choices": 5}], [{"choices": [5]}], [{"choices": ["a"]}], []])
def test_chunks_of_another_form_are_told(chunks: list[Any]) -> None:
    with pytest.raises(BadTrajectory):
        plain_turn(AgentTrajectoryTurn(AgentItem("a", {}, [5]), [USER], chunks))


SAID_TWICE: Any = {"choices": [{"message": {"role": "assistant", "content": "a"}}], "areno": TOLD}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0.5], "it has 1 turn_rewards for 2 turns; one for each is expected"),
        ([0.5, math.nan], "the reward of turn 1: nan; a reward is a finite number"),
        (["1", 0.5], r"the reward of turn 0: '1' \(str\); a reward is a number"),
        ([0.5, None], "the reward of turn 1: None"),
        ([3e38, 3e38], "the sum of rewards 6e[+]38; a reward is at most"),
        (0.5, "the turn_rewards 0.5; a list with a number for each turn is expected"),
        ("ab", "the turn_rewards 'ab'; a list"),
    ],
)
def test_wrong_rewards_of_turns_are_errors_of_the_sample(rewards: Any, message: str) -> None:
    item = AgentItem("a", {}, [5])
    turns = [AgentTrajectoryTurn(item, [USER], SAID_TWICE) for _ in range(2)]
    [found] = plain_results(AgentTrajectory(turns, turn_rewards=rewards), [item])
    assert isinstance(found, BadTrajectory)
    assert re.search(message, str(found))
    if rewards != [0.5]:  # a session knows how many it has recorded
        with pytest.raises(BadTrajectory, match=message):
            recorded_result(AgentTrajectory([], turn_rewards=rewards))


def test_the_rewards_of_turns_add_up() -> None:
    item = AgentItem("a", {}, [5])
    turns = [AgentTrajectoryTurn(item, [USER], SAID_TWICE) for _ in range(2)]
    [found] = plain_results(AgentTrajectory(turns, 0.5, {"steps": 2}, turn_rewards=[1, -0.25]), [item])
    assert not isinstance(found, BadTrajectory)
    assert [turn["reward"] for turn in found] == [1.0, -0.25]
    assert found[1]["outcome"] == (1.25, {"steps": 2.0})
    assert recorded_result([1, -0.25]) == ((0.75, {}), None, [1.0, -0.25])
    assert recorded_result([AgentTrajectory(turns)]) is None
    assert with_rewards([{"tools": None}], [0.5]) == [{"tools": None, "reward": 0.5}]
    with pytest.raises(BadTrajectory, match="it has 2 turn_rewards for 0 turns"):
        with_rewards([], [0.5, 1.0])


@pytest.mark.parametrize("turns", [None, 5, "ab", {"a": 1}, [5], [None]])
def test_turns_of_another_form_are_told(turns: Any) -> None:
    with pytest.raises(DataError, match=r"turns of a trajectory|among its turns"):
        read_trajectories(AgentTrajectory(turns), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("tools", [{5}, [datetime.date(2024, 1, 1)], {"a": "\udfff"}, [{("a",): 1}], [DEEP]])
def test_tools_that_no_file_can_hold_are_told(tools: Any) -> None:
    good = {"choices": [{"message": {"role": "assistant", "content": "a"}}], "areno": TOLD}
    with pytest.raises(BadTrajectory, match="a turn does not hold messages and a response as the client gave it"):
        plain_turn(AgentTrajectoryTurn(AgentItem("a", {}, [5]), [USER], good, tools=tools))


def test_chosen_turns_with_a_reward() -> None:
    item = AgentItem("p", {}, [1])
    found = with_chosen_turns({"reward": 2, "won": 1.0, "turns": [([USER], "response")]}, item)
    assert (found.reward, found.parts) == (2, {"won": 1.0})
    assert [(turn.item, turn.messages, turn.response) for turn in found.turns] == [(item, [USER], "response")]
    for other in (None, 1.0, {"reward": 1.0}, {"turns": []}, [1.0]):
        assert with_chosen_turns(other, item) is other
