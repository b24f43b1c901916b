"""Conversion of trajectories into training rows, which hold exactly the tokens that were sampled.

The prompt of a turn usually begins with all tokens of the previous turn. Both turns then become one row. A turn begins
a new row if its prompt does not continue an earlier row, for example because the chat template dropped reasoning, the
agent rewrote or shortened its messages, or the agent leads several conversations. So each sampled token of
a row follows exactly the tokens that the model had read.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from areno.agents.conversations import KINDS, conversation_kinds
from areno.agents.trajectories import AgentItem, BadTrajectory, LossMaskPolicy, PlainTurn, items_of, plain_results
from areno.config.rollout import SamplingConfig
from areno.errors import DataError
from areno.loss_fns.advantages import turn_rewards
from areno.schema.values import format_value
from areno.server.detokenize import TextStream
from areno.server.errors import ApiError
from areno.server.messages import conversation_keys, read_messages
from areno.server.prompt_builder import PromptBuilder
from areno.server.returned_responses import TurnTokens, changed_parts
from areno.server.token_sources import TokenSource, expand_runs
from areno.types import RewardRecord, TokenRow, TrainSequence, Trajectory

logger = logging.getLogger("areno")

_OF_TOKENS = ("tokens", "choice", "outcome", "forced")  # keys of a turn that its record for users lacks
_SHOWN = 60  # characters on either side of a difference


class RowBuilder:
    """Builds trajectories, with their training rows, from the turns of agents.

    `policy` selects the tokens that are trained. If `session` is given, responses must come from it. `context` is the
    largest number of tokens in a row. `prompts` renders messages again, to compare them with the prompts that the model
    read. Of the turns that a sample's session has recorded, conversations of the kinds `conversations` are trained.
    `export_style` is the setting of this name.
    """

    def __init__(
        self,
        prompts: PromptBuilder,
        policy: LossMaskPolicy,
        vocab_size: int,
        session: str | None = None,
        context: int | None = None,
        conversations: Collection[str] = KINDS,
        export_style: str | None = None,
    ):
        self._conversations, self._export_style = conversations, export_style
        self._prompts, self._policy, self._session = prompts, policy, session
        self._vocab_size, self._context = vocab_size, context
        self._trained_sources = [
            int(source)
            for source, trained in (
                (TokenSource.TOOL, policy.tool_results),
                (TokenSource.SYSTEM, policy.system_prompt),
                (TokenSource.USER, policy.user_prompt),
            )
            if trained
        ]

    def build_trajectory(self, turns: Sequence[PlainTurn]) -> Trajectory:
        """Build the trajectory of one item, with one or more rows.

        Raises BadTrajectory if there are no turns, a turn was changed after it was sampled, or a row is too long.
        """
        if not turns:
            raise BadTrajectory("it returned no turns, and its session has recorded none")
        rows: list[_OpenRow] = []
        known: dict[tuple[str, int], int] = {}
        for number, turn in enumerate(turns):
            response, index = turn["choice"]
            first = known.setdefault((response, index), number)
            if first != number and response:
                raise BadTrajectory(f"turn {number} has the response of turn {first} again; return each response once")
            tokens = self._checked_tokens(turn, number)
            known_rows = [] if self._export_style == "individual" else rows
            row = max((row for row in known_rows if row.is_prefix_of(tokens.prompt)), key=len, default=None)
            if row is None and rows and self._export_style == "concat":
                raise BadTrajectory(
                    f"the prompt of turn {number} does not continue the tokens of the turns before, and "
                    "agent.export_style=concat trains one linear conversation; leave it out, or set individual"
                )
            if row is None:
                rows.append(row := _OpenRow())
            row.turns.append(number)
            row.append_turn(tokens, self._trained_mask(turn, tokens.sampled, is_last=number == len(turns) - 1))
            if self._context is not None and len(row) > self._context:
                raise BadTrajectory(f"it has {len(row)} tokens, more than the model's context of {self._context}")
        last, kept, kinds, own = turns[-1], rows, list[str](), list(range(len(turns)))
        if isinstance(last["tokens"], TurnTokens):
            kinds += conversation_kinds(turns, [row.turns for row in rows])
            of_agent = [row.turns for row, kind in zip(rows, kinds, strict=True) if kind in ("main", "compaction")]
            own = sorted(turn for of_row in of_agent for turn in of_row) or own
            last = turns[own[-1]]
            kept = [row for row, kind in zip(rows, kinds, strict=True) if kind in self._conversations]
            if not kept:
                raise BadTrajectory(
                    f"its conversations ({', '.join(kinds)}) are none that agent.train_conversations names"
                )
        messages = [*last["messages"], last["message"]]
        # A turn of another conversation is a part of the agent's turn before it.
        places = [max(bisect_right(own, turn) - 1, 0) for turn in range(len(turns))]
        rewards = [0.0] * len(own)
        for place, turn in zip(places, turns, strict=True):
            rewards[place] += turn.get("reward", 0.0)
        return Trajectory(
            rows=[row.to_token_row(self._trained_sources, places) for row in kept],
            conversations=Counter(kinds),
            turns=[
                {"turn": place, **{name: turn[name] for name in turn if name not in _OF_TOKENS}}
                for place, turn in zip(places, turns, strict=True)
            ],
            turn_rewards=rewards,
            messages=messages,
            tool_calls=[call for turn in turns for call in turn["message"].get("tool_calls") or []],
            tool_results=[message for message in messages if message.get("role") == "tool"],
            reward=turns[-1].get("outcome"),
            finish_reason=last["finish_reason"],
        )

    def _checked_tokens(self, turn: PlainTurn, number: int) -> TurnTokens:
        """Return the tokens of a turn. Raises BadTrajectory if anything differs from what the server sent.

        Turns that the session of the sample has recorded need no check.
        """
        values = turn["tokens"]
        if isinstance(values, TurnTokens):
            return values
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
            raise BadTrajectory(f"turn {number}: {self._describe_difference(messages, turn, tokens.prompt)}")
        if changed := changed_parts(turn["message"], tokens.message):
            shown = {name: turn["message"].get(name) for name in changed}
            sampled = self._prompts.tokenizer.decode(tokens.sampled, skip_special_tokens=False)
            raise BadTrajectory(
                f"turn {number}: the message of its response was changed after it was sampled: it has "
                f"{format_value(shown)}, and the sampled text is {format_value(sampled)}; return the response unchanged"
            )
        return tokens

    def _describe_difference(self, messages: list[Any], turn: PlainTurn, prompt: list[int]) -> str:
        read = self._prompts.tokenizer.decode(prompt, skip_special_tokens=False)
        start = f"its messages are not those of the request ({len(messages)} messages): "
        try:
            text = self._prompts.render_text(messages, turn["tools"])
        except DataError as error:
            return f"{start}{error}"
        if text == read:
            return start + "they differ in a field that the chat template leaves out"
        same = next((i for i, (a, b) in enumerate(zip(text, read, strict=False)) if a != b), min(len(text), len(read)))
        around = slice(max(0, same - _SHOWN), same + _SHOWN)
        return start + f"at character {same} they say {text[around]!r}, and the model read {read[around]!r}"

    def _trained_mask(self, turn: PlainTurn, tokens: list[int], is_last: bool) -> np.ndarray:
        policy = self._policy
        if turn.get("forced"):
            return np.zeros(len(tokens), dtype=bool)
        text = policy.assistant_text and (policy.final_assistant_text or not is_last)
        if text == policy.assistant_tool_calls or not turn["message"].get("tool_calls"):
            return np.full(len(tokens), text)
        start = self._tool_call_start(tokens)
        return np.repeat([text, policy.assistant_tool_calls], [start, len(tokens) - start])

    def _tool_call_start(self, tokens: list[int]) -> int:
        """Return the index of the first token of a tool call, or len(tokens) if there is no tool call."""
        stream, ends, text = TextStream(self._prompts.tokenizer, frozenset()), [], ""
        for token in tokens:
            text += stream.feed([token])
            ends.append(len(text))
        start = self._prompts.parser.first_call_index(text + stream.finish())
        return next((index for index, end in enumerate(ends) if end > start), len(tokens))


class _OpenRow:
    """A training row under construction, to which turns are appended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.turns: list[int] = []  # their indices
        self._sources: list[tuple[int, int]] = []
        self._pieces: list[tuple[int, np.ndarray, list[float], list[int]]] = []  # start, trained, logprobs, versions
        self._temperatures: set[float] = set()

    def __len__(self) -> int:
        return len(self.tokens)

    def is_prefix_of(self, prompt: list[int]) -> bool:
        n = len(self.tokens)
        return prompt[n - 1 : n] == self.tokens[-1:] and prompt[:n] == self.tokens

    def append_turn(self, tokens: TurnTokens, trained: np.ndarray) -> None:
        """Append a turn whose prompt begins with the tokens of this row. `trained` is bool [len(tokens.sampled)]."""
        self.tokens = [*tokens.prompt, *tokens.sampled]
        self._sources = [*tokens.sources, (int(TokenSource.SAMPLED), len(tokens.sampled))]
        self._pieces.append((len(tokens.prompt), trained, tokens.logprobs, tokens.versions))
        self._temperatures.add(tokens.temperature)

    def to_token_row(self, trained_sources: list[int], places: Sequence[int]) -> TokenRow:
        """Return the row as arrays. `places` has, for each turn of the sample, its index in the rewards of turns.

        A sampled token is trained if `append_turn` received True for it. Any other token is trained if its
        `TokenSource` is in `trained_sources`. The first token is never trained.
        """
        n_tokens, sources = len(self.tokens), expand_runs(self._sources)
        sampled, trained = np.zeros(n_tokens, dtype=bool), np.isin(sources, trained_sources)
        logprobs, versions = np.zeros(n_tokens), np.zeros(n_tokens, dtype=np.int64)
        for start, of_piece, piece_logprobs, piece_versions in self._pieces:
            place = slice(start, start + len(of_piece))
            sampled[place], trained[place] = True, of_piece
            logprobs[place], versions[place] = piece_logprobs, piece_versions
        ends = [start + len(of_piece) for start, of_piece, *_ in self._pieces]
        of_turns = np.repeat([places[turn] for turn in self.turns], np.diff(ends, prepend=0))
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
            turns=of_turns,
        )


