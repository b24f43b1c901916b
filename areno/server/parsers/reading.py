"""A place in a text that is still being written.

The methods are generators. They yield while the answer depends on text that has not come yet, and return the answer
with `yield from`. So a reader is written once, as if it had the whole text, and reads a stream with the same result.

JSON that a model wrote, and the schemas of the tools that it was offered.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Reading = Generator[None, None, Answer]

_JSON_PAIRS = {"}": "{", "]": "["}
_JSON_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789truefalsenullE")


def after_space(text: str, at: int) -> int:
    """The first position from `at` on whose character is no whitespace, or the end."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def partial_tag(text: str, tags: tuple[str, ...], at: int = 0) -> int:
    """From where on the end of the text could become one of the tags; the end if it cannot."""
    longest = max(map(len, tags), default=1) - 1
    for start in range(max(at, len(text) - longest), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


class Cursor:
    """text: all that was written so far. at: the next character to read. ended: no more text comes."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False

    def forget(self) -> None:
        """Drop the text before the cursor."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Reading[None]:
        """Go to the next character that is no whitespace."""
        while (yield from self.peek()).isspace():
            self.at = after_space(self.text, self.at)

    def skip_newlines(self) -> Reading[None]:
        while (yield from self.peek()) == "\n":
            self.at += 1

    def looks_at(self, word: str) -> Reading[bool]:
        """Whether this word comes next."""
        while not self.ended and len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            yield
        return self.text.startswith(word, self.at)

    def accept(self, word: str) -> Reading[bool]:
        """Go past this word if it comes next."""
        found = yield from self.looks_at(word)
        if found:
            self.at += len(word)
        return found

    def until(self, mark: str) -> Reading[str | None]:
        """The text before the next `mark`, past which the cursor goes. None if there is none."""
        start = searched = self.at
        while (found := self.text.find(mark, searched)) < 0:
            if self.ended:
                return None
            searched = max(start, len(self.text) - len(mark) + 1)
            yield
        self.at = found + len(mark)
        return self.text[start:found]

    def json_object(self) -> Reading[str | None]:
        """The text of a JSON object, as far as its brackets and strings tell. None if no object can come of it."""
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
        """Go past a string whose first quote has been read."""
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
MOST_REFERENCES = 10  # that are followed

# Tools made from Python signatures often have its types in the place of JSON's, even as "int, optional".
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


def load_json(text: str) -> Any:
    """The value of a JSON text. ValueError if it is none, for whatever reason."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dump_json(value: Any) -> str:
    """A value as JSON. ValueError for what JSON does not have, such as infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError("not expressible in JSON") from error
    return text


def _refuse(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def schemas_of(tools: Sequence[Any] | None) -> dict[str, Schema] | None:
    """Name -> parameters of each tool, in the form {"type": "function", "function": {...}} or the function alone.

    None where it is not known which tools there are. What is no tool is left out.
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


def properties_of(schema: Schema) -> dict[str, Schema]:
    """The schemas of an object's properties. Some tools give the properties themselves in the place of the object."""
    is_bare = "properties" not in schema and not isinstance(schema.get("type"), str)
    properties = schema if is_bare else schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: each if isinstance(each, dict) else {} for name, each in properties.items()}


def resolved(schema: Schema, root: Schema) -> Schema:
    """The schema that a `$ref` into the root points to; the schema itself if it has none."""
    for _ in range(MOST_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        schema = target
    return schema


def json_type(name: str) -> str:
    """The JSON name of a type."""
    word = name.partition(",")[0].strip()
    return _ALIASES.get(word, word)


def types_of(schema: Schema) -> set[str]:
    """The JSON types that a schema allows, as far as it says; empty if it does not."""
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    types = {json_type(each) for each in listed if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            types |= types_of(branch) if isinstance(branch, dict) else set()
    return types
