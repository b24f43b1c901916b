"""Convert rows of other tools into areno's form, and check every row before a model is loaded.

The form of a dataset is recognised by its columns. Rows in areno's own form (see row_schema.py) are not changed.
`prepare_rows` recognises, converts and checks rows. These other forms are recognised:

questions    a question (question, problem, query or instruction) and its answer (answer, solution, ...)
alpaca       instruction, input, output                                                    (Stanford Alpaca)
completion   prompt, completion: text or messages                                          (TRL)
conversation messages [{role, content}]                                                    (OpenAI)
sharegpt     conversations [{from, value}], with system and tools; chosen and rejected     (ShareGPT, LLaMA-Factory)
math-shepherd input with ки after each step, label with + or - in their places           (Math-Shepherd)
verl         prompt as messages, reward_model {ground_truth}                               (verl)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.data.arrow_rows import without_nulls
from areno.data.row_schema import (
    EXPECTED,
    FIELDS,
    VARIABLES,
    Row,
    RowKind,
    Rows,
    common_prefix_length,
    describe_json_error,
    describe_value,
    join_names,
    row_problem,
    rows_at,
)
from areno.environments.package import LazyRows
from areno.errors import DataError, Key, Problem, printable

_QUESTIONS = ("question", "problem", "query", "instruction")
_ANSWERS = ("answer", "solution", "ground_truth", "target", "output")
_TALKS = ("messages", "conversation", "conversations", "dialogue", "dialog", "chat", "turns")
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": (*_QUESTIONS, "user_prompt", "task", "input"),
    "solutions": (*_ANSWERS, "reference", "expected", "expected_answer", "final_answer", "correct_answer", "gold"),
    "response": (*_ANSWERS, "completion", "reply", "responses"),
    "messages": _TALKS,
    "chosen": ("preferred", "accepted", "winner", "better"),
    "rejected": ("dispreferred", "refused", "loser", "worse"),
    "tools": ("functions", "available_tools", "available_functions", "tool_definitions", "function_definitions"),
}
_LEAST_WORD = 5  # letters of a word that can be misspelt
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_CALLS = {"function_call", "tool_call"}


@dataclass(frozen=True)
class DatasetFormat:
    """A form of rows that another tool uses. `convert` returns the fields of areno's form, to be added to a row."""

    name: str
    description: str
    convert: Callable[[Row], Mapping[str, Any]]


