"""Random JSON schemas with most keywords, values that are meant to satisfy them, and the validator that decides."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jsonschema
from jsonschema.validators import extend

NAMES = ["a", "b", "c", "é", "enum", "not", "if", "allOf", "x_y", "z", "p1"]
ODD_NAMES = ["", 'q"', "\\", "x y", "😀", "\n"]
PATTERNS = [
    "^.{2}$",
    "^[a-z]{1,3}$",
    "^a",
    "b$",
    "[0-9]",
    "^x|y$",
    r"^\d{2,3}-\w+$",
    "^.{2,}$",
    "é",
    "^(ab|cd)*$",
    r"\.",
]
TEXTS = ["ab", "a", "b9", "a\x7f", "x", "12-a", "cdab", "xx.é", '"x', "é"]
FORMATS = {
    "date": "2024-02-29",
    "time": "12:30:00Z",
    "date-time": "2024-02-29T12:30:00.5+01:00",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "1.2.3.4",
    "ipv6": "::1",
    "email": "a@b.c",
    "hostname": "a.b",
    "duration": "P1DT2H",
    "uri": "http://a/b?c#d",
}
COMBINING = {"anyOf", "allOf", "oneOf", "$ref", "$defs"}


def _is_multiple(_: Any, divisor: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and Fraction(repr(value)) % Fraction(repr(divisor))
    ):
        yield jsonschema.ValidationError("is no multiple")


# The library divides doubles, so that 0.07 is no multiple of 0.01 for it.
Validator = extend(jsonschema.Draft202012Validator, {"multipleOf": _is_multiple})


def is_valid(value: Any, schema: Any) -> bool:
    try:
        return Validator(schema).is_valid(value)
    except RecursionError:  # a $ref that leads back to itself in a branch without values
        return True


class NoValue(Exception):
    """Raised if a value cannot be drawn."""


class Draw:
    """A schema, drawn with `rng`, and values for it."""

    def __init__(self, rng: random.Random, names: list[str] | None = None):
        self.rng, self.names = rng, names or NAMES + ODD_NAMES
        self.schema = self._whole()

    def _chance(self, share: float) -> bool:
        return self.rng.randrange(100) < 100 * share

    def _whole(self) -> Any:
        has_definitions = self._chance(0.4)
        schema = self._any(self.rng.randrange(4), has_definitions)
        if has_definitions and isinstance(schema, dict):
            return {**schema, "$defs": {"d0": self._any(1, True), "d1": self._any(1, False)}}
        return schema

    def _any(self, depth: int, refers: bool) -> Any:
        if depth <= 0:
            return self._flat(refers)
        kind = self.rng.randrange(9)
        if kind < 2:
            return self._array(depth, refers)
        if kind < 5:
            return self._object(depth, refers)
        schema: Any = {}
        if self._chance(0.4):
            schema = self._object(depth, refers) if self._chance(0.6) else self._flat(False)
        schema = dict(schema) if isinstance(schema, dict) else {}
        schema[self.rng.choice(["anyOf", "anyOf", "allOf", "oneOf"])] = [
            self._any(depth - 1, refers) if self._chance(0.5) else self._object(depth - 1, refers)
            for _ in range(self.rng.randrange(1, 4))
        ]
        return dict(reversed(schema.items())) if self._chance(0.3) else schema

    def _flat(self, refers: bool) -> Any:
        kind = self.rng.randrange(10)
        if kind < 2:
            return {"type": ["boolean", "null"][kind]}
        if kind < 4:
            return self._number(["integer", "number"][kind - 2])
        if kind < 6:
            return self._string()
        if kind == 6:
            return {"enum": [self._literal() for _ in range(self.rng.randrange(1, 4))]}
        if kind == 7:
            return {"const": self._literal()}
        if kind == 8:
            several = {"type": ["number", "string"], "enum": [1, "a", None, 2.5]}
            return self.rng.choice([{}, True, {"type": ["string", "null"]}, {"minimum": 3, "maxLength": 2}, several])
        return {"$ref": f"#/$defs/d{self.rng.randrange(2)}"} if refers else {}

    def _number(self, kind: str) -> dict[str, Any]:
        def bound() -> Any:
            small = [self.rng.randrange(-20, 20), self.rng.randrange(-500, 500) / 100, float(self.rng.randrange(-5, 5))]
            return self.rng.choice([*small, *small, 2**53, -(2**63), 2**63 - 1, 2**64 - 1, 1e-5, 1e18])

        schema: dict[str, Any] = {"type": kind}
        for low in ("minimum", "exclusiveMinimum")[: self.rng.randrange(3)][-1:]:
            schema[low] = bound()
        for high in ("maximum", "exclusiveMaximum")[: self.rng.randrange(3)][-1:]:
            schema[high] = bound()
        is_narrow = self._chance(0.2)
        if is_narrow:
            low = self.rng.randrange(-20, 20) / 10
            schema = {"type": kind, "minimum": low, "maximum": low + self.rng.randrange(5) / 10}
        if self._chance(0.7 if is_narrow else 0.2):
            schema["multipleOf"] = self.rng.choice([1, 2, 3, 7, 10, 0.5, 0.25, 0.1, 0.01, 2.5, 0.05])
        return schema

    def _string(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if self._chance(0.3):
            schema["minLength"] = self.rng.randrange(3)
        if self._chance(0.3):
            schema["maxLength"] = self.rng.randrange(1, 5)
        if self._chance(0.3):
            schema["pattern"] = self.rng.choice(PATTERNS)
        elif self._chance(0.2):
            schema["format"] = self.rng.choice(list(FORMATS))
        return schema

    def _array(self, depth: int, refers: bool) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if self._chance(0.7):
            schema["items"] = False if self._chance(0.2) else self._any(depth - 1, refers)
        if self._chance(0.3):
            schema["prefixItems"] = [self._any(depth - 1, refers) for _ in range(self.rng.randrange(1, 3))]
        if self._chance(0.4):
            schema["minItems"] = self.rng.randrange(3)
        if self._chance(0.4):
            schema["maxItems"] = self.rng.randrange(4)
        return schema

    def _object(self, depth: int, refers: bool) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"} if self._chance(0.85) else {}
        names = self.rng.sample(self.names, self.rng.randrange(4))
        names = [""] if "" in self.names and self._chance(0.05) else names
        if self._chance(0.9):
            schema["properties"] = {name: self._any(depth - 1, refers) for name in names}
        if self._chance(0.6):
            required = [name for name in names if self._chance(0.5)]
            schema["required"] = list(dict.fromkeys([*required, *self.rng.sample(self.names, self._chance(0.1))]))
        if self._chance(0.35):
            schema["additionalProperties"] = False if self._chance(0.5) else self._any(depth - 1, refers)
        if self._chance(0.1):
            schema["patternProperties"] = {self.rng.choice(["^p", "z$", "[0-9]"]): self._flat(False)}
        if self._chance(0.1):
            schema["minProperties"] = self.rng.randrange(3)
        if self._chance(0.1):
            schema["maxProperties"] = self.rng.randrange(4)
        return schema

    def _literal(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(9 if depth < 2 else 7)
        if kind < 2:
            return [None, self._chance(0.5)][kind]
        if kind == 2:
            return self.rng.randrange(-10, 300)
        if kind == 3:
            return self.rng.choice([0.5, -1.25, 1e-7, 1e22, 3.0, 2.5e300, 2**64 - 1])
        if kind < 7:
            return self._text(4)
        if kind == 7:
            return [self._literal(depth + 1) for _ in range(self.rng.randrange(3))]
        return {self.rng.choice(self.names): self._literal(depth + 1) for _ in range(self.rng.randrange(3))}

    def _text(self, most: int) -> str:
        return "".join(
            self.rng.choice('abcxyz09 é\n"\\\u0001\u007f😀/-.ÿ日\t') for _ in range(self.rng.randrange(most + 1))
        )

    # Values ----------------------------------------------------------------------------------------------------------

    def value(self) -> Any:
        """A valid value with properties in the order of the schema. Raises NoValue if it is not found."""
        value = _canonical(self._value([self.schema]))
        if not is_valid(value, self.schema):
            raise NoValue
        return value

    def _in_place(self, schema: Any, depth: int = 0) -> list[dict[str, Any]]:
        """The schemas that apply to one value, in order, with one branch of each anyOf and oneOf."""
        if depth > 8 or schema is False:
            raise NoValue
        if schema is True:
            return []
        found: list[dict[str, Any]] = []
        own = "properties" if "properties" in schema else next((word for word in schema if word not in COMBINING), None)
        for word, value in schema.items():
            if word == own:
                found.append(schema)
            elif word == "$ref":
                found += self._in_place(self.schema["$defs"][value.rpartition("/")[2]], depth + 1)
            elif word == "allOf":
                found += [each for branch in value for each in self._in_place(branch, depth + 1)]
            elif word in ("anyOf", "oneOf"):
                found += self._in_place(self.rng.choice(value), depth + 1)
        return found

    def _value(self, places: list[Any], depth: int = 0) -> Any:
        schemas = [each for place in places for each in self._in_place(place)]
        value = self._of(schemas, depth)
        definitions = self.schema.get("$defs", {}) if isinstance(self.schema, dict) else {}
        for schema in schemas:
            own = {word: each for word, each in schema.items() if word not in COMBINING}
            if not is_valid(value, {**own, "$defs": definitions}):
                raise NoValue
            if isinstance(value, str) and value != FORMATS.get(schema.get("format", ""), value):
                raise NoValue
        return value

    def _of(self, schemas: list[dict[str, Any]], depth: int) -> Any:
        if depth > 6:
            raise NoValue
        for schema in schemas:
            if "const" in schema or "enum" in schema:
                return self.rng.choice(schema.get("enum") or [schema["const"]])
        kinds = {"null", "boolean", "integer", "number", "string", "array", "object"}
        for types in (schema["type"] for schema in schemas if "type" in schema):
            named = {types} if isinstance(types, str) else set(types)
            kinds &= named | ({"integer"} if "number" in named else set())
        if not kinds:
            raise NoValue
        kind = self.rng.choice(sorted(kinds))
        if kind in ("null", "boolean"):
            return None if kind == "null" else self._chance(0.5)
        if kind in ("integer", "number"):
            return self._some_number(schemas, kind)
        if kind == "string":
            return self._some_string(schemas)
        if kind == "array":
            n_items = max([schema.get("minItems", 0) for schema in schemas], default=0) + self.rng.randrange(3)
            places = [[_item(schema, at) for schema in schemas] for at in range(n_items)]
            return [self._value(each, depth + 1) for each in places]
        return self._some_object(schemas, depth)

    def _some_number(self, schemas: list[dict[str, Any]], kind: str) -> Any:
        words = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        found = [0, 1, -1, self.rng.randrange(-30, 400), 0.5, 1e-7, 1e16 + 2]
        found.append(self.rng.randrange(-3000, 3000) / 1000 * 10.0 ** self.rng.randrange(-9, 25))
        for bound in [schema[word] for schema in schemas for word in words if word in schema]:
            found += [bound, bound + 1, bound - 1, int(bound), float(bound)]
            found += [math.nextafter(float(bound), math.inf), math.nextafter(float(bound), -math.inf)]
        for step in [schema["multipleOf"] for schema in schemas if "multipleOf" in schema]:
            found = [float(Fraction(repr(step)) * self.rng.randrange(-40, 40)) for _ in range(5)]
        value = self.rng.choice(found)
        return int(value) if kind == "integer" else value

    def _some_string(self, schemas: list[dict[str, Any]]) -> str:
        if formats := [schema["format"] for schema in schemas if "format" in schema]:
            return FORMATS[self.rng.choice(formats)]
        if any("pattern" in schema for schema in schemas):
            return self.rng.choice(TEXTS)
        return self._text(2) + self._text(max([schema.get("minLength", 0) for schema in schemas], default=0))

    def _some_object(self, schemas: list[dict[str, Any]], depth: int) -> dict[str, Any]:
        names = dict.fromkeys(name for schema in schemas for name in schema.get("properties", ()))
        required = dict.fromkeys(name for schema in schemas for name in schema.get("required", ()))
        is_closed = bool(any("properties" in each for each in schemas))
        is_closed &= not any("additionalProperties" in each for each in schemas)
        patterns = {pattern for schema in schemas for pattern in schema.get("patternProperties", ())}
        others = [] if is_closed else ["u", "v", "日"]
        others += [name for name in ("p7", "kz") if sum(bool(re.search(each, name)) for each in patterns) == 1]
        found: dict[str, Any] = {}
        for name in [*names, *(name for name in required if name not in names)]:
            if name in required or self._chance(0.5):
                found[name] = self._value(_property(schemas, name), depth + 1)
        for name in self.rng.sample(others, self.rng.randrange(2) if others else 0):
            found[name] = self._value(_property(schemas, name), depth + 1)
        return found


def _item(schema: dict[str, Any], at: int) -> Any:
    first = schema.get("prefixItems", [])
    return first[at] if at < len(first) else schema.get("items", True)


def _property(schemas: list[dict[str, Any]], name: str) -> list[Any]:
    found = []
    for schema in schemas:
        own = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        patterns = schema.get("patternProperties", {}).items()
        own += [each for pattern, each in patterns if re.search(pattern, name)]
        if not own and "additionalProperties" in schema:
            own = [schema["additionalProperties"]]
        found += own
    return found


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(each) for each in value]
    return {name: _canonical(each) for name, each in value.items()} if isinstance(value, dict) else value
