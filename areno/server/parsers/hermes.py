"""Qwen 2.5, Qwen 3 and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or more.

Llama 3: `{"name": ..., "parameters": {...}}` as the answer itself, or after `<|python_tag|>`; several by `;`.
"""

from __future__ import annotations

from areno.server.parsers.lark import Lark, moved
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.reading import Cursor, Reading, Schema, after_space, dump_json, load_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """At the end of the text the closing tag may be missing."""

    name = "hermes"
    tags = (OPEN,)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        yield from source.skip_space()
        text = yield from source.json_object()
        if text is None or (call := call_of(text, ("arguments",))) is None:
            return None
        yield from source.skip_space()
        if not (yield from source.accept(CLOSE)) and (yield from source.peek()):
            return None
        return [call]

    def call_grammar(self, lark: Lark, functions: dict[str, Schema], many: bool) -> str:
        return in_tags(lark, call_object(lark, functions, "arguments"), many)


def in_tags(lark: Lark, call: str, many: bool) -> str:
    """A call between its tags; with `many`, one or more of them, each on lines of its own."""
    opening, closing, newline = map(lark.literal, (f"{OPEN}\n", f"\n{CLOSE}", "\n"))
    call = lark.rule(f"{opening} {call} {closing}")
    return lark.rule(f"{call} ({newline} {call})*") if many else call


def call_object(lark: Lark, functions: dict[str, Schema], arguments_key: str) -> str:
    """A JSON object with the name of one of the functions and its arguments."""
    objects = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments_key: moved(schema, f"/properties/{arguments_key}")},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for name, schema in functions.items()
    ]
    return f"({' | '.join(map(lark.json, objects))})"


def call_of(text: str, argument_keys: tuple[str, ...]) -> RawCall | None:
    """The call that a JSON object with name and arguments describes. None if it is none.

    Missing arguments are {}. Arguments may also be a string that holds the object.
    """
    try:
        value = load_json(text)
        name = value.get("name")
        arguments = next((value[key] for key in argument_keys if key in value), {})
        if isinstance(arguments, str):
            arguments = load_json(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        name.encode()
        return name, dump_json(arguments)
    except ValueError:  # UnicodeEncodeError is one
        return None


PYTHON_TAG = "<|python_tag|>"


class LlamaJsonParser(ToolCallParser):
    """An object at the start of the answer is a call if it names a tool that was offered, else it is text."""

    name = "llama3_json"
    tags = (PYTHON_TAG,)

    def opening(self, text: str, at: int, is_fresh: bool, after_call: bool) -> tuple[int, int | None]:
        if is_fresh:
            start = after_space(text, at)
            brace = after_space(text, start + 1) if after_call and text.startswith(";", start) else start
            if brace == len(text) or text.startswith("{", brace):
                return start, None if brace == len(text) else brace
        return super().opening(text, at, is_fresh, after_call)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        yield from source.skip_space()
        text = yield from source.json_object()
        call = None if text is None else call_of(text, ("parameters", "arguments"))
        return None if call is None or (tools is not None and call[0] not in tools) else [call]

    def call_grammar(self, lark: Lark, functions: dict[str, Schema], many: bool) -> str:
        call = call_object(lark, functions, "parameters")
        return lark.rule(f"{call} ({lark.literal('; ')} {call})*") if many else call
