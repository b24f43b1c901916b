"""Grammar rules for JSON: `JsonRules` writes rules that match exactly the values of a schema.

If the rules match a text, its value is valid under the schema. Each valid value can be written in the form of
`json.dumps`, with properties in the order of the schema. docs/serving.md lists the exceptions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from areno.engine.decoder.grammar import grammar_error, has_empty_language
from areno.errors import GrammarError
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.numbers import Range
from areno.server.parsers.patterns import (
    FORMATS,
    decimal_term,
    escape_regex,
    json_expression,
    lark_literal,
    pattern_fault,
    pattern_matches,
    text_schema_fault,
    whole_text_term,
)
from areno.server.parsers.schemas import (
    Alternative,
    ObjectSchema,
    Place,
    SchemaDocument,
    schemas_of,
    size_bounds,
    split_array_items,
)

_SPACE = r"([ \t]|\r?\n[ \t]{0,40})?"  # bounded, since a model might never stop writing it
_PLAIN = r'[^"\\\x00-\x1f]'
_PLAIN_NAME = f"/{_PLAIN}*/"
_UNIT = r"00[01][0-9a-f]|007f|00[89a-f][0-9a-f]|0[1-9a-f][0-9a-f]{2}|[1-9a-cef][0-9a-f]{3}|d[0-7][0-9a-f]{2}"
_PAIR = r"d[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}"
_SHORT = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", '"': '"', "\\": "\\"}
_WORDS = {"null": '"null"', "true": '"true"', "false": '"false"'}
_PYTHON = {"null": '("None" | "null")', "true": '("True" | "true")', "false": '("False" | "false")'}
_MAX_MULTIPLE = 10**15  # of integers with multipleOf
_MAX_OPTIONAL = 5000  # properties of an object, each of which may come next
_MAX_PARTS = 1000  # of one, for fractions with multipleOf
_WIDTH = 16  # of the tree of properties that are not counted
_Key = tuple[int, ...]


@dataclass(frozen=True)
class JsonStyle:
    """How values are written: by default as `json.dumps` and the chat templates write them."""

    is_free: bool = False  # a bounded amount of whitespace is allowed where JSON allows it
    is_python: bool = False  # words and strings must have the same meaning in Python


class JsonRules:
    """Adds rules for the values of one JSON schema to a grammar. Most methods return expressions or names of rules."""

    def __init__(self, lark: LarkBuilder, document: SchemaDocument, style: JsonStyle):
        self._lark, self._document, self._style = lark, document, style
        self._space = _SPACE if style.is_free else ""
        comma, colon = (f"{_SPACE}{each}{_SPACE}" if style.is_free else f"{each} " for each in ",:")
        self.comma, self._colon = lark.terminal(lark_literal(comma)), colon
        self._words = _PYTHON if style.is_python else _WORDS
        self._unit = rf"\\u({_UNIT}{'' if style.is_python else f'|{_PAIR}'})"
        self._char = rf'({_PLAIN}|\\["\\bfnrt]|{self._unit})'
        self._values: dict[_Key, str | None] = {}
        self._open: set[_Key] = set()  # keys whose rule is being written
        self._used: set[_Key] = set()  # those of them that other rules use already
        self._finite: set[_Key] = set()

    def root(self) -> str:
        """Return the rule of the whole schema. Raises GrammarError if no finite value satisfies it."""
        return self.require_rule(self.value_rule([self._document.root]))

    def require_rule(self, rule: str | None) -> str:
        if rule is None:
            raise GrammarError("the schema cannot be compiled: no value of finite length can satisfy it")
        return rule

    def value_rule(self, places: Iterable[Place]) -> str | None:
        """Return the rule of the values that match all schemas in `places`, or None if there is no such value."""
        places, key = _distinct_schemas(places)
        if key in self._open:
            self._used.add(key)
        if key not in self._values:
            if not self._is_finite(places):
                return None
            name = self._values[key] = self._lark.reserve_name()
            self._open.add(key)
            terms = [term for each in self._document.alternatives(places) for term in self._alternative_terms(each)]
            self._open.discard(key)
            if terms:
                self._lark.define(name, " | ".join(dict.fromkeys(terms)))
            elif key in self._used:
                self.require_rule(None)
            else:
                self._values[key] = None
        return self._values[key]

    def _is_finite(self, places: Sequence[Place]) -> bool:
        """Return whether a value of finite length matches all schemas in `places`. Recursive schemas may allow none."""
        while True:
            n_known = len(self._finite)
            found = self._has_finite_value(places, set())
            if found or len(self._finite) == n_known:
                return found

    def _has_finite_value(self, places: Iterable[Place], seen: set[_Key]) -> bool:
        places, key = _distinct_schemas(places)
        if key in self._finite or key in seen:
            return key in self._finite
        seen.add(key)
        if any(self._alternative_has_finite_value(each, seen) for each in self._document.alternatives(places)):
            self._finite.add(key)
        return key in self._finite

    def _alternative_has_finite_value(self, alternative: Alternative, seen: set[_Key]) -> bool:
        document, kinds = self._document, self._document.kinds(alternative)
        if document.literals(alternative) is not None:
            return bool(self._alternative_terms(alternative))
        if self._scalar_terms(alternative):
            return True
        n_items = min(size_bounds(alternative, "Items")[0], _n_prefix(alternative) + 1)
        if "array" in kinds and all(
            self._has_finite_value(document.item_schemas(at, alternative), seen) for at in range(n_items)
        ):
            return True
        return "object" in kinds and all(
            self._has_finite_value(document.property_schemas(name, alternative), seen)
            for name in document.required(alternative)
        )

    def _alternative_terms(self, alternative: Alternative) -> list[str]:
        if (values := self._document.literals(alternative)) is not None:
            return self._literal_terms([value for value in values if self.matches_patterns(value, alternative)])
        kinds, found = self._document.kinds(alternative), self._scalar_terms(alternative)
        containers = [self._array_rule(alternative)] if "array" in kinds else []
        containers += [self._object_rule(alternative)] if "object" in kinds else []
        return found + [each for each in containers if each is not None]

    def _scalar_terms(self, alternative: Alternative) -> list[str]:
        kinds = self._document.kinds(alternative)
        found: list[str | None] = [self._words["null"]] if "null" in kinds else []
        found += [self._words["true"], self._words["false"]] if "boolean" in kinds else []
        found += self._number_terms(alternative, "number" not in kinds) if "integer" in kinds else []
        found += [self._string_term(alternative)] if "string" in kinds else []
        return [each for each in found if each is not None]

    def _literal_terms(self, values: list[Any]) -> list[str]:
        is_plain = [isinstance(each, str | int | float) and not isinstance(each, bool) for each in values]
        found = [self.literal_rule(each) for each, plain in zip(values, is_plain, strict=True) if not plain]
        terms = [
            term
            for each, plain in zip(values, is_plain, strict=True)
            if plain
            for term in self._literal_spellings(each)
        ]
        return found + ([self._lark.terminal(" | ".join(terms))] if terms else [])

    def matches_patterns(self, value: Any, alternative: Alternative) -> bool:
        """Return whether a value fits an alternative's patterns and formats, which `SchemaDocument.rejects` ignores."""
        if not isinstance(value, str):
            return True
        patterns, formats = self.patterns_and_formats(alternative)
        return all(pattern_matches(each, value) for each in (*patterns, *(f"^({FORMATS[each]})$" for each in formats)))

    # Numbers ---------------------------------------------------------------------------------------------------------

    def _number_terms(self, alternative: Alternative, is_integer: bool) -> list[str | None]:
        found = self._document.range_of(alternative)
        step, n_parts = 1, 0  # integers are multiples of `step`, fractions of 1 / n_parts
        for schema in schemas_of(alternative):
            if "multipleOf" in schema:
                divisor = Fraction(repr(schema["multipleOf"]))
                if divisor.numerator > 1 and divisor.denominator > 1 and not is_integer:
                    self._document.relax_or_refuse(f"multipleOf {schema['multipleOf']!r} for numbers with fractions")
                elif divisor.denominator > _MAX_PARTS or divisor.numerator > 2**31:
                    self._document.relax_or_refuse(f"multipleOf {schema['multipleOf']!r}")
                else:
                    step, n_parts = math.lcm(step, divisor.numerator), math.gcd(n_parts, divisor.denominator)
        if n_parts == 0:
            return [self._lark.union_terminal(found.terms(is_integer))]
        fractions = [] if is_integer or n_parts == 1 else found.fraction_terms(n_parts)
        return [self._multiples_term(found, step), self._lark.union_terminal(fractions)]

    def _multiples_term(self, range_: Range, step: int) -> str | None:
        """Return the expression of the integers in a range that are multiples of `step`, or None if there are none."""
        if step == 1:
            return self._lark.union_terminal(range_.terms(integer=True))
        found = range_.at_least(-_MAX_MULTIPLE, False).at_most(_MAX_MULTIPLE, False)
        assert found.low is not None
        assert found.high is not None
        low, high = -(-found.low // step) * step, found.high // step * step
        words = {"type": "integer", "minimum": low, "maximum": high, "multipleOf": step}
        return self._lark.rule(json_expression(words)) if low <= high else None

    # Strings ---------------------------------------------------------------------------------------------------------

    def patterns_and_formats(self, alternative: Alternative) -> tuple[list[str], list[str]]:
        """Return a string's enforceable (patterns, formats). Others go to `SchemaDocument.relax_or_refuse`."""
        patterns, formats = list[str](), list[str]()
        for schema in schemas_of(alternative):
            if (name := schema.get("format")) in FORMATS:
                formats.append(name)
            elif name not in (None, "unknown"):
                self._document.relax_or_refuse(f"format {name!r}")
            if (pattern := schema.get("pattern")) is not None:
                if fault := pattern_fault(pattern):
                    self._document.relax_or_refuse(f"pattern {pattern!r} ({fault})")
                else:
                    patterns.append(pattern)
        return list(dict.fromkeys(patterns)), list(dict.fromkeys(formats))

    def _string_term(self, alternative: Alternative) -> str | None:
        (low, high), (patterns, formats) = size_bounds(alternative, "Length"), self.patterns_and_formats(alternative)
        if high is not None and low > high:
            return None
        has_length = low > 0 or high is not None
        if has_length + len(patterns) + len(formats) > 1 or any(decimal_term(each) is None for each in patterns):
            words: dict[str, Any] = {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})
            words["allOf"] = [{"pattern": each} for each in (*patterns, *(f"^({FORMATS[each]})$" for each in formats))]
            if not (fault := text_schema_fault(words)):
                text = json_expression(words)
                return None if grammar_error(f"start: {text}") else self._lark.rule(text)
            self._document.relax_or_refuse(f"the keywords of a string beside each other ({fault})")
            patterns, formats = [], []
        if not patterns and not formats:
            return self._lark.terminal(lark_literal(f'"{self._char}{repetition_range(low, high)}"'))
        term = decimal_term(patterns[0]) if patterns else f"({lark_literal(FORMATS[formats[0]])})"
        return self._lark.union_terminal([f"{json.dumps(chr(34))} {term} {json.dumps(chr(34))}"])

    def literal_rule(self, value: Any) -> str:
        if isinstance(value, list):
            return self._brackets("[]", f" {self.comma} ".join(map(self.literal_rule, value)), not value)
        if isinstance(value, dict):
            fields = [f"{self._property_name_term(name)} {self.literal_rule(each)}" for name, each in value.items()]
            return self._brackets("{}", f" {self.comma} ".join(fields), not value)
        if isinstance(value, bool) or value is None:
            return self._words[json.dumps(value)]
        return self._lark.terminal(" | ".join(self._literal_spellings(value)))

    def _literal_spellings(self, value: str | float) -> list[str]:
        """Return terms that match each way to write a string or number."""
        if not isinstance(value, str):
            forms = [json.dumps(value)]
            forms += [str(int(value))] if isinstance(value, float) and value.is_integer() else []
            return list(map(json.dumps, forms))
        text = json.dumps(value)
        self._lark.literals.setdefault(text)
        # A text without escapes and beyond ASCII has one spelling.
        return [
            json.dumps(text)
            if value.isascii() and "\\" not in text
            else lark_literal(f'"{self._text_spellings(value)}"')
        ]

    def _property_name_term(self, name: str) -> str:
        [term] = self._literal_spellings(name)
        return self._lark.terminal(f"{term} {lark_literal(self._colon)}")

    def _text_spellings(self, text: str) -> str:
        return "".join(_character_spellings(char, self._style.is_python) for char in text)

    # Arrays and objects ----------------------------------------------------------------------------------------------

    def _brackets(self, brackets: str, content: str, may_be_empty: bool) -> str:
        """Return the expression of `content` in brackets. If `may_be_empty`, the brackets may also be empty."""
        self._lark.literals |= dict.fromkeys(brackets)
        opening, closing = map(json.dumps, brackets)
        if self._space:
            opening = self._lark.terminal(f"{opening} {lark_literal(self._space)}")
            closing = self._lark.terminal(f"{lark_literal(self._space)} {closing}")
        return f"{opening} {f'({content})?' if may_be_empty and content else content} {closing}"

    def _array_rule(self, alternative: Alternative) -> str | None:
        (low, high), n_prefix = size_bounds(alternative, "Items"), _n_prefix(alternative)
        items: list[str] = []
        for at in range(n_prefix if high is None else min(n_prefix, high)):
            item = self.value_rule(self._document.item_schemas(at, alternative))
            if item is None:
                high = at
                break
            items.append(item)
        rest = None if high == len(items) else self.value_rule(self._document.item_schemas(n_prefix, alternative))
        if rest is None:
            high = len(items)
        if high is not None and low > high:
            return None
        tail = ""
        if rest is not None:
            start = "" if items else rest
            least = max(low - max(len(items), 1), 0)
            most = None if high is None else high - max(len(items), 1)
            tail = self._lark.rule(f"{start} {_repetition(f'{self.comma} {rest}', least, most)}")
        for at in reversed(range(len(items))):
            tail = f"{tail}?" if tail and at + 1 >= low and (at + 1 < len(items) or rest is None) else tail
            tail = self._lark.rule(f"{self.comma if at else ''} {items[at]} {tail}")
        return self._brackets("[]", tail, low == 0)

    def _object_rule(self, alternative: Alternative) -> str | None:
        form = self._document.object_schema(alternative)
        content = self.properties_rule(
            form,
            lambda name, value: f"{self._property_name_term(name)} {value}",
            self.comma,
            self._unlisted_property_rule(form),
        )
        return None if content is None else self._brackets("{}", *content)

    def properties_rule(
        self, form: ObjectSchema, write: Callable[[str, str], str], comma: str, other: str | None = None
    ) -> tuple[str, bool] | None:
        """Return (expression of one or more properties, whether an object may be empty), or None if no object matches.

        `write` receives the name of a property and the expression of its value, and returns the expression of the
        property. `comma` separates properties. `other` is the expression of a property that `form` does not list.
        """
        listed: list[tuple[str, bool]] = []
        for name, places in form.properties.items():
            value = self.property_value_rule(name, places)
            if value is not None:
                listed.append((write(name, value), name in form.required))
            elif name in form.required:
                return None
        return self._sequence(listed, other, comma, (form.low, form.high))

    def property_value_rule(self, name: str, places: Sequence[Place]) -> str | None:
        return self.value_rule(places)

    def _unlisted_property_rule(self, form: ObjectSchema) -> str | None:
        """Return the rule of one property that is not listed, or None if there can be none."""
        taken = f" & ~{lark_literal('|'.join(map(self._text_spellings, form.properties)))}" if form.properties else ""
        found, terms = (
            list[tuple[str, tuple[Place, ...]]](),
            [(each, whole_text_term(each)) for each, _ in form.patterns],
        )
        for pattern, term in terms:
            if term is None or grammar_error(f"start: T\nT: {term}"):
                self._document.relax_or_refuse(f"patternProperties {pattern!r}")
            elif has_empty_language(f"({term}) & {_PLAIN_NAME}") and not has_empty_language(term):
                self._document.relax_or_refuse(f"patternProperties {pattern!r}, whose names need escapes")
        known = [f"({term})" for _, term in terms if term is not None]
        for (_, places), (_, term) in zip(form.patterns, terms, strict=True):
            if term is not None:
                others = "".join(f" & ~{each}" for each in known if each != f"({term})")
                found.append((f"{_PLAIN_NAME}{taken} & ({term}){others}", places))
        if form.others is not None:
            names = _PLAIN_NAME if known else f"/{self._char}*/"
            found.append((f"{names}{taken}{''.join(f' & ~{each}' for each in known)}", form.others))
        rules = list[str]()
        for names, places in found:
            quoted = f"{json.dumps(chr(34))} ({names}) {lark_literal(chr(34) + self._colon)}"
            name = self._lark.union_terminal([quoted]) if known else self._lark.terminal(quoted)
            if name is not None and (value := self.value_rule(places)) is not None:
                rules.append(f"{name} {value}")
        return self._lark.rule(" | ".join(rules)) if rules else None

    def _sequence(
        self, items: Sequence[tuple[str, bool]], other: str | None, comma: str, limits: tuple[int, int | None]
    ) -> tuple[str, bool] | None:
        """Do the work of `properties_rule`. `items` are (expression, is required), and `limits` bound their number."""
        low, high = limits
        n_needed = sum(required for _, required in items)
        if len(items) - n_needed > _MAX_OPTIONAL:
            text = "the schema cannot be compiled: an object has {:,} optional properties; at most {:,} are possible"
            raise GrammarError(text + ", so make some of them required", len(items) - n_needed, _MAX_OPTIONAL)
        if (high is not None and max(low, n_needed) > high) or (other is None and low > len(items)):
            return None
        if other is not None and low - n_needed > 1:  # two of the names that are not listed may be equal
            self._document.relax_or_refuse(f"minProperties {low}")
        if low > 1 or (high is not None and (other is not None or high < len(items))):
            return self._counted_sequence(items, other, comma, low, high)
        # A part of the sequence: its items, as (the first without a comma, each with one, whether one is required).
        nodes = [
            (item, self._lark.rule(f"({comma} {item}){'' if required else '?'}"), required) for item, required in items
        ]
        if other is not None:
            nodes.append((f"{other} ({comma} {other})*", f"({comma} {other})*", False))
        while len(nodes) > 1:
            nodes = [self._sequence_of_nodes(nodes[at : at + _WIDTH]) for at in range(0, len(nodes), _WIDTH)]
        return self._lark.rule(nodes[0][0] if nodes else '""'), n_needed == 0 and low == 0

    def _sequence_of_nodes(self, nodes: list[tuple[str, str, bool]]) -> tuple[str, str, bool]:
        n_first = next((at for at, node in enumerate(nodes) if node[2]), len(nodes) - 1) + 1
        rest = [node[1] for node in nodes]
        first = " | ".join(" ".join([nodes[at][0], *rest[at + 1 :]]) for at in range(n_first))
        return self._lark.rule(first), self._lark.rule(" ".join(rest)), any(node[2] for node in nodes)

    def _counted_sequence(
        self, items: Sequence[tuple[str, bool]], other: str | None, comma: str, low: int, high: int | None
    ) -> tuple[str, bool] | None:
        """Do the work of `_sequence` if the number of items is limited. The rules count the written items."""
        is_limited = high is not None and (other is not None or high < len(items))
        most = min(max(low, high) if high is not None and is_limited else max(low, 1), len(items))

        rests = self._ends_of_sequence(other, comma, low, high if is_limited else None, most)
        n_before = list(accumulate((required for _, required in items), initial=0))
        for at in reversed(range(len(items))):
            item, required = items[at]
            found: dict[int, str | None] = {}
            for n in range(min(n_before[at], most), min(at, most) + 1):
                rest = rests[min(n + 1, most)] if not is_limited or high is None or n < high else None
                skipped = None if required else rests[n]
                if rest is not None and skipped == rest and n:
                    found[n] = self._lark.rule(f"({comma} {item})? {rest}")
                    continue
                terms = [] if rest is None else [f"{comma if n else ''} {item} {rest}"]
                terms += [] if skipped is None else [skipped]
                found[n] = self._lark.rule(" | ".join(terms)) if terms else None
            rests = found
        return None if rests[0] is None else (rests[0], low == 0 and not any(required for _, required in items))

    def _ends_of_sequence(
        self, other: str | None, comma: str, low: int, high: int | None, most: int
    ) -> dict[int, str | None]:
        """Map each n up to `most` to a rule of what may follow n listed items, or to None if n cannot be enough."""
        found: dict[int, str | None] = {}
        for n in range(most + 1):
            least, limit = max(low - n, 0), None if high is None else high - n
            if other is None or limit == 0:
                found[n] = '""' if least == 0 else None
            elif n:
                found[n] = self._lark.rule(_repetition(f"{comma} {other}", least, limit))
            else:
                more = _repetition(f"{comma} {other}", max(least - 1, 0), None if limit is None else limit - 1)
                found[n] = self._lark.rule(f"{other} {more}" + (' | ""' if least == 0 else ""))
        return found


