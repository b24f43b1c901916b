"""Turn trajectories into training rows of the exact tokens that were sampled.

The prompt of a turn usually begins with all tokens of the turn before, so both become one row. A turn begins a row of
its own if its prompt does not (the template dropped reasoning, the agent rewrote or shortened its messages, or it leads
several conversations). So every row has only tokens that the model saw at their positions. `RowBuilder` also checks
that the turns are those of the session, and marks which tokens are trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from areno.agents.trajectories import (
    AgentItem,
    BadTrajectory,
    LossMaskPolicy,
    PlainTurn,
    items_of,
    plain_results,
)
from areno.config.rollout import SamplingConfig
from areno.errors import DataError
from areno.server.conversations import Conversations
from areno.server.detokenize import TextStream
from areno.server.errors import ApiError
from areno.server.messages import conversation_keys, read_messages
from areno.server.parsers import ToolCallParser
from areno.server.responses import TurnTokens
from areno.server.tokens import Source, expand_runs
from areno.types import RewardRecord, TokenRow, TrainSequence, Trajectory

logger = logging.getLogger("areno")

_SHOWN = 60  # characters on either side of a difference


class RowBuilder:
    """Builds trajectories from the turns of agents.

    Args:
        conversations: Renders messages, for comparison with the prompts that the model read.
        policy: Which tokens are trained.
        vocab_size: Number of token ids of the model.
        session: Session that the turns must come from. None accepts any.
        context: The most tokens of a row. None has no limit.
    """

    def __init__(
        self,
        conversations: Conversations,
        policy: LossMaskPolicy,
        vocab_size: int,
        session: str | None = None,
        context: int | None = None,
    ):
        self._conversations, self._policy, self._session = conversations, policy, session
        self._vocab_size, self._context = vocab_size, context
        self._trained_sources = [
            int(source)
            for source, trained in (
                (Source.TOOL, policy.tool_results),
                (Source.SYSTEM, policy.system_prompt),
                (Source.USER, policy.user_prompt),
            )
            if trained
        ]

    def trajectory(self, turns: Sequence[PlainTurn]) -> Trajectory:
        """Build the trajectory of one item.

        Args:
            turns: The turns, in order.

        Raises:
            BadTrajectory: If there are no turns, a turn differs from what was sampled, or a row is too long.
        """
        if not turns:
            raise BadTrajectory("it returned no turns")
        rows: list[_Row] = []
        for number, turn in enumerate(turns):
            tokens = self._checked(turn, number)
            row = max((row for row in rows if row.is_prefix_of(tokens.prompt)), key=len, default=None)
            if row is None:
                rows.append(row := _Row())
            row.extend(tokens, self._trained_of(turn, tokens.sampled, is_last=number == len(turns) - 1))
            if self._context is not None and len(row) > self._context:
                raise BadTrajectory(f"it has {len(row)} tokens, more than the model's context of {self._context}")
        last = turns[-1]
        messages = [*last["messages"], last["message"]]
        return Trajectory(
            rows=[row.finished(self._trained_sources) for row in rows],
            turns=[{name: turn[name] for name in turn if name not in ("tokens", "reward")} for turn in turns],
            messages=messages,
            tool_calls=[call for turn in turns for call in turn["message"].get("tool_calls") or []],
            tool_results=[message for message in messages if message.get("role") == "tool"],
            reward=last.get("reward"),
        )

    def _checked(self, turn: PlainTurn, number: int) -> TurnTokens:
        """Check a turn and return its tokens.

        Raises BadTrajectory if they are not valid, the response is of another session, or the messages of the turn
        differ from those of its request.
        """
        values = turn["tokens"]
        if self._session is not None and values.get("session") != self._session:
            raise BadTrajectory(f"turn {number} has a response of another session")
        try:
            tokens = TurnTokens.read(values, self._vocab_size)
        except BadTrajectory as error:
            raise BadTrajectory(f"the response of turn {number} was changed: {error}") from error
        try:
            messages = read_messages(list(turn["messages"]))
        except (ApiError, TypeError) as error:
            raise BadTrajectory(f"the messages of turn {number} are not valid: {error}") from error
        if conversation_keys(messages)[-1] != values.get("conversation"):
            raise BadTrajectory(f"turn {number}: {self._difference(messages, turn, tokens.prompt)}")
        return tokens

    def _difference(self, messages: list[Any], turn: PlainTurn, prompt: list[int]) -> str:
        """Describe how the text of the messages differs from the prompt that the model read."""
        read = self._conversations.tokenizer.decode(prompt, skip_special_tokens=False)
        start = f"its messages are not those of the request ({len(messages)} messages): "
        try:
            text = self._conversations.text(messages, turn["tools"])
        except DataError as error:
            return f"{start}{error}"
        if text == read:
            return start + "they differ in a field that the chat template leaves out"
        same = next((i for i, (a, b) in enumerate(zip(text, read, strict=False)) if a != b), min(len(text), len(read)))
        around = slice(max(0, same - _SHOWN), same + _SHOWN)
        return start + f"at character {same} they say {text[around]!r}, and the model read {read[around]!r}"

    def _trained_of(self, turn: PlainTurn, tokens: list[int], is_last: bool) -> np.ndarray:
        """Return which sampled tokens of a turn are trained, shape [len(tokens)], bool."""
        policy = self._policy
        text = policy.assistant_text and (policy.final_assistant_text or not is_last)
        if text == policy.assistant_tool_calls or not turn["message"].get("tool_calls"):
            return np.full(len(tokens), text)
        start = self._first_call(tokens)
        return np.repeat([text, policy.assistant_tool_calls], [start, len(tokens) - start])

    def _first_call(self, tokens: list[int]) -> int:
        """Return the index of the token at which the tool calls of a turn begin."""
        stream, ends, text = TextStream(self._conversations.tokenizer, frozenset()), [], ""
        for token in tokens:
            text += stream.feed([token])
            ends.append(len(text))
        start = call_start(self._conversations.parser, text + stream.finish())
        return next((place for place, end in enumerate(ends) if end > start), len(tokens))


class _Row:
    """A row under construction, which grows turn by turn."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._sources: list[tuple[int, int]] = []
        self._pieces: list[tuple[int, np.ndarray, list[float], list[int]]] = []  # start, trained, logprobs, versions
        self._temperatures: set[float] = set()

    def __len__(self) -> int:
        return len(self.tokens)

    def is_prefix_of(self, prompt: list[int]) -> bool:
        """Return whether a prompt begins with all tokens of the row."""
        return prompt[: len(self.tokens)] == self.tokens

    def extend(self, tokens: TurnTokens, trained: np.ndarray) -> None:
        """Append the new tokens of a turn's prompt, and its sampled tokens."""
        self.tokens = [*tokens.prompt, *tokens.sampled]
        self._sources = [*tokens.sources, (int(Source.SAMPLED), len(tokens.sampled))]
        self._pieces.append((len(tokens.prompt), trained, tokens.logprobs, tokens.versions))
        self._temperatures.add(tokens.temperature)

    def finished(self, trained_sources: list[int]) -> TokenRow:
        """Return the row as arrays. Tokens of `trained_sources` are trained in addition to sampled ones."""
        n_tokens, sources = len(self.tokens), expand_runs(self._sources)
        sampled, trained = np.zeros(n_tokens, dtype=bool), np.isin(sources, trained_sources)
        logprobs, versions = np.zeros(n_tokens), np.zeros(n_tokens, dtype=np.int64)
        for start, of_piece, piece_logprobs, piece_versions in self._pieces:
            place = slice(start, start + len(of_piece))
            sampled[place], trained[place] = True, of_piece
            logprobs[place], versions[place] = piece_logprobs, piece_versions
        trained[:1] = False  # the first token has no prediction
        temperature = next(iter(self._temperatures)) if len(self._temperatures) == 1 else None
        return TokenRow(
            tokens=self.tokens,
            sources=sources,
            sampled=sampled,
            trained=trained,
            logprobs=logprobs,
            versions=versions,
            temperature=temperature,
        )