class ConvertedRows:
    """A dataset that converts each row when it is read, and keeps its other fields. With `kind`, rows are checked."""

    def __init__(self, rows: Rows, convert: Callable[[Row], Mapping[str, Any]], kind: RowKind | None = None):
        self.rows, self.convert = rows, convert
        self._kind: RowKind | None = kind

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.convert_row(self.rows[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.convert_row(row) for row in rows_at(self.rows, indices)]

    def convert_row(self, row: Any) -> Any:
        found = {**row, **self.convert(row)} if isinstance(row, Mapping) else row
        if self._kind is not None and (problem := row_problem(found, self._kind)):
            raise DataError(problem)
        return found


def rename_columns(rows: Rows, columns: Mapping[str, str]) -> ConvertedRows:
    """Return the rows with areno's fields added. `columns` maps each field to the column that holds its value."""
    there = column_names(rows)
    if missing := [name for name in columns.values() if name not in there]:
        has = join_names(there) or "none"
        raise DataError(f"there is no column {', '.join(map(repr, missing))}; the data has {has}")
    return ConvertedRows(rows, lambda row: {field: row.get(column) for field, column in columns.items()})


def column_names(rows: Rows) -> list[str]:
    """Return the names of the columns of a dataset. For a list, these are the fields of its first hundred rows."""
    names = getattr(rows, "column_names", None)
    if names is not None:
        return list(names)
    first = (rows[index] for index in range(min(100, len(rows))))
    return list(dict.fromkeys(str(name) for row in first if isinstance(row, Mapping) for name in row))


def recognise_format(rows: Rows, kind: RowKind) -> DatasetFormat | None:
    """Return the form of the rows, recognised by the fields of the first row. None if it is areno's own or unknown."""
    first: Any = rows[0]
    if not isinstance(first, Mapping):
        return None
    recognise: dict[RowKind, Callable[[set[str]], DatasetFormat | None]] = {
        "prompt": _prompt_format,
        "sft": _answer_format,
        "dpo": _pair_format,
        "kto": _label_format,
        "rw": _pair_format,
        "prm": _step_format,
    }
    return recognise[kind](set(first))


def _prompt_format(there: set[str]) -> DatasetFormat | None:
    if "prompt" in there:
        if "reward_model" in there and "solutions" not in there:
            return DatasetFormat("verl", "solutions from reward_model.ground_truth", _convert_verl)
        return _question_format(there, "prompt") if "solutions" not in there else None
    if {"instruction", "output"} <= there:
        return DatasetFormat(
            "alpaca", "prompt from instruction and input, solutions from output", _alpaca_converter("solutions")
        )
    if "conversations" in there:
        description = "prompt from conversations up to its last answer, solutions from that answer"
        return DatasetFormat("sharegpt", description, lambda row: _split_off_answer(sharegpt_messages(row)))
    if "messages" in there:
        description = "prompt from messages up to the last answer, solutions from that answer"
        return DatasetFormat("conversation", description, lambda row: _split_off_answer(_list_field(row, "messages")))
    question = next((name for name in _QUESTIONS if name in there), None)
    return None if question is None else _question_format(there, question)


def _question_format(there: set[str], question: str) -> DatasetFormat | None:
    """Return the form of rows with the field `question` and the other fields `there`. None for a prompt alone."""
    answer = next((name for name in _ANSWERS if name in there), None)
    if answer is None and question == "prompt":
        return None
    columns = {"prompt": question} | ({"solutions": answer} if answer else {})
    description = ", ".join(f"{field} from {column}" for field, column in columns.items() if field != column)
    return DatasetFormat(
        "questions", description, lambda row: {field: row.get(column) for field, column in columns.items()}
    )


def _answer_format(there: set[str]) -> DatasetFormat | None:
    if "messages" in there or {"prompt", "response"} <= there:
        return None
    if {"prompt", "completion"} <= there:
        return DatasetFormat("completion", "the answer from completion", _convert_trl_completion)
    if "conversations" in there:
        description = "messages from conversations"
        return DatasetFormat("sharegpt", description, lambda row: {"messages": sharegpt_messages(row)})
    if {"instruction", "output"} <= there:
        return DatasetFormat(
            "alpaca", "prompt from instruction and input, response from output", _alpaca_converter("response")
        )
    question = next((name for name in ("prompt", *_QUESTIONS) if name in there), None)
    answer = next((name for name in ("response", *_ANSWERS) if name in there), None)
    if question is None or answer is None:
        return None
    description = f"prompt from {question}, response from {answer}"
    return DatasetFormat(
        "questions", description, lambda row: {"prompt": row.get(question), "response": row.get(answer)}
    )


def _label_format(there: set[str]) -> DatasetFormat | None:
    if "response" not in there and {"prompt", "completion", "label"} <= there:
        return DatasetFormat(
            "completion", "the answer from completion", lambda row: {"response": row.get("completion")}
        )
    return None


def _pair_format(there: set[str]) -> DatasetFormat | None:
    if {"conversations", "chosen", "rejected"} <= there:
        description = "prompt from conversations, answers from chosen and rejected"
        return DatasetFormat("sharegpt", description, _convert_sharegpt_pair)
    question = next((name for name in _QUESTIONS if name in there), None)
    if "prompt" in there or question is None or not {"chosen", "rejected"} <= there:
        return None
    return DatasetFormat("questions", f"prompt from {question}", lambda row: {"prompt": row.get(question)})


def _step_format(there: set[str]) -> DatasetFormat | None:
    if "completions" not in there and {"input", "label"} <= there:
        description = "prompt and completions from input, cut at ки, labels from + and - in label"
        return DatasetFormat("math-shepherd", description, _convert_math_shepherd)
    return None


# Rows ----------------------------------------------------------------------------------------------------------------


def _convert_verl(row: Row) -> dict[str, Any]:
    """Return {solutions: reward_model.ground_truth} for a row of verl. The value is None if the row lacks it."""
    model = row.get("reward_model")
    return {"solutions": model.get("ground_truth") if isinstance(model, Mapping) else None}


def _alpaca_converter(answer: str) -> Callable[[Row], dict[str, Any]]:
    """Return a function that converts an Alpaca row. The field named `answer` gets the output.

    The prompt is instruction and input as one text, or messages if the row has a system text or a history.
    """

    def convert(row: Row) -> dict[str, Any]:
        instruction = "\n".join(filter(None, (_text_field(row, "instruction"), _text_field(row, "input"))))
        if not row.get("system") and not row.get("history"):
            return {"prompt": instruction, answer: row.get("output")}
        earlier = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        for turn in _list_field(row, "history") if row.get("history") else ():
            if isinstance(turn, str) or not isinstance(turn, Sequence) or len(turn) != 2:
                raise DataError(f"field history has {describe_value(turn)}, not a pair [instruction, output]")
            question, reply = turn
            earlier += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        return {"prompt": [*earlier, {"role": "user", "content": instruction}], answer: row.get("output")}

    return convert


def _convert_trl_completion(row: Row) -> dict[str, Any]:
    """Convert a row of TRL to {response} if its completion is a text, and otherwise to {messages}."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(completion, str):
        return {"response": completion}
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _list_field(row, "prompt")
    return {"messages": [*prompt, *_list_field(row, "completion")]}


def _convert_math_shepherd(row: Row) -> dict[str, Any]:
    """Convert a row of Math-Shepherd to {prompt, completions, labels}.

    The field input has a question and its steps, "Step 1: ... ки Step 2: ... ки". The field label is the same text with
    + (right) or - (wrong) in place of each ки.
    """
    solution, marked = row.get("input"), row.get("label")
    if not isinstance(solution, str) or not isinstance(marked, str):
        raise DataError(f"field label is {describe_value(marked)} and field input {describe_value(solution)}, not text")
    *pieces, _ = solution.split("ки")
    labels, at = [], 0
    for piece in pieces:
        at += len(piece) + 1
        labels.append(marked[at - 1 : at])
    if not pieces or len(marked) != len(solution) - len(pieces) or not set(labels) <= {"+", "-"}:
        raise DataError("field label is not the text of field input with + or - in place of each ки")
    start = pieces[0].lower().find("step 1:")
    if start < 0:
        raise DataError("field input has no 'Step 1:', at which the question ends")
    question, steps = pieces[0][:start], [pieces[0][start:], *pieces[1:]]
    return {
        "prompt": question.strip(),
        "completions": [step.strip() for step in steps],
        "labels": [label == "+" for label in labels],
    }


def _split_off_answer(messages: list[Any]) -> dict[str, Any]:
    """Split a conversation into {prompt, solutions} if the last message is the assistant's, else return {prompt}."""
    if not messages or not isinstance(messages[-1], Mapping) or messages[-1].get("role") != "assistant":
        return {"prompt": messages}
    return {"prompt": messages[:-1], "solutions": messages[-1].get("content")}


def _convert_sharegpt_pair(row: Row) -> dict[str, Any]:
    """Convert a ShareGPT row with a preference pair. An answer {from, value} becomes a list with one message."""
    return {"prompt": sharegpt_messages(row)} | {
        name: [_sharegpt_message(row[name], name)] if isinstance(row.get(name), Mapping) else row.get(name)
        for name in ("chosen", "rejected")
    }


def sharegpt_messages(row: Row) -> list[dict[str, Any]]:
    """Return the messages {role, content} of a ShareGPT row. Its field system becomes the first message."""
    turns = _list_field(row, "conversations")
    messages = [_sharegpt_message(turn, f"conversations[{number}]") for number, turn in enumerate(turns)]
    system = row.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _sharegpt_message(turn: Any, where: str) -> dict[str, Any]:
    """Convert one turn {from, value} to a message {role, content}. Errors call the turn `where`.

    A turn that calls tools becomes a message with empty content and tool_calls. A turn that has a role is only copied.
    """
    if isinstance(turn, Mapping) and "role" in turn:  # some sets mix the two forms
        return dict(turn)
    speaker = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(turn, Mapping) or not isinstance(speaker, str) or speaker not in _ROLES:
        known = ", ".join(_ROLES)
        raise DataError(
            f"field {where} is {describe_value(turn)}, not a turn {{from, value}} whose from is one of {known}"
        )
    role, value = _ROLES[speaker], turn.get("value")
    if speaker in _CALLS:
        return {"role": role, "content": "", "tool_calls": parse_tool_calls(value, where)}
    return {"role": role, "content": value}


def parse_tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Convert a call {name, arguments}, a list of calls, or either as JSON text, to the format of OpenAI's messages."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"field {where} is a tool call, but not JSON: {describe_json_error(error)}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if any(not isinstance(call, Mapping) or not isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"field {where} is {describe_value(value)}, not a tool call {{name, arguments}}")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _text_field(row: Row, name: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"field {name} is {describe_value(value)}, not text")
    return value or ""


def _list_field(row: Row, name: str) -> list[Any]:
    value = row.get(name)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DataError(f"field {name} is {describe_value(value, name in row)}, not a list")
    return list(value)


logger = logging.getLogger("areno")

SHOWN = 5  # faulty rows that a message lists
MAX_CHECKED = 1_000_000  # rows that are checked before the run, in some seconds


def prepare_rows(
    rows: Rows, kind: RowKind, setting: str, name: str | Key, *, columns: Mapping[str, str] | None = None, key: str = ""
) -> Rows:
    """Convert rows to areno's form and check them. Of more than a million rows, only an even sample is checked.

    Rows in another form are converted each time that they are read. Rows outside the sample are checked at that time.
    Errors quote `setting` and `name`. They suggest the settings `columns` and `loader` of the section `key`.
    """
    rows = without_nulls(rows)
    if len(rows) == 0:
        raise DataError(Problem(setting, "{} has no rows", name))
    if columns:
        try:
            rows = rename_columns(rows, columns)
        except DataError as error:
            raise DataError(Problem(f"{key}.columns", "{}: {}", name, error)) from error
    elif form := recognise_format(rows, kind):
        logger.info("%s: %d rows of the form %s: %s", name, len(rows), form.name, form.description)
        rows = ConvertedRows(rows, form.convert)
    indices = range(1) if isinstance(rows, LazyRows) else range(0, len(rows), -(-len(rows) // MAX_CHECKED))
    faults, count = [], 0
    try:
        for number, problem in _iter_faulty_rows(rows, kind, indices):
            count += 1
            if count <= SHOWN:
                faults.append((number, problem))
    except DataError as error:  # a row that cannot be read
        raise DataError(Problem(setting, str(error))) from error
    if faults:
        raise DataError(_dataset_problems(rows, kind, setting, name, key, faults, (count, len(indices))))
    if indices.step > 1:
        logger.info(
            "%s: of %d rows, each %dth is checked now, the others when they are used", name, len(rows), indices.step
        )
        is_converted = isinstance(rows, ConvertedRows)
        rows = (
            ConvertedRows(rows.rows, rows.convert, kind) if is_converted else ConvertedRows(rows, lambda row: {}, kind)
        )
    return rows


def _iter_faulty_rows(rows: Rows, kind: RowKind, indices: range) -> Iterator[tuple[int, str]]:
    """Yield (index, reason) for each faulty row among the rows with the indices `indices`."""
    convert: Callable[[Row], Any] = rows.convert_row if isinstance(rows, ConvertedRows) else lambda row: row
    plain = rows.rows if isinstance(rows, ConvertedRows) else rows
    fields = None if isinstance(rows, ConvertedRows) else (*FIELDS[kind], VARIABLES)
    for number, row in zip(indices, _iter_fields(plain, fields, indices), strict=False):
        try:
            problem = row_problem(convert(row), kind)
        except DataError as error:
            problem = str(error)
        if problem is not None:
            yield number, problem


def _iter_fields(rows: Rows, fields: Sequence[str] | None, indices: range) -> Iterator[Row]:
    """Yield the rows with the indices `indices`. From an Arrow table, read only the columns `fields` (None: all)."""
    columns = getattr(rows, "column_names", None)
    present = [name for name in columns or () if fields is None or name in fields]
    if columns is None:
        read: Any = rows
    elif present:
        table: Any = rows
        read = without_nulls(table.select_columns(present).with_format(None))
    else:  # one row is enough to report that the fields are missing
        yield {}
        return
    for start in range(0, len(indices), 1000):
        yield from rows_at(read, indices[start : start + 1000])


def _dataset_problems(
    rows: Rows,
    kind: RowKind,
    setting: str,
    name: str | Key,
    key: str,
    faults: Sequence[tuple[int, str]],
    counts: tuple[int, int],
) -> list[Problem]:
    """Return a Problem for each of `faults` (row index, reason), and one with `counts` (faulty rows, checked rows)."""
    number, problem = faults[0]
    first = f"row {number}: {problem}; expected {EXPECTED[kind]}"
    named = dict[str, str]()
    if not isinstance(rows, ConvertedRows) and isinstance(rows[number], Mapping):
        first += f"; the row has {join_names(rows[number]) or 'no fields'}"
        named = similar_columns(kind, rows[number])
    text, args = "{} {}", [name, first]
    if key:
        named = named or {"prompt": "COLUMN"}
        settings = " ".join(["{}={}"] * len(named))
        text += f"; name your columns, as in {settings}, or set {{}} to a file.py that makes such rows"
        args += [
            each for field, column in named.items() for each in (Key(f"{key}.columns.{field}"), printable(str(column)))
        ]
        args.append(Key(f"{key}.loader"))
    problems = [Problem(setting, text, *args)]
    problems += [Problem(setting, "{} row {}: {}", name, number, problem) for number, problem in faults[1:]]
    if counts[0] > 1:
        shown = f"; the first {SHOWN} are above" if counts[0] > SHOWN else ""
        problems.append(Problem(setting, "{}: {} of {} rows are faulty{}", name, *counts, shown))
    return problems


def similar_columns(kind: RowKind, row: Row) -> dict[str, str]:
    """Return field -> column for the fields that a row lacks and has under a name that looks like them."""
    found = dict[str, str]()
    for field in (*FIELDS[kind], *(("solutions", "tools") if kind == "prompt" else ("tools",))):
        rest = {name: value for name, value in row.items() if name not in found.values() and _is_filled(value)}
        if field not in rest and (column := _similar(field, rest, _TALKS * (kind == "prompt"))) is not None:
            found[field] = column
    return found


def _similar(field: str, row: Row, of_prompts: tuple[str, ...]) -> str | None:
    others = _OTHER_NAMES.get(field, ()) + (of_prompts if field == "prompt" else ())
    names = [_plain(name) for name in (field, *others)]
    for is_same in (str.__eq__, _is_misspelt):
        for name in names:
            if (found := next((each for each in row if is_same(_plain(each), name)), None)) is not None:
                return found
    return None


def _is_filled(value: Any) -> bool:
    return value is not None and value not in ("", [])


def _plain(name: Any) -> str:
    return "".join(char for char in str(name).lower() if char.isalpha())


def _is_misspelt(name: str, right: str) -> bool:
    """Whether a name has one letter more, less or other than it should, or two letters exchanged."""
    n = common_prefix_length(name, right)
    pairs = ((name[n + 1 :], right[n + 1 :]), (name[n + 1 :], right[n:]), (name[n:], right[n + 1 :]))
    is_exchanged = name[n : n + 2] == right[n : n + 2][::-1] and name[n + 2 :] == right[n + 2 :]
    return len(right) >= _LEAST_WORD and (is_exchanged or any(one == other for one, other in pairs))
