"""Find the messages, and the parts of trained messages, that a chat template leaves out.

A conversation is rendered with random marks in place of its texts and numbers. A part is left out if its mark is not in
the output. Searching for the text itself would prove nothing, because it may also occur elsewhere. Conversations of the
same shape are rendered only once. `missing_text` compares the texts themselves, for templates that change texts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from areno.data.chat_template import END_THINK, THINK
from areno.data.control_tokens import BREAK, random_mark
from areno.data.messages import REASONING, ROLES, decoded_arguments, rendered_or_none, template_traits
from areno.errors import DataError
from areno.types import Message

_MAX_SHAPES = 10_000  # of conversations, for each template
_MARK = random_mark()
_FLOAT_MARK = str(secrets.randbelow(9 * 10**7) + 10**7)  # few digits, which floats of 64 bits hold exactly


class Omissions(NamedTuple):
    """The parts of trained messages that a template leaves out, as {index of message: its first missing part}."""

    as_last: dict[int, str]  # although the message is the last
    in_talk: dict[int, str]  # of the whole conversation


def check_rendered(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Any = None,
    thinking: bool | None = None,
    opened: bool = False,
    trained: Collection[int] = (),
    /,
    **variables: Any,
) -> Omissions:
    """Check that the template renders every message. Return the parts of trained messages that it leaves out.

    Raises DataError if a message is missing. There are two exceptions: an assistant message that the template drops
    once more messages follow, and text beside tool calls in a message that is not trained. `trained` are indices of
    messages, and `opened` is add_generation_prompt.
    """
    form = template_traits(tokenizer)
    if form.template is None:
        return Omissions({}, {})
    shapes = tuple(_message_shape(message, at in trained) for at, message in enumerate(messages))
    key = hash((shapes, bool(tools), thinking, opened, repr(variables)))
    if key not in form.left_out:
        if len(form.left_out) >= _MAX_SHAPES:
            form.left_out.clear()
        form.left_out[key] = _find_omissions(tokenizer, messages, trained, tools, thinking, opened, **variables)
    at, parts = form.left_out[key]
    if at is not None:
        raise _not_rendered_error(tokenizer, messages, at, tools, thinking, opened, **variables)
    return parts


def _message_shape(message: Message, trained: bool) -> Hashable:
    calls = message.get("tool_calls") or ()
    if not trained:
        return message["role"], bool(message["content"].strip()), bool(calls)
    pieces = tuple(
        piece if n % 2 else bool(piece.strip()) for n, piece in enumerate(_split_at_think_tags(message["content"]))
    )
    functions = [[each.get("name"), decoded_arguments(each.get("arguments"))] for each in _called_functions(message)]
    return pieces, bool(reasoning_of(message).strip()), _shape_of_value(functions)


def _shape_of_value(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return "{}", tuple(map(_shape_of_value, value.values()))
    if isinstance(value, list | tuple):
        return "[]", tuple(map(_shape_of_value, value))
    return bool(value.strip()) if isinstance(value, str) else type(value)


def _find_omissions(
    tokenizer: Any,
    messages: Sequence[Message],
    trained: Collection[int],
    tools: Any,
    thinking: bool | None,
    opened: bool,
    /,
    **variables: Any,
) -> tuple[int | None, Omissions]:
    """Return (index of the first message that is not rendered, or None; omissions). See `check_rendered`."""
    marks = [_Marks(at) for at in range(len(messages))]
    marked = [own.mark_message(each, own.at in trained) for own, each in zip(marks, messages, strict=True)]
    text, found = rendered_or_none(tokenizer, marked, tools, thinking, opened, **variables), Omissions({}, {})
    for own, message in zip(marks, messages, strict=True):
        if text is None or not (missing := own.first_missing_part(text)):
            continue
        if own.at in trained:
            found.in_talk[own.at] = missing
        # A message counts as rendered if the answer that it is, or the prompt of a trained answer after it, has it.
        is_answer, last = message["role"] == "assistant", max(trained, default=0)
        if is_answer or own.at < last:
            stop = own.at + 1 if is_answer else last
            shorter = rendered_or_none(tokenizer, marked[:stop], tools, thinking, not is_answer, **variables)
            if shorter is None or not (missing := own.first_missing_part(shorter)):
                continue
        if own.at not in trained:
            return own.at, found
        found.as_last[own.at] = missing
    return None, found


def _not_rendered_error(
    tokenizer: Any, messages: Sequence[Message], at: int, /, *how: Any, **variables: Any
) -> DataError:
    """Return the error for messages[at]. It names the roles with which the template would render the message."""
    known = []
    for role in ROLES:
        changed = [*messages[:at], {**messages[at], "role": role, "content": _MARK}, *messages[at + 1 :]]
        if role != messages[at]["role"] and _MARK in (rendered_or_none(tokenizer, changed, *how, **variables) or ""):
            known.append(role)
    text = f"the chat template does not render messages[{at}], whose role is {messages[at]['role']!r}"
    advice = f"give it a role that the template renders here ({', '.join(known)}), or " if known else ""
    return DataError(f"{text}; {advice}leave it out")


class _Marks:
    """Replaces parts of messages[at] by marks, and finds the marks that are missing in the rendered text."""

    def __init__(self, at: int):
        self.at = at
        self._names: dict[str, str] = {}  # mark -> name of its part

    def mark_message(self, message: Message, trained: bool) -> Message:
        """Return the message with marks. If `trained`, they replace all its parts, otherwise only its text."""
        if not trained:
            is_marked = message["content"].strip() and not message.get("tool_calls")
            return {**message, "content": self._mark_value("the text", _MARK)} if is_marked else message
        pieces = _split_at_think_tags(message["content"])
        pieces[::2] = [self._mark_value(f"a part of messages[{self.at}].content", piece) for piece in pieces[::2]]
        marked = {**message, "content": "".join(pieces)}
        for name in REASONING:
            if isinstance(message.get(name), str):
                marked[name] = self._mark_value(f"the reasoning of messages[{self.at}]", message[name])
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._mark_call(f"tool_calls[{n}]", call) for n, call in enumerate(calls)]
        return marked

    def first_missing_part(self, text: str) -> str | None:
        """Return the name of a part whose mark is missing in a rendered text, None if there is no such part."""
        absent = [name for mark, name in self._names.items() if mark not in text]
        of_calls = [name for name in self._names.values() if name.startswith("tool_calls")]
        if absent and absent[0] in of_calls:
            are_all = len(absent) == len(of_calls)
            return f"the tool calls of messages[{self.at}]" if are_all else f"a part of messages[{self.at}].{absent[0]}"
        return absent[0] if absent else None

    def _mark_call(self, name: str, call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
            return call
        given = function.get("arguments")
        arguments = self._mark_value(name, decoded_arguments(given))
        if isinstance(given, str) and not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        function = {**function, "name": self._mark_value(name, function.get("name")), "arguments": arguments}
        return {**call, "function": function}

    def _mark_value(self, name: str, value: Any) -> Any:
        """Replace texts, keys and numbers in a JSON value by marks of the part `name`. Blank texts stay."""
        if isinstance(value, Mapping):
            return {self._mark_value(name, key): self._mark_value(name, each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_value(name, each) for each in value]
        is_blank = isinstance(value, str) and not value.strip()
        if is_blank or isinstance(value, bool) or not isinstance(value, str | int | float):
            return value
        number = f"{self.at:05}{len(self._names):05}"
        mark = f"{_FLOAT_MARK}{int(number) % 10**6}.5" if isinstance(value, float) else _MARK + number
        self._names[mark] = name
        return type(value)(mark) if not isinstance(value, str) else value.replace(value.strip(), mark)


def _split_at_think_tags(content: str) -> list[str]:
    for tag in (THINK, END_THINK):
        content = content.replace(tag, f"{_MARK}{tag}{_MARK}")
    return content.split(_MARK)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message has in a field of its own, "" without one."""
    return next((message[name] for name in REASONING if isinstance(message.get(name), str)), "")


