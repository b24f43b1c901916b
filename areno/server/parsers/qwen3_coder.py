"""Parser for tool calls in the XML form of Qwen3-Coder, Qwen 3.5 and Nemotron 3.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

String values are written without quotes, and all other values as JSON. Only the type in the tool's schema tells whether
a value is a string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from areno.engine.decoder.grammar import grammar_error, has_empty_language
from areno.errors import GrammarError
from areno.server.parsers.hermes import CLOSE, OPEN, calls_in_lines_rule
from areno.server.parsers.json_rules import JsonRules, JsonStyle, repetition_range
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.message import RawCall, ToolCallParser, Tools
from areno.server.parsers.partial_text import Cursor, Reading, Schema, dump_json, load_json
from areno.server.parsers.patterns import FORMATS, decimal_term, escape_regex, lark_literal, whole_text_term
from areno.server.parsers.pythonic import arguments_rule, parse_literal
from areno.server.parsers.schemas import (
    Alternative,
    ObjectSchema,
    Place,
    SchemaDocument,
    arguments_schema,
    json_type_of,
    json_values_are_equal,
    schemas_of,
    size_bounds,
)

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_ReadParameter: TypeAlias = "Callable[[Cursor, set[str] | None], Reading[tuple[str, str] | None]]"
_NULLS = ("null", "none")
_WORDS = {"true": True, "false": False, **dict.fromkeys(_NULLS)}
_ANY_NULL = "/\\s*([nN][uU][lL][lL]|[nN][oO][nN][eE])\\s*/"
_UNLISTED = "\n"  # no parameter has this name


class CallTags(NamedTuple):
    """The texts around the parts of a call.

    `end`: after a value. `no_values`: texts of which none is in a value. `no_tags`: the expression of texts from which
    no tag would be read.
    """

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    end: str
    after_call: str
    no_values: tuple[str, ...]
    no_tags: str


TAGS = CallTags(
    before_name=f"{OPEN}\n{FUNCTION}",
    after_name=">\n",
    before_key=PARAMETER,
    after_key=">\n",
    end=f"\n{END_PARAMETER}\n",
    after_call=f"{END_FUNCTION}\n{CLOSE}",
    no_values=(END_PARAMETER, PARAMETER),
    no_tags=r"/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/ & ~/((?s:.*)\n)?<parameter=(?s:.*)/",
)


class Qwen3CoderParser(ToolCallParser):
    """Parser for Qwen3-Coder, Qwen 3.5 and Nemotron 3.

    The tag `<tool_call>` around the function is optional, because these models sometimes omit it. A value that should
    not be a string, but is not valid JSON, is passed on as a string. The tool will then refuse it.
    """

    name = "qwen3_coder"
    tags = (OPEN, FUNCTION)

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        if tag == OPEN:
            yield from source.skip_space()
            if not (yield from source.accept(FUNCTION)):
                return None
        name = yield from self._read_name(source)
        if name is None or (tag == FUNCTION and tools is not None and name not in tools):
            return None
        known = Parameters.from_schema((tools or {}).get(name, {}))
        if (arguments := (yield from known.read(source, PARAMETER, END_FUNCTION, self._read_parameter))) is None:
            return None
        end = source.at
        yield from source.skip_space()
        if not (yield from source.accept(CLOSE)):
            if tag == OPEN and (yield from source.peek()):
                return None
            source.at = end  # the whitespace belongs to the text after the call
        try:
            return [(name, dump_json(arguments))]
        except ValueError:
            return None

    def calls_rule(self, lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool) -> str:
        return xml_calls_rule(lark, functions, many, TAGS)

    def _read_parameter(self, source: Cursor, left: set[str] | None) -> Reading[tuple[str, str] | None]:
        key = yield from self._read_name(source)
        value = None if key is None else (yield from self._read_value(source, left and left - {key}))
        return None if key is None or value is None else (key, value)

    def _read_name(self, source: Cursor) -> Reading[str | None]:
        """Read a name and the `>` after it."""
        start = source.at
        while (char := (yield from source.peek())) != ">":
            if char == "" or char in "<\n":
                return None
            source.at += 1
        source.at += 1
        return source.text[start : source.at - 1].strip() or None

    def _read_value(self, source: Cursor, names: set[str] | None) -> Reading[str | None]:
        """Read a parameter's value and its closing tag. Returns None if the value has no end.

        A closing tag ends the value only if the next parameter or the end of the function follows. If no closing tag
        does, the value ends before a line with the opening tag of a parameter in `names`, or of any parameter if
        `names` is None.
        """
        start = source.at
        while (tag := (yield from source.skip_past_one_of((END_PARAMETER, PARAMETER)))) is not None:
            after = source.at
            if tag == END_PARAMETER:
                yield from source.skip_space()
                if (yield from source.starts_with(PARAMETER)) or (yield from source.starts_with(END_FUNCTION)):
                    return _without_outer_newlines(source.text[start : after - len(tag)])
            elif source.text[start : after - len(tag)].endswith("\n"):
                name = yield from self._read_name(source)
                if name is not None and (names is None or name in names):
                    source.at = after - len(tag)
                    return _without_outer_newlines(source.text[start : source.at])
            source.at = after
        return None


def _without_outer_newlines(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


class Parameters:
    def __init__(self, document: SchemaDocument | None):
        self._document = document
        found = [] if document is None else document.alternatives([document.root])
        self.names = {name for each in found for one in schemas_of(each) for name in one.get("properties", ())}

    @classmethod
    def from_schema(cls, schema: Schema) -> Parameters:
        try:
            return cls(arguments_schema(schema, strict=False))
        except GrammarError:  # a schema that means nothing tells no types
            return cls(None)

    def read(
        self, source: Cursor, opening: str, end: str, read_parameter: _ReadParameter
    ) -> Reading[dict[str, Any] | None]:
        """Read all parameters, each after the tag `opening`, and the tag `end`. Return None if they are no parameters.

        `read_parameter` gets the names that are not read yet, or None if the schema has no names.
        """
        arguments: dict[str, Any] = {}
        while True:
            yield from source.skip_space()
            if (yield from source.accept(end)):
                return arguments
            if not (yield from source.accept(opening)):
                return None
            left = self.names - arguments.keys() if self.names else None
            if (found := (yield from read_parameter(source, left))) is None:
                return None
            key, value = found
            arguments[key] = self.convert_value(key, value)

    def types_and_values(self, key: str) -> tuple[frozenset[str], list[Any]]:
        """Return the types of a parameter (empty if any is allowed), and its values in `enum` or `const`."""
        document = self._document
        if document is None or not (found := document.property_alternatives(key)):
            return frozenset(), []
        values = [value for each in found for value in document.literals(each) or ()]
        return frozenset().union(*(_named_kinds(document, each) for each in found)), values

    def convert_value(self, key: str, text: str) -> Any:
        """Convert the text of a parameter's value to the type that the schema names.

        If the text is a value in `enum` or `const`, as a string or as JSON, return that value. If the schema allows a
        string or names no type, return the text, but None for "null" if null is allowed. Otherwise parse the text as
        JSON. A list or an object may also be a Python literal.
        """
        try:
            kinds, values = self.types_and_values(key)
        except GrammarError:
            kinds, values = frozenset(), []
        if text in (value for value in values if isinstance(value, str)):
            return text
        if known := [value for value in values if not isinstance(value, str) and text == dump_json(value)]:
            return known[0]
        word = text.strip().lower()
        if not kinds or "string" in kinds:
            return None if "null" in kinds and word in _NULLS else text
        value = _WORDS[word] if word in _WORDS else _parse(load_json, text)
        if value is text and kinds & {"array", "object"}:
            literal = _parse(parse_literal, text)
            return literal if isinstance(literal, list | dict) else text
        is_whole = isinstance(value, float) and value.is_integer() and "number" not in kinds
        return int(value) if is_whole else value


def _named_kinds(document: SchemaDocument, alternative: Alternative) -> frozenset[str]:
    """Return the types that the schema names. Empty if it allows all types."""
    if (values := document.literals(alternative)) is not None:
        return frozenset(map(json_type_of, values))
    kinds = document.kinds(alternative)
    return frozenset() if kinds == document.kinds(()) else kinds


def _parse(parse: Callable[[str], Any], text: str) -> Any:
    try:
        dump_json(value := parse(text))
    except ValueError:
        return text
    return value


def xml_calls_rule(lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool, tags: CallTags) -> str:
    call = " | ".join(_call_rule(lark, name, document, tags) for name, document in functions.items())
    return calls_in_lines_rule(lark, call, many)


def _call_rule(lark: LarkBuilder, name: str, document: SchemaDocument, tags: CallTags) -> str:
    values = _ParameterRules(lark, document, tags)

    def parameter(key: str, value: str) -> str:
        if set(key + name) & set("<>\n") or key != key.strip() or not key:
            why = "is empty, or has <, >, a line break or a space at an end, which this model's calls cannot have"
            raise GrammarError("the name {!r} {}", key, why)
        return f"{lark.literal(tags.before_key + key + tags.after_key)} {value}"

    found = [
        values.properties_rule(form, parameter, "", values.unlisted_parameter_rule(form))
        for form in document.object_schemas
    ]
    content = arguments_rule(lark, values, found)
    start, end = tags.before_name + name + tags.after_name, tags.after_call
    return lark.rule(f"{lark.literal(start)} {content} {lark.literal(end)}")


class _ParameterRules(JsonRules):
    """Rules of values with their closing tags. What may be a string is written as a string, without quotes."""

    def __init__(self, lark: LarkBuilder, document: SchemaDocument, tags: CallTags):
        super().__init__(lark, document, JsonStyle())
        self._json, self._known = JsonRules(lark, document, JsonStyle()), Parameters(document)
        self._tags = tags

    def property_value_rule(self, name: str, places: Sequence[Place]) -> str | None:
        kinds, values = self._known.types_and_values(name)
        if kinds and "string" not in kinds:
            value = self._json.value_rule(places)
            return None if value is None else f"{value} {self._lark.literal(self._tags.end)}"
        document, terms = self._document, list[str]()
        found = document.alternatives(places)
        has_null = any(not document.rejects(None, each) for each in found)
        # Texts that are not read as strings.
        others = [lark_literal(escape_regex(dump_json(value))) for value in values if not isinstance(value, str)]
        others += [_ANY_NULL] if "null" in kinds and not has_null else []
        for each in found:
            literals = document.literals(each)
            if literals is None:
                text = self._string_rule(each, others) if "string" in document.kinds(each) else None
                terms += [] if text is None else [text]
                literals = [None] if "null" in kinds and has_null else []
            for value in (value for value in literals if self.matches_patterns(value, each)):
                text = value if isinstance(value, str) else dump_json(value)
                if not any(each in text for each in self._tags.no_values) and json_values_are_equal(
                    self._known.convert_value(name, text), value
                ):
                    terms.append(self._lark.literal(text + self._tags.end))
        return f"({' | '.join(dict.fromkeys(terms))})" if terms else None

    def _string_rule(self, alternative: Alternative, others: list[str]) -> str | None:
        """Return the expression of a string and its closing tag. The string matches no term in `others`."""
        patterns, formats = self.patterns_and_formats(alternative)
        terms = [f"({lark_literal(FORMATS[each])})" for each in formats]
        for pattern in patterns:
            term = decimal_term(pattern) or whole_text_term(pattern)
            if term is None or grammar_error(f"start: T\nT: {term}"):
                self._document.relax_or_refuse(f"pattern {pattern!r} in a string without quotes")
            else:
                terms.append(term)
        low, high = size_bounds(alternative, "Length")
        if high is not None and low > high:
            return None
        if low or high is not None:
            terms.append(f"/(?s:.{repetition_range(low, high)})/")
        # The line break before the closing tag may be missing where the length of the text does not matter.
        end = self._tags.end if terms or others else self._tags.end.removeprefix("\n")
        term = f"({' & '.join([*terms, self._tags.no_tags, *(f'~{each}' for each in others)])})"
        return None if (terms or others) and has_empty_language(term) else self._lark.term_before_tag(term, end)

    def unlisted_parameter_rule(self, form: ObjectSchema) -> str | None:
        value = None if form.others is None or form.patterns else self.property_value_rule(_UNLISTED, form.others)
        if value is None:
            return None
        taken = "|".join(map(escape_regex, form.properties))
        name = self._lark.terminal(r"/[^<>\s]+( [^<>\s]+)*/" + (f" & ~{lark_literal(taken)}" if taken else ""))
        before, after = self._lark.literal(self._tags.before_key), self._lark.literal(self._tags.after_key)
        return self._lark.rule(f"{before} {name} {after} {value}")
