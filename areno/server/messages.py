"""Checks of the messages, tools and `tool_choice` in a chat request, and hashes that identify conversations.

`where` is the path of a value in the request. A wrong value raises ApiError 400 with this path.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.data.messages import decoded_arguments
from areno.data.row_schema import json_value_problem
from areno.schema.values import format_value
from areno.server.errors import exceeds_size, invalid_field_error
from areno.server.json_bodies import RequestFields
from areno.types import Message

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")
_KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")

MAX_SCHEMA = 1_000_000  # characters of a schema, of all tools, or of the arguments of a call
_LONG_TEXT = 1000  # characters of a text that is hashed without JSON
TOO_LARGE = f"has more than {MAX_SCHEMA:,} characters"


Tool = dict[str, Any]
"""A tool definition in OpenAI's form, for the chat template."""


def read_messages(given: list[Any] | None) -> list[Message]:
    """Check messages, and convert them for the chat template: contents to text or text parts, arguments to objects."""
    if not given:
        raise invalid_field_error("messages", "is missing or empty; a list of messages is expected")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _read_message(given: Any, where: str) -> Message:
    fields = RequestFields(given, where)
    role = fields.choice("role", _ROLES)
    if role is None:
        raise invalid_field_error(f"{where}.role", "is missing")
    message: Message = {"role": role}
    content = _read_content(fields.get("content"), f"{where}.content")
    calls = [
        _read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(fields.array("tool_calls", 1024) or [])
    ]
    if (call := fields.get("function_call")) is not None:  # the earlier form of tool_calls
        calls = calls or [_read_call({"function": call}, where)]
    if content is None and not calls and role != "assistant":
        raise invalid_field_error(f"{where}.content", "is missing; text is expected")
    message["content"] = content or ""
    # Servers use two names for reasoning, and clients send messages back as they got them.
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        if role != "assistant":
            raise invalid_field_error(f"{where}.tool_calls", "is for messages of the assistant")
        message["tool_calls"] = calls
    for field in ("name", "tool_call_id"):
        if (value := fields.text(field)) is not None:
            message[field] = value
    if role == "tool" and "tool_call_id" not in message:
        raise invalid_field_error(
            f"{where}.tool_call_id", "is missing; the id of the call that is answered is expected"
        )
    # LiteLLM keeps in the last two what other providers answered.
    fields.reject_unread(ignored=("refusal", "annotations", "audio", "provider_specific_fields", "thinking_blocks"))
    return message


def _read_content(value: Any, where: str) -> str | list[Any] | None:
    """Check the content of a message. Return a text, or a list if there are several text parts."""
    if value is None or isinstance(value, str):
        text: str | list[Any] | None = value
    elif isinstance(value, list):
        parts = []
        for number, part in enumerate(value):
            if not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal"):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise invalid_field_error(
                    f"{where}[{number}]", f"is of type {format_value(kind)}; this server takes text only"
                )
            piece = part.get(part["type"])
            if not isinstance(piece, str):
                raise invalid_field_error(
                    f"{where}[{number}].{part['type']}", f"is {format_value(piece)}; a string is expected"
                )
            parts.append({"type": "text", "text": piece})
        text = parts[0]["text"] if len(parts) == 1 else parts
    else:
        raise invalid_field_error(where, f"is {format_value(value)}; text is expected")
    if text is not None and (problem := json_value_problem(text)):
        raise invalid_field_error(where, problem)
    return text


def _read_call(given: Any, where: str) -> dict[str, Any]:
    fields = RequestFields(given, where)
    function = RequestFields(fields.get("function"), f"{where}.function")
    name, arguments = function.text("name"), function.get("arguments")
    if not name:
        raise invalid_field_error(f"{where}.function.name", "is missing; a string is expected")
    function.reject_unread()
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _read_arguments(arguments, where)},
    }
    if (call_id := fields.text("id")) is not None:
        call["id"] = call_id
    fields.reject_unread(ignored=("type", "index"))
    return call


def _read_arguments(value: Any, where: str) -> Any:
    if exceeds_size(value, MAX_SCHEMA):
        raise invalid_field_error(f"{where}.function.arguments", TOO_LARGE)
    if isinstance(value, str) and (problem := json_value_problem(value)):
        raise invalid_field_error(f"{where}.function.arguments", problem)
    if value is not None and not isinstance(value, str | Mapping):
        raise invalid_field_error(
            f"{where}.function.arguments", f"is {format_value(value)}; JSON as a string is expected"
        )
    return decoded_arguments(dict(value) if isinstance(value, Mapping) else value)


def read_tools(given: list[Any] | None) -> list[Tool]:
    if exceeds_size(given, MAX_SCHEMA):
        raise invalid_field_error("tools", TOO_LARGE)
    tools = [_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(given or [])]
    for name, n in Counter(map(_tool_name, tools)).items():
        if n > 1:
            raise invalid_field_error("tools", f"has two functions named {format_value(name)}")
    return tools