def content_and_reasoning(message: Mapping[str, Any]) -> list[str]:
    """Return the texts around the think tags in the content, and then the reasoning."""
    return [part.strip() for part in (*_split_at_think_tags(message["content"])[::2], reasoning_of(message))]


def missing_text(message: Mapping[str, Any], answer: str, at: int) -> str | None:
    """Return a part of `mark_message`, by name, whose text the trained text `answer` lacks. None if it lacks none.

    White space and think tags do not count.
    """

    def is_missing(text: str) -> bool:
        return "".join(text.replace(BREAK, "").split()) not in written

    written = "".join(answer.replace(BREAK, "").split())
    *content, reasoning = content_and_reasoning(message)
    if any(map(is_missing, content)):
        return f"a part of messages[{at}].content"
    if is_missing(reasoning):
        return f"the reasoning of messages[{at}]"
    for leaf in _json_leaves(
        [[function.get("name"), function.get("arguments")] for function in _called_functions(message)]
    ):
        if all(map(is_missing, _template_spellings(leaf))):
            return f"the tool calls of messages[{at}]"
    return None


def _called_functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    found = [call.get("function") for call in calls if isinstance(call, Mapping)]
    return [function for function in found if isinstance(function, Mapping)]


def _template_spellings(leaf: Any) -> list[str]:
    """Return the forms in which templates write a text, number or truth value."""
    quotes = slice(1, -1) if isinstance(leaf, str) else slice(None)
    return [str(leaf), *(json.dumps(leaf, ensure_ascii=ascii)[quotes] for ascii in (True, False))]


def _json_leaves(value: Any) -> Iterator[str | float]:
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif value is not None:
            yield value