def read_trajectories(returned: Any, builder: RowBuilder) -> list[tuple[AgentItem, Trajectory]]:
    """Convert what an agent function of a script returned.

    Args:
        returned: Trajectories or turns.
        builder: Builds the trajectories.

    Returns:
        (item, trajectory) for each item, in order.

    Raises:
        DataError: If a trajectory cannot be trained on. The message says which.
    """
    found = []
    try:
        items = list({item.key: item for item in items_of(returned)}.values())
        for item, turns in zip(items, plain_results(returned, items), strict=True):
            found.append((item, builder.trajectory(turns)))
    except BadTrajectory as error:
        where = f"trajectory {len(found)}: " if found else ""
        raise DataError(f"{where}{error}".replace("it returned", "the agent returned")) from error
    return found


def train_sequences(
    trajectory: Trajectory,
    *,
    reward: float = 0.0,
    eos_token_id: int = 0,
    weights_version: int = 0,
    masked: bool = False,
) -> list[TrainSequence]:
    """Return the training rows of a trajectory.

    Args:
        trajectory: The trajectory.
        reward: Its reward.
        eos_token_id: Id of the end-of-sequence token.
        weights_version: Current version of the weights. A row is as stale as the oldest weights that sampled one of its
            tokens.
        masked: Whether no token is trained.
    """
    return [
        TrainSequence(
            prompt_mask=np.ones(len(row), dtype=bool) if masked else ~row.trained,
            tokens=np.array(row.tokens, dtype=np.int64),
            logprobs=row.logprobs,
            reward=float(reward),
            eos_token_id=eos_token_id,
            staleness=weights_version - int(row.versions[row.sampled].min(initial=weights_version)),
        )
        for row in trajectory.rows
    ]