def read_trajectories(returned: Any, builder: RowBuilder) -> list[tuple[AgentItem, Trajectory]]:
    """Return (item, trajectory) for each item that an agent function returned.

    Raises DataError with the index of a trajectory that cannot be used for training.
    """
    found = []
    try:
        items = list({item.key: item for item in items_of(returned)}.values())
        for item, turns in zip(items, plain_results(returned, items), strict=True):
            if isinstance(turns, BadTrajectory):
                raise turns
            found.append((item, builder.build_trajectory(turns)))
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
    reward_scaling: float = 1.0,
) -> list[TrainSequence]:
    """Return one TrainSequence for each row, each with the reward of the trajectory, and the rewards of its turns.

    The staleness of a row is `weights_version` minus the oldest version that sampled a token of it. `masked` excludes
    all tokens from the loss. `reward_scaling` is the factor of the rewards that the agent has given.
    """
    rewards_K = turn_rewards(reward, trajectory.turn_rewards, reward_scaling)
    return [
        TrainSequence(
            prompt_mask=np.ones(len(row), dtype=bool) if masked else ~row.trained,
            tokens=np.array(row.tokens, dtype=np.int64),
            logprobs=row.logprobs,
            reward=float(reward),
            eos_token_id=eos_token_id,
            staleness=weights_version - int(row.versions[row.sampled].min(initial=weights_version)),
            turns=row.turns,
            turn_rewards=rewards_K,
        )
        for row in trajectory.rows
    ]


