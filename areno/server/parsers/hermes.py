"""Parsers for tool calls that are JSON objects.

Qwen 2.5, Qwen 3 and Hermes write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once or several times.
Llama 3 writes `{"name": ..., "parameters": {...}}` as the whole answer or after `<|python_tag|>`, and separates several
calls by `;`.
"""

from __future__ import annotations

from areno.server.parsers.lark import Lark, rebase_refs
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.reading import Cursor, Reading, Schema, after_space, dump_json, load_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """Parser for Qwen 2.5, Qwen 3 and Hermes.

    At the end of the text, the tag `</tool_call>` may be missing.
    """

    name = "hermes"
    tags = (OPEN,)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        """Read one JSON call and its closing tag.

        Args:
            source: Cursor directly after the opening tag. It is moved past the call.
            tag: The opening tag.
            tools: Ignored. Any function name is accepted.

        Returns:
            A generator for `yield from`, which yields while more text is needed. Its result is a list with one tuple
            (name, arguments as JSON text), or None if the text is not a call.
        """
        yield from source.skip_space()
        text = yield from source.json_object()
        if text is None or (call := call_of(text, ("arguments",))) is None:
            return None
        yield from source.skip_space()
        if not (yield from source.accept(CLOSE)) and (yield from source.peek()):
            return None
        return [call]

    def call_grammar(self, lark: Lark, functions: dict[str, Schema], many: bool) -> str:
        """Add rules for JSON calls between `<tool_call>` tags to a grammar.

        Args:
            lark: Grammar under construction, to which the rules are added.
            functions: Function name -> JSON schema of its arguments.
            many: Whether several calls may follow each other.

        Returns:
            Name of the rule in `lark` that matches the calls.
        """
        return in_tags(lark, call_object(lark, functions, "arguments"), many)


def in_tags(lark: Lark, call: str, many: bool) -> str:
    """Add rules for calls between `<tool_call>` and `</tool_call>` to a grammar.

    Args:
        lark: Grammar under construction, to which the rules are added.
        call: Grammar expression of the call without tags.
        many: Whether several calls may follow each other, separated by newlines.

    Returns:
        Name of the rule in `lark` that matches the calls.
    """
    opening, closing, newline = map(lark.literal, (f"{OPEN}\n", f"\n{CLOSE}", "\n"))
    call = lark.rule(f"{opening} {call} {closing}")
    return lark.rule(f"{call} ({newline} {call})*") if many else call


def call_object(lark: Lark, functions: dict[str, Schema], arguments_key: str) -> str:
    """Return the grammar expression for a JSON object with a function's name and arguments.

    Args:
        lark: Grammar under construction, to which rules for the expression are added.
        functions: Function name -> JSON schema of its arguments.
        arguments_key: Key of the arguments in the object, such as "arguments".

    Returns:
        A grammar expression that matches a call of any of the functions.
    """
    objects = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                arguments_key: rebase_refs(schema, f"/properties/{arguments_key}"),
            },
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for name, schema in functions.items()
    ]
    return f"({' | '.join(map(lark.json, objects))})"


def call_of(text: str, argument_keys: tuple[str, ...]) -> RawCall | None:
    """Parse the JSON object of a tool call.

    Args:
        text: Text of the object.
        argument_keys: Keys that may hold the arguments, tried in order. If the object has none of these keys, the
            arguments are {}. The value of the key may also be a string with the JSON text of the arguments.

    Returns:
        (name, arguments as JSON text), or None if the text does not describe a call.
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
    """Parser for Llama 3.

    A JSON object without the tag `<|python_tag|>` is a call only at the start of the answer or after another call, and
    only if it names an offered tool.
    """

    name = "llama3_json"
    tags = (PYTHON_TAG,)

    def opening(self, text: str, at: int, is_fresh: bool, after_call: bool) -> tuple[int, int | None]:
        """Find the next place at which a call may begin.

        At the start of the answer or directly after a call, a call may begin with the brace of a JSON object. After a
        call, a `;` may precede the brace. Elsewhere, a call begins with the tag `<|python_tag|>`. A call that begins
        with a brace has no tag, so the second index of the result is the index of the brace itself.

        Args:
            text: All text so far.
            at: Index of the first character to search.
            is_fresh: Whether `at` is the start of the content or directly after a call.
            after_call: Whether `at` is directly after a call.

        Returns:
            A tuple (index of the opening tag, index of the first character after the tag). If no tag is found, the
            result is (index, None). Then the text before this index contains no tag, and the text from this index on
            may be the beginning of a tag that has not arrived completely.
        """
        if is_fresh:
            start = after_space(text, at)
            brace = after_space(text, start + 1) if after_call and text.startswith(";", start) else start
            if brace == len(text) or text.startswith("{", brace):
                return start, None if brace == len(text) else brace
        return super().opening(text, at, is_fresh, after_call)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        """Read one JSON call.

        Args:
            source: Cursor directly after the opening tag. It is moved past the call.
            tag: The opening tag, "" for a call without a tag.
            tools: Function name -> JSON schema of the arguments. None accepts any name.

        Returns:
            A generator for `yield from`, which yields while more text is needed. Its result is a list with one tuple
            (name, arguments as JSON text), or None if the text is not a call of an offered tool.
        """
        yield from source.skip_space()
        text = yield from source.json_object()
        call = None if text is None else call_of(text, ("parameters", "arguments"))
        return None if call is None or (tools is not None and call[0] not in tools) else [call]

    def call_grammar(self, lark: Lark, functions: dict[str, Schema], many: bool) -> str:
        """Add rules for JSON calls separated by `;` to a grammar.

        Args:
            lark: Grammar under construction, to which the rules are added.
            functions: Function name -> JSON schema of its arguments.
            many: Whether several calls may follow each other.

        Returns:
            Name of the rule in `lark` that matches the calls.
        """
        call = call_object(lark, functions, "parameters")
        return lark.rule(f"{call} ({lark.literal('; ')} {call})*") if many else call