def needs_scoring(row: TokenRow, sampling: SamplingConfig) -> bool:
    """Return whether a row has trained tokens that were not sampled with the temperature of `sampling`."""
    return row.temperature != sampling.logprob_temperature or bool((row.trained & ~row.sampled).any())


def warn_of_temperatures(rows: Iterable[TokenRow], sampling: SamplingConfig) -> None:
    """Warn of rows that were sampled at another temperature than that of `sampling`, or at several."""
    own = sampling.logprob_temperature
    if others := {row.temperature for row in rows} - {own}:
        text = "agents sampled at temperatures %s, and training is at gconfig.temperature=%g: ratios are approximate"
        logger.warning(text, ", ".join(map(str, others)), own)


def call_start(parser: ToolCallParser, text: str) -> int:
    """Return the character at which the first tool call of a text begins, or the length of the text without calls.

    Args:
        parser: Tool-call parser of the model's family.
        text: The model's output.
    """
    places = [place for tag in parser.tags for place in _all_places(text, tag)]
    for place in sorted(places):
        if parser.parse(text[place:]).tool_calls and not parser.parse(text[:place]).tool_calls:
            return place
    return 0 if parser.parse(text).tool_calls else len(text)


def _all_places(text: str, tag: str) -> list[int]:
    """Return all positions of a tag in a text."""
    places, at = [], text.find(tag)
    while at >= 0:
        places.append(at)
        at = text.find(tag, at + 1)
    return places


def reward_record(item: AgentItem, trajectory: Trajectory, tokenizer: Any, solutions: Any = None) -> RewardRecord:
    """Return the record of a trajectory for a reward function.

    Args:
        item: Item of the trajectory.
        trajectory: The trajectory.
        tokenizer: Tokenizer of transformers.
        solutions: Reference solutions. None takes those of the item's record.
    """
    written = [row.tokens[int(start) : int(end)] for row in trajectory.rows for start, end in _spans(row.sampled)]
    n_prompt = int(trajectory.rows[0].sampled.argmax())
    whole = [trajectory.rows[0].tokens[n_prompt:], *(row.tokens for row in trajectory.rows[1:])]
    sampled = [row.sampled for row in trajectory.rows]
    logprobs = np.concatenate([row.logprobs[kept] for row, kept in zip(trajectory.rows, sampled, strict=True)])
    mask = np.concatenate([row.trained[kept] for row, kept in zip(trajectory.rows, sampled, strict=True)])
    return RewardRecord(
        prompt=item.prompt,
        completion="".join(tokenizer.batch_decode(written, skip_special_tokens=True)),
        final_answer=trajectory.messages[-1].get("content") or "",
        messages=trajectory.messages,
        rendered_completion="".join(tokenizer.batch_decode(whole, skip_special_tokens=False)),
        tool_calls=trajectory.tool_calls,
        tool_results=trajectory.tool_results,
        tokens=[token for tokens in written for token in tokens],
        logprobs=logprobs.tolist(),
        loss_mask=mask.tolist(),
        solutions=item.record.get("solutions") if solutions is None else solutions,
        record=item.record,
        prompt_tokens=trajectory.rows[0].tokens[:n_prompt],
    )


def _spans(mask: np.ndarray) -> np.ndarray:
    """Return (start, end) of each run of True in a mask, shape [K, 2]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2)
