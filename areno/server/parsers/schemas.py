"""Resolution of JSON schemas into alternatives, which are free of `$ref`, `allOf`, `anyOf` and `oneOf`.

An alternative is a tuple of plain schemas, and a value matches it if it matches all of them. A `SchemaDocument` reads
one schema. `alternatives` resolves the combining keywords, and most other methods combine the schemas of an
alternative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from areno.errors import GrammarError
from areno.schema.values import format_value
from areno.server.parsers.numbers import Range
from areno.server.parsers.partial_text import json_type
from areno.server.parsers.patterns import pattern_matches
from areno.server.parsers.references import BOUNDS, KINDS, MAX_SIZE, SIZES, Place, References

MAX_ALTERNATIVES = 4096
_MAX_DEPTH = 4  # of properties that are compared to find out whether branches overlap

_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")

_OWN = {"type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "prefixItems"}
_OWN |= {"items", "additionalItems", "pattern", "format", *SIZES, *BOUNDS}
# Keyword that no grammar enforces -> the type that it is about, None for any.
_UNENFORCED = {
    "not": None,
    "if": None,
    "$dynamicRef": None,
    "$recursiveRef": None,
    "contains": "array",
    "uniqueItems": "array",
    "unevaluatedItems": "array",
    "propertyNames": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
    "dependencies": "object",
    "unevaluatedProperties": "object",
}


@dataclass(eq=False)
class Siblings:
    """Schemas beside an alternative, such as the other branches of `anyOf`. They may list further properties."""

    branches: list[list[Alternative]]


Alternative = tuple["Place | Siblings", ...]


@dataclass
class ObjectSchema:
    """The properties that objects may have: listed ones in order, ones whose names match a pattern, and others."""

    properties: dict[str, tuple[Place, ...]]
    required: set[str]
    patterns: list[tuple[str, tuple[Place, ...]]] = field(default_factory=list)
    others: tuple[Place, ...] | None = None
    low: int = 0
    high: int | None = None


class SchemaDocument:
    """A JSON schema with everything that its references lead to.

    Args:
        root: The schema.
        strict: Whether a keyword that no grammar can enforce is an error. Otherwise it is left out, and noted in
            `relaxed`.
    """

    def __init__(self, root: Any, strict: bool = True):
        self.strict = strict
        self.relaxed: dict[str, None] = {}
        self._expanded: dict[int, list[Alternative] | None] = {}
        self._fixed: dict[int, frozenset[Any]] = {}
        self._made: dict[tuple[int, ...], Any] = {}
        self._constants: dict[int, Any] = {}
        self._references = References(root)
        self.root = self._references.root

    def relax_or_refuse(self, what: str) -> None:
        if self.strict:
            why = "a grammar cannot enforce it; change the schema, or set strict to false, so that it is left out"
            raise GrammarError("the schema cannot be compiled: Unimplemented: {}: {}", what, why)
        self.relaxed.setdefault(what)

    def alternatives(self, places: Iterable[Place]) -> list[Alternative]:
        """Combine schemas into alternatives. A value matches all the schemas if it matches one of the alternatives."""
        found: list[Alternative] = [()]
        for place in places:
            found = _combinations(found, self._expand(*place))
        return found

    def _expand(self, schema: Any, base: str) -> list[Alternative]:
        if isinstance(schema, bool):
            return [()] if schema else []
        if not isinstance(schema, dict):
            raise GrammarError("the schema cannot be compiled: {} is no schema", format_value(schema))
        if id(schema) in self._expanded:
            if (known := self._expanded[id(schema)]) is None:
                raise GrammarError("the schema cannot be compiled: a $ref leads back to itself")
            return known
        self._expanded[id(schema)] = None
        base = self._references.base_of(schema, base)
        found: list[Alternative] = [()]
        # The properties of an object have the order in which the keywords of the schema list them.
        own = "properties" if "properties" in schema else next((word for word in schema if word in _OWN), None)
        for word, value in schema.items():
            if word == own:
                found = _combinations(found, [((schema, base),)])
            elif word == "$ref":
                found = _combinations(found, self._expand(*self._references.resolve(value, base)))
            elif word == "allOf":
                found = _combinations(found, self.alternatives((each, base) for each in value))
            elif word in ("anyOf", "oneOf"):
                found = _combinations(found, self._expand_branches(word, [(each, base) for each in value]))
            elif word in _UNENFORCED and _has_effect(word, schema):
                self.relax_or_refuse(word)
                found = _combinations(
                    found, [(Siblings([self._expand(each, base) for each in _applied_subschemas(word, schema)]),)]
                )
        self._expanded[id(schema)] = found
        return found

    def _expand_branches(self, word: str, places: list[Place]) -> list[Alternative]:
        branches = [self._expand(*place) for place in places]
        is_tagged = self._have_discriminator(branches)
        if word == "oneOf" and not is_tagged:
            pairs = ((one, other) for at, one in enumerate(branches) for other in branches[:at])
            if not all(self._are_disjoint(one, other) for one, other in pairs):
                self.relax_or_refuse("oneOf with branches that overlap")
        if is_tagged or not _has_properties(branches):
            return [each for branch in branches for each in branch]
        found: list[Alternative] = []
        for at, branch in enumerate(branches):
            before, after = Siblings(branches[:at]), Siblings(branches[at + 1 :])
            found += [(before, *each, after) for each in branch]
        return found

    def _have_discriminator(self, branches: list[list[Alternative]]) -> bool:
        """Return whether all branches require the same property, with different values, so that only one can match."""
        found = [each for branch in branches for each in branch]
        if any(self.kinds(each) != {"object"} for each in found):
            return False
        for name in self.required(found[0]) if found else ():
            tags = [self._discriminator_values(name, each) for branch in branches for each in branch]
            if all(tags) and len(frozenset().union(*tags)) == sum(map(len, tags)):
                return True
        return len(found) <= 1

    def _discriminator_values(self, name: str, alternative: Alternative) -> frozenset[Any]:
        """Return the values that `const` and `enum` leave for a property. Empty if it has neither or is optional."""
        found = (
            self.alternatives(self.property_schemas(name, alternative)) if name in self.required(alternative) else []
        )
        values = [self.literals(each) for each in found]
        if None in values:
            return frozenset()
        return frozenset(_comparison_key(value) for of_one in values for value in of_one or ())

    def _are_disjoint(self, one: Sequence[Alternative], other: Sequence[Alternative], depth: int = 0) -> bool:
        return all(self.are_alternatives_disjoint(a, b, depth) for a in one for b in other)

    def are_alternatives_disjoint(self, one: Alternative, other: Alternative, depth: int = 0) -> bool:
        """Return True only if it is certain that no value matches both alternatives."""
        for a, b in ((one, other), (other, one)):
            if (values := self.literals(a)) is not None:
                return all(self.rejects(value, b) for value in values)
        shared = self.kinds(one) & self.kinds(other)
        return all(self._is_kind_disjoint(kind, one, other, depth) for kind in shared)

    def _is_kind_disjoint(self, kind: str, one: Alternative, other: Alternative, depth: int) -> bool:
        if kind in ("integer", "number"):
            return self.range_of(one).is_disjoint(self.range_of(other), kind == "integer")
        if kind == "object":
            names = self.required(one) | self.required(other)
            return depth < _MAX_DEPTH and any(
                self._are_disjoint(
                    self.alternatives(self.property_schemas(name, one)),
                    self.alternatives(self.property_schemas(name, other)),
                    depth + 1,
                )
                for name in names
            )
        words = {"string": "Length", "array": "Items"}.get(kind)
        if words is None:
            return False
        (low, high), (other_low, other_high) = (size_bounds(each, words) for each in (one, other))
        return (high is not None and high < other_low) or (other_high is not None and other_high < low)

    def kinds(self, alternative: Alternative) -> frozenset[str]:
        """Return the types that an alternative allows. "integer" without "number" allows no fractions."""
        found = KINDS
        for schema in schemas_of(alternative):
            if "type" in schema:
                declared = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
                types = {json_type(each) for each in declared}
                found &= types | ({"integer"} if "number" in types else set())
        return found

    def literals(self, alternative: Alternative) -> list[Any] | None:
        """Return the values that `const` and `enum` leave, or None if there is no such keyword."""
        lists = [[schema["const"]] for schema in schemas_of(alternative) if "const" in schema]
        lists += [schema["enum"] for schema in schemas_of(alternative) if "enum" in schema]
        if not lists:
            return None
        return [value for value in lists[0] if not self.rejects(value, alternative)]

    def range_of(self, alternative: Alternative) -> Range:
        found = Range()
        for schema in schemas_of(alternative):
            for word, bound in (("Minimum", Range.at_least), ("Maximum", Range.at_most)):
                exclusive = schema.get(f"exclusive{word}", False)  # true or false in older drafts
                if word.lower() in schema:
                    found = bound(found, schema[word.lower()], exclusive is True)
                if not isinstance(exclusive, bool):
                    found = bound(found, exclusive, True)
        return found

    def required(self, alternative: Alternative) -> dict[str, None]:
        return dict.fromkeys(name for schema in schemas_of(alternative) for name in schema.get("required", ()))

    def property_schemas(self, name: str, alternative: Alternative) -> tuple[Place, ...]:
        found: list[Place] = []
        for schema, base in _schema_places(alternative):
            own = [schema["properties"][name]] if name in schema.get("properties", {}) else []
            own += [
                each for pattern, each in schema.get("patternProperties", {}).items() if pattern_matches(pattern, name)
            ]
            if not own and "additionalProperties" in schema:
                own = [schema["additionalProperties"]]
            found += [(each, base) for each in own]
        return tuple(found)

    def rejects(self, value: Any, alternative: Alternative) -> bool:
        """Return True only if a value certainly does not match an alternative. Patterns and formats are not checked."""
        if json_type_of(value) not in self.kinds(alternative):
            return True
        if any(
            _comparison_key(value) not in self._allowed_values(schema)
            for schema in schemas_of(alternative)
            if _has_const_or_enum(schema)
        ):
            return True
        if isinstance(value, bool) or value is None:
            return False
        if isinstance(value, int | float):
            divisors = [schema["multipleOf"] for schema in schemas_of(alternative) if "multipleOf" in schema]
            return not self.range_of(alternative).contains(value) or any(
                Fraction(repr(value)) % Fraction(repr(each)) for each in divisors
            )
        word = "Length" if isinstance(value, str) else "Items" if isinstance(value, list) else "Properties"
        low, high = size_bounds(alternative, word)
        if len(value) < low or (high is not None and len(value) > high):
            return True
        if isinstance(value, list):
            return any(self.rejects_all(each, self.item_schemas(at, alternative)) for at, each in enumerate(value))
        if isinstance(value, dict):
            is_short = not self.required(alternative).keys() <= value.keys()
            return is_short or any(
                self.rejects_all(each, self.property_schemas(name, alternative)) for name, each in value.items()
            )
        return False

    def _allowed_values(self, schema: dict[str, Any]) -> frozenset[Any]:
        if id(schema) not in self._fixed:
            lists = [[schema["const"]]] if "const" in schema else []
            lists += [schema["enum"]] if "enum" in schema else []
            self._fixed[id(schema)] = frozenset.intersection(*(frozenset(map(_comparison_key, each)) for each in lists))
        return self._fixed[id(schema)]

    def rejects_all(self, value: Any, places: Iterable[Place]) -> bool:
        return all(self.rejects(value, each) for each in self.alternatives(places))

    def item_schemas(self, at: int, alternative: Alternative) -> tuple[Place, ...]:
        found: list[Place] = []
        for schema, base in _schema_places(alternative):
            first, rest = split_array_items(schema)
            found += [(first[at], base)] if at < len(first) else [(rest, base)]
        return tuple(found)

    def object_schema(self, alternative: Alternative) -> ObjectSchema:
        """Return which properties the objects of an alternative may have.

        If `properties` is set and `additionalProperties` is not, an unlisted property is only allowed if it is
        required, if it matches a pattern, or if a sibling branch lists it.
        """
        is_closed = any("properties" in schema for schema in schemas_of(alternative))
        is_closed &= not any("additionalProperties" in schema for schema in schemas_of(alternative))
        own = {
            name
            for schema in schemas_of(alternative)
            for word in ("properties", "required")
            for name in schema.get(word, ())
        }
        properties: dict[str, tuple[Place, ...]] = {}
        for part in alternative:
            if not isinstance(part, Siblings):
                properties |= {name: () for name in part[0].get("properties", ()) if name not in properties}
            elif is_closed:
                supplied = self._properties_of_siblings(part, alternative)
                properties |= {name: supplied[name] for name in supplied if name not in own and name not in properties}
        properties |= {name: () for name in self.required(alternative) if name not in properties}
        properties = {name: (*places, *self.property_schemas(name, alternative)) for name, places in properties.items()}
        low, high = size_bounds(alternative, "Properties")
        form = ObjectSchema(properties, set(self.required(alternative)), low=low, high=high)
        patterns = dict.fromkeys(name for each in schemas_of(alternative) for name in each.get("patternProperties", ()))
        form.patterns = [(pattern, self._schemas_of_pattern(pattern, alternative)) for pattern in patterns]
        if not is_closed:
            form.others = tuple(
                (schema["additionalProperties"], base)
                for schema, base in _schema_places(alternative)
                if "additionalProperties" in schema
            )
        return form

    def _schemas_of_pattern(self, pattern: str, alternative: Alternative) -> tuple[Place, ...]:
        """Return the schemas of a property whose name matches this pattern and no other pattern."""
        found: list[Place] = []
        for schema, base in _schema_places(alternative):
            if pattern in schema.get("patternProperties", {}):
                found.append((schema["patternProperties"][pattern], base))
            elif "additionalProperties" in schema:
                found.append((schema["additionalProperties"], base))
        return tuple(found)

    def _properties_of_siblings(self, siblings: Siblings, alternative: Alternative) -> dict[str, tuple[Place, ...]]:
        """Return the properties of sibling branches. A branch counts if a value may match it and the alternative."""
        found: dict[str, tuple[list[Any], str]] = {}
        for other in (each for branch in siblings.branches for each in branch if _has_properties([[each]])):
            if not self.are_alternatives_disjoint(other, alternative):
                for schema, base in _schema_places(other):
                    for name, each in schema.get("properties", {}).items():
                        found.setdefault(name, ([], base))[0].append(each)
        return {name: ((self._any_of(schemas), base),) for name, (schemas, base) in found.items()}

    def _any_of(self, schemas: list[Any]) -> Any:
        """Return a schema that allows what any of the schemas allows. The same schemas always give the same object."""
        key = tuple(map(id, schemas))
        if key not in self._made:
            self._made[key] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return self._made[key]

    @cached_property
    def object_schemas(self) -> list[ObjectSchema]:
        found: list[ObjectSchema] = []
        for alternative in self.alternatives([self.root]):
            values = self.literals(alternative)
            if values is not None:
                found += [self._object_schema_of_value(value) for value in values if isinstance(value, dict)]
            elif "object" in self.kinds(alternative):
                found.append(self.object_schema(alternative))
        return found

    def _object_schema_of_value(self, value: dict[str, Any]) -> ObjectSchema:
        return ObjectSchema({name: self._const_schema(each) for name, each in value.items()}, set(value))

    def _const_schema(self, value: Any) -> tuple[Place, ...]:
        return ((self._constants.setdefault(id(value), {"const": value}), ""),)

    def property_alternatives(self, name: str) -> list[Alternative]:
        """Return the alternatives of the property `name`, collected from all alternatives of the root schema."""
        found: list[Alternative] = []
        for alternative in self.alternatives([self.root]):
            values = self.literals(alternative)
            if values is None:
                found += self.alternatives(self.property_schemas(name, alternative))
            else:
                objects = [value for value in values if isinstance(value, dict) and name in value]
                found += [each for value in objects for each in self.alternatives(self._const_schema(value[name]))]
        return found


def arguments_schema(parameters: dict[str, Any], strict: bool) -> SchemaDocument:
    """Return the schema of a tool's arguments, which is the schema of an object.

    `parameters` may use Python's type names, and may consist of only the properties.
    """
    words = ("properties", "additionalProperties", *_COMBINING)
    is_bare = all(isinstance(each, dict) for each in parameters.values()) and not any(map(parameters.get, words))
    full = {"properties": parameters} if is_bare else parameters
    return SchemaDocument({"properties": {}, **full, "type": "object"}, strict)


def schemas_of(alternative: Alternative) -> Iterator[dict[str, Any]]:
    return (schema for schema, _ in _schema_places(alternative))


def _schema_places(alternative: Alternative) -> Iterator[Place]:
    return (part for part in alternative if not isinstance(part, Siblings))


def _has_properties(branches: list[list[Alternative]]) -> bool:
    return any("properties" in schema for branch in branches for each in branch for schema in schemas_of(each))


def _combinations(one: list[Alternative], other: list[Alternative]) -> list[Alternative]:
    if len(one) * len(other) > MAX_ALTERNATIVES:
        raise GrammarError("the schema has more than {:,} combinations of branches of anyOf", MAX_ALTERNATIVES)
    return [(*a, *b) for a in one for b in other]


def size_bounds(alternative: Alternative, word: str) -> tuple[int, int | None]:
    """Return the bounds (min<word>, max<word>) of a schema. `word` is "Length", "Items" or "Properties"."""
    low = [math.ceil(schema[f"min{word}"]) for schema in schemas_of(alternative) if f"min{word}" in schema]
    high = [math.floor(schema[f"max{word}"]) for schema in schemas_of(alternative) if f"max{word}" in schema]
    return max(low, default=0), min((each for each in high if each <= MAX_SIZE), default=None)


def split_array_items(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of the first elements of an array, and of the elements after them."""
    if isinstance(schema.get("items"), list):  # as in older drafts
        return schema["items"], schema.get("additionalItems", True)
    return schema.get("prefixItems", []), schema.get("items", True)


