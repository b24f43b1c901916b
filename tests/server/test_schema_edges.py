"""Schemas at the edges: without a value, with odd names and characters, and of sizes that the library cannot hold."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from areno.errors import GrammarError
from areno.server.parsers.lark import LarkBuilder
from tests.helpers.grammars import accepted, answers, call, calls

pytest.importorskip("llguidance")


@pytest.mark.parametrize("more", [{}, {"patternProperties": {"^x": {"type": "null"}}}])
def test_a_name_may_be_empty(more: Any) -> None:
    schema = {"type": "object", "properties": {"": {"type": "integer"}}, "additionalProperties": True, **more}
    texts = ['{"": 1}', '{"a": 1}', "{}", '{"": "x"}', '{"a": 1, "": "x"}']
    assert accepted(answers(schema), texts) == texts[:3]


def test_the_name_of_a_parameter_in_xml_can_be_read() -> None:
    for name in ("", " a", "a ", "a>"):
        with pytest.raises(GrammarError, match="which this model's calls cannot have"):
            calls("qwen3_coder", {"type": "object", "properties": {name: {"type": "integer"}}})


NOTHING: list[Any] = [
    {"type": "number", "minimum": 0.1, "maximum": 0.4, "multipleOf": 0.5},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.01, "multipleOf": 0.01},
    {"type": "string", "minLength": 3, "pattern": "^.{2}$"},
    {"type": "string", "pattern": r"^[^\s\S]$"},
    {"type": "string", "format": "date", "maxLength": 5},
    {"enum": ["a", "b"], "pattern": "c"},
    {"enum": [1], "type": "string"},
    {"type": "array", "items": {"type": "number", "minimum": 0.1, "maximum": 0.4, "multipleOf": 0.5}, "minItems": 1},
]


@pytest.mark.parametrize("schema", NOTHING)
@pytest.mark.parametrize("strict", [True, False])
def test_what_has_no_value_is_left_out_or_refused(schema: Any, strict: bool) -> None:
    for whole in (schema, {"type": "object", "properties": {"a": schema}, "required": ["a"]}):
        with pytest.raises(GrammarError, match="no value of finite length"):
            answers(whole, strict)
    assert accepted(answers({"properties": {"a": schema, "b": {}}}, strict), ["{}", '{"b": 1}', '{"a": 1}']) == [
        "{}",
        '{"b": 1}',
    ]
    node = {"type": "object", "properties": {"value": schema, "next": {"$ref": "#/$defs/node"}}, "required": ["value"]}
    around = answers({"properties": {"n": {"$ref": "#/$defs/node"}, "m": {}}, "$defs": {"node": node}}, strict)
    assert accepted(around, ["{}", '{"m": 1}']) == ["{}", '{"m": 1}']
    if schema.get("type") == "string":
        with pytest.raises(GrammarError, match="no value of finite length"):
            calls("qwen3_coder", {"properties": {"x": schema}, "required": ["x"]}, strict=strict)


def test_names_that_no_pattern_leaves_are_left_out() -> None:
    both = {"^a": {"type": "integer"}, "^ab": {"type": "integer"}}
    grammar = answers({"type": "object", "patternProperties": both, "additionalProperties": False})
    assert accepted(grammar, ['{"a": 1}', "{}", '{"b": 1}']) == ['{"a": 1}', "{}"]
    assert grammar.drawn(random.Random(3)) is not None
    for how in (True, False):
        quoted = {"type": "object", "patternProperties": {'"': {"type": "integer"}}}
        if how:
            with pytest.raises(GrammarError, match="whose names need escapes"):
                answers(quoted)
        else:
            assert accepted(answers(quoted, strict=False), ['{"a": 1}', "{}"]) == ['{"a": 1}', "{}"]


def test_characters_that_are_written_as_escapes_beside_a_pattern() -> None:
    for schema in ({"enum": ["a\x7f", "b"], "pattern": "a|b"}, {"const": "a\x7f", "pattern": "^a.$"}):
        assert accepted(answers(schema), [r'"a\u007f"', '"a\x7f"']) == [r'"a\u007f"', '"a\x7f"']
    pattern = {"type": "string", "pattern": "^a.$"}
    assert accepted(answers(pattern), [r'"a\u007f"', r'"a\u0001"', r'"a\t"', '"ab"']) == [
        r'"a\u007f"',
        r'"a\u0001"',
        r'"a\t"',
        '"ab"',
    ]
    for family in ("hermes", "pythonic"):
        grammar = calls(family, {"properties": {"x": pattern}, "required": ["x"]})
        assert grammar.accepts(call(family, x="a\x01"))
    # Half of a pair is a character that no pattern names.
    assert accepted(answers({"enum": ["\ud800", "b"], "pattern": "b"}), ['"b"', r'"\ud800"']) == ['"b"']
    assert answers({"enum": ["\ud800"], "pattern": "^.$"}).accepts(r'"\ud800"')


def test_sizes_beyond_all_answers() -> None:
    assert answers({"type": "string", "maxLength": 10**30}).accepts('"a"')
    assert answers({"type": "array", "maxItems": 10**30}).accepts("[1, 2]")
    assert answers({"type": "object", "maxProperties": 10**30}).accepts('{"a": 1, "b": 2}')
    assert answers(
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {}, "maxProperties": 10**6}
    ).accepts('{"a": 1, "b": 2}')
    for word in ("minLength", "minItems", "minProperties"):
        with pytest.raises(GrammarError, match=f"{word} is 1000000+; an integer up to 2,147,483,647 is expected"):
            answers({word: 10**30})


def members(n: int, **words: Any) -> Any:
    return {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(n)}, **words}


def test_objects_with_many_properties() -> None:
    grammar = answers(members(700))
    some = json.dumps({f"p{at}": at for at in range(0, 700, 7)})
    assert accepted(grammar, ["{}", '{"p699": 1}', some, '{"p3": 1, "p2": 1}', '{"p3": 1, "p3": 1}', '{"p3": 1,}']) == [
        "{}",
        '{"p699": 1}',
        some,
    ]
    names = [f"p{at}" for at in range(0, 700, 3)]
    grammar = answers(members(700, required=names, additionalProperties={"type": "integer"}))
    needed = dict.fromkeys(names, 1)
    texts = [json.dumps(each) for each in (needed, {**needed, "q": 1}, {"p1": 1, **needed}, {"p0": 1})]
    assert accepted(grammar, texts) == [texts[0], texts[1]]
    with pytest.raises(GrammarError, match="an object has 5,001 optional properties; at most 5,000"):
        answers(members(5001))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "prefixItems": [{"type": "integer"}] * 1000}, "nested too deeply"),
        (members(1000, maxProperties=2), "nested too deeply"),
    ],
)
def test_schemas_that_would_overflow_the_stack(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        answers(schema)


def test_a_grammar_has_a_bounded_number_of_symbols() -> None:
    lark = LarkBuilder({})
    for number in range(32_500):
        lark.terminal(f'"{number}"')
    with pytest.raises(GrammarError, match="more than 65,000 symbols"):
        lark.terminal("/a/")
