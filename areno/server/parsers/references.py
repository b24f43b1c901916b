"""Schemas in a JSON schema: where they lie, and what `$ref`, `$id` and `$anchor` lead to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from areno.errors import GrammarError
from areno.schema.values import format_value
from areno.server.parsers.partial_text import json_type

Place = tuple[Any, str]
"""(schema, URI against which its references are resolved)."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
_SINGLE += ("propertyNames", "unevaluatedItems", "unevaluatedProperties")

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_SIZE = 2**31 - 1  # no answer is larger, and llguidance counts no further
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class References:
    """The schemas of one document. Names of properties, and values in `enum` or `default`, are no schemas."""

    def __init__(self, root: Any):
        self._bases: dict[int, str] = {}
        self._targets: dict[str, Place] = {}
        self._index_schema(root, "")
        self.root: Place = (root, self.base_of(root, ""))
        self._targets.setdefault("", self.root)

    def base_of(self, schema: Any, default: str) -> str:
        return self._bases.get(id(schema), default)

    def _index_schema(self, schema: Any, base: str) -> None:
        """Record the base URI of a schema and of all schemas in it, and the targets of `$id` and `$anchor`."""
        if not isinstance(schema, dict) or id(schema) in self._bases:
            return
        _check_keywords(schema)
        if isinstance(own := schema.get("$id"), str):
            if own.startswith("#"):
                self._targets.setdefault(base + own, (schema, base))
            else:
                base = urljoin(base, own).partition("#")[0]
                self._targets.setdefault(base, (schema, base))
        self._bases[id(schema)] = base
        for word in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(word), str):
                self._targets.setdefault(f"{base}#{schema[word]}", (schema, base))
        for each in _direct_subschemas(schema):
            self._index_schema(each, base)

    def resolve(self, reference: str, base: str) -> Place:
        """Return the schema to which a `$ref` leads. Raises GrammarError if there is none in the document."""
        uri = base + reference if reference.startswith("#") else urljoin(base, reference)
        document, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        if not fragment or not fragment.startswith("/"):
            place = self._targets.get(f"{document}#{fragment}" if fragment else document)
            if place is None:
                raise GrammarError(
                    "the schema cannot be compiled: $ref {} does not exist in it", format_value(reference)
                )
            return place
        target, base = self._targets.get(document, (None, ""))
        for step in fragment[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal():
                target = target[int(step)] if int(step) < len(target) else None
            else:
                target = target.get(step) if isinstance(target, dict) else None
            base = self._bases.get(id(target), base)
        if not isinstance(target, dict | bool):
            raise GrammarError("the schema cannot be compiled: $ref: {} does not exist in it", format_value(fragment))
        self._index_schema(target, base)
        return target, base


def _direct_subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for word, value in schema.items():
        if word in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif word in _LISTS or (word == "items" and isinstance(value, list)):
            yield from value
        elif word in _SINGLE:
            yield value


def _check_keywords(schema: dict[str, Any]) -> None:
    def keyword_error(word: str, expected: str) -> GrammarError:
        return GrammarError(
            "the schema cannot be compiled: {} is {}; {} is expected", word, format_value(schema[word]), expected
        )

    for word, value in schema.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if word in SIZES and not (is_number and value >= 0 and value == value // 1):
            raise keyword_error(word, "an integer from 0 on")
        if word in SIZES and word.startswith("min") and value > MAX_SIZE:
            raise keyword_error(word, f"an integer up to {MAX_SIZE:,}")
        if word in BOUNDS and not (is_number or (word[:2] == "ex" and isinstance(value, bool))):
            raise keyword_error(word, "a number")
        if word == "multipleOf" and not (value > 0 and math.isfinite(value)):
            raise keyword_error(word, "a number above 0")
        if word in ("pattern", "format", "$ref") and not isinstance(value, str):
            raise keyword_error(word, "a string")
        if word in _MAPS and not isinstance(value, dict):
            raise keyword_error(word, "an object")
        if word in (*_LISTS, "enum") and not isinstance(value, list):
            raise keyword_error(word, "a list")
        if word == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise keyword_error(word, "a list of names")
    declared = schema.get("type", [])
    for each in declared if isinstance(declared, list) else [declared]:
        if not isinstance(each, str) or json_type(each) not in KINDS:
            text = "the schema cannot be compiled: Invalid type: {}; expected one of {}"
            raise GrammarError(text, each if isinstance(each, str) else format_value(each), ", ".join(sorted(KINDS)))
