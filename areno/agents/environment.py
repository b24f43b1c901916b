"""The base class for tasks with tools (`Environment`), and the loop in which a model works on such a task.

`agent_of` turns a class derived from `Environment` into an agent function, and `reward_of` turns it into a reward
function:

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
from areno.scoring.records import reward_number
from areno.types import Message

logger = logging.getLogger("areno")

StepResult = tuple[Sequence[Message], float, bool]  # messages for the model, reward of this step, whether it is done


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model made. Its arguments are not checked against the tool's schema."""

    id: str  # the tool message with the result carries the same
    name: str
    arguments: dict[str, Any]

    def result(self, content: str) -> Message:
        """Return the tool message with the result of this call, as text for the model."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


class Environment:
    """Base class for a task with tools. Derived classes override `reset` and `step`.

    Each instance is used for one episode, which produces one sample of a prompt. A method may be `async`. A method that
    is not `async` is called in a thread, so that it does not block other episodes.

    `tools` are definitions in OpenAI's format. They are read before each request to the model, so they may change.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def reset(self) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Start the task, and return the messages of the first request to the model, in OpenAI's format."""
        raise NotImplementedError

    def step(self, tool_calls: list[Call]) -> StepResult | Awaitable[StepResult]:
        """Run the tool calls in one answer of the model, in the order in which it wrote them.

        Every call names a tool in `tools` and has a JSON object as arguments. areno answers all other calls of the
        model with an error message, without calling this method for them.

        Returns:
            (messages, reward, done): one tool message for each call, the reward of this step, whether the task is over.
        """
        raise NotImplementedError

    def answer(self, text: str) -> StepResult | Awaitable[StepResult]:
        """Handle an answer of the model that is text without tool calls. The default ends the task with reward 0.

        Returns:
            (messages, reward, done): further messages for the model, the reward of this step, whether the task is over.
        """
        return [], 0.0, True

    def close(self) -> Any:
        """Release the resources of the task. areno calls this once at the end of the episode, also after an error."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request to the model, with the response."""

    messages: list[Message]
    response: Any  # of the OpenAI client
    tools: list[Any] | None  # definitions in the request


@dataclass(slots=True)
class Episode:
    """The record of one run of an environment from `reset` until its end."""

    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # the whole conversation
    rewards: list[float] = field(default_factory=list)  # of each turn, 0 if the environment did no step
    ended: Literal["", "done", "length", "max_turns"] = ""  # "length": an answer was cut off; "": in progress

    @property
    def reward(self) -> float:
        return math.fsum(self.rewards)


async def run_episode(
    environment: Environment, client: Any, *, model: str = "policy", max_turns: int = 16, **request: Any
) -> Episode:
    """Alternate between the model and an environment until the task is over or an answer of the model is truncated.

    It also stops after `max_turns` requests. The environment is closed at the end. Exceptions of the environment and
    the client are raised.

    Args:
        environment: The environment of the task.
        client: An `openai.AsyncOpenAI`.
        model: The name of the model in each request.
        max_turns: The largest number of requests to the model.
        **request: Further fields of each request, such as top_p.

    Raises:
        DataError: A method of the environment returned a value of a wrong type.
    """
    episode = Episode()
    try:
        episode.messages = list(_checked_messages(await _call_method(environment.reset), "reset"))
        while not episode.ended:
            tools = [dict(tool) for tool in environment.tools]
            sent = {"tools": tools, **request} if tools else request
            response = await client.chat.completions.create(model=model, messages=list(episode.messages), **sent)
            choice = response.choices[0]
            episode.turns.append(Turn(list(episode.messages), response, tools or None))
            message = choice.message.model_dump(exclude_none=True)
            episode.messages.append(message)
            if choice.finish_reason == "length":
                episode.rewards.append(0.0)
                episode.ended = "length"
            elif await _step_environment(environment, message, episode):
                episode.ended = "done"
            elif len(episode.turns) == max_turns:
                episode.ended = "max_turns"
    finally:
        await _call_method(environment.close)
    return episode


async def replay(environment: Environment, messages: Sequence[Message]) -> float:
    """Replay a finished conversation in a new environment, and return the sum of the rewards of all steps.

    The assistant messages are passed to the environment until the task is over. If the environment is deterministic,
    the reward equals that of the original episode. The environment is closed at the end.
    """
    episode = Episode()
    try:
        await _call_method(environment.reset)
        for message in messages:
            if message.get("role") == "assistant" and await _step_environment(environment, message, episode):
                break
    finally:
        await _call_method(environment.close)
    return episode.reward


