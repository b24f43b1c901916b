"""Parser for tool calls in the XML form of Qwen3-Coder, Qwen 3.5 and Nemotron 3.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

String values are written without quotes, and all other values as JSON. Only the type in the tool's schema tells whether
a value is a string.
"""

from __future__ import annotations

from typing import Any

from areno.errors import GrammarError
from areno.server.parsers.hermes import CLOSE, OPEN, in_tags
from areno.server.parsers.lark import Lark
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.reading import (
    Cursor,
    Reading,
    Schema,
    dump_json,
    load_json,
    properties_of,
    resolved,
    types_of,
)

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_WORDS = {"true": True, "false": False, "null": None, "none": None}


class Qwen3CoderParser(ToolCallParser):
    """Parser for Qwen3-Coder, Qwen 3.5 and Nemotron 3.

    The tag `<tool_call>` around the function is optional, because these models sometimes omit it. The JSON schema of
    a tool names the type of each parameter. If this type is not a string, but the value that the model wrote is not
    valid JSON, the value is passed on as a string. The tool will then refuse this argument.
    """

    name = "qwen3_coder"
    tags = (OPEN, FUNCTION)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        """Read one call and its closing tags.

        Args:
            source: Cursor directly after the opening tag. It is moved past the call.
            tag: The opening tag, `<tool_call>` or `<function=`.
            tools: Function name -> JSON schema of the arguments. None accepts any name. An unknown function is accepted
                only after `<tool_call>`.

        Returns:
            A generator for `yield from`, which yields while more text is needed. Its result is a list with one tuple
            (name, arguments as JSON text), or None if the text is not a call.
        """
        if tag == OPEN:
            yield from source.skip_space()
            if not (yield from source.accept(FUNCTION)):
                return None
        name = yield from self._name(source)
        if name is None or (tag == FUNCTION and tools is not None and name not in tools):
            return None
        schema = (tools or {}).get(name, {})
        properties = properties_of(schema)
        arguments: dict[str, Any] = {}
        while True:
            yield from source.skip_space()
            if (yield from source.accept(END_FUNCTION)):
                break
            if not (yield from source.accept(PARAMETER)):
                return None
            key = yield from self._name(source)
            value = None if key is None else (yield from self._value(source))
            if key is None or value is None:
                return None
            arguments[key] = _typed(value, resolved(properties.get(key, {}), schema))
        end = source.at
        yield from source.skip_space()
        if not (yield from source.accept(CLOSE)):
            if tag == OPEN and (yield from source.peek()):
                return None
            source.at = end  # the whitespace belongs to the text after the call
        try:
            return [(name, dump_json(arguments))]
        except ValueError:
            return None

    def call_grammar(self, lark: Lark, functions: dict[str, Schema], many: bool) -> str:
        """Add rules for calls in XML form to a grammar.

        String values have no quotes, so the grammar enforces only the keywords `enum` and `const` of their schemas.

        Args:
            lark: Grammar under construction, to which the rules are added.
            functions: Function name -> JSON schema of its arguments.
            many: Whether several calls may follow each other.

        Returns:
            Name of the rule in `lark` that matches the calls.
        """
        call = lark.rule(" | ".join(self._function(lark, name, schema) for name, schema in functions.items()))
        return in_tags(lark, call, many)

    def _function(self, lark: Lark, name: str, schema: Schema) -> str:
        """Add rules for a call of the function `name` to `lark`, and return the name of the top rule.

        `schema` is the JSON schema of the arguments.
        """
        parts, required = [lark.literal(f"{FUNCTION}{name}>\n")], frozenset(schema.get("required") or ())
        for key, each in properties_of(schema).items():
            if set(key + name) & set("<>\n"):
                raise GrammarError("the name {!r} has <, > or a line break, which this model's calls cannot have", key)
            body = f"{lark.literal(f'{PARAMETER}{key}>' + chr(10))} {_value_grammar(lark, each, schema)}"
            parts.append(lark.rule(body) if key in required else f"{lark.rule(body)}?")
        return lark.rule(" ".join([*parts, lark.literal(END_FUNCTION)]))

    def _name(self, source: Cursor) -> Reading[str | None]:
        """Read a name and the `>` after it. Return None if the name is empty or malformed."""
        start = source.at
        while (char := (yield from source.peek())) != ">":
            if char == "" or char in "<\n":
                return None
            source.at += 1
        source.at += 1
        return source.text[start : source.at - 1].strip() or None

    def _value(self, source: Cursor) -> Reading[str | None]:
        """Read a parameter's value and its closing tag, and return the value as text.

        Returns None if no closing tag is found. A closing tag ends the value only if the next parameter or the end
        of the function follows.
        """
        start = source.at
        while (yield from source.until(END_PARAMETER)) is not None:
            after = source.at
            yield from source.skip_space()
            if (yield from source.looks_at(PARAMETER)) or (yield from source.looks_at(END_FUNCTION)):
                value = source.text[start : after - len(END_PARAMETER)]
                return value.removeprefix("\n").removesuffix("\n")
            source.at = after
        return None


def _value_grammar(lark: Lark, schema: Schema, root: Schema) -> str:
    """Return the grammar expression for a parameter's value and the closing tag after the value.

    `schema` is the schema of the parameter, and `root` is the schema of all arguments, in which references are
    looked up.
    """
    target = resolved(schema, root)
    types, end = types_of(target), lark.literal(f"\n{END_PARAMETER}\n")
    choices = [target["const"]] if "const" in target else target.get("enum")
    if choices and all(isinstance(each, str) and "<" not in each for each in choices):
        return f"({' | '.join(map(lark.literal, choices))}) {end}"
    if "string" in types or not (types or choices):
        return f"{lark.until(END_PARAMETER)} {lark.literal(chr(10))}"
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{lark.json({**definitions, **schema})} {end}"


def _typed(text: str, schema: Schema) -> Any:
    """Convert the text of a parameter's value to the type that the parameter's `schema` names.

    If the schema names no type, the result is the text, or the value in `enum` whose JSON is the text. If the schema
    allows a string, the result is the text, or None for "null" where the schema also allows null. Otherwise the text
    is parsed as JSON. Text that is not JSON stays a string.
    """
    types, word = types_of(schema), text.strip().lower()
    if not types and isinstance(schema.get("enum"), list):
        return next((each for each in schema["enum"] if each == text or dump_json(each) == text), text)
    if not types or "string" in types:
        return None if "null" in types and word in ("null", "none") else text
    value = _WORDS[word] if word in _WORDS else _as_json(text)
    is_whole = isinstance(value, float) and value.is_integer() and "number" not in types
    return int(value) if is_whole else value


def _as_json(text: str) -> Any:
    """Return the JSON value of a text, or the text itself if it is not JSON."""
    try:
        dump_json(value := load_json(text))
    except ValueError:
        return text
    return value