def _distinct_schemas(places: Iterable[Place]) -> tuple[list[Place], _Key]:
    """Drop duplicates and schemas that allow everything. Return the other schemas, and a key for these."""
    found = {id(place[0]): place for place in places if place[0] is not True and place[0] != {}}
    return list(found.values()), tuple(found)


def _n_prefix(alternative: Alternative) -> int:
    return max((len(split_array_items(schema)[0]) for schema in schemas_of(alternative)), default=0)


def repetition_range(low: int, high: int | None) -> str:
    return "*" if low == 0 and high is None else f"{{{low},{'' if high is None else high}}}"


def _repetition(expression: str, low: int, high: int | None) -> str:
    return '""' if high == 0 else f"({expression}){repetition_range(low, high)}"


def _character_spellings(char: str, is_python: bool) -> str:
    code = ord(char)
    unit = rf"\\u{code:04x}"
    if code >= 2**16:
        high, low = divmod(code - 2**16, 2**10)
        return char if is_python else rf"({char}|\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x})"
    if 0xD800 <= code < 0xE000:  # half of a pair can only be escaped
        return unit
    if char in _SHORT:
        short = rf"\\{escape_regex(_SHORT[char])}"
        return f"({short}|{unit})" if code < 32 else short
    if code < 32:
        return unit
    return f"({char}|{unit})" if code >= 127 else escape_regex(char)
