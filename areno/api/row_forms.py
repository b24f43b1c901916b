"""What a row of a dataset must look like, for each kind of training.

prompt  {prompt: text or messages, solutions?: anything}                      reinforcement learning
sft     {prompt: text or messages, response: text} or {messages}              supervised fine-tuning
dpo     {prompt: text or messages, chosen, rejected}                          preference pairs
        two answers, both text or both messages that follow the prompt;
        or {chosen: messages, rejected: messages}
        two conversations that begin alike: the messages they share are the prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from areno.errors import DataError

Row = Mapping[str, Any]
RowKind = Literal["prompt", "sft", "dpo"]

EXPECTED = {
    "prompt": "{prompt: text or messages, solutions: optional}",
    "sft": "{prompt, response} or {messages}",
    "dpo": "{prompt, chosen, rejected}, or {chosen, rejected} as messages that begin alike",
}
FIELDS = {
    "prompt": ("prompt",),
    "sft": ("prompt", "response", "messages"),
    "dpo": ("prompt", "chosen", "rejected"),
}


def row_problem(row: Any, kind: RowKind) -> str | None:
    """What keeps a row from being of `kind`, or None."""
    if not isinstance(row, Mapping):
        return f"is {brief(row)}, not a dictionary"
    if kind == "prompt":
        return _prompt_problem(row)
    if kind == "dpo":
        try:
            split_pair(row)
        except DataError as error:
            return str(error)
        return None
    if row.get("messages") is not None and row.get("response") is None:
        problem = messages_problem(row["messages"])
        if problem is None and not any(m["role"] == "assistant" for m in row["messages"]):
            problem = "has no assistant message to train on"
        return problem and f"field messages {problem}"
    problem = _prompt_problem(row)
    if problem is None and not isinstance(row.get("response"), str):
        problem = f"field response is {brief(row.get('response'), 'response' in row)}, not text"
    return problem


def _prompt_problem(row: Row) -> str | None:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return None if prompt else "field prompt is empty"
    if not isinstance(prompt, Sequence):
        return f"field prompt is {brief(prompt, 'prompt' in row)}, not text or messages"
    problem = messages_problem(prompt)
    if problem is None and prompt[-1]["role"] == "assistant":
        problem = "ends with an assistant message, so there is nothing left to answer"
    return problem and f"field prompt {problem}"


def messages_problem(messages: Any) -> str | None:
    """What is wrong with a list of chat messages, or None."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"is {brief(messages)}, not a list of messages"
    if not messages:
        return "is an empty list of messages"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"[{number}] is {brief(message)}, not a message {{role, content}}"
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"[{number}].content is {brief(content, 'content' in message)}, not text"
    return None


def split_pair(row: Row) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a DPO row: answers as text with a prompt of either form, or three message lists.

    Raises DataError for a row that is none.
    """
    answers: dict[str, Any] = {name: row.get(name) for name in ("chosen", "rejected")}
    for name, answer in answers.items():
        if not isinstance(answer, str) and (isinstance(answer, Mapping) or not isinstance(answer, Sequence)):
            raise DataError(f"field {name} is {brief(answer, name in row)}, not text or messages")
    chosen, rejected = answers.values()
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("of the fields chosen and rejected one is text and one is messages; give both in one form")
    if chosen == rejected:
        raise DataError("fields chosen and rejected are the same, so none is preferred")
    if isinstance(chosen, str) or row.get("prompt") is not None:
        problem = _prompt_problem(row)
        if problem:
            raise DataError(problem)
    if isinstance(chosen, str):
        return row["prompt"], chosen, rejected
    for name, answer in answers.items():
        if problem := messages_problem(answer):
            raise DataError(f"field {name} {problem}")
    prompt, chosen, rejected = _split_conversations(row.get("prompt"), list(chosen), list(rejected))
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise DataError(f"field {name} has nothing after the {len(prompt)} messages that both begin with")
        if answer[0]["role"] != "assistant":
            raise DataError(
                f"field {name} goes on after the prompt with a message of role {answer[0]['role']!r}; the first "
                "message in which the two differ must be the assistant's"
            )
    return prompt, chosen, rejected


def _split_conversations(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The prompt as messages, and what follows it in each of the two, which may repeat it."""
    if prompt is None:
        pairs = zip(chosen, rejected, strict=False)
        n = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
        if not n:
            raise DataError(
                "field prompt is missing, and chosen and rejected begin with different messages; give a prompt, or "
                "conversations that share their first messages"
            )
        return chosen[:n], chosen[n:], rejected[n:]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    n = len(asked) if chosen[: len(asked)] == rejected[: len(asked)] == asked else 0
    return asked, chosen[n:], rejected[n:]


def brief(value: Any, present: bool = True) -> str:
    """A short description of a value found where something else was expected."""
    if value is None:
        return "null" if present else "missing"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
