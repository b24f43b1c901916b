"""The kind of conversation that a training row of an agent belongs to.

A program leads several conversations for one sample. A row begins where a prompt does not continue the tokens of an
earlier turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from areno.agents.trajectories import PlainTurn
from areno.config.agent import ConversationKind

KINDS: tuple[str, ...] = get_args(ConversationKind)
_MIN_SUMMARY = 20  # characters: a shorter text could be in other messages by chance


def conversation_kinds(turns: Sequence[PlainTurn], rows: Sequence[Sequence[int]]) -> list[ConversationKind]:
    """Return the kind of each row, given the indices of its turns. Rows and turns are in the order of time.

    - main: the first conversation with tools, or the first one if none has tools. Its history may be edited on the way
    - compaction: a request for a summary, which has the messages of an earlier request but no tools; and the
      conversation that begins with that summary
    - subagent: any other conversation with tools, or any other if none has tools
    - auxiliary: a conversation without tools beside others with tools, such as a request for a title
    """
    any_tools = any(turns[row[0]]["tools"] for row in rows)
    kinds: list[ConversationKind] = []
    kind_of_turn: dict[int, ConversationKind] = {}
    for row in rows:
        kind = _kind_of_source(turns, row[0], kind_of_turn)
        if kind is None and any_tools and not turns[row[0]]["tools"]:
            kind = "auxiliary"
        kinds.append(kind or ("subagent" if "main" in kinds else "main"))
        kind_of_turn |= dict.fromkeys(row, kinds[-1])
    return kinds


def _kind_of_source(
    turns: Sequence[PlainTurn], first: int, kind_of_turn: Mapping[int, ConversationKind]
) -> ConversationKind | None:
    """Return the kind of a row whose first turn goes on with an earlier conversation or a summary of it, else None."""
    turn, earlier = turns[first], [number for number in reversed(range(first)) if number in kind_of_turn]
    keys = set(turn["tokens"].keys)
    texts = "\n".join(str(message["content"]) for message in turn["messages"])
    for number in earlier:
        summary = (turns[number]["message"].get("content") or "").strip()
        if kind_of_turn[number] == "compaction" and len(summary) >= _MIN_SUMMARY and summary in texts:
            return "compaction"
    for number in earlier:
        if turns[number]["tokens"].keys[-1] in keys:
            is_summary, is_new = (
                turns[number]["tools"] and not turn["tools"],
                turn["tools"] and not turns[number]["tools"],
            )
            return "compaction" if is_summary else None if is_new else kind_of_turn[number]
    same = (number for number in earlier if _first_request(turns[number]) in keys)
    return next((kind_of_turn[number] for number in same if bool(turns[number]["tools"]) == bool(turn["tools"])), None)


def _first_request(turn: PlainTurn) -> str:
    """Return the key of a conversation up to the message before its first answer."""
    roles = [message["role"] for message in turn["messages"]]
    n_before = roles.index("assistant") if "assistant" in roles else len(roles)
    return turn["tokens"].keys[n_before - 1]
