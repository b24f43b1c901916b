"""The form of a row for each kind of training, and functions that check rows.

prompt  {prompt: text or messages, solutions?: anything}                      reinforcement learning
sft     {prompt: text or messages, response: text} or {messages}              supervised fine-tuning
dpo     {prompt: text or messages, chosen, rejected}                          preference pairs
        chosen and rejected are both text, or both messages that follow the prompt;
        or {chosen: messages, rejected: messages}: two conversations that begin with the same messages, the prompt
kto     {prompt: text or messages, response, label: true or false}            labelled answers
        response is text, or messages that follow the prompt
rw      a row of the kind dpo, optionally with margin: a number               ranked answers
        or {prompt: text or messages, answers: [...], ratings?: [numbers]}; without ratings, the best answer first
prm     {prompt: text or messages, completions: [steps], labels: [0 to 1]}    labelled steps

`row_problem` checks one row. The other functions check or describe parts of rows for error messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from areno.errors import DataError, printable
from areno.schema.values import text_problem

Row = Mapping[str, Any]


class TiedAnswers(DataError):
    """Raised for a row in which no answer is preferred to a different answer. Such rows are skipped and counted."""


class RowTooLong(DataError):
    """Raised for a row that is too long. Such rows are skipped and counted. `n_tokens` is the length of the row."""

    def __init__(self, n_tokens: int, what: Any, *args: Any):
        super().__init__(what, *args)
        self.n_tokens = n_tokens


RowKind = Literal["prompt", "sft", "dpo", "kto", "rw", "prm"]


class Rows(Protocol):
    """The interface of a dataset: a length, and rows by index. Lists and `datasets.Dataset` have it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def rows_at(rows: Rows, indices: Sequence[int]) -> list[Any]:
    """Return several rows. For `datasets.Dataset`, one call of `__getitems__` takes a fraction of the time."""
    read_all = getattr(rows, "__getitems__", None) if len(indices) > 1 else None
    return [rows[index] for index in indices] if read_all is None else read_all(list(indices))


EXPECTED = {
    "prompt": "{prompt: text or messages, solutions: optional}",
    "sft": "{prompt, response} or {messages}",
    "dpo": "{prompt, chosen, rejected}, or {chosen, rejected} as messages that begin alike",
    "kto": "{prompt, response, label: true or false}",
    "rw": "{prompt, chosen, rejected, margin: optional}, {chosen, rejected} as messages that begin alike, or "
    "{prompt, answers: a list, ratings: optional}",
    "prm": "{prompt, completions: a list of steps, labels: true, false or a probability for each step}",
}
FIELDS = {
    "prompt": ("prompt",),
    "sft": ("prompt", "response", "messages"),
    "dpo": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "response", "label"),
    "rw": ("prompt", "chosen", "rejected", "margin", "answers", "ratings"),
    "prm": ("prompt", "completions", "labels"),
}
SHARED_FIELDS = ("solutions", "tools")  # optional fields of all kinds
VARIABLES = "chat_template_kwargs"  # optional field of all kinds, with variables for the chat template
NOT_VARIABLES = {
    "self",
    "messages",
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}
"""Arguments of `apply_chat_template` that rows and requests may not set, because they are no template variables."""
MAX_DEPTH = 100  # levels of lists and objects in a field, since copying, pickling and printing a value recurse


def row_problem(row: Any, kind: RowKind, prompt_key: str = "prompt") -> str | None:
    """Return the reason why a row does not have the form that its kind of training needs. None if it is valid."""
    problem = _schema_problem(row, kind, prompt_key) or _variables_problem(row)
    fields = (prompt_key, *FIELDS[kind], *SHARED_FIELDS, VARIABLES) if problem is None else ()
    return next((f"field {name} {found}" for name in fields if (found := json_value_problem(row.get(name)))), problem)


def template_variables(row: Row) -> Mapping[str, Any]:
    """Return the variables of the chat template in a row's field chat_template_kwargs, an object or JSON text."""
    found = row.get(VARIABLES)
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"field {VARIABLES} is text, but not JSON: {describe_json_error(error)}") from error
    if found is not None and not isinstance(found, Mapping):
        raise DataError(f"field {VARIABLES} is {describe_value(found)}, not an object")
    if wrong := [name for name in found or () if name in NOT_VARIABLES or not str(name).isidentifier()]:
        raise DataError(f"field {VARIABLES} may not set {join_names(wrong)}; it holds variables of the template")
    return found or {}


