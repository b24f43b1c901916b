"""Parser for tool calls that look like Python: `[name(key=value, ...), ...]`.

Llama 3.2, Llama 4 and LFM2 write such a list as the whole answer or between tags. A small parser reads the literals,
and nothing is evaluated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from string import hexdigits
from typing import Any

from areno.errors import GrammarError
from areno.server.parsers.json_rules import JsonRules, JsonStyle
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.partial_text import Cursor, Reading, dump_json, index_after_space
from areno.server.parsers.schemas import SchemaDocument

TAGS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
MAX_NESTED = 50

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class MalformedCallError(Exception):
    """The text is not a list of calls."""


class PythonicParser(ToolCallParser):
    """A list of calls without tags must be the whole answer and must name only offered tools."""

    name = "pythonic"
    tags = tuple(TAGS)

    def find_opening(self, text: str, at: int, at_boundary: bool, after_call: bool) -> tuple[int, int | None]:
        """Accept the `[` at the start of the answer in place of a tag."""
        if at_boundary and not after_call:
            at = index_after_space(text, at)
            if text.startswith("[", at):
                return at, at
        return super().find_opening(text, at, at_boundary, after_call)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        yield from source.skip_space()
        try:
            calls = yield from _LiteralParser(source).read_calls()
        except MalformedCallError:
            return None
        yield from source.skip_space()
        closed = bool(tag) and (yield from source.accept(TAGS[tag]))
        if not closed and (yield from source.peek()):
            return None
        return calls if tools is None or tag or all(name in tools for name, _ in calls) else None

    def calls_rule(self, lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool) -> str:
        call = lark.rule(" | ".join(_call_rule(lark, name, document) for name, document in functions.items()))
        more = f"({lark.literal(', ')} {call})*" if many else ""
        return lark.rule(f"{lark.literal('[')} {call} {more} {lark.literal(']')}")


def _call_rule(lark: LarkBuilder, name: str, document: SchemaDocument) -> str:
    """Return the rule of a call name(key=value, ...)."""
    rules = JsonRules(lark, document, JsonStyle(is_python=True))

    def argument(key: str, value: str) -> str:
        if not key.isidentifier():
            raise GrammarError("{!r} cannot be the name of an argument in a Python call; rename the argument", key)
        return f"{lark.literal(f'{key}=')} {value}"

    found = [rules.properties_rule(form, argument, rules.comma) for form in document.object_schemas]
    content = arguments_rule(lark, rules, found)
    return lark.rule(f"{lark.literal(f'{name}(')} {content} {lark.literal(')')}")


def arguments_rule(lark: LarkBuilder, rules: JsonRules, found: Iterable[tuple[str, bool] | None]) -> str:
    """Return the grammar rule of a call's arguments. `found`: the `properties_rule` of each form of their schema."""
    contents = [f"{content}{'?' if may_be_empty else ''}" for content, may_be_empty in filter(None, found)]
    return rules.require_rule(lark.rule(" | ".join(contents)) if contents else None)