def json_type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _has_const_or_enum(schema: dict[str, Any]) -> bool:
    return "const" in schema or "enum" in schema


def json_values_are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where 1 equals 1.0 but not true."""
    return _comparison_key(one) == _comparison_key(other)


def _comparison_key(value: Any) -> Any:
    """Return a hashable value that is equal for equal values of JSON."""
    if isinstance(value, list):
        return ("array", *map(_comparison_key, value))
    if isinstance(value, dict):
        return frozenset((name, _comparison_key(each)) for name, each in value.items())
    return isinstance(value, bool), value


def _has_effect(word: str, schema: dict[str, Any]) -> bool:
    kind, value = _UNENFORCED[word], schema[word]
    declared = schema.get("type", kind)
    if kind is not None and kind not in (declared if isinstance(declared, list) else [declared]):
        return False
    if word == "if":
        return "then" in schema or "else" in schema
    if word == "uniqueItems":
        return value is True and not schema.get("maxItems", 2) < 2
    if word == "propertyNames" and isinstance(value, dict):  # all names are strings
        return value.get("type", "string") != "string" or any(
            each in _OWN or each in _COMBINING or each in _UNENFORCED for each in value if each != "type"
        )
    if word in ("propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        return value is not True and value != {}
    return value != {} or word == "not"


def _applied_subschemas(word: str, schema: dict[str, Any]) -> list[Any]:
    """Return the schemas inside the unenforced keyword `word` that apply to the same object as `schema`."""
    if word == "if":
        return [schema[each] for each in ("then", "else") if each in schema]
    if word in ("dependentSchemas", "dependencies"):
        return [each for each in schema[word].values() if isinstance(each, dict | bool)]
    return []