def needs_scoring(row: TokenRow, sampling: SamplingConfig) -> bool:
    """Return whether trained tokens of a row have no usable log-probability.

    That is so if the row was sampled at another temperature than training uses, or if some trained tokens were not
    sampled.
    """
    return row.temperature != sampling.logprob_temperature or bool((row.trained & ~row.sampled).any())


def warn_of_temperatures(rows: Iterable[TokenRow], sampling: SamplingConfig, waits: bool = True) -> None:
    """Warn if rows were sampled at other temperatures than training uses.

    The temperature of a row is None if its tokens have several. `waits` means that the current weights sampled
    all rows (rollout.max_head_offpolicyness=0).
    """
    own = sampling.logprob_temperature
    if others := {row.temperature for row in rows} - {own}:
        text = "agents sampled at temperatures %s, and training is at gconfig.temperature=%g: ratios are approximate"
        text += "" if waits else ", and updates since the tokens were sampled do not count in them"
        logger.warning(text, ", ".join("several" if each is None else f"{each:g}" for each in others), own)


def reward_record(item: AgentItem, trajectory: Trajectory, tokenizer: Any, solutions: Any = None) -> RewardRecord:
    """Return the record that reward functions receive. If `solutions` is None, those of the item's row are used."""
    written = [
        row.tokens[int(start) : int(end)] for row in trajectory.rows for start, end in _spans_of_true(row.sampled)
    ]
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
        turn_rewards=[turn.get("reward", 0.0) for turn in trajectory.turns if "reward" in trajectory.turns[0]],
        source=item.source,
    )


def _spans_of_true(mask: np.ndarray) -> np.ndarray:
    """Return (start, end) of each stretch of True values, [K, 2]. The end is exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2)