def _variables_problem(row: Row) -> str | None:
    try:
        template_variables(row)
    except DataError as error:
        return str(error)
    return None


def choice_problem(row: Any, field: str, names: Collection[str]) -> str | None:
    """Return an error message unless the value of the row's field is one of `names`."""
    value = row.get(field) if isinstance(row, Mapping) else None
    if isinstance(value, str) and value in names:
        return None
    found = "missing" if value is None else printable(repr(value))
    return f"field {field} is {found}; {' or '.join(names)} is expected"


def json_value_problem(value: Any, levels: int = MAX_DEPTH) -> str | None:
    """Return what is wrong with a JSON value: an invalid text in it, or too many levels. None if it is valid."""
    if isinstance(value, str):
        return text_problem(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, list | tuple):
        return None
    if levels == 0:
        return f"is nested more than {MAX_DEPTH} levels deep"
    return next(filter(None, (json_value_problem(item, levels - 1) for item in value)), None)


def _schema_problem(row: Any, kind: RowKind, prompt_key: str) -> str | None:
    if not isinstance(row, Mapping):
        return f"is {describe_value(row)}, not a dictionary"
    if kind == "prompt":
        return _prompt_problem(row, prompt_key)
    if kind in _PARSERS:
        try:
            _PARSERS[kind](row)
        except TiedAnswers:
            return None
        except DataError as error:
            return str(error)
        return None
    if row.get("messages") is not None and row.get("response") is None:
        problem = messages_problem(row["messages"])
        if problem is None and not any(map(is_trained, row["messages"])):
            problem = "has no assistant message to train on"
        return problem and f"field messages {problem}"
    problem = _prompt_problem(row)
    if problem is None and not isinstance(row.get("response"), str):
        problem = f"field response is {describe_value(row.get('response'), 'response' in row)}, not text"
    return problem


def rows_problem(rows: Any) -> str | None:
    """Return the reason why an object that a script passes in cannot be a dataset. None if it can."""
    expected = "a list of dictionaries, or a dataset, is expected"
    if hasattr(rows, "iloc"):  # indexing a DataFrame gives columns, not rows
        return f'is a pandas {type(rows).__name__}; {expected}: write .to_dict("records")'
    if isinstance(rows, Mapping | str | bytes) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        return f"is {describe_value(rows)}; {expected}"
    return None


def _prompt_problem(row: Row, field: str = "prompt") -> str | None:
    prompt = row.get(field)
    if isinstance(prompt, str):
        return None if prompt else f"field {field} is empty"
    if not isinstance(prompt, Sequence):
        return _not_text_problem(field, prompt, field in row)
    problem = messages_problem(prompt)
    if problem is None and prompt[-1]["role"] == "assistant":
        problem = "ends with an assistant message, so there is nothing left to answer"
    return problem and f"field {field} {problem}"


