"""What an agent is told of its session.

What goes to an agent and what comes back: items of a batch, and trajectories, one for each item.

A turn is one request of the agent and the answer to it. What the agent returns may hold objects of the OpenAI client;
`plain_results` makes plain values of it, wherever the agent ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.rewards.records import reward_number
from areno.server.errors import BadTrajectory
from areno.server.responses import check_json, plain, read_response
from areno.types import Message, PromptBatch


@dataclass(frozen=True)
class AgentContext:
    """The `ctx` of an agent in a process of its own. timeout_s: of the agent, and of each of its requests."""

    base_url: str
    api_key: str
    session: str
    timeout_s: float

    def get_base_url(self) -> str:
        """Where the policy is served, as OpenAI clients want it."""
        return self.base_url


@dataclass(slots=True)
class AgentItem:
    """One task for an agent: sample number `sample_index` of prompt number `prompt_index`.

    prompt: its text. record: the whole row of the dataset. input_tokens: of the prompt. messages: those of the row,
    None where it has text.
    """

    prompt: str
    record: Mapping[str, Any]
    input_tokens: list[int]
    prompt_index: int = 0
    sample_index: int = 0
    messages: list[Message] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """By which it is recognised in what comes back."""
        return self.prompt_index, self.sample_index


@dataclass
class AgentBatch:
    """Prompts for agents, each `n_samples` times. records, prompts, input_tokens: by prompt; see AgentItem."""

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
        """The prompts of a batch of Trainer.load_prompt_batches, each `n_samples` times."""
        items = prompt_batch.items
        batch = cls(
            [item.record for item in items], [item.prompt for item in items], [item.tokens for item in items], n_samples
        )
        for item in batch._items:
            item.messages = items[item.prompt_index].messages
        return batch

    @classmethod
    def of_item(cls, item: AgentItem) -> AgentBatch:
        """A batch of one item, which keeps its numbers."""
        return cls([item.record], [item.prompt], [item.input_tokens], 1, [item])

    def iter_samples(self) -> Iterator[AgentItem]:
        """Each prompt `n_samples` times."""
        return iter(self._items)

    __iter__ = iter_samples

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class AgentTrajectoryTurn:
    """One answer of the model. messages: that it answered. response: of the client; of a stream, its chunks.

    tools, tool_choice: as they were sent. `messages` is copied, so the list may grow afterwards.
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
    """The turns of one item, in their order.

    reward: of the whole, where the agent knows it; a reward function is then not needed. parts: numbers by name that
    tell more of it, such as what it is made of.
    """

    turns: list[AgentTrajectoryTurn]
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class LossMaskPolicy:
    """Which tokens of a trajectory the policy's loss trains.

    assistant_text, assistant_tool_calls: what the model wrote as text (with its reasoning), and as calls of tools.
    final_assistant_text: the text of its last turn, where assistant_text is set. tool_results, system_prompt,
    user_prompt: what others wrote, which the model did not sample.
    """

    assistant_text: bool = True
    assistant_tool_calls: bool = True
    tool_results: bool = False
    final_assistant_text: bool = True
    system_prompt: bool = False
    user_prompt: bool = False


PlainTurn = dict[str, Any]
"""messages, tools, tool_choice, message (the model's), finish_reason, tokens (the extra field `areno`).

The last turn of a trajectory with a reward also has `reward`: (reward, parts).
"""


def plain_results(returned: Any, items: Sequence[AgentItem]) -> list[list[PlainTurn]]:
    """The turns of each item, as plain values. Raises BadTrajectory for a return value that is none of the forms.

    Turns that belong to none of the items, and several trajectories of one item, are errors.
    """
    found: dict[tuple[int, int], list[PlainTurn]] = {}
    loose: set[tuple[int, int]] = set()  # whose turns came without a trajectory around them
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
    """Return the reward and its parts, by the rule for reward functions. Raises BadTrajectory."""
    said, parts = "its trajectory has the", trajectory.parts
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) and name for name in parts):
        raise BadTrajectory(f"{said} parts {repr(parts)[:80]}; a dictionary has numbers under names")
    try:
        reward = reward_number(trajectory.reward, f"{said} reward")
        return reward, {name: reward_number(value, f"{said} part {name!r}:") for name, value in parts.items()}
    except Exception as error:  # __float__ may raise anything
        raise BadTrajectory(str(error) or type(error).__name__) from error


def items_of(returned: Any) -> list[AgentItem]:
    """The items of a return value, in its order. Raises BadTrajectory for one that is none of the forms."""
    return [turn.item for part in _parts(returned) for turn in _turns_of(part) if _item_of(turn) is not None]


def _parts(returned: Any) -> Iterable[Any]:
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
    if isinstance(part, AgentTrajectoryTurn):
        return [part]
    if not isinstance(part.turns, list | tuple):
        raise BadTrajectory(f"the turns of a trajectory are {_kind(part.turns)}; a list is expected")
    return part.turns


def _item_of(turn: Any) -> tuple[int, int]:
    if not isinstance(turn, AgentTrajectoryTurn):
        raise BadTrajectory(f"a trajectory has {_kind(turn)} among its turns; AgentTrajectoryTurn is expected")
    if not isinstance(turn.item, AgentItem):
        raise BadTrajectory(f"the item of a turn is {_kind(turn.item)}; an AgentItem of the batch is expected")
    return turn.item.key


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def plain_turn(turn: AgentTrajectoryTurn) -> PlainTurn:
    """Return a turn as values of JSON. Raises BadTrajectory where its response is not one of the session's."""
    try:
        asked = {"messages": plain(turn.messages), "tools": plain(turn.tools), "tool_choice": plain(turn.tool_choice)}
        answered = read_response(turn.response)
        check_json([asked, answered["message"], answered["finish_reason"]])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        said = f"{type(error).__name__}: {error}"[:200]
        raise BadTrajectory(f"a turn does not hold messages and a response as the client gave it ({said})") from error
    return asked | answered
