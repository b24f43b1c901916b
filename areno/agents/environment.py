"""Write a task with tools as a class, and let areno run the loop between it and the model.

`agent_of` turns an environment into an agent function, and `reward_of` into a reward function:

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
"""(messages for the model, reward of this step, whether the task is over)."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model.

    Attributes:
        id: Id of the call, which its result refers to.
        name: Name of the tool.
        arguments: Arguments as an object. They are not checked against the tool's schema.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def result(self, content: str) -> Message:
        """Return the tool message that answers the call.

        Args:
            content: Result of the tool, as text for the model.
        """
        return {"role": "tool", "tool_call_id": self.id, "content": content}


class Environment:
    """One task for one sample. Derive from it and override `reset` and `step`.

    The methods may be `async`. Other methods run in a thread.

    Attributes:
        tools: Tool definitions in OpenAI's form. They are read before each turn, so they may change.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def reset(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start the task.

        Returns:
            The messages that the model answers first.
        """
        raise NotImplementedError

    def step(self, tool_calls: list[Call]) -> StepResult | Awaitable[StepResult]:
        """Run the tool calls of one turn.

        Only calls of known tools whose arguments are an object arrive here. The loop answers other calls with an error
        message. The arguments are not checked against the schema.

        Args:
            tool_calls: The calls.

        Returns:
            (one message for each call, reward of this step, whether the task is over).
        """
        raise NotImplementedError

    def answer(self, text: str) -> StepResult | Awaitable[StepResult]:
        """Handle a turn in which the model wrote text and called no tool.

        Args:
            text: The model's text.

        Returns:
            (messages for the model, reward of this step, whether the task is over). By default the task is over, with
            reward 0.
        """
        return [], 0.0, True

    def close(self) -> Any:
        """Release the resources of the task. Called once, also after an error."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the model and its answer.

    Attributes:
        messages: Messages of the request.
        response: The client's response object.
        tools: Tools of the request, or None.
    """

    messages: list[Message]
    response: Any
    tools: list[Any] | None


@dataclass(slots=True)
class Episode:
    """The record of one episode.

    Attributes:
        turns: Requests and answers, in order.
        messages: The whole conversation.
        rewards: Reward of each step.
        ended: Why the episode ended: the environment is done, the model reached its length limit, or `max_turns`.
    """

    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ended: Literal["", "done", "length", "max_turns"] = ""

    @property
    def reward(self) -> float:
        """Reward of the whole episode, the sum over its steps."""
        return math.fsum(self.rewards)


async def run_episode(
    environment: Environment, client: Any, *, model: str = "policy", max_turns: int = 16, **request: Any
) -> Episode:
    """Let the model act until the environment is done or a limit is reached.

    Args:
        environment: The task. It is closed at the end.
        client: An `openai.AsyncOpenAI`.
        model: Name of the model.
        max_turns: The most answers of the model.
        **request: Further fields of each request, such as top_p.

    Raises:
        DataError: If a method of the environment returns a wrong value.
        Exception: Any exception that the environment or the client raises.
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
    """Compute the reward of a finished conversation by running its assistant messages again.

    The result equals the episode's reward if the environment is deterministic.

    Args:
        environment: A new environment of the same task. It is closed at the end.
        messages: The conversation.
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
    """Return the agent function `run_agent(ctx, batch)` of an environment.

    An episode that raises an error is logged and left out of its group. If all episodes of a batch fail, the first
    error is raised.

    Args:
        make: Builds the environment of an AgentItem, whose `record` is the row of the dataset.
        max_turns: The most answers of the model.
        **request: Further fields of each request, such as temperature.
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
    """Return the reward function of a deterministic environment, which replays the conversation.

    Args:
        make: Builds the environment of a RewardRecord, whose `record` is the row of the dataset.
    """

    async def reward_fn(record: Any) -> float:
        return await replay(make(record), record.messages)

    return reward_fn


async def _act(environment: Environment, message: Message, episode: Episode) -> bool:
    """Let the environment handle one message of the model. Return whether the task is over."""
    written = message.get("tool_calls") or []
    if not written:
        result = await _call(environment.answer, message.get("content") or "")
    else:
        names = {_name_of(tool) for tool in environment.tools}
        calls = [_read_call(each, names) for each in written]
        episode.messages += [call for call in calls if isinstance(call, dict)]  # the errors of invalid calls
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
    """Return a valid call, or the message with its error for the model."""
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
    """Return the name of a tool."""
    return tool.get("function", tool)["name"]


def _checked_messages(messages: Any, method: str) -> Sequence[Message]:
    """Return the messages of an environment. Raises DataError if they are none."""
    if isinstance(messages, list | tuple) and all(isinstance(each, dict) and "role" in each for each in messages):
        return messages
    raise DataError(f"the messages of an environment's {method} are {messages!r}; expected a list of messages")


async def _call(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method without blocking the event loop, whether it is `async` or not."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    result = await asyncio.to_thread(method, *args)
    return await result if inspect.isawaitable(result) else result
