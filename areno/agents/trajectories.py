"""Define what agents get and return: items of a batch, and trajectories.

A turn is one request of the agent and the model's answer. An agent returns turns that may hold objects of the OpenAI
client. `plain_results` checks them and converts them to plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.rewards.records import reward_number
from areno.server.errors import BadTrajectory
from areno.server.responses import check_json, read_response, to_plain
from areno.types import Message, PromptBatch


@dataclass(frozen=True)
class AgentContext:
    """The argument `ctx` of an agent that runs in an agent process.

    Attributes:
        base_url: Address of the policy's endpoint.
        api_key: Key of the endpoint.
        session: Name of the session.
        timeout_s: Time limit of the agent, and of each of its requests, in seconds.
    """

    base_url: str
    api_key: str
    session: str
    timeout_s: float

    def get_base_url(self) -> str:
        """Return the address of the policy's endpoint, as OpenAI clients take it."""
        return self.base_url


@dataclass(slots=True)
class AgentItem:
    """One task for an agent, which is one sample of a prompt.

    Attributes:
        prompt: Text of the prompt.
        record: The whole row of the dataset.
        input_tokens: Token ids of the prompt.
        prompt_index: Number of the prompt.
        sample_index: Number of the sample.
        messages: Messages of the row. None if the row has text instead.
    """

    prompt: str
    record: Mapping[str, Any]
    input_tokens: list[int]
    prompt_index: int = 0
    sample_index: int = 0
    messages: list[Message] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """(prompt index, sample index), which identifies the item in an agent's results."""
        return self.prompt_index, self.sample_index


@dataclass
class AgentBatch:
    """Prompts for agents, each with `n_samples` items. Iterating over it yields the items.

    Attributes:
        records: Row of the dataset of each prompt.
        prompts: Text of each prompt.
        input_tokens: Token ids of each prompt.
        n_samples: Samples of each prompt.
    """

    records: list[Any]
    prompts: list[str]
    input_tokens: list[list[int]]
    n_samples: int
    _items: list[AgentItem] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if not self._items:
            rows = zip(self.prompts, self.records, self.input_tokens, strict=True)
            self._items = [
                AgentItem(prompt, record, tokens, index, sample)
                for index, (prompt, record, tokens) in enumerate(rows)
                for sample in range(self.n_samples)
            ]

    @classmethod
    def from_prompt_batch(cls, prompt_batch: PromptBatch, n_samples: int) -> AgentBatch:
        """Return the items of a batch from `Trainer.load_prompt_batches`.

        Args:
            prompt_batch: The batch.
            n_samples: Samples of each prompt.
        """
        items = prompt_batch.items
        batch = cls(
            [item.record for item in items], [item.prompt for item in items], [item.tokens for item in items], n_samples
        )
        for item in batch._items:
            item.messages = items[item.prompt_index].messages
        return batch

    @classmethod
    def of_item(cls, item: AgentItem) -> AgentBatch:
        """Return a batch of one item, which keeps its indices.

        Args:
            item: The item.
        """
        return cls([item.record], [item.prompt], [item.input_tokens], 1, [item])

    def iter_samples(self) -> Iterator[AgentItem]:
        """Iterate over all items: each prompt `n_samples` times."""
        return iter(self._items)

    __iter__ = iter_samples

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class AgentTrajectoryTurn:
    """One request of an agent and the model's answer.

    Attributes:
        item: Item of the agent.
        messages: Messages of the request. The list is copied, so it may grow afterwards.
        response: The client's response object, or the list of chunks of a streamed one.
        tools: Tools of the request.
        tool_choice: `tool_choice` of the request.
    """

    item: AgentItem
    messages: list[Any]
    response: Any
    tools: list[Any] | None = None
    tool_choice: Any = None

    def __post_init__(self) -> None:
        self.messages = list(self.messages)


@dataclass
class AgentTrajectory:
    """The turns of one item, in order.

    Attributes:
        turns: The turns.
        reward: Reward of the trajectory, if the agent knows it. No reward function is needed then.
        parts: Further numbers to log by name, such as components of the reward.
    """

    turns: list[AgentTrajectoryTurn]
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class LossMaskPolicy:
    """Which tokens of a trajectory the policy's loss trains.

    Attributes:
        assistant_text: Text of the model, with its reasoning.
        assistant_tool_calls: Tool calls of the model.
        tool_results: Results of tools, which the model did not sample.
        final_assistant_text: Text of the last turn. Has an effect only with `assistant_text`.
        system_prompt: The system prompt, which the model did not sample.
        user_prompt: User messages, which the model did not sample.
    """

    assistant_text: bool = True
    assistant_tool_calls: bool = True
    tool_results: bool = False
    final_assistant_text: bool = True
    system_prompt: bool = False
    user_prompt: bool = False


