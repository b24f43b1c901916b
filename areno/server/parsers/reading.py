"""Reading of text and JSON schemas for the tool-call parsers.

`Cursor` reads a text that is still being sampled. Most of its methods are generators for `yield from`. Such a method
yields while its result depends on text that has not arrived. So a parser is written once, as if it had the whole
text, and gives the same result for a stream. The functions after `Cursor` read the JSON of calls and the schemas of
tools.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Reading = Generator[None, None, Answer]
"""A generator that yields while text has not arrived, and returns its result to `yield from`."""

_JSON_PAIRS = {"}": "{", "]": "["}
_JSON_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789truefalsenullE")


def after_space(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not whitespace, or len(text).

    Args:
        text: Any text.
        at: Index of the first character to look at.
    """
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def partial_tag(text: str, tags: tuple[str, ...], at: int = 0) -> int:
    """Find the beginning of a tag that may be cut off by the end of the text.

    Args:
        text: Any text.
        tags: The tags.
        at: Index of the first character to look at.

    Returns:
        The smallest index such that text[index:] is the beginning of a tag. len(text) if there is no such index.
    """
    longest = max(map(len, tags), default=1) - 1
    for start in range(max(at, len(text) - longest), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


class Cursor:
    """A reading position in a text that is still being sampled.

    All methods but `forget` are generators for `yield from`. Such a method yields while its result needs text that has
    not arrived.

    Attributes:
        text: All text so far, without the text dropped by `forget`.
        at: Index of the next character to read.
        ended: Whether no more text will arrive.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False

    def forget(self) -> None:
        """Drop the text before the cursor, so that `at` becomes 0."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """Return the next character, or "" at the end of the text.

        This is a generator for `yield from`, which yields until the next character arrives or the text ends.
        """
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Reading[None]:
        """Skip whitespace.

        This is a generator for `yield from`, which yields while more whitespace may arrive.
        """
        while (yield from self.peek()).isspace():
            self.at = after_space(self.text, self.at)

    def skip_newlines(self) -> Reading[None]:
        """Skip newlines.

        This is a generator for `yield from`, which yields while more newlines may arrive.
        """
        while (yield from self.peek()) == "\n":
            self.at += 1

    def looks_at(self, word: str) -> Reading[bool]:
        """Return whether `word` comes next.

        This is a generator for `yield from`, which yields until the result is certain.

        Args:
            word: The text to look for.
        """
        while not self.ended and len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            yield
        return self.text.startswith(word, self.at)

    def accept(self, word: str) -> Reading[bool]:
        """Skip `word` if it comes next, and return whether it was skipped.

        This is a generator for `yield from`, which yields until the result is certain.

        Args:
            word: The text to look for.
        """
        found = yield from self.looks_at(word)
        if found:
            self.at += len(word)
        return found

    def until_one_of(self, marks: tuple[str, ...]) -> Reading[str | None]:
        """Move the cursor past the next of some marks, and return this mark.

        Returns None, and does not move the cursor, if the text ends without one. This is a generator for `yield from`,
        which yields until a mark arrives or the text ends.
        """
        searched = self.at
        while not (found := [(at, mark) for mark in marks if (at := self.text.find(mark, searched)) >= 0]):
            if self.ended:
                return None
            searched = max(self.at, len(self.text) - max(map(len, marks)) + 1)
            yield
        at, mark = min(found)
        self.at = at + len(mark)
        return mark

    def json_object(self) -> Reading[str | None]:
        """Return the text of the JSON object at the cursor, and move the cursor past the object.

        This is a generator for `yield from`, which yields until the end of the object arrives. Only brackets and
        strings are checked, so the result may be invalid JSON.

        Returns:
            The text, or None if the text at the cursor cannot be a JSON object.
        """
        start, brackets = self.at, []
        while True:
            char = yield from self.peek()
            self.at += 1
            if char == '"' and brackets:
                if not (yield from self._json_string()):
                    return None
            elif char in ("{", "["):
                brackets.append(char)
            elif char in _JSON_PAIRS:
                if not brackets or brackets.pop() != _JSON_PAIRS[char]:
                    return None
            elif char == "" or char not in _JSON_OUTSIDE_STRINGS:
                return None
            if brackets[:1] != ["{"]:  # closed again, or it never was an object
                return self.text[start : self.at] if char == "}" else None

    def _json_string(self) -> Reading[bool]:
        """Move the cursor past a JSON string whose opening quote has been read.

        Return False if the string is invalid, else True. This is a generator for `yield from`, which yields until
        the closing quote arrives.
        """
        while (char := (yield from self.peek())) != '"':
            if char < " ":  # the end, or a control character, which JSON does not allow in a string
                return False
            self.at += 1
            if char == "\\":
                if (yield from self.peek()) == "":
                    return False
                self.at += 1
        self.at += 1
        return True


Schema = dict[str, Any]

# Tools made from Python signatures often name Python's types instead of JSON's, even as "int, optional".
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


def load_json(text: str) -> Any:
    """Parse a JSON text.

    Args:
        text: Text of one JSON value.

    Raises:
        ValueError: If the text is not JSON, has NaN or infinity, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dump_json(value: Any) -> str:
    """Return a value as JSON text.

    Args:
        value: Any value.

    Raises:
        ValueError: If JSON cannot express the value, such as infinity.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which can only be written as an escape
        return json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError("not expressible in JSON") from error
    return text


def _refuse(name: str) -> Any:
    """Raise ValueError for a constant that JSON lacks, such as NaN or Infinity."""
    raise ValueError(f"JSON has no {name}")


def schemas_of(tools: Sequence[Any] | None) -> dict[str, Schema] | None:
    """Return the JSON schema of each tool's arguments.

    Args:
        tools: Tools as {"type": "function", "function": {...}}, or as the inner object alone. Other entries are
            skipped.

    Returns:
        Function name -> JSON schema of the arguments. None if `tools` is None.
    """
    if tools is None:
        return None
    schemas: dict[str, Schema] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            schemas[name] = parameters if isinstance(parameters, dict) else {}
    return schemas


def json_type(name: str) -> str:
    """Return the JSON Schema name of a type, such as "integer" for "int, optional".

    Args:
        name: Name of a type in JSON Schema or Python.
    """
    word = name.partition(",")[0].strip()
    return _ALIASES.get(word, word)
