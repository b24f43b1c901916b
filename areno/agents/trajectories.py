"""The types that agents receive and return: items of a batch, turns and trajectories.

A turn is a request of the agent with the model's response. The turns that an agent returns may hold objects of the
OpenAI client. `plain_results` checks them and converts them to JSON values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from areno.scoring.records import reward_number
from areno.server.errors import BadTrajectory
from areno.server.returned_responses import check_json, index_of_response, read_response, to_plain
from areno.types import Message, ProgramEnd, PromptBatch

_MAX_NAME = 80  # characters in an error
POLICY = "policy"
"""The model name in requests to a session. The name and the path of the model's folder are also accepted."""


@dataclass(frozen=True)
class AgentContext:
    """The argument `ctx` of an agent function. `timeout_s` limits the agent and each of its requests.

    `base_url` and `api_key` are those of a session for one sample, which records its turns, and which ends with it.
    With agent.whole_group, the key of each sample is `session_of(item)`. With agent.whole_batch, `base_url` and
    `api_key` are those of all samples, and nothing is recorded.
    """

    base_url: str
    api_key: str
    session: str
    timeout_s: float
    socket: str | None = None  # a Unix socket that leads to the session of the sample, for a program in a box
    sessions: Mapping[tuple[int, int], str] = field(default_factory=dict)  # key of an item -> id of its session
    server_url: str = ""  # the endpoint of all sessions, which the API key or the header X-Session-ID tells apart

    def get_base_url(self) -> str:
        """Return the address of the policy's endpoint, for the argument `base_url` of an OpenAI client."""
        return self.base_url

    def session_of(self, item: AgentItem) -> str:
        """Return the API key of the session of an item's sample."""
        return self.sessions[item.key]


@dataclass(slots=True)
class AgentItem:
    """One task for an agent. A prompt with n samples has n items.

    Attributes:
        prompt: The text of the prompt.
        record: The row of the dataset, with all fields.
        input_tokens: The token ids of the prompt.
        prompt_index: The index of the prompt in its batch.
        sample_index: The index of the sample among the samples of the prompt.
        messages: The messages of the row, or None if the row has a text instead of messages.
        source: The name of the row's source (train_dataset.sources). "" if there is only one.
    """

    prompt: str
    record: Mapping[str, Any]
    input_tokens: list[int]
    prompt_index: int = 0
    sample_index: int = 0
    messages: list[Message] | None = None
    source: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """(prompt index, sample index), which identifies the item in the results of an agent."""
        return self.prompt_index, self.sample_index


@dataclass
class AgentBatch:
    """The argument `batch` of an agent function: prompts, each with `n_samples` items. Iterating yields the items.

    Attributes:
        records: For each prompt, the row of the dataset.
        prompts: For each prompt, the text.
        input_tokens: For each prompt, the token ids.
        n_samples: The number of samples per prompt.
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
        """Build the AgentBatch for a batch of prompts from `Trainer.load_prompt_batches`."""
        items = prompt_batch.items
        batch = cls(
            [item.record for item in items], [item.prompt for item in items], [item.tokens for item in items], n_samples
        )
        for item in batch._items:
            item.messages, item.source = items[item.prompt_index].messages, items[item.prompt_index].source
        return batch

    @classmethod
    def of_items(cls, items: Sequence[AgentItem]) -> AgentBatch:
        """Return a batch of the given items, which keep their prompt index and their sample index."""
        first = list({item.prompt_index: item for item in reversed(items)}.values())[::-1]
        return cls(
            [item.record for item in first],
            [item.prompt for item in first],
            [item.input_tokens for item in first],
            len(items) // len(first),
            list(items),
        )

    def iter_samples(self) -> Iterator[AgentItem]:
        """Iterate over the items, which are `n_samples` for each prompt."""
        return iter(self._items)

    __iter__ = iter_samples

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class AgentTrajectoryTurn:
    """A request of an agent to the model, with the response.

    Attributes:
        item: The item that the agent works on.
        messages: The messages in the request. The list is copied, so the agent may append to its own list afterwards.
        response: The response object of the OpenAI client, or the list of chunks for a streamed response.
        tools: The tool definitions in the request, or None if it had no tools.
        tool_choice: The field `tool_choice` of the request, or None if it was not set.
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
    """The turns that an agent took for one item, in order.

    Attributes:
        turns: The turns.
        reward: The reward of the trajectory. None if the reward function of the run computes it.
        parts: Further numbers to log by name, such as components of the reward.
        turn_rewards: The reward of each turn, to which `reward` is added. None if turns have no rewards. Without
            `turns`, it has one for each turn that the session of the sample has recorded.
    """

    turns: list[AgentTrajectoryTurn]
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] | None = field(default=None, kw_only=True)


@dataclass
class ProgramTrajectory(AgentTrajectory):
    """The result of the program of agent.command, whose turns the session of the sample has recorded."""

    program: ProgramEnd | None = None


