"""Parser for tool calls of GLM-4.5, 4.6 and 4.7, whose tags have no line breaks between them in 4.7.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

As in Qwen3-Coder's form (qwen3_coder.py), strings are written without quotes, and all other values as JSON.
"""

from __future__ import annotations

from areno.server.parsers.hermes import CLOSE, OPEN
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.partial_text import Cursor, Reading, dump_json
from areno.server.parsers.qwen3_coder import CallTags, Parameters, xml_calls_rule
from areno.server.parsers.schemas import SchemaDocument

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

TAGS = CallTags(
    before_name=OPEN,
    after_name="\n",
    before_key=KEY,
    after_key=f"{END_KEY}\n{VALUE}",
    end=f"{END_VALUE}\n",
    after_call=CLOSE,
    no_values=(END_VALUE,),
    no_tags=r"/(?s:.*)/ & ~/(?s:.*)<\/arg_value>(?s:.*)/",
)


class Glm4MoeParser(ToolCallParser):
    """A value that should not be a string, but is not valid JSON, is passed on as a string."""

    name = "glm4_moe"
    tags = (OPEN,)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        name = yield from self._read_name(source)
        if name is None:
            return None
        known = Parameters.from_schema((tools or {}).get(name, {}))
        if (arguments := (yield from known.read(source, KEY, CLOSE, self._read_parameter))) is None:
            return None
        try:
            name.encode()
            return [(name, dump_json(arguments))]
        except ValueError:
            return None

    def calls_rule(self, lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool) -> str:
        return xml_calls_rule(lark, functions, many, TAGS)

    def _read_name(self, source: Cursor) -> Reading[str | None]:
        """Read the word before a line break or a tag. Return None if it cannot be a name, as a JSON object cannot."""
        yield from source.skip_space()
        start = source.at
        while (char := (yield from source.peek())) not in ("\n", "<", ""):
            if char in '{["':
                return None
            source.at += 1
        name = source.text[start : source.at].strip()
        return name if name and char and len(name.split()) == 1 else None

    def _read_parameter(self, source: Cursor, left: set[str] | None) -> Reading[tuple[str, str] | None]:
        start = source.at
        if (yield from source.skip_past_one_of((END_KEY,))) is None:
            return None
        key = source.text[start : source.at - len(END_KEY)].strip()
        yield from source.skip_space()
        if not key or not (yield from source.accept(VALUE)):
            return None
        value = yield from self._read_value(source)
        return None if value is None else (key, value)

    def _read_value(self, source: Cursor) -> Reading[str | None]:
        """Read a value and its closing tag, which the next key or the end of the call follows."""
        start = source.at
        while (yield from source.skip_past_one_of((END_VALUE,))) is not None:
            after = source.at
            yield from source.skip_space()
            if (yield from source.starts_with(KEY)) or (yield from source.starts_with(CLOSE)):
                return source.text[start : after - len(END_VALUE)]
            source.at = after
        return None
