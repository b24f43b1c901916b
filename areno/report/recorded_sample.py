"""Convert a recorded sample, a line of rollouts/<step>.jsonl, to a row of tokens.

A run may come from another machine or be damaged, so `check_sample` checks each field first. `recorded_row` takes the
token ids of the sample, or encodes its text if no token ids are recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.errors import ArenoError
from areno.schema.values import format_value
from areno.server.token_sources import TokenSource, expand_runs
from areno.tracking.metrics_file import is_number

_MOST = 2**31  # limit of token ids, weight versions and lengths


def check_sample(sample: Mapping[str, Any], number: int) -> None:
    """Raise ArenoError if a field that areno reads from a recorded sample has a wrong type or length."""
    _check_fields(sample, _FIELD_TYPES, f"sample {number}")
    trajectory = sample.get("trajectory")
    if trajectory is None:
        return
    rows = trajectory.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ArenoError("sample {}: trajectory.rows is {}; a list of rows is expected", number, format_value(rows))
    if not isinstance(turns := trajectory.get("turns", []), list) or not all(isinstance(turn, dict) for turn in turns):
        raise ArenoError("sample {}: trajectory.turns is {}; a list of turns is expected", number, format_value(turns))
    for index, turn in enumerate(turns):
        _check_fields(turn, _TURN_TYPES, f"sample {number}, turn {index} of its trajectory")
    for index, row in enumerate(rows):
        where = f"sample {number}, row {index} of its trajectory"
        _check_fields(row, _ROW_TYPES, where)
        if missing := [name for name in ("tokens", "sources", "trained") if row.get(name) is None]:
            raise ArenoError("{}: has no {}", where, missing[0])
        n_trained = sum(count for value, count in row["trained"] if value)
        lengths = dict.fromkeys(("sources", "trained", "turns"), len(row["tokens"])) | {"advantages": n_trained}
        for name, expected in lengths.items():
            if row.get(name) is not None and (n := sum(count for _, count in row[name])) != expected:
                raise ArenoError("{}: {} are for {} tokens, and it has {}", where, name, n, expected)


def _check_fields(
    fields: Mapping[str, Any], forms: Mapping[str, tuple[Callable[[Any], bool], str]], where: str
) -> None:
    for name, (is_fine, expected) in forms.items():
        if (value := fields.get(name)) is not None and not is_fine(value):
            raise ArenoError("{}: {} is {}; {} is expected", where, name, format_value(value), expected)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or is_number(one) for one in value)


def _are_run_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(_are_counts(pair) and len(pair) == 2 for pair in value)


def _are_numbers_with_counts(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(is_number(number) and _is_count(count) for number, count in value)


_COUNT, _NUMBER = (_is_count, "a whole number"), (is_number, "a number")
_COUNTS, _NUMBERS = (_are_counts, "a list of whole numbers"), (_are_numbers, "a list of numbers")
_RLE = (_are_run_lengths, "a list of [value, how many tokens]")
_TEXT = (lambda value: isinstance(value, str), "text")
_VERSIONS = (lambda value: _are_counts(value) or _are_run_lengths(value), "a list of whole numbers or of pairs of them")
_FIELD_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": _TEXT,
    "completion": _TEXT,
    "reward": _NUMBER,
    "advantage": _NUMBER,
    "group": _COUNT,
    "row": _COUNT,
    "prompt_tokens": _COUNT,
    "response_tokens": _COUNT,
    "prompt_token_ids": _COUNTS,
    "token_ids": _COUNTS,
    "logprobs": _NUMBERS,
    "token_advantages": _NUMBERS,
    "loss_mask": _NUMBERS,
    "versions": _VERSIONS,
    "teacher": _TEXT,
    "trajectory": (lambda value: isinstance(value, dict), "a mapping"),
}
_ROW_TYPES = {"tokens": _COUNTS, "sources": _RLE, "trained": _RLE, "logprobs": _NUMBERS, "versions": _VERSIONS}
_ROW_TYPES |= {"turns": _RLE, "advantages": (_are_numbers_with_counts, "a list of [number, how many tokens]")}
_TURN_TYPES = {"turn": _COUNT, "reward": _NUMBER}


@dataclass(kw_only=True)
class RecordedRow:
    """The tokens of a recorded sample.

    Arrays have the shape (n_tokens,). NaN stands for a value that is not recorded.
    """

    tokens: list[int]
    trained: np.ndarray  # bool
    logprobs: np.ndarray  # float64, of the rollout
    train_logprobs: np.ndarray  # float64, under the policy before the update
    advantages: np.ndarray  # float64
    turns: np.ndarray | None = None  # turn of each token; None if it has none, or they are not recorded
    versions: tuple[int, int] | None = None  # oldest and newest version of the weights that sampled it
    missing: list[str] = field(default_factory=list)  # what is not recorded, in words


def recorded_row(sample: Mapping[str, Any], tokenizer: Any, number: int = 0) -> RecordedRow:
    """Return the row of tokens of a checked sample. `number` is the index of a row in an agent's trajectory."""
    if sample.get("trajectory") is not None:
        return _row_of_agent(sample, number)
    if number:
        raise ArenoError("the sample has one row, and row {} is asked for; only those of agents have more", number)
    missing: list[str] = []
    prompt = _token_ids(sample, "prompt_token_ids")
    if prompt is None:
        prompt = tokenizer.encode(_text_field(sample, "prompt"), add_special_tokens=tokenizer.chat_template is None)
        _note_length_mismatch(missing, "prompt", len(prompt), sample.get("prompt_tokens"))
    response = _token_ids(sample, "token_ids", "tokens")
    if response is None:
        response = tokenizer.encode(_text_field(sample, "completion"), add_special_tokens=False)
        if sample.get("finish_reason") == "stop" and len(response) + 1 == sample.get("response_tokens"):
            response.append(tokenizer.eos_token_id)
        missing.append("token ids: the tokens are made of the text again")
        _note_length_mismatch(missing, "completion", len(response), sample.get("response_tokens"))
    if not response:
        raise ArenoError("the sample has no tokens")
    trained = np.repeat([False, True], [len(prompt), len(response)])
    row = RecordedRow(
        tokens=[*prompt, *response],
        trained=trained,
        missing=missing,
        logprobs=np.full(len(trained), np.nan),
        train_logprobs=np.full(len(trained), np.nan),
        advantages=np.full(len(trained), np.nan),
    )
    if sample.get("loss_mask") is not None and len(sample["loss_mask"]) == len(response):
        row.trained = np.concatenate([np.zeros(len(prompt), dtype=bool), np.array(sample["loss_mask"], dtype=bool)])
    _fill_at(row, trained, "logprobs", sample.get("logprobs"))
    _fill_at(row, trained, "train_logprobs", sample.get("train_logprobs"))
    _fill_at(row, trained, "advantages", sample.get("token_advantages"))
    if np.isnan(row.advantages[trained]).all() and sample.get("advantage") is not None:
        row.advantages[trained] = sample["advantage"]
    row.versions = _version_bounds(sample.get("versions"))
    return row


