"""Llama 3: `{"name": ..., "parameters": {...}}` as the answer itself, or after `<|python_tag|>`; several by `;`."""

from __future__ import annotations

from areno.server.parsers.cursor import Cursor, Reading, after_space
from areno.server.parsers.hermes import call_object, call_of
from areno.server.parsers.lark import Lark
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.values import Schema

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
