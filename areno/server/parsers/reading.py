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

    def until(self, mark: str) -> Reading[str | None]:
        """Return the text before the next `mark`, and move the cursor past the mark.

        This is a generator for `yield from`, which yields until the mark arrives or the text ends.

        Args:
            mark: The text to look for.

        Returns:
            The text before the mark. If the text ends without the mark, the result is None, and the cursor is not
            moved.
        """
        start = searched = self.at
        while (found := self.text.find(mark, searched)) < 0:
            if self.ended:
                return None
            searched = max(start, len(self.text) - len(mark) + 1)
            yield
        self.at = found + len(mark)
        return self.text[start:found]

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
MAX_REFERENCES = 10  # `$ref`s that are followed in a row

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


def properties_of(schema: Schema) -> dict[str, Schema]:
    """Return the properties of an object schema, as name -> JSON schema.

    Args:
        schema: Schema of an object. Some tools write only the properties, without the object schema around them.
            This form is accepted, too.
    """
    is_bare = "properties" not in schema and not isinstance(schema.get("type"), str)
    properties = schema if is_bare else schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: each if isinstance(each, dict) else {} for name, each in properties.items()}


def resolved(schema: Schema, root: Schema) -> Schema:
    """Follow the `$ref` of a schema, up to 10 references in a row.

    Args:
        schema: A schema inside of `root`.
        root: The whole schema, in which references are looked up.

    Returns:
        The schema to which the references lead. If `schema` has no reference, `schema` itself. If a reference cannot
        be followed, the schema that contains this reference.
    """
    for _ in range(MAX_REFERENCES):
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
    """Return the JSON Schema name of a type, such as "integer" for "int, optional".

    Args:
        name: Name of a type in JSON Schema or Python.
    """
    word = name.partition(",")[0].strip()
    return _ALIASES.get(word, word)


def types_of(schema: Schema) -> set[str]:
    """Return the names of the JSON types that a schema allows, also through `anyOf` and `oneOf`.

    Args:
        schema: JSON schema.

    Returns:
        Names such as "string". Empty if the schema names no type.
    """
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    types = {json_type(each) for each in listed if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            types |= types_of(branch) if isinstance(branch, dict) else set()
    return types