def _row_of_agent(sample: Mapping[str, Any], number: int) -> RecordedRow:
    rows = sample["trajectory"]["rows"]
    if not 0 <= number < len(rows):
        raise ArenoError("the sample has {} rows, and row {} is asked for; they are counted from 0", len(rows), number)
    given = rows[number]
    sources, n_tokens = expand_runs(given["sources"]), len(given["tokens"])
    row = RecordedRow(
        tokens=given["tokens"],
        trained=expand_runs(given["trained"]).astype(bool),
        logprobs=np.full(n_tokens, np.nan),
        train_logprobs=np.full(n_tokens, np.nan),
        advantages=np.full(n_tokens, np.nan),
    )
    # A turn that began another row is trained here too, but its log-probabilities are recorded in that row.
    _fill_at(row, sources == TokenSource.SAMPLED, "logprobs", given.get("logprobs"))
    if given.get("turns") is not None:
        row.turns = np.repeat(*np.array(given["turns"], dtype=np.int64).reshape(-1, 2).T)
    if given.get("advantages") is not None:
        numbers, counts = ([pair[place] for pair in given["advantages"]] for place in (0, 1))
        _fill_at(row, row.trained, "advantages", np.repeat(numbers, counts).tolist())
    elif sample.get("advantage") is not None:
        row.advantages[row.trained] = sample["advantage"]
    row.versions = _version_bounds(given.get("versions"))
    return row


@dataclass(kw_only=True)
class RecordedTurn:
    """A turn of a recorded sample. Its advantage and its trained tokens are those of one row."""

    turn: int
    reward: float | None  # before it is shaped; the last turn has all that no turn got. None: the sample has none
    advantage: float | None  # mean over its trained tokens
    trained: int


def recorded_turns(sample: Mapping[str, Any], row: RecordedRow) -> list[RecordedTurn]:
    """Return the turns of a checked sample that the row has tokens of. Empty if turns are not recorded."""
    if row.turns is None:
        return []
    recorded, total = sample["trajectory"].get("turns", []), sample.get("reward")
    rewards = defaultdict[int, float](float)
    for turn in recorded:
        rewards[turn.get("turn", 0)] += turn.get("reward") or 0.0
    if total is not None:
        rewards[max(rewards, default=0)] += total - sum(rewards.values())
    found = []
    for turn in np.unique(row.turns).tolist():
        advantages = row.advantages[row.trained & (row.turns == turn)]
        mean = float(advantages.mean()) if len(advantages) and not np.isnan(advantages).any() else None
        reward = None if total is None else rewards[turn]
        found.append(RecordedTurn(turn=turn, reward=reward, advantage=mean, trained=len(advantages)))
    return found


def _text_field(sample: Mapping[str, Any], name: str) -> str:
    if not sample.get(name):
        raise ArenoError("the sample has neither the token ids nor the text of its {}", name)
    return sample[name]


def _token_ids(sample: Mapping[str, Any], *names: str) -> list[int] | None:
    """Return the token ids of the first field in `names` that has any, or None."""
    for name in names:
        value = sample.get(name)
        if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
            return list(value)
    return None


def _note_length_mismatch(missing: list[str], what: str, found: int, recorded: int | None) -> None:
    if recorded is not None and recorded != found:
        missing.append(f"the {what} as it was: its text makes {found} tokens, and it had {recorded}")


def _fill_at(row: RecordedRow, places: np.ndarray, name: str, values: Sequence[float | None] | None) -> None:
    """Write values into the array `name` of a row, one at each True in the mask `places`. None becomes NaN.

    If the number of values differs, add a description to `row.missing` instead.
    """
    if values is None:
        return
    if len(values) != places.sum():
        row.missing.append(f"{name}: there are {len(values)} for {places.sum()} tokens")
        return
    vars(row)[name][places] = [np.nan if value is None else value for value in values]


def _version_bounds(versions: Any) -> tuple[int, int] | None:
    """Return (oldest, newest) of the versions. They are one for each token, or pairs [version, number of tokens]."""
    if not versions:
        return None
    plain = [version[0] if isinstance(version, list) else version for version in versions]
    return min(plain), max(plain)