def parse_literal(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError for other text."""
    source = Cursor()
    source.text, source.ended = text, True
    reading = _LiteralParser(source).read_whole_literal()
    try:
        next(reading)
    except StopIteration as end:
        return end.value
    except MalformedCallError as error:
        raise ValueError("no literal of Python") from error
    raise AssertionError("a reader of a text that has ended waits for more")


class _LiteralParser:
    """Recursive-descent parser of calls and of literals of Python and JSON.

    Its generators raise Malformed for other text. `depth` is the number of lists and dicts around a literal.
    """

    def __init__(self, source: Cursor):
        self._source = source

    def read_calls(self) -> Reading[list[RawCall]]:
        calls: list[RawCall] = []
        yield from self._expect("[")
        while not (yield from self._skip_end_or_comma("]", calls)):
            calls.append((yield from self._read_call()))
        return calls

    def read_whole_literal(self) -> Reading[Any]:
        value = yield from self._read_value(0)
        yield from self._source.skip_space()
        if (yield from self._source.peek()):
            raise MalformedCallError
        return value

    def _read_call(self) -> Reading[RawCall]:
        name = yield from self._read_name()
        yield from self._expect("(")
        arguments: dict[str, Any] = {}
        while not (yield from self._skip_end_or_comma(")", arguments)):
            key = yield from self._read_name()
            yield from self._expect("=")
            if not key.isidentifier() or key in arguments:
                raise MalformedCallError
            arguments[key] = yield from self._read_value(0)
        try:
            return name, dump_json(arguments)
        except ValueError as error:
            raise MalformedCallError from error

    def _read_name(self) -> Reading[str]:
        """Read a name. Like the names of tools, it may contain `_`, `.` and `-`."""
        yield from self._source.skip_space()
        start = self._source.at
        while (char := (yield from self._source.peek())) and (char.isalnum() or char in "_.-"):
            self._source.at += 1
        word = self._source.text[start : self._source.at]
        if not word or not (word[0].isalpha() or word[0] == "_"):
            raise MalformedCallError
        return word

    def _expect(self, char: str) -> Reading[None]:
        """Skip whitespace and then `char`."""
        yield from self._source.skip_space()
        if not (yield from self._source.accept(char)):
            raise MalformedCallError

    def _skip_end_or_comma(self, closing: str, items: Any) -> Reading[bool]:
        """Skip the closing bracket and return True, or skip the comma before the next item.

        A trailing comma is allowed.
        """
        if items:
            yield from self._source.skip_space()
            if (yield from self._source.accept(closing)):
                return True
            yield from self._expect(",")
        yield from self._source.skip_space()
        return (yield from self._source.accept(closing))

    def _read_value(self, depth: int) -> Reading[Any]:
        yield from self._source.skip_space()
        char = yield from self._source.peek()
        if depth > MAX_NESTED or not char:
            raise MalformedCallError
        if char in "'\"":
            return (yield from self._read_string(char))
        if char in "[(":
            return (yield from self._read_list(char, depth))
        if char == "{":
            return (yield from self._read_dict(depth))
        if char.isdecimal() or char in "+-.":
            return (yield from self._read_number())
        word = yield from self._read_name()
        if word not in _WORDS:
            raise MalformedCallError
        return _WORDS[word]

    def _read_list(self, opening: str, depth: int) -> Reading[Any]:
        """Read a list or a tuple as a list, and `(value)` as the value."""
        closing = "]" if opening == "[" else ")"
        items: list[Any] = []
        yield from self._expect(opening)
        while not (yield from self._skip_end_or_comma(closing, items)):
            items.append((yield from self._read_value(depth + 1)))
        bare = (
            opening == "(" and len(items) == 1 and not self._source.text[: self._source.at - 1].rstrip().endswith(",")
        )
        return items[0] if bare else items

    def _read_dict(self, depth: int) -> Reading[dict[str, Any]]:
        items: dict[str, Any] = {}
        yield from self._expect("{")
        while not (yield from self._skip_end_or_comma("}", items)):
            key = yield from self._read_value(depth + 1)
            yield from self._expect(":")
            if not isinstance(key, str):
                raise MalformedCallError
            items[key] = yield from self._read_value(depth + 1)
        return items

    def _read_number(self) -> Reading[int | float]:
        start = self._source.at
        while (char := (yield from self._source.peek())) and (char.isalnum() or char in "+-._"):
            self._source.at += 1
        text = self._source.text[start : self._source.at]
        for read in (int, float):
            try:
                return read(text)
            except ValueError:
                continue
        raise MalformedCallError

    def _read_string(self, quote: str) -> Reading[str]:
        source = self._source
        is_long = yield from source.accept(quote * 3)
        end = quote * 3 if is_long else quote
        if not is_long:
            source.at += 1
        chars: list[str] = []
        while not (yield from source.accept(end)):
            char = yield from source.peek()
            if char == "" or (char == "\n" and not is_long):
                raise MalformedCallError
            source.at += 1
            chars.append((yield from self._read_escape()) if char == "\\" else char)
        return "".join(chars)

    def _read_escape(self) -> Reading[str]:
        r"""Read an escape sequence after its backslash. Unknown and octal escapes, except \0, keep their backslash."""
        source = self._source
        char = yield from source.peek()
        source.at += 1
        if char in _HEX_DIGITS:
            digits = ""
            for _ in range(_HEX_DIGITS[char]):
                digits += yield from source.peek()
                source.at += 1
            if not set(digits) <= set(hexdigits) or len(digits) < _HEX_DIGITS[char] or int(digits, 16) > sys.maxunicode:
                raise MalformedCallError
            return chr(int(digits, 16))
        if char in ("\\", "'", '"'):
            return char
        if char == "":
            raise MalformedCallError
        return _ESCAPES.get(char, "\\" + char)