PlainTurn = dict[str, Any]
"""A turn as JSON values.

The keys are `messages`, `tools`, `tool_choice`, `message` (the model's), `finish_reason` and `tokens` (the extra field
`areno`). The last turn of a trajectory with a reward also has `reward`, which is (reward, parts).
"""


def plain_results(returned: Any, items: Sequence[AgentItem]) -> list[list[PlainTurn]]:
    """Check what an agent returned and convert it to plain values.

    Args:
        returned: An AgentTrajectory or AgentTrajectoryTurn, or a list of them.
        items: The items that the agent was given.

    Returns:
        The turns of each item, in the order of `items`. Empty for items without a trajectory.

    Raises:
        BadTrajectory: If the value has another form, turns belong to no item, or an item has several trajectories.
    """
    found: dict[tuple[int, int], list[PlainTurn]] = {}
    loose: set[tuple[int, int]] = set()  # items whose turns were returned without a trajectory around them
    known = {item.key for item in items}
    for part in _parts(returned):
        turns = _turns_of(part)
        keys = {_item_of(turn) for turn in turns}
        if len(keys) > 1:
            raise BadTrajectory("a trajectory has turns of several items; return one for each item")
        for key in keys:
            if key not in known:
                raise BadTrajectory(f"it returned a trajectory of item {key}, which it was not given")
            is_loose = not isinstance(part, AgentTrajectory)
            if key in found and not (is_loose and key in loose):
                raise BadTrajectory(f"it returned two trajectories of item {key}; one for each item is expected")
            loose |= {key} if is_loose else set()
            found.setdefault(key, []).extend(map(plain_turn, turns))
            if isinstance(part, AgentTrajectory) and part.reward is not None:
                found[key][-1]["reward"] = _checked_reward(part)
    return [found.get(item.key, []) for item in items]


def _checked_reward(trajectory: AgentTrajectory) -> tuple[float, dict[str, float]]:
    """Return the reward and its parts, checked as for reward functions. Raises BadTrajectory."""
    start, parts = "its trajectory has the", trajectory.parts
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) and name for name in parts):
        raise BadTrajectory(f"{start} parts {repr(parts)[:80]}; a dictionary of numbers by name is expected")
    try:
        reward = reward_number(trajectory.reward, f"{start} reward")
        return reward, {name: reward_number(value, f"{start} part {name!r}:") for name, value in parts.items()}
    except Exception as error:  # __float__ may raise anything
        raise BadTrajectory(str(error) or type(error).__name__) from error


def items_of(returned: Any) -> list[AgentItem]:
    """Return the item of each turn that an agent returned, in order.

    Args:
        returned: An AgentTrajectory or AgentTrajectoryTurn, or a list of them.

    Raises:
        BadTrajectory: If the value has another form.
    """
    return [turn.item for part in _parts(returned) for turn in _turns_of(part) if _item_of(turn) is not None]


def _parts(returned: Any) -> Iterable[Any]:
    """Return the trajectories or turns that an agent returned, as a list."""
    if isinstance(returned, AgentTrajectory | AgentTrajectoryTurn):
        return [returned]
    if returned is None or isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        raise BadTrajectory(f"it returned {_kind(returned)}; an AgentTrajectory, or a list of them, is expected")
    parts = list(returned)
    for part in parts:
        if not isinstance(part, AgentTrajectory | AgentTrajectoryTurn):
            raise BadTrajectory(f"it returned a list with {_kind(part)}; AgentTrajectory is expected")
    return parts


def _turns_of(part: AgentTrajectory | AgentTrajectoryTurn) -> Sequence[Any]:
    """Return the turns of a trajectory or turn."""
    if isinstance(part, AgentTrajectoryTurn):
        return [part]
    if not isinstance(part.turns, list | tuple):
        raise BadTrajectory(f"the turns of a trajectory are {_kind(part.turns)}; a list is expected")
    return part.turns


def _item_of(turn: Any) -> tuple[int, int]:
    """Return the key of a turn's item."""
    if not isinstance(turn, AgentTrajectoryTurn):
        raise BadTrajectory(f"a trajectory has {_kind(turn)} among its turns; AgentTrajectoryTurn is expected")
    if not isinstance(turn.item, AgentItem):
        raise BadTrajectory(f"the item of a turn is {_kind(turn.item)}; an AgentItem of the batch is expected")
    return turn.item.key


def _kind(value: Any) -> str:
    """Describe the type of a value."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def plain_turn(turn: AgentTrajectoryTurn) -> PlainTurn:
    """Convert a turn to JSON values.

    Args:
        turn: The turn.

    Raises:
        BadTrajectory: If its response does not come from the session's endpoint.
    """
    try:
        request = {
            "messages": to_plain(turn.messages),
            "tools": to_plain(turn.tools),
            "tool_choice": to_plain(turn.tool_choice),
        }
        answer = read_response(turn.response)
        check_json([request, answer["message"], answer["finish_reason"]])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise BadTrajectory(f"a turn does not hold messages and a response as the client gave it ({why})") from error
    return request | answer