def messages_problem(messages: Any) -> str | None:
    """Return the reason why an object is not a list of chat messages. None if it is."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"is {describe_value(messages)}, not a list of messages"
    if not messages:
        return "is an empty list of messages"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"[{number}] is {describe_value(message)}, not a message {{role, content}}"
        content = message.get("content")
        has_call = message.get("tool_calls") or message.get("function_call")
        if not isinstance(content, str | list) and not (content is None and has_call):
            return f"[{number}].content is {describe_value(content, 'content' in message)}, not text"
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                return f"[{number}].content[{index}] is {describe_value(part)}, not a part {{type: text, text}}"
        if problem := _weight_problem(message):
            return f"[{number}].weight {problem}"
    return None


def _weight_problem(message: Row) -> str | None:
    weight = message.get("weight")
    if weight is None or (_is_number(weight) and weight == 0):
        return None
    if not _is_number(weight) or weight != 1:
        return f"is {describe_value(weight)}, not 0 (do not train this message) or 1"
    return None if message["role"] == "assistant" else "is 1, but only messages of the assistant are trained"


def is_trained(message: Row) -> bool:
    """Return whether a message is to be trained: it is the assistant's, and its weight is not 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def with_joined_text(messages: Sequence[Any], rendered: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return copies of messages in which each list of text parts is joined to one text.

    The text is taken from the same message in `rendered`, where the parts are joined as the chat template does it.
    Without `rendered`, line breaks join the parts.
    """
    copies = [dict(message) for message in messages]
    for at, message in enumerate(copies):
        if isinstance(message.get("content"), list):
            parts = (part["text"] for part in message["content"])
            message["content"] = rendered[at]["content"] if rendered else "\n".join(parts)
    return copies


def parse_preference_row(row: Row) -> tuple[Any, Any, Any]:
    """Split a row for DPO into (prompt, chosen, rejected): lists of messages, unless the answers are text.

    The prompt may be absent if chosen and rejected are conversations that begin with it. Raises Tie if the answers are
    the same.
    """
    answers: dict[str, Any] = {name: row.get(name) for name in ("chosen", "rejected")}
    for name, answer in answers.items():
        if not isinstance(answer, Sequence):
            raise DataError(_not_text_problem(name, answer, name in row))
    chosen, rejected = answers.values()
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("of the fields chosen and rejected one is text and one is messages; give both in one form")
    if (isinstance(chosen, str) or row.get("prompt") is not None) and (problem := _prompt_problem(row)):
        raise DataError(problem)
    for name, answer in answers.items():
        if not isinstance(answer, str) and (problem := messages_problem(answer)):
            raise DataError(f"field {name} {problem}")
    if chosen == rejected:
        raise TiedAnswers("fields chosen and rejected are the same, so none is preferred")
    if isinstance(chosen, str):
        return row["prompt"], chosen, rejected
    prompt, chosen, rejected = _split_conversations(row.get("prompt"), list(chosen), list(rejected))
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise DataError(f"field {name} has nothing after the {len(prompt)} messages that both begin with")
        if answer[0]["role"] != "assistant":
            fault = f"field {name} continues the prompt with a message of role {answer[0]['role']!r}"
            raise DataError(f"{fault}; the first message in which the two differ must be the assistant's")
    return prompt, chosen, rejected


def parse_labelled_row(row: Row) -> tuple[Any, Any, bool]:
    """Split a row for KTO into (prompt, answer, whether the answer is desirable)."""
    if problem := _prompt_problem(row):
        raise DataError(problem)
    _check_answer(row.get("response"), "response", "response" in row)
    label = row.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(f"field label is {describe_value(label, 'label' in row)}, not true or false")
    return row["prompt"], row["response"], bool(label)


@dataclass(frozen=True)
class RankedAnswers:
    """The prompt and the answers of a row for a reward model."""

    prompt: Any  # text or messages
    answers: list[Any]  # texts, or lists of messages, the best first
    ratings: list[float]  # the answer with the higher number is preferred, equal numbers are ties
    levels: list[float]  # the difference between two is the margin of their comparison


def parse_ranked_row(row: Row) -> RankedAnswers:
    """Split a row for a reward model. Raises Tie if no answer is preferred to another.

    Without ratings, each answer is preferred to the later ones, and all margins are 0.
    """
    if row.get("answers") is None:
        prompt, chosen, rejected = parse_preference_row(row)
        margin = row.get("margin")
        if margin is not None and not _is_number(margin):
            raise DataError(f"field margin is {describe_value(margin)}, not a number")
        return RankedAnswers(prompt, [chosen, rejected], [1.0, 0.0], [float(margin or 0.0), 0.0])
    if problem := _prompt_problem(row):
        raise DataError(problem)
    answers, ratings = row["answers"], row.get("ratings")
    if isinstance(answers, str) or not isinstance(answers, Sequence) or len(answers) < 2:
        raise DataError(f"field answers is {describe_value(answers)}, not a list of at least two answers")
    for number, answer in enumerate(answers):
        _check_answer(answer, f"answers[{number}]", True)
    if ratings is None:
        ranks = [float(len(answers) - 1 - index) for index in range(len(answers))]
        return RankedAnswers(row["prompt"], list(answers), ranks, [0.0] * len(answers))
    if isinstance(ratings, str) or not isinstance(ratings, Sequence) or not all(map(_is_number, ratings)):
        raise DataError(f"field ratings is {describe_value(ratings)}, not a list of numbers")
    if len(ratings) != len(answers):
        raise DataError(f"field ratings has {len(ratings)} numbers for {len(answers)} answers")
    if len(set(ratings)) == 1:
        raise TiedAnswers("field ratings has equal numbers only, so no answer is preferred")
    order = sorted(range(len(answers)), key=lambda number: -ratings[number])
    rated = [float(ratings[number]) for number in order]
    return RankedAnswers(row["prompt"], [answers[number] for number in order], rated, rated)


def parse_step_row(row: Row) -> tuple[Any, list[str], list[float]]:
    """Split a row for a process reward model into (prompt, steps, labels). Labels go from 0 (wrong) to 1 (right)."""
    steps, labels = row.get("completions"), row.get("labels")
    problems = [_prompt_problem(row)]
    for name, values in (("completions", steps), ("labels", labels)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            problems.append(f"field {name} is {describe_value(values, name in row)}, not a list")
        elif not values:
            problems.append(f"field {name} is an empty list")
    if not any(problems[1:]):
        assert steps is not None
        assert labels is not None
        if len(steps) != len(labels):
            text = f"fields completions and labels have {len(steps)} and {len(labels)} entries"
            problems.append(f"{text}; each step needs one label")
        for number, step in enumerate(steps):
            if not isinstance(step, str) or not step.strip():
                problems.append(f"field completions[{number}] is {describe_value(step)}, not the text of a step")
        for number, label in enumerate(labels):
            if not isinstance(label, bool) and not (_is_number(label) and 0 <= label <= 1):
                problems.append(f"field labels[{number}] is {describe_value(label)}, not true, false or from 0 to 1")
    if found := list(filter(None, problems)):
        raise DataError("; ".join(found))
    return row["prompt"], list(steps or ()), [float(label) for label in labels or ()]


_PARSERS: dict[RowKind, Callable[[Row], Any]] = {
    "dpo": parse_preference_row,
    "kto": parse_labelled_row,
    "rw": parse_ranked_row,
    "prm": parse_step_row,
}
"""Kind of training -> function that splits a row into its fields, and raises DataError if the row is not valid."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_answer(answer: Any, name: str, present: bool) -> None:
    """Raise DataError unless an answer is a text, or messages of which the first is the assistant's."""
    if isinstance(answer, str):
        return
    if not isinstance(answer, Sequence):
        raise DataError(_not_text_problem(name, answer, present))
    if problem := messages_problem(answer):
        raise DataError(f"field {name} {problem}")
    if answer[0]["role"] != "assistant":
        raise DataError(f"field {name} begins with a message of role {answer[0]['role']!r}, not with the assistant's")