@dataclass
class LossMaskPolicy:
    """Selects the tokens of a trajectory that the policy loss trains. Each attribute switches one kind of tokens on.

    Attributes:
        assistant_text: Whether text of the model is trained, including its reasoning.
        assistant_tool_calls: Whether tool calls of the model are trained.
        tool_results: Whether results of tools are trained, although the model did not sample them.
        final_assistant_text: Whether text in the last turn is trained. It has an effect only with `assistant_text`.
        system_prompt: Whether the system prompt is trained, although the model did not sample it.
        user_prompt: Whether user messages are trained, although the model did not sample them.
    """

    assistant_text: bool = True
    assistant_tool_calls: bool = True
    tool_results: bool = False
    final_assistant_text: bool = True
    system_prompt: bool = False
    user_prompt: bool = False


PlainTurn = dict[str, Any]
"""A turn as JSON values.

The keys are `messages`, `tools` and `tool_choice` of the request, and those that `read_response` reads from the
response. If the agent has given a reward for each turn, each has the key `reward`. If it has given any reward, the last
turn has the key `outcome`, a Reward.
"""


Reward = tuple[float, dict[str, float]] | None
"""A reward with its parts by name, or None if the reward function of the run computes it."""
TurnRewards = list[float] | dict[str, float] | None
"""The reward of each turn, or of some responses by their ids."""
RecordedResult = tuple[Reward, ProgramEnd | None, TurnRewards]
"""(reward, end of its program, reward of each turn) of an agent whose turns its session has recorded."""


def with_chosen_turns(returned: Any, item: AgentItem) -> Any:
    """Convert a dictionary with the key "turns", see EnvironmentPackage.agent. Other values are unchanged."""
    if not isinstance(returned, Mapping) or not {"reward", "turns"} <= returned.keys():
        return returned
    if not isinstance(returned["turns"], list | tuple):  # a part of the reward
        return returned
    parts = dict(returned)
    turns = [AgentTrajectoryTurn(item, *turn) for turn in parts.pop("turns")]
    return AgentTrajectory(turns, parts.pop("reward"), parts)


def recorded_results(returned: Any, n_items: int) -> list[RecordedResult | Exception] | None:
    """Return the result of each item if an agent leaves the turns to the record of the sessions, else None.

    For several items, the agent returns nothing or a list in their order, in which an exception stands for a failure.
    """
    each = [returned] if n_items == 1 else [None] * n_items if returned is None else returned
    if not isinstance(each, list | tuple) or len(each) != n_items:
        return None
    found: list[RecordedResult | Exception] = []
    for one in each:
        try:
            recorded = one if isinstance(one, Exception) else recorded_result(one)
        except BadTrajectory as error:
            recorded = error
        if recorded is None:
            return None
        found.append(recorded)
    return found


def recorded_result(returned: Any) -> RecordedResult | None:
    """Return the result of an agent that leaves its turns to the record of its session.

    Then it returns nothing, a reward, a list with one for each turn, or a dictionary of response id -> reward. A
    trajectory without turns is a reward with parts, and so is a dictionary with the key "reward". Any other value gives
    None. Raises BadTrajectory for a wrong reward.
    """
    if returned is None:
        return None, None, None
    if isinstance(returned, Real):
        returned = AgentTrajectory([], float(returned))
    if isinstance(returned, Mapping) and "reward" in returned:
        parts = dict(returned)
        returned = AgentTrajectory([], parts.pop("reward"), parts)
    elif isinstance(returned, Mapping):
        of_responses = {name: _turn_reward(name, reward) for name, reward in returned.items()}
        return (math.fsum(of_responses.values()), {}) if returned else None, None, of_responses or None
    if isinstance(returned, list | tuple) and returned and all(isinstance(each, Real) for each in returned):
        returned = AgentTrajectory([], turn_rewards=returned)
    if not isinstance(returned, AgentTrajectory) or returned.turns:
        return None
    reward, of_turns = _checked_rewards(returned)
    return reward, returned.program if isinstance(returned, ProgramTrajectory) else None, of_turns


def with_rewards(turns: Sequence[PlainTurn], rewards: TurnRewards) -> Sequence[PlainTurn]:
    """Return turns with the rewards that an agent has given for them. Raises BadTrajectory if a reward has no turn."""
    if rewards is None:
        return turns
    if isinstance(rewards, dict):
        of_turns = [0.0] * len(turns)
        for name, reward in rewards.items():
            if (index := index_of_response(turns, name)) is None:
                raise BadTrajectory(f"it gives a reward for the response {name[:_MAX_NAME]!r}, which is not its own")
            of_turns[index] += reward
        rewards = of_turns
    if len(rewards) != len(turns):
        raise BadTrajectory(f"it has {len(rewards)} turn_rewards for {len(turns)} turns; one for each is expected")
    return [{**turn, "reward": reward} for turn, reward in zip(turns, rewards, strict=True)]


def _turn_reward(response_id: Any, reward: Any) -> float:
    if not isinstance(response_id, str):
        raise BadTrajectory(f"it gives a reward for {repr(response_id)[:_MAX_NAME]}; the id of a response is expected")
    try:
        return reward_number(reward, f"the reward of the response {response_id!r} is")
    except Exception as error:  # __float__ may raise anything
        raise BadTrajectory(str(error) or type(error).__name__) from error


