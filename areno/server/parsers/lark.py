"""Grammars in llguidance's variant of Lark, put together from pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from areno.errors import GrammarError
from areno.server.parsers.reading import Schema, json_type, properties_of

MOST_CHARACTERS = 2_000_000
"""Of a grammar. Larger ones take many seconds to compile."""

# How `json.dumps` and the chat templates write JSON: a model has seen its own calls that way.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Space may stand where JSON has it, but not without end.
_FREE = {"whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,40}"}
_HEADER = '%llguidance {"ignore_once": true}'
_VALUES = ("enum", "const", "default", "examples")
_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions"}  # whose keys are no keywords
_COMBINING = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "patternProperties")


class Lark:
    """Expressions are strings that may be joined by spaces; `rule` gives one a name.

    special: the tokens that no text matches, with their ids. strict: refuse what the library does not know of JSON
    Schema, instead of leaving it out.
    """

    def __init__(self, special: Mapping[str, int], strict: bool = True):
        self._special, self._strict = special, strict
        self._rules: list[str] = []
        self._size = 0  # characters of the rules

    def rule(self, body: str, option: str = "") -> str:
        """Give an expression a name, which is returned. Raises GrammarError where the grammar becomes too large."""
        name = f"r{len(self._rules)}"
        self._size += len(body)
        if self._size > MOST_CHARACTERS:
            raise GrammarError("the grammar has more than {:,} characters; use smaller schemas", MOST_CHARACTERS)
        self._rules.append(f"{name}{option}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text."""
        parts, at = [], 0
        places = {tag: place for tag in self._special if (place := text.find(tag)) >= 0}
        while places:
            place, _, tag = min((place, -len(tag), tag) for tag, place in places.items())
            parts += [json.dumps(text[at:place])] if place > at else []
            parts.append(f"<[{self._special[tag]}]>")
            at = place + len(tag)
            found = {tag: place if place >= at else text.find(tag, at) for tag, place in places.items()}
            places = {tag: place for tag, place in found.items() if place >= 0}
        parts += [json.dumps(text[at:])] if at < len(text) else []
        return " ".join(parts) or '""'

    def until(self, tag: str) -> str:
        """Any text, and the tag at its end."""
        if tag in self._special:
            return self.rule(f"/(?s:.*)/ {self.literal(tag)}")
        escaped = "".join(f"\\{char}" if char in "\\/.*+?()[]{}|^$" else char for char in tag)
        return self.rule(f"/(?s:.*){escaped}/", "[lazy]")

    def json(self, schema: Any, one_line: bool = True, strict: bool | None = None, **how: Any) -> str:
        """A JSON value of a schema. one_line: as `json.dumps` writes it; else with any sensible space."""
        strict = self._strict if strict is None else strict
        options = {**(_ONE_LINE if one_line else _FREE), "lenient": not strict, **how}
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": options}
        return self.rule(f"%json {json.dumps(schema)}")

    def text(self, start: str) -> str:
        """The whole grammar, which begins with this expression."""
        return "\n".join([_HEADER, f"start: {start}", *self._rules])


def parameters_of(schema: Schema) -> Schema:
    """The schema of a tool's arguments as an object with all its properties, and with JSON's names of the types."""
    full = dict(schema)
    if full.get("type") is None and "properties" not in full and not {"$ref", "anyOf", "oneOf", "allOf"} & set(full):
        full = {"properties": properties_of(full)}
    full.setdefault("properties", {})
    return closed(_json_types({**full, "type": "object"}))


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` for each object that names its properties and does not say.

    Models then end objects as they are meant to end. Where schemas are combined nothing is changed: what is closed in
    one part could be needed by the other.
    """
    shown = json.dumps(schema)
    if any(f'"{word}"' in shown for word in _COMBINING):
        return schema
    return _closed(schema)


def moved(schema: Any, path: str) -> Any:
    """A schema that is to stand at this path of another one: its references into itself go on pointing there."""

    def follow(key: str, value: Any) -> Any:
        is_own = key == "$ref" and isinstance(value, str) and value.startswith("#")
        return f"#{path}{value[1:]}" if is_own else _rewritten(value, follow)

    return _rewritten(schema, follow)


def _closed(schema: Any) -> Any:
    done = _rewritten(schema, lambda _, value: _closed(value))
    if (
        isinstance(done, dict)
        and isinstance(done.get("properties"), dict)
        and not {"anyOf", "oneOf", "$ref"} & set(done)
    ):
        done.setdefault("additionalProperties", False)
    return done


def _json_types(schema: Any) -> Any:
    return _rewritten(
        schema, lambda key, value: json_type(value) if key == "type" and isinstance(value, str) else _json_types(value)
    )


def _rewritten(schema: Any, rewrite: Callable[[str, Any], Any]) -> Any:
    """Return a schema whose subschemas are rewritten, each once. Keywords that hold plain values stay as they are."""
    if isinstance(schema, list):
        return [rewrite("", each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    done = {}
    for key, value in schema.items():
        if key in _VALUES:
            done[key] = value
        elif key in _OF_NAMES and isinstance(value, dict):
            done[key] = {name: rewrite("", each) for name, each in value.items()}
        else:
            done[key] = rewrite(key, value)
    return done
