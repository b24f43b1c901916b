"""Convert messages to the form that a chat template reads, for training and serving alike.

Templates differ in what they accept. `template_messages` finds out by rendering a few short conversations, once for
each template, and then converts all messages to that form.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from areno.data.chat_template import render
from areno.data.control_tokens import random_mark
from areno.data.row_schema import VARIABLES, json_value_problem
from areno.errors import DataError, Key
from areno.types import Message

_ALIASES = {"developer": "system", "function": "tool"}  # role -> role for templates that do not render it
ROLES = ("system", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
_NOT_RENDERED = {"weight", "function_call", "tool_calls", *REASONING}
_MAX_VARIANTS = 64  # of a tokenizer, for rows that set variables of the template
_MARK = random_mark()


def with_template_variables(tokenizer: Any, variables: Mapping[str, Any]) -> Any:
    """Return a copy of a tokenizer whose chat template sets `variables`, or the tokenizer itself if there are none."""
    if not variables:
        return tokenizer
    if tokenizer.chat_template is None:
        text = f"field {VARIABLES} needs a tokenizer with a chat template; set {{}} to one that has it"
        raise DataError(text, Key("tokenizer_path"))
    settings = "".join(f"{{% set {name} = {value!a} %}}\n" for name, value in variables.items())
    own = _variants.setdefault(tokenizer, {})
    if settings not in own:
        if len(own) >= _MAX_VARIANTS:
            own.clear()
        own[settings] = copy.copy(tokenizer)
    own[settings].chat_template = settings + tokenizer.chat_template
    return own[settings]


_variants: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def template_messages(tokenizer: Any, messages: Sequence[Any]) -> list[Message]:
    """Convert messages from OpenAI's form to the form that the chat template reads.

    A list of text parts becomes one text, joined as the template joins parts. If the template takes no parts, they are
    joined by line breaks. The arguments of tool calls become objects, or JSON text if the template takes no objects.
    Reasoning gets the key that the template reads. Content beside tool calls is appended to the reasoning if the
    template refuses both (gpt-oss). Roles that the template does not render are replaced: developer by system, and
    function by tool.
    """
    form = template_traits(tokenizer)
    return [_template_message(tokenizer, form, message) for message in messages]


def _template_message(tokenizer: Any, form: _TemplateTraits, given: Mapping[str, Any]) -> Message:
    message = {key: value for key, value in given.items() if key not in _NOT_RENDERED}
    message["role"] = form.rendered_role(tokenizer, given["role"])
    content = given.get("content")
    if isinstance(content, list):
        content = form.join_parts(tokenizer, message["role"], [part["text"] for part in content])
    message["content"] = content or ""
    if reasoning := next((given[name] for name in REASONING if given.get(name) is not None), None):
        message[form.reasoning] = reasoning
    if calls := given.get("tool_calls") or ([given["function_call"]] if given.get("function_call") else []):
        message["tool_calls"] = [_template_call(call, form.calls_are_text) for call in calls]
        if reasoning and form.takes_one_text_beside_calls and message["content"].strip():
            message[form.reasoning], message["content"] = f"{reasoning}\n\n{message['content']}", ""
    return message


def separate_calls(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """Divide messages with several tool calls, if the template writes only the first call of a message (gpt-oss).

    Each call becomes a message, followed by its result. The messages must be in the template's form.
    """
    rest, found = list(messages), list[Message]()
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2 or not template_traits(tokenizer).drops_later_calls:
            found.append(message)
            continue
        n_results = next((n for n, each in enumerate(rest) if each["role"] != "tool"), len(rest))
        results, rest = rest[:n_results], rest[n_results:]
        for number, call in enumerate(calls):
            texts = {} if number == 0 else {"content": "", **dict.fromkeys(message.keys() & set(REASONING), "")}
            found.append({**message, **texts, "tool_calls": [call]})
            if number + 1 == len(calls):
                found += results
            elif (at := _result_index(results, call)) is not None:
                found.append(results.pop(at))
    return found


def _result_index(results: Sequence[Message], call: Any) -> int | None:
    """Return the index of a call's result: that with its id, else the first without an id, else None."""
    ids, own = [each.get("tool_call_id") for each in results], call.get("id") if isinstance(call, Mapping) else None
    return next((ids.index(one) for one in (own, None) if one in ids), None)


def _template_call(given: Any, as_text: bool) -> Any:
    """Convert a tool call to {type, function: {name, arguments}}. Values that are no tool call are unchanged."""
    if not isinstance(given, Mapping) or not isinstance(function := given.get("function", given), Mapping):
        return given
    arguments = decoded_arguments(function.get("arguments"))
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if function is given:
        given, function = {key: given[key] for key in given if key == "id"}, {"name": given.get("name")}
    return {"type": "function", **given, "function": {**function, "arguments": arguments}}


def decoded_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object, parsed if they are JSON text. None becomes {}.

    A text is not parsed if it is no JSON object, is nested too deeply, or contains half of a surrogate pair.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) and json_value_problem(found) is None else arguments


def rendered_or_none(tokenizer: Any, messages: Sequence[Message], /, *how: Any, **variables: Any) -> str | None:
    """Call `render`. Returns None if the template refuses the messages."""
    try:
        return render(tokenizer, list(messages), *how, **variables)
    except DataError:
        return None


