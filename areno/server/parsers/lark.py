"""Composition of grammars in llguidance's variant of Lark.

`Lark` collects named rules for texts and JSON schemas and returns the whole grammar as text. The other functions
prepare JSON schemas for llguidance, because users write schemas in many dialects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from areno.errors import GrammarError
from areno.server.parsers.reading import Schema, json_type, properties_of

MAX_CHARACTERS = 2_000_000
"""Maximum number of characters in a grammar. Larger grammars take many seconds to compile."""

# The form of `json.dumps` and the chat templates: a model has seen its own calls in this form.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Whitespace is allowed where JSON allows it, but bounded, since a model might never stop writing it.
_FREE = {"whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,40}"}
_HEADER = '%llguidance {"ignore_once": true}'
_VALUES = ("enum", "const", "default", "examples")
_NAME_MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # their keys are names, not keywords
_COMBINING = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "patternProperties")


class Lark:
    """A grammar under construction.

    The methods return grammar expressions as strings. Expressions joined by spaces match one after the other. `rule`
    gives an expression a name, and `text` returns the whole grammar.

    Args:
        special: Special tokens and their ids. Only `literal` and `until` can match special tokens. Other text patterns
            never match them.
        strict: Whether a feature of JSON Schema that llguidance does not know is an error. If False, the feature is
            ignored.
    """

    def __init__(self, special: Mapping[str, int], strict: bool = True):
        self._special, self._strict = special, strict
        self._rules: list[str] = []
        self._size = 0  # characters of the rules

    def rule(self, body: str, option: str = "") -> str:
        """Add a named rule for an expression.

        Args:
            body: The expression.
            option: Options of the rule in llguidance's syntax, such as "[lazy]".

        Returns:
            The name of the rule, which can be used as an expression.

        Raises:
            GrammarError: If the grammar exceeds 2,000,000 characters.
        """
        name = f"r{len(self._rules)}"
        self._size += len(body)
        if self._size > MAX_CHARACTERS:
            raise GrammarError("the grammar has more than {:,} characters; use smaller schemas", MAX_CHARACTERS)
        self._rules.append(f"{name}{option}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return an expression that matches exactly this text. Special tokens in the text match as token ids.

        Args:
            text: The text.
        """
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
        """Return an expression that matches any text up to and including a tag.

        Args:
            tag: The tag, such as "</think>".
        """
        if tag in self._special:
            return self.rule(f"/(?s:.*)/ {self.literal(tag)}")
        escaped = "".join(f"\\{char}" if char in "\\/.*+?()[]{}|^$" else char for char in tag)
        return self.rule(f"/(?s:.*){escaped}/", "[lazy]")

    def json(self, schema: Any, one_line: bool = True, strict: bool | None = None, **guidance: Any) -> str:
        """Return an expression that matches the JSON values that a schema allows.

        Args:
            schema: JSON schema.
            one_line: If True, the JSON must be formatted as by `json.dumps`. If False, a bounded amount of whitespace
                is allowed wherever JSON allows whitespace.
            strict: Whether a feature of JSON Schema that llguidance does not know is an error. None takes the value
                that was given to `Lark`.
            **guidance: Further options of llguidance's `x-guidance`.
        """
        strict = self._strict if strict is None else strict
        options = {**(_ONE_LINE if one_line else _FREE), "lenient": not strict, **guidance}
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": options}
        return self.rule(f"%json {json.dumps(schema)}")

    def text(self, start: str) -> str:
        """Return the text of the whole grammar.

        Args:
            start: The expression that the answer must match.
        """
        return "\n".join([_HEADER, f"start: {start}", *self._rules])


def parameters_of(schema: Schema) -> Schema:
    """Return the JSON schema of a tool's arguments, as an object schema that forbids unlisted properties if possible.

    Args:
        schema: The `parameters` of a tool. It may have Python's type names, or consist of the properties alone.
    """
    full = dict(schema)
    if full.get("type") is None and "properties" not in full and not {"$ref", "anyOf", "oneOf", "allOf"} & set(full):
        full = {"properties": properties_of(full)}
    full.setdefault("properties", {})
    return close_objects(_json_types({**full, "type": "object"}))


def close_objects(schema: Any) -> Any:
    """Return a schema in which objects that list their properties forbid unlisted properties.

    This adds `additionalProperties: false` to each object that lists properties and does not set
    `additionalProperties`, so that models end objects where they should end. Objects with `anyOf`, `oneOf` or `$ref`
    are left as they are. A schema that contains other combining keywords, such as `allOf`, is returned unchanged,
    because a property that is unknown in one branch may be required by another branch.

    Args:
        schema: JSON schema. It is not changed in place.
    """
    shown = json.dumps(schema)
    if any(f'"{word}"' in shown for word in _COMBINING):
        return schema
    return _close_all(schema)


def rebase_refs(schema: Any, path: str) -> Any:
    """Return a copy of a schema that can be embedded in another schema, by adding a prefix to its `$ref`s.

    Only references within the schema itself, which begin with `#`, get the prefix.

    Args:
        schema: JSON schema. It is not changed in place.
        path: JSON pointer to the place in the other schema, such as "/properties/arguments". This is the prefix.
    """

    def follow(key: str, value: Any) -> Any:
        is_own = key == "$ref" and isinstance(value, str) and value.startswith("#")
        return f"#{path}{value[1:]}" if is_own else _rewritten(value, follow)

    return _rewritten(schema, follow)


def _close_all(schema: Any) -> Any:
    """Return a copy of a schema in which objects that list their properties forbid unlisted properties.

    This sets `additionalProperties` to false, unless the schema sets another value. Objects with `anyOf`, `oneOf` or
    `$ref` are left as they are.
    """
    done = _rewritten(schema, lambda _, value: _close_all(value))
    if (
        isinstance(done, dict)
        and isinstance(done.get("properties"), dict)
        and not {"anyOf", "oneOf", "$ref"} & set(done)
    ):
        done.setdefault("additionalProperties", False)
    return done


def _json_types(schema: Any) -> Any:
    """Return a copy of a schema with JSON's type names in place of Python's, such as "string" for "str"."""
    return _rewritten(
        schema, lambda key, value: json_type(value) if key == "type" and isinstance(value, str) else _json_types(value)
    )


def _rewritten(schema: Any, rewrite: Callable[[str, Any], Any]) -> Any:
    """Return a copy of a schema in which `rewrite(keyword, value)` replaces the value of each keyword.

    Only the keywords at the top level are visited. To reach deeper levels, `rewrite` calls this function again. For
    each element of a list, and for each named subschema, such as those in `properties`, the keyword is "". Values
    that are plain data, such as the value of `enum`, are copied unchanged.
    """
    if isinstance(schema, list):
        return [rewrite("", each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    done = {}
    for key, value in schema.items():
        if key in _VALUES:
            done[key] = value
        elif key in _NAME_MAPS and isinstance(value, dict):
            done[key] = {name: rewrite("", each) for name, each in value.items()}
        else:
            done[key] = rewrite(key, value)
    return done
