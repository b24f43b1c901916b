"""The short way to a task with tools: you write the environment, areno runs the loop between it and the model.

class Counter(Environment):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {...}}}]

    def __init__(self, item):
        self.total = item.record["start"]

    def reset(self):
        return [{"role": "user", "content": f"Make 10 of {self.total}."}]

    def step(self, tool_calls):
        self.total += sum(call.arguments["n"] for call in tool_calls)
        messages = [call.result(str(self.total)) for call in tool_calls]
        return messages, float(self.total == 10), self.total >= 10

run_agent = agent_of(Counter)       # agent.fn=this_file.py
reward_fn = reward_of(Counter)      # reward.fn=this_file.py
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areno.errors import DataError
from areno.rewards.records import reward_number
from areno.types import Message

logger = logging.getLogger("areno")

StepResult = tuple[Sequence[Message], float, bool]
"""Messages for the model, the reward of this step, whether the task is over."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model, with its arguments as an object."""

    id: str
    name: str
    arguments: dict[str, Any]

    def result(self, content: str) -> Message:
        """The message that answers it."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


class Environment:
    """One task, for one sample. The methods may be `async`; those that are not run in a thread.

    tools: definitions in OpenAI's form. They are read before each turn, so they may change.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def reset(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start the task; returns the messages that the model is to answer first."""
        raise NotImplementedError

    def step(self, tool_calls: list[Call]) -> StepResult | Awaitable[StepResult]:
        """Do what the model asks for in one turn, and answer each call with a message.

        Only calls of tools that there are, whose arguments are an object, arrive here. The loop answers the others with
        an error message. The arguments are not checked against the schema.
        """
        raise NotImplementedError

    def answer(self, text: str) -> StepResult | Awaitable[StepResult]:
        """The model wrote a text and called nothing. By default the task is over, without a reward."""
        return [], 0.0, True

    def close(self) -> Any:
        """Free what the task holds. Called once, also after an error."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer, as the client gave it."""

    messages: list[Message]
    response: Any
    tools: list[Any] | None


@dataclass(slots=True)
class Episode:
    """What happened. messages: all of them. rewards: one for each step. ended: why."""

    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ended: Literal["", "done", "length", "max_turns"] = ""

    @property
    def reward(self) -> float:
        """Of the whole episode."""
        return math.fsum(self.rewards)


async def run_episode(
    environment: Environment, client: Any, *, model: str = "policy", max_turns: int = 16, **request: Any
) -> Episode:
    """Let the model act until the environment says that it is done, or a limit is reached.

    client: an `openai.AsyncOpenAI`. max_turns: most answers of the model. request: more fields of each request, such as
    top_p. Raises DataError for an environment that returns something else than it should, and what it raises.
    """
    episode = Episode()
    try:
        episode.messages = list(_checked_messages(await _call(environment.reset), "reset"))
        while not episode.ended:
            tools = [dict(tool) for tool in environment.tools]
            sent = {"tools": tools, **request} if tools else request
            response = await client.chat.completions.create(model=model, messages=list(episode.messages), **sent)
            choice = response.choices[0]
            episode.turns.append(Turn(list(episode.messages), response, tools or None))
            message = choice.message.model_dump(exclude_none=True)
            episode.messages.append(message)
            if choice.finish_reason == "length":
                episode.ended = "length"
            elif await _act(environment, message, episode):
                episode.ended = "done"
            elif len(episode.turns) == max_turns:
                episode.ended = "max_turns"
    finally:
        await _call(environment.close)
    return episode


async def replay(environment: Environment, messages: Sequence[Message]) -> float:
    """The reward of a conversation that took place: its assistant messages are acted on once more.

    It is the reward that the episode had, if the environment does the same each time.
    """
    episode = Episode()
    try:
        await _call(environment.reset)
        for message in messages:
            if message.get("role") == "assistant" and await _act(environment, message, episode):
                break
    finally:
        await _call(environment.close)
    return episode.reward


def agent_of(
    make: Callable[[Any], Environment], *, max_turns: int = 16, **request: Any
) -> Callable[[Any, Any], Awaitable[list[Any]]]:
    """The agent function `run_agent(ctx, batch)` of an environment.

    make: gets an AgentItem, whose `record` is the row of the dataset. max_turns and request: see `run_episode`. An
    episode that raises is logged and leaves its group; only where all of a batch do, the first error is raised.
    """

    async def run_agent(ctx: Any, batch: Any) -> list[Any]:
        from openai import AsyncOpenAI

        from areno.agents.trajectories import AgentTrajectory, AgentTrajectoryTurn

        async def run_one(item: Any) -> Any:
            episode = await run_episode(make(item), client, max_turns=max_turns, **request)
            turns = [AgentTrajectoryTurn(item, turn.messages, turn.response, turn.tools) for turn in episode.turns]
            return AgentTrajectory(turns=turns)

        async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:
            found = await asyncio.gather(*map(run_one, batch.iter_samples()), return_exceptions=True)
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in errors:
            if len(errors) == len(found) or not isinstance(error, Exception):
                raise error
            logger.warning("an episode failed: %s: %s", type(error).__name__, error)
        return [each for each in found if not isinstance(each, BaseException)]

    return run_agent


def reward_of(make: Callable[[Any], Environment]) -> Callable[[Any], Awaitable[float]]:
    """The reward function of an environment that does the same each time: it replays the conversation.

    make: as for `agent_of`; here it gets the RewardRecord, which has a `record`, too.
    """

    async def reward_fn(record: Any) -> float:
        return await replay(make(record), record.messages)

    return reward_fn


async def _act(environment: Environment, message: Message, episode: Episode) -> bool:
    """Let the environment answer one message of the model. Whether the task is over."""
    written = message.get("tool_calls") or []
    if not written:
        result = await _call(environment.answer, message.get("content") or "")
    else:
        names = {_name_of(tool) for tool in environment.tools}
        calls = [_read_call(each, names) for each in written]
        episode.messages += [call for call in calls if isinstance(call, dict)]  # what is wrong with the others
        valid = [call for call in calls if isinstance(call, Call)]
        if not valid:
            return False
        result = await _call(environment.step, valid)
    if not isinstance(result, tuple) or len(result) != 3:
        raise DataError(f"an environment returned {result!r}; expected (messages, reward, whether it is done)")
    messages, reward, done = result
    if isinstance(reward, bool) and not isinstance(done, bool):
        raise DataError(f"an environment returned {result!r}; expected (messages, reward, whether it is done)")
    try:
        episode.rewards.append(reward_number(reward, "an environment returned the reward"))
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(str(error)) from error
    episode.messages += _checked_messages(messages, "step")
    return bool(done)


def _read_call(written: Any, names: set[str]) -> Call | Message:
    """A call of a message, or the message that tells the model what is wrong with it."""
    function = written["function"]
    call = Call(written["id"], function["name"], {})
    if call.name not in names:
        return call.result(f"error: there is no tool {call.name!r}; the tools are {', '.join(sorted(names))}")
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return call.result("error: the arguments are not a JSON object")
    return Call(call.id, call.name, arguments)


def _name_of(tool: Mapping[str, Any]) -> str:
    return tool.get("function", tool)["name"]


def _checked_messages(messages: Any, method: str) -> Sequence[Message]:
    if isinstance(messages, list | tuple) and all(isinstance(each, dict) and "role" in each for each in messages):
        return messages
    raise DataError(f"the messages of an environment's {method} are {messages!r}; expected a list of messages")


async def _call(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method without blocking the event loop, whether it is `async` or not."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    result = await asyncio.to_thread(method, *args)
    return await result if inspect.isawaitable(result) else result