class _TemplateTraits:
    """What a chat template accepts. Short conversations with marks are rendered to find out."""

    def __init__(self, tokenizer: Any):
        self.template = tokenizer.chat_template
        self.left_out: dict[int, Any] = {}  # hash of a conversation's shape -> what template_omissions.py found
        self._roles: dict[str, str] = {}
        self._separators: dict[str, tuple[str, bool]] = {}
        self.reasoning, self.calls_are_text, self.takes_later_system = REASONING[0], False, True
        self.takes_one_text_beside_calls = self.drops_later_calls = False
        if self.template is not None:
            self._probe(tokenizer)

    def _probe(self, tokenizer: Any) -> None:
        question = {"role": "user", "content": "a"}
        for name in REASONING:
            answer = {"role": "assistant", "content": "b", name: _MARK}
            if _MARK in (rendered_or_none(tokenizer, [question, answer]) or ""):
                self.reasoning = name
                break
        self.calls_are_text = not self._renders_calls(tokenizer, False) and self._renders_calls(tokenizer, True)
        both = {"content": "b", self.reasoning: "b"}
        self.takes_one_text_beside_calls = not self._renders_calls(tokenizer, self.calls_are_text, **both) and (
            self._renders_calls(tokenizer, self.calls_are_text, **{self.reasoning: "b"})
        )
        self.drops_later_calls = self._drops_later_calls(tokenizer)
        later = [question, {"role": "assistant", "content": "b"}, question, {"role": "system", "content": _MARK}]
        self.takes_later_system = _MARK in (rendered_or_none(tokenizer, later) or "")

    def _renders_calls(self, tokenizer: Any, as_text: bool, **texts: str) -> bool:
        """Return whether the template renders tool calls whose arguments are objects or, if `as_text`, JSON text.

        `texts` are fields of the message with the calls.
        """
        arguments: Any = {"c": _MARK}
        function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
        call = {"type": "function", "id": "call00000", "function": function}
        calls = {"role": "assistant", "content": "", "tool_calls": [call], **texts}
        text = rendered_or_none(tokenizer, [{"role": "user", "content": "a"}, calls]) or ""
        return _MARK in text and f'\\"{_MARK}' not in text  # a text that is encoded once more has its quotes escaped

    def _drops_later_calls(self, tokenizer: Any) -> bool:
        """Return whether the template writes one of two tool calls of a message, without an error."""
        names = [f"f{_MARK}{number}" for number in (1, 2)]
        arguments: Any = json.dumps({"c": 1}) if self.calls_are_text else {"c": 1}
        calls = [
            {"type": "function", "id": f"call0000{name[-1]}", "function": {"name": name, "arguments": arguments}}
            for name in names
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        text = rendered_or_none(tokenizer, [{"role": "user", "content": "a"}, answer]) or ""
        return names[0] in text and names[1] not in text

    def rendered_role(self, tokenizer: Any, role: str) -> str:
        """Return `role`, or the role that replaces it if the template does not render it."""
        if role not in _ALIASES or self.template is None:
            return _ALIASES.get(role, role)
        if role not in self._roles:
            is_rendered = _MARK in (rendered_or_none(tokenizer, _example_conversation(role, _MARK)) or "")
            self._roles[role] = role if is_rendered else _ALIASES[role]
        return self._roles[role]

    def join_parts(self, tokenizer: Any, role: str, parts: Sequence[str]) -> str:
        if role not in self._separators:
            self._separators[role] = _part_separator(tokenizer, role) if self.template is not None else ("\n", False)
        separator, trims = self._separators[role]
        return separator.join(part.strip() for part in parts) if trims else separator.join(parts)


def _example_conversation(role: str, content: Any) -> list[Message]:
    message, question = {"role": role, "content": content}, {"role": "user", "content": "a"}
    if role in ("system", "developer"):
        return [message, question]
    if role == "assistant":
        return [question, message, question]
    if role in ("tool", "function"):
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
        calls = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [question, calls, {**message, "tool_call_id": "call00000", "name": "f"}, question]
    return [message]


def _part_separator(tokenizer: Any, role: str) -> tuple[str, bool]:
    """Return (text that the template writes between two parts of a content, whether it strips each part)."""
    first, second = f"{_MARK}1", f"{_MARK}2"
    parts = [{"type": "text", "text": f"\t{mark}\t"} for mark in (first, second)]
    text = rendered_or_none(tokenizer, _example_conversation(role, parts)) or ""
    _, found, rest = text.partition(first)
    between, also_found, _ = rest.partition(second)
    if not found or not also_found or "'" in between or '"' in between:
        return "\n", False
    is_kept = len(between) > 1 and between[0] == between[-1] == "\t"
    return (between[1:-1], False) if is_kept else (between, True)


_forms: weakref.WeakKeyDictionary[Any, _TemplateTraits] = weakref.WeakKeyDictionary()


def template_traits(tokenizer: Any) -> _TemplateTraits:
    form = _forms.get(tokenizer)
    if form is None or form.template != tokenizer.chat_template:
        form = _forms[tokenizer] = _TemplateTraits(tokenizer)
    return form
