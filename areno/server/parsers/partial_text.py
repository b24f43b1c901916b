"""Reading of text that is still being sampled, and of tools' schemas, for the tool-call parsers.

Methods that return `Reading` are generators for `yield from`. They yield while their result depends on text that has
not arrived. So a parser is written once, as if it had the whole text, and gives the same result for a stream.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Reading = Generator[None, None, Answer]

_JSON_PAIRS = {"}": "{", "]": "["}
_JSON_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789truefalsenullE")


def index_after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def partial_tag_start(text: str, tags: tuple[str, ...], at: int = 0) -> int:
    """Return the smallest index such that text[index:] is the beginning of a tag, else len(text)."""
    longest = max(map(len, tags), default=1) - 1
    for start in range(max(at, len(text) - longest), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


class Cursor:
    """A reading position in a text that is still being sampled.

    `text` has what arrived so far, and `at` is the index of the next character to read.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False

    def drop_read_text(self) -> None:
        """Drop the text before the cursor, so that `at` becomes 0."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """Return the next character, "" at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            self.at = index_after_space(self.text, self.at)

    def skip_newlines(self) -> Reading[None]:
        while (yield from self.peek()) == "\n":
            self.at += 1

    def starts_with(self, word: str) -> Reading[bool]:
        while not self.ended and len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            yield
        return self.text.startswith(word, self.at)

    def accept(self, word: str) -> Reading[bool]:
        """Skip `word` if it comes next, and return whether it did."""
        found = yield from self.starts_with(word)
        if found:
            self.at += len(word)
        return found

    def skip_past_one_of(self, marks: tuple[str, ...]) -> Reading[str | None]:
        """Move past the first occurrence of a mark, and return the mark. Without one, return None and do not move."""
        searched = self.at
        while not (found := [(at, mark) for mark in marks if (at := self.text.find(mark, searched)) >= 0]):
            if self.ended:
                return None
            searched = max(self.at, len(self.text) - max(map(len, marks)) + 1)
            yield
        at, mark = min(found)
        self.at = at + len(mark)
        return mark

    def read_json_object(self) -> Reading[str | None]:
        """Read a JSON object, or return None if there is none. Only brackets and strings are checked."""
        start, brackets = self.at, []
        while True:
            char = yield from self.peek()
            self.at += 1
            if char == '"' and brackets:
                if not (yield from self._skip_json_string()):
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

    def _skip_json_string(self) -> Reading[bool]:
        """Move past a JSON string whose opening quote was already read. Return whether it is valid."""
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
    """Parse one JSON value. NaN, infinity and deep nesting are ValueErrors, too."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dump_json(value: Any) -> str:
    """Return a value as JSON text. Raises ValueError if JSON cannot express it, such as infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which can only be written as an escape
        return json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError("not expressible in JSON") from error
    return text


def _reject_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def schemas_by_name(tools: Sequence[Any] | None) -> dict[str, Schema] | None:
    """Return function name -> JSON schema of the arguments. Elements of `tools` that are no tools are skipped."""
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
    """Return the JSON Schema name of a type that may be written as in Python: "integer" for "int, optional"."""
    word = name.partition(",")[0].strip()
    return _ALIASES.get(word, word)