def plain_results(returned: Any, items: Sequence[AgentItem]) -> list[list[PlainTurn] | BadTrajectory]:
    """Check the return value of an agent function. Returns the plain turns, or the error, of each item in order.

    An item has an error if it has no trajectory, several trajectories, or one that cannot be trained on. Raises
    BadTrajectory if `returned` has a wrong type, or a turn belongs to no item.
    """
    parts_of: dict[tuple[int, int], list[Any]] = {item.key: [] for item in items}
    for part in _trajectories_and_turns(returned):
        keys = {_item_key(turn) for turn in _turns_of(part)}
        if len(keys) > 1:
            raise BadTrajectory("a trajectory has turns of several items; return one for each item")
        for key in keys:
            if key not in parts_of:
                raise BadTrajectory(f"it returned a trajectory of item {key}, which it was not given")
            parts_of[key].append(part)
    return [_plain_result(parts_of[item.key], item) for item in items]


def _plain_result(parts: Sequence[Any], item: AgentItem) -> list[PlainTurn] | BadTrajectory:
    """Return the plain turns of an item, or its error. `parts` are the trajectories and turns returned for it."""
    whole = [part for part in parts if isinstance(part, AgentTrajectory)]
    try:
        if not parts:
            raise BadTrajectory("it returned no trajectory")
        if whole and len(parts) > 1:
            raise BadTrajectory(f"it returned two trajectories of item {item.key}; one for each item is expected")
        turns = [plain_turn(turn) for part in parts for turn in _turns_of(part)]
        if not whole:
            return turns
        outcome, of_turns = _checked_rewards(whole[0])
        turns = list(with_rewards(turns, of_turns))
        turns[-1]["outcome"] = outcome
        return turns
    except BadTrajectory as error:
        return error


def _checked_rewards(trajectory: AgentTrajectory) -> tuple[Reward, list[float] | None]:
    """Return the reward of a whole trajectory, with that of its turns, and the reward of each turn."""
    start, parts, given = "its trajectory has the", trajectory.parts, trajectory.turn_rewards
    if trajectory.reward is None and given is None:
        return None, None
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) and name for name in parts):
        raise BadTrajectory(f"{start} parts {repr(parts)[:80]}; a dictionary of numbers by name is expected")
    if given is not None and (isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable)):
        raise BadTrajectory(f"{start} turn_rewards {repr(given)[:80]}; a list with a number for each turn is expected")
    try:
        outcome = 0.0 if trajectory.reward is None else reward_number(trajectory.reward, f"{start} reward")
        named = {name: reward_number(value, f"{start} part {name!r}:") for name, value in parts.items()}
        if given is None:
            return (outcome, named), None
        of_turns = [reward_number(value, f"{start} reward of turn {turn}:") for turn, value in enumerate(given)]
        return (reward_number(math.fsum([outcome, *of_turns]), f"{start} sum of rewards"), named), of_turns
    except Exception as error:  # __float__ may raise anything
        raise BadTrajectory(str(error) or type(error).__name__) from error


def items_of(returned: Any) -> list[AgentItem]:
    """Return the item of each turn in the return value of an agent function, with duplicates."""
    return [
        turn.item
        for part in _trajectories_and_turns(returned)
        for turn in _turns_of(part)
        if _item_key(turn) is not None
    ]


def _trajectories_and_turns(returned: Any) -> Iterable[Any]:
    if isinstance(returned, AgentTrajectory | AgentTrajectoryTurn):
        return [returned]
    if returned is None or isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        raise BadTrajectory(f"it returned {_type_name(returned)}; an AgentTrajectory, or a list of them, is expected")
    parts = list(returned)
    for part in parts:
        if not isinstance(part, AgentTrajectory | AgentTrajectoryTurn):
            raise BadTrajectory(f"it returned a list with {_type_name(part)}; AgentTrajectory is expected")
    return parts


def _turns_of(part: AgentTrajectory | AgentTrajectoryTurn) -> Sequence[Any]:
    if isinstance(part, AgentTrajectoryTurn):
        return [part]
    if not isinstance(part.turns, list | tuple):
        raise BadTrajectory(f"the turns of a trajectory are {_type_name(part.turns)}; a list is expected")
    return part.turns


def _item_key(turn: Any) -> tuple[int, int]:
    if not isinstance(turn, AgentTrajectoryTurn):
        raise BadTrajectory(f"a trajectory has {_type_name(turn)} among its turns; AgentTrajectoryTurn is expected")
    if not isinstance(turn.item, AgentItem):
        raise BadTrajectory(f"the item of a turn is {_type_name(turn.item)}; an AgentItem of the batch is expected")
    return turn.item.key


def _type_name(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def plain_turn(turn: AgentTrajectoryTurn) -> PlainTurn:
    """Convert a turn to JSON values. Raises BadTrajectory if the response does not come from the session's endpoint."""
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