def _read_tool(given: Any, where: str) -> Tool:
    fields = RequestFields(given, where)
    if fields.choice("type", ("function",)) is None:
        raise invalid_field_error(f"{where}.type", "is missing; function is expected")
    function = RequestFields(fields.get("function"), f"{where}.function")
    name = function.text("name")
    if not name or len(name) > 64 or not _NAME.issuperset(name):
        found = format_value(name) if name else "missing"
        raise invalid_field_error(
            f"{where}.function.name", f"is {found}; 1 to 64 letters, digits, - and _ are expected"
        )
    function.text("description")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.function.parameters", is_root=True)
    function.reject_unread(ignored=("strict",))
    fields.reject_unread()
    if problem := json_value_problem(given):
        raise invalid_field_error(where, problem)
    return given


def _tool_name(tool: Tool) -> str:
    return tool["function"]["name"]


def _check_schema(schema: Any, where: str, is_root: bool = False) -> None:
    if isinstance(schema, bool) and not is_root:
        return
    if not isinstance(schema, Mapping):
        raise invalid_field_error(where, f"is {format_value(schema)}; a JSON schema is expected")
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind is not None and kind not in _KINDS:
            raise invalid_field_error(f"{where}.type", f"is {format_value(kind)}; expected one of {', '.join(_KINDS)}")
    if is_root and schema and kinds not in ("object", None):
        raise invalid_field_error(
            f"{where}.type", f"is {format_value(kinds)}; the arguments of a function are an object"
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise invalid_field_error(f"{where}.properties", f"is {format_value(properties)}; an object is expected")
    for name, inner in properties.items():
        _check_schema(inner, f"{where}.properties.{name}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid_field_error(f"{where}.required", f"is {format_value(required)}; a list of names is expected")


@dataclass(frozen=True)
class ToolChoice:
    tools: list[Tool]  # those that the prompt offers
    requires_call: bool = False
    named: str | None = None  # the function that must be called


def read_tool_choice(value: Any, tools: list[Tool]) -> ToolChoice:
    if value is None:
        return ToolChoice(tools)
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise invalid_field_error(
                "tool_choice", f"is {format_value(value)}; none, auto, required or a function is expected"
            )
        if value == "required" and not tools:
            raise invalid_field_error("tool_choice", "is required, but there are no tools")
        return ToolChoice([] if value == "none" else tools, value == "required")
    fields = RequestFields(value, "tool_choice")
    kind = fields.choice("type", ("function", "allowed_tools"))
    if kind != "allowed_tools":
        name = _read_tool_name(fields, tools)
        return ToolChoice([tool for tool in tools if _tool_name(tool) == name], True, name)
    allowed = RequestFields(fields.get("allowed_tools"), "tool_choice.allowed_tools")
    fields.reject_unread()
    mode, given = allowed.choice("mode", ("auto", "required")), allowed.array("tools", 1024)
    allowed.reject_unread()
    if mode is None or not given:
        missing = "mode" if mode is None else "tools"
        raise invalid_field_error(f"tool_choice.allowed_tools.{missing}", "is missing or empty")
    where = "tool_choice.allowed_tools.tools"
    entries = [RequestFields(entry, f"{where}[{number}]") for number, entry in enumerate(given)]
    for entry in entries:
        entry.choice("type", ("function",))
    names = {_read_tool_name(entry, tools) for entry in entries}
    return ToolChoice([tool for tool in tools if _tool_name(tool) in names], mode == "required")


def _read_tool_name(fields: RequestFields, tools: list[Tool]) -> str:
    function = RequestFields(fields.get("function"), fields.path("function"))
    name = function.text("name")
    fields.reject_unread()
    if name is None or name not in map(_tool_name, tools):
        raise invalid_field_error(function.path("name"), f"is {format_value(name)}, which is none of the tools")
    return name


def conversation_keys(messages: Sequence[Message]) -> list[str]:
    """Return, for each message, a hash of the conversation up to and including this message."""
    key, keys = "", []
    for message in messages:
        key = extended_key(key, message)
        keys.append(key)
    return keys


def template_inputs_key(tools: Any, template: Any) -> str:
    """Return a hash of the tools and the template variables of a prompt, or "" if there are none."""
    return extended_key("", [tools or None, template or None]) if tools or template else ""


_as_text = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


def extended_key(key: str, value: Any) -> str:
    """Return the hash of a conversation whose last message is `value`. `key` is the hash of what comes before."""
    long: dict[str, str] = {}
    if isinstance(value, dict):  # long texts are hashed without JSON, whose encoder blocks other threads
        long = {name: text for name, text in value.items() if isinstance(text, str) and len(text) > _LONG_TEXT}
    short = {**value, **{name: [len(text)] for name, text in long.items()}} if long else value
    hashed = hashlib.blake2b(f"{key}{_as_text(short)}".encode(), digest_size=16)
    for _, text in sorted(long.items()):
        hashed.update(text.encode())
    return hashed.hexdigest()
