"""Conversion of trajectories into training rows, which hold exactly the tokens that were sampled.

A turn is one request of an agent with the response. The prompt of a turn usually begins with all tokens of the
previous turn. Both turns then become one row. A turn begins a new row if its prompt does not continue an earlier
row, for example because the chat template dropped reasoning, the agent rewrote or shortened its messages, or the
agent leads several conversations. So the model saw each token of a row after exactly the tokens before it in the
row. `RowBuilder` also checks that the turns come from the current session, and marks the tokens to train.
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
from areno.schema.values import show
from areno.server.conversations import PromptBuilder
from areno.server.detokenize import TextStream
from areno.server.errors import ApiError
from areno.server.messages import conversation_keys, read_messages
from areno.server.parsers import ToolCallParser
from areno.server.responses import TurnTokens, changed_parts
from areno.server.tokens import Source, expand_runs
from areno.types import RewardRecord, TokenRow, TrainSequence, Trajectory

logger = logging.getLogger("areno")

_SHOWN = 60  # characters on either side of a difference


class RowBuilder:
    """Builds trajectories, with their training rows, from the turns of agents.

    Args:
        prompts: Renders messages with the chat template, to compare them with the prompts that the model read.
        policy: Selects the kinds of tokens that are trained.
        vocab_size: The number of token ids of the model.
        session: The name of the session that all responses must come from. None accepts responses of any session.
        context: The largest number of tokens in a row. None has no limit.
    """

    def __init__(
        self,
        prompts: PromptBuilder,
        policy: LossMaskPolicy,
        vocab_size: int,
        session: str | None = None,
        context: int | None = None,
    ):
        self._prompts, self._policy, self._session = prompts, policy, session
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
            turns: The turns of the item, in order.

        Returns:
            The trajectory with one or more rows.

        Raises:
            BadTrajectory: There are no turns, a turn was changed after it was sampled, or a row is too long.
        """
        if not turns:
            raise BadTrajectory("it returned no turns")
        rows: list[_Row] = []
        known: dict[tuple[str, int], int] = {}
        for number, turn in enumerate(turns):
            response, index = turn["choice"]
            first = known.setdefault((response, index), number)
            if first != number and response:
                raise BadTrajectory(f"turn {number} has the response of turn {first} again; return each response once")
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
            turns=[{name: turn[name] for name in turn if name not in ("tokens", "choice", "reward")} for turn in turns],
            messages=messages,
            tool_calls=[call for turn in turns for call in turn["message"].get("tool_calls") or []],
            tool_results=[message for message in messages if message.get("role") == "tool"],
            reward=last.get("reward"),
        )

    def _checked(self, turn: PlainTurn, number: int) -> TurnTokens:
        """Check a turn and return its tokens. `number` is the index of the turn, for error messages.

        Raises BadTrajectory if the tokens are invalid, the response is from another session, or the messages that
        the agent returned for the turn differ from the messages that the server received.
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
        if changed := changed_parts(turn["message"], tokens.message):
            shown = {name: turn["message"].get(name) for name in changed}
            sampled = self._prompts.tokenizer.decode(tokens.sampled, skip_special_tokens=False)
            raise BadTrajectory(
                f"turn {number}: the message of its response was changed after it was sampled: it has {show(shown)}, "
                f"and the sampled text is {show(sampled)}; return the response unchanged"
            )
        return tokens

    def _difference(self, messages: list[Any], turn: PlainTurn, prompt: list[int]) -> str:
        """Describe for an error how the rendered text of `messages` differs from the prompt that the model read.

        `messages` are the checked messages of `turn`. `prompt` has the token ids of the prompt that the model read.
        """
        read = self._prompts.tokenizer.decode(prompt, skip_special_tokens=False)
        start = f"its messages are not those of the request ({len(messages)} messages): "
        try:
            text = self._prompts.text(messages, turn["tools"])
        except DataError as error:
            return f"{start}{error}"
        if text == read:
            return start + "they differ in a field that the chat template leaves out"
        same = next((i for i, (a, b) in enumerate(zip(text, read, strict=False)) if a != b), min(len(text), len(read)))
        around = slice(max(0, same - _SHOWN), same + _SHOWN)
        return start + f"at character {same} they say {text[around]!r}, and the model read {read[around]!r}"

    def _trained_of(self, turn: PlainTurn, tokens: list[int], is_last: bool) -> np.ndarray:
        """Return whether each sampled token of a turn is trained, according to the loss mask policy.

        Args:
            turn: The turn.
            tokens: The ids of the sampled tokens of the turn.
            is_last: Whether this is the last turn of the trajectory. Text in the last turn is trained only if the
                policy's attribute `final_assistant_text` is also True.

        Returns:
            Array of bool, shape [len(tokens)].
        """
        policy = self._policy
        text = policy.assistant_text and (policy.final_assistant_text or not is_last)
        if text == policy.assistant_tool_calls or not turn["message"].get("tool_calls"):
            return np.full(len(tokens), text)
        start = self._first_call(tokens)
        return np.repeat([text, policy.assistant_tool_calls], [start, len(tokens) - start])

    def _first_call(self, tokens: list[int]) -> int:
        """Return the index of the first token that belongs to a tool call, or len(tokens) if there is no call.

        `tokens` are the ids of the sampled tokens of a turn.
        """
        stream, ends, text = TextStream(self._prompts.tokenizer, frozenset()), [], ""
        for token in tokens:
            text += stream.feed([token])
            ends.append(len(text))
        start = call_start(self._prompts.parser, text + stream.finish())
        return next((place for place, end in enumerate(ends) if end > start), len(tokens))


class _Row:
    """A training row under construction, to which turns are appended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._sources: list[tuple[int, int]] = []
        self._pieces: list[tuple[int, np.ndarray, list[float], list[int]]] = []  # start, trained, logprobs, versions
        self._temperatures: set[float] = set()

    def __len__(self) -> int:
        return len(self.tokens)

    def is_prefix_of(self, prompt: list[int]) -> bool:
        """Return whether `prompt` begins with all tokens of the row."""
        return prompt[: len(self.tokens)] == self.tokens

    def extend(self, tokens: TurnTokens, trained: np.ndarray) -> None:
        """Append the tokens of a turn, whose prompt begins with the tokens of this row.

        Args:
            tokens: The tokens of the turn, prompt and completion.
            trained: Whether each sampled token is trained, as an array of bool, shape [len(tokens.sampled)].
        """
        self.tokens = [*tokens.prompt, *tokens.sampled]
        self._sources = [*tokens.sources, (int(Source.SAMPLED), len(tokens.sampled))]
        self._pieces.append((len(tokens.prompt), trained, tokens.logprobs, tokens.versions))
        self._temperatures.add(tokens.temperature)

    def finished(self, trained_sources: list[int]) -> TokenRow:
        """Return the row as arrays.

        A sampled token is trained if `extend` received True for it. Any other token is trained if `trained_sources`
        contains its origin, which is a value of `Source`, such as `Source.TOOL` for a tool's result. The first token
        is never trained.
        """
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
    """Build the trajectories of the items from the return value of an agent function.

    Args:
        returned: An AgentTrajectory or AgentTrajectoryTurn, or a list of them.
        builder: Builds the trajectory of an item from its turns.

    Returns:
        A tuple (item, trajectory) for each item, in the order in which the agent function returned them.

    Raises:
        DataError: A trajectory cannot be used for training. The message has the index of the trajectory.
    """
    found = []
    try:
        items = list({item.key: item for item in items_of(returned)}.values())
        for item, turns in zip(items, plain_results(returned, items), strict=True):
            if isinstance(turns, BadTrajectory):
                raise turns
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
    """Return one TrainSequence for each row of a trajectory.

    Args:
        trajectory: The trajectory.
        reward: The reward of the trajectory. Each row gets this reward.
        eos_token_id: The id of the end-of-sequence token, for scripts that pad the rows.
        weights_version: The current version of the weights. The staleness of a row is this version minus the oldest
            version of the weights that sampled a token of the row.
        masked: Whether all tokens are excluded from the loss.
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
    """Return whether trained tokens of a row have no usable log-probability.

    This is the case if the row was sampled at another temperature than training uses, or if tokens are trained that the
    model did not sample.

    Args:
        row: The training row.
        sampling: The sampling settings of the run (gconfig).
    """
    return row.temperature != sampling.logprob_temperature or bool((row.trained & ~row.sampled).any())


def warn_of_temperatures(rows: Iterable[TokenRow], sampling: SamplingConfig, waits: bool = True) -> None:
    """Log a warning if rows were sampled at other temperatures than training uses.

    Args:
        rows: The training rows. The temperature of a row is None if its turns were sampled at different temperatures.
        sampling: The sampling settings of the run (gconfig).
        waits: Whether the current weights sampled all rows (rollout.max_head_offpolicyness=0).
    """
    own = sampling.logprob_temperature
    if others := {row.temperature for row in rows} - {own}:
        text = "agents sampled at temperatures %s, and training is at gconfig.temperature=%g: ratios are approximate"
        text += "" if waits else ", and updates since the tokens were sampled do not count in them"
        logger.warning(text, ", ".join("several" if each is None else f"{each:g}" for each in others), own)


def call_start(parser: ToolCallParser, text: str) -> int:
    """Return the character index at which the first tool call in a text begins, or len(text) if there is no call.

    Args:
        parser: The tool-call parser for the model's family.
        text: The model's output.
    """
    places = [place for tag in parser.tags for place in _all_places(text, tag)]
    for place in sorted(places):
        if parser.parse(text[place:]).tool_calls and not parser.parse(text[:place]).tool_calls:
            return place
    return 0 if parser.parse(text).tool_calls else len(text)


def _all_places(text: str, tag: str) -> list[int]:
    """Return the indices of all occurrences of a tag in a text."""
    places, at = [], text.find(tag)
    while at >= 0:
        places.append(at)
        at = text.find(tag, at + 1)
    return places


def reward_record(item: AgentItem, trajectory: Trajectory, tokenizer: Any, solutions: Any = None) -> RewardRecord:
    """Return the RewardRecord of a trajectory, which the reward functions receive.

    Args:
        item: The item of the trajectory.
        trajectory: The trajectory.
        tokenizer: A transformers tokenizer.
        solutions: The reference solutions. None takes the field `solutions` of the item's row.
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
    """Return the start and end index of each stretch of consecutive True values in a bool array.

    The result has shape [K, 2], with one row (start, end) for each of the K stretches. The end is exclusive.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2)