def agent_of(
    make: Callable[[Any], Environment], *, max_turns: int = 16, turn_rewards: bool = False, **request: Any
) -> Callable[[Any, Any], Awaitable[list[Any]]]:
    """Return an agent function `run_agent(ctx, batch)` that runs an episode for each item of a batch.

    The agent function returns one AgentTrajectory for each item whose episode succeeded. An exception in an episode is
    logged. If all episodes of a batch fail, the first exception is raised.

    Args:
        make: Function that builds the environment for an AgentItem, whose `record` is the row of the dataset.
        max_turns: The largest number of requests to the model in an episode.
        turn_rewards: Whether the reward of each step is the reward of its turn. Their sum is then added to the reward
            of other sources, so reward.fn can be null.
        **request: Further fields of each request, such as temperature.
    """

    async def run_agent(ctx: Any, batch: Any) -> list[Any]:
        from openai import AsyncOpenAI

        from areno.agents.trajectories import AgentTrajectory, AgentTrajectoryTurn

        async def run_item(item: Any) -> Any:
            episode = await run_episode(make(item), client, max_turns=max_turns, **request)
            turns = [AgentTrajectoryTurn(item, turn.messages, turn.response, turn.tools) for turn in episode.turns]
            return AgentTrajectory(turns=turns, turn_rewards=episode.rewards if turn_rewards else None)

        url = ctx.get_base_url()
        # timeout=None: the server limits the time of each request.
        async with AsyncOpenAI(base_url=url, api_key=ctx.api_key, max_retries=0, timeout=None) as client:
            found = await asyncio.gather(*map(run_item, batch.iter_samples()), return_exceptions=True)
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in errors:
            if len(errors) == len(found) or not isinstance(error, Exception):
                raise error
            logger.warning("an episode failed: %s: %s", type(error).__name__, error)
        return [each for each in found if not isinstance(each, BaseException)]

    return run_agent


def reward_of(make: Callable[[Any], Environment]) -> Callable[[Any], Awaitable[float]]:
    """Return a reward function that replays the conversation of a sample in a new environment.

    It returns the sum of the rewards of all steps, which equals that of the original episode only if the environment is
    deterministic. It returns 0 if the agent has given these rewards itself. `make` builds the environment for a
    RewardRecord, whose `record` is the row of the dataset.
    """

    async def reward_fn(record: Any) -> float:
        return 0.0 if record.turn_rewards else await replay(make(record), record.messages)

    return reward_fn


async def _step_environment(environment: Environment, message: Message, episode: Episode) -> bool:
    """Pass an assistant message to the environment, and its result to `episode`. Return whether the task is over."""
    written = message.get("tool_calls") or []
    if not written:
        method, result = "answer", await _call_method(environment.answer, message.get("content") or "")
    else:
        names = {_tool_name(tool) for tool in environment.tools}
        calls = [_read_call(each, names) for each in written]
        episode.messages += [call for call in calls if isinstance(call, dict)]  # the errors of invalid calls
        valid = [call for call in calls if isinstance(call, Call)]
        if not valid:
            episode.rewards.append(0.0)
            return False
        method, result = "step", await _call_method(environment.step, valid)
    is_triple = isinstance(result, tuple) and len(result) == 3
    if not is_triple or (isinstance(result[1], bool) and not isinstance(result[2], bool)):
        raise DataError(f"an environment returned {result!r}; expected (messages, reward, whether it is done)")
    messages, reward, done = result
    try:
        episode.rewards.append(reward_number(reward, "an environment returned the reward"))
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(str(error)) from error
    episode.messages += _checked_messages(messages, method)
    return bool(done)


def _read_call(written: Any, names: set[str]) -> Call | Message:
    """Parse a tool call, or return a tool message with an error for the model."""
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


def _tool_name(tool: Mapping[str, Any]) -> str:
    return tool.get("function", tool)["name"]


def _checked_messages(messages: Any, method: str) -> Sequence[Message]:
    if isinstance(messages, list | tuple) and all(isinstance(each, dict) and "role" in each for each in messages):
        return messages
    raise DataError(f"the messages of an environment's {method} are {messages!r}; expected a list of messages")


async def _call_method(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method, in a thread if it is not `async`."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    result = await asyncio.to_thread(method, *args)
    return await result if inspect.isawaitable(result) else result
