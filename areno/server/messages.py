"""Messages and tools of a chat request: checked, and in the form in which chat templates read them."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areno.data.row_schema import bad_text
from areno.schema.values import show
from areno.server.errors import bad, is_deeper, is_larger
from areno.server.fields import MOST_LEVELS, Fields
from areno.types import Message

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")

MOST_SCHEMA = 1_000_000
"""Characters of a schema, of all tools, or of the arguments of a call."""
TOO_LARGE = f"has more than {MOST_SCHEMA:,} characters"


@dataclass(frozen=True)
class Tool:
    """definition: in OpenAI's form, as the chat template gets it."""

    name: str
    definition: dict[str, Any]


def read_messages(given: list[Any] | None) -> list[Message]:
    """Messages as chat templates read them: contents are text, and arguments of calls are objects."""
    if not given:
        raise bad("messages", "is missing or empty; a list of messages is expected")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _message(given: Any, where: str) -> Message:
    fields = Fields(given, where)
    role = fields.choice("role", _ROLES)
    if role is None:
        raise bad(f"{where}.role", "is missing")
    message: Message = {"role": "system" if role == "developer" else role}
    content = _content(fields.take("content"), f"{where}.content")
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(fields.items("tool_calls", 1024) or [])]
    if content is None and not calls and role != "assistant":
        raise bad(f"{where}.content", "is missing; text is expected")
    message["content"] = content or ""
    # Reasoning goes by two names in replies of servers, and clients send back what they got.
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        if role != "assistant":
            raise bad(f"{where}.tool_calls", "is for messages of the assistant")
        message["tool_calls"] = calls
    for field in ("name", "tool_call_id"):
        if (value := fields.text(field)) is not None:
            message[field] = value
    if role == "tool" and "tool_call_id" not in message:
        raise bad(f"{where}.tool_call_id", "is missing; the id of the call that is answered is expected")
    fields.finish(ignored=("refusal", "annotations", "audio", "function_call"))
    return message


def _content(value: Any, where: str) -> str | None:
    """The text of a content; that of several parts is joined."""
    if value is None or isinstance(value, str):
        text = value
    elif isinstance(value, list):
        parts = []
        for number, part in enumerate(value):
            if not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal"):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise bad(f"{where}[{number}]", f"is of type {show(kind)}; this server takes text only")
            piece = part.get(part["type"])
            if not isinstance(piece, str):
                raise bad(f"{where}[{number}].text", f"is {show(piece)}; a string is expected")
            parts.append(piece)
        text = "\n".join(parts)
    else:
        raise bad(where, f"is {show(value)}; text is expected")
    if text is not None and (problem := bad_text(text)):
        raise bad(where, problem)
    return text


def _call(given: Any, where: str) -> dict[str, Any]:
    fields = Fields(given, where)
    function = Fields(fields.take("function"), f"{where}.function")
    name, arguments = function.text("name"), function.take("arguments")
    if not name:
        raise bad(f"{where}.function.name", "is missing; a string is expected")
    function.finish()
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _arguments(arguments, where)}}
    if (call_id := fields.text("id")) is not None:
        call["id"] = call_id
    fields.finish(ignored=("type", "index"))
    return call


def _arguments(value: Any, where: str) -> Any:
    """Templates write arguments as JSON themselves, so text that is an object is read; other text stays text.

    So does what they could not write: nested too deeply, or with half of a surrogate pair, for which JSON has escapes.
    """
    if value is None:
        return {}
    if is_larger(value, MOST_SCHEMA):
        raise bad(f"{where}.function.arguments", TOO_LARGE)
    if isinstance(value, str):
        if problem := bad_text(value):
            raise bad(f"{where}.function.arguments", problem)
        try:
            found = json.loads(value)
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, dict) and not is_deeper(found, MOST_LEVELS) else value
    if isinstance(value, Mapping):
        return dict(value)
    raise bad(f"{where}.function.arguments", f"is {show(value)}; JSON as a string is expected")


def read_tools(given: list[Any] | None) -> list[Tool]:
    """The tools, each a function with a JSON schema of its arguments."""
    if is_larger(given, MOST_SCHEMA):
        raise bad("tools", TOO_LARGE)
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(given or [])]
    for name, n in Counter(tool.name for tool in tools).items():
        if n > 1:
            raise bad("tools", f"has two functions named {show(name)}")
    return tools


def _tool(given: Any, where: str) -> Tool:
    fields = Fields(given, where)
    if fields.choice("type", ("function",)) is None:
        raise bad(f"{where}.type", "is missing; function is expected")
    function = Fields(fields.take("function"), f"{where}.function")
    name = function.text("name")
    if not name or len(name) > 64 or not _NAME.issuperset(name):
        found = show(name) if name else "missing"
        raise bad(f"{where}.function.name", f"is {found}; 1 to 64 letters, digits, - and _ are expected")
    function.text("description")
    parameters = function.take("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.function.parameters", is_root=True)
    function.finish(ignored=("strict",))
    fields.finish()
    if problem := bad_text(given):
        raise bad(where, problem)
    return Tool(name, given)


def _check_schema(schema: Any, where: str, is_root: bool = False) -> None:
    """Whether something looks like the JSON schema of an object."""
    if isinstance(schema, bool) and not is_root:
        return
    if not isinstance(schema, Mapping):
        raise bad(where, f"is {show(schema)}; a JSON schema is expected")
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind is not None and kind not in _KINDS:
            raise bad(f"{where}.type", f"is {show(kind)}; expected one of {', '.join(_KINDS)}")
    if is_root and schema and kinds not in ("object", None):
        raise bad(f"{where}.type", f"is {show(kinds)}; the arguments of a function are an object")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise bad(f"{where}.properties", f"is {show(properties)}; an object is expected")
    for name, inner in properties.items():
        _check_schema(inner, f"{where}.properties.{name}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad(f"{where}.required", f"is {show(required)}; a list of names is expected")


def read_tool_choice(value: Any, tools: list[Tool]) -> tuple[str, str | None]:
    """(none, auto or required; the name of a function that is asked for)."""
    if value is None:
        return "auto" if tools else "none", None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise bad("tool_choice", f"is {show(value)}; none, auto, required or a function is expected")
        if value == "required" and not tools:
            raise bad("tool_choice", "is required, but there are no tools")
        return value, None
    fields = Fields(value, "tool_choice")
    fields.choice("type", ("function",))
    name = Fields(fields.take("function"), "tool_choice.function").text("name")
    fields.finish()
    if name not in [tool.name for tool in tools]:
        raise bad("tool_choice.function.name", f"is {show(name)}, which is none of the tools")
    return "required", name