def _split_conversations(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split a preference pair into (prompt, chosen, rejected), each a list of messages.

    If both answers begin with the prompt, it is removed from both. If `prompt` is None, their common prefix is the
    prompt.
    """
    if prompt is None:
        if n := common_prefix_length(with_joined_text(chosen), with_joined_text(rejected)):
            return chosen[:n], chosen[n:], rejected[n:]
        fault = "field prompt is missing, and chosen and rejected begin with different messages"
        raise DataError(f"{fault}; give a prompt, or conversations that share their first messages")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    heads = [with_joined_text(each[: len(messages)]) for each in (messages, chosen, rejected)]
    n = len(messages) if heads[0] == heads[1] == heads[2] else 0
    return messages, chosen[n:], rejected[n:]


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def join_names(names: Iterable[Any]) -> str:
    return ", ".join(printable(str(name)) for name in names)


def describe_json_error(error: ValueError | RecursionError) -> str:
    """Describe in a few words why json.loads raised an error."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _not_text_problem(field: str, value: Any, present: bool) -> str:
    if value is None and not present:
        return f"field {field} is missing; text or messages are expected"
    return f"field {field} is {describe_value(value, present)}, not text or messages"


def describe_value(value: Any, present: bool = True) -> str:
    """Describe an unexpected value, for an error message. None is "null" or, if the field is not present, "missing"."""
    if value is None:
        return "null" if present else "missing"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, or lists within lists
        return type(value).__name__
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
