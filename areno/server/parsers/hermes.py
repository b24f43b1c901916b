"""Parsers for tool calls that are JSON objects.

Qwen 2.5, Qwen 3 and Hermes write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once or several times.
Llama 3 writes `{"name": ..., "parameters": {...}}` as the whole answer or after `<|python_tag|>`, and separates several
calls by `;`.
"""

from __future__ import annotations

import json

from areno.server.parsers.json_rules import JsonRules, JsonStyle
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.partial_text import Cursor, Reading, dump_json, index_after_space, load_json
from areno.server.parsers.schemas import SchemaDocument

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = {"name", "id", "type"}  # keys of a call beside its arguments


class HermesParser(ToolCallParser):
    """At the end of the text, the tag `</tool_call>` may be missing."""

    name = "hermes"
    tags = (OPEN,)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        yield from source.skip_space()
        text = yield from source.read_json_object()
        if text is None or (call := parse_call(text, ("arguments", "parameters"))) is None:
            return None
        yield from source.skip_space()
        if not (yield from source.accept(CLOSE)) and (yield from source.peek()):
            return None
        return [call]

    def calls_rule(self, lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool) -> str:
        opening, closing = lark.literal(f"{OPEN}\n"), lark.literal(f"\n{CLOSE}")
        call = f"{opening} {call_object_rule(lark, functions, 'arguments')} {closing}"
        return calls_in_lines_rule(lark, call, many)


def calls_in_lines_rule(lark: LarkBuilder, call: str, many: bool) -> str:
    """Return the rule of one call, or of any number of them in lines of their own if `many`."""
    call, newline = lark.rule(call), lark.literal("\n")
    return lark.rule(f"{call} ({newline} {call})*") if many else call


def call_object_rule(lark: LarkBuilder, functions: dict[str, SchemaDocument], arguments_key: str) -> str:
    calls = []
    for name, document in functions.items():
        start = json.dumps(f'{{"name": {json.dumps(name)}, "{arguments_key}": ')
        calls.append(f'{start} {JsonRules(lark, document, JsonStyle()).root()} "}}"')
    return f"({' | '.join(calls)})"


def parse_call(text: str, argument_keys: tuple[str, ...]) -> RawCall | None:
    """Parse the JSON object of a tool call. Returns None if the text is no call.

    The arguments, an object or its JSON text, are the value of the first of `argument_keys` that the object has.
    """
    try:
        value = load_json(text)
        name = value.get("name")
        arguments = next((value[key] for key in argument_keys if key in value), {} if value.keys() <= _HEAD else None)
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
    """A JSON object without the tag is a call only at the start or after a call, and only if the tool is offered."""

    name = "llama3_json"
    tags = (PYTHON_TAG,)

    def find_opening(self, text: str, at: int, at_boundary: bool, after_call: bool) -> tuple[int, int | None]:
        """Accept the brace of a JSON object in place of a tag. After a call, accept a `;` before the brace."""
        if at_boundary:
            start = index_after_space(text, at)
            brace = index_after_space(text, start + 1) if after_call and text.startswith(";", start) else start
            if brace == len(text) or text.startswith("{", brace):
                return start, None if brace == len(text) else brace
        return super().find_opening(text, at, at_boundary, after_call)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        yield from source.skip_space()
        text = yield from source.read_json_object()
        call = None if text is None else parse_call(text, ("parameters", "arguments"))
        return None if call is None or (tools is not None and call[0] not in tools) else [call]

    def calls_rule(self, lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool) -> str:
        call = call_object_rule(lark, functions, "parameters")
        return lark.rule(f"{call} ({lark.literal('; ')} {call})*") if many else call
