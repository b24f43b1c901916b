"""Schemas as people and libraries write them, as grammars of answers and of calls."""

from __future__ import annotations

import json
import logging
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import pydantic
import pytest
from openai import pydantic_function_tool
from openai.lib._parsing import type_to_response_format_param
from pydantic import BaseModel, Field

from areno.errors import GrammarError
from areno.server.output_grammars import Constraint
from areno.server.parsers import PARSERS
from tests.helpers.grammars import ByteGrammar, accepted, answers, call, calls, response_format

pytest.importorskip("llguidance")

FAMILIES = ["hermes", "llama3_json", "pythonic", "qwen3_coder", "glm4_moe"]
BOTH = ["response_format", "call"]


def test_answers_in_the_models_of_pydantic() -> None:
    class Kind(Enum):
        SMALL = "small"
        LARGE = "large"

    class Node(BaseModel):
        name: str
        children: list[Node]

    class Order(BaseModel):
        kind: Kind
        node: Node
        note: str | None
        price: Annotated[Decimal, Field(ge=0)]
        tags: list[Literal["a", "b"]]

    [schema] = [type_to_response_format_param(Order)]
    grammar = ByteGrammar(Constraint(response_format=schema).grammar({}) or "")  # type: ignore[arg-type]
    node = '{"name": "n", "children": [{"name": "m", "children": []}]}'
    good = f'{{"kind": "small", "node": {node}, "note": null, "price": 1.5, "tags": ["a", "b"]}}'
    assert grammar.accepts(good)
    for old, new in (('"small"', '"tiny"'), ("1.5", "-1.5"), ('"b"', '"c"'), ('"children": []', '"child": []')):
        assert not grammar.accepts(good.replace(old, new))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_root_of_arguments_may_be_a_reference_or_branches(family: str) -> None:
    class Tree(BaseModel):
        value: int
        child: Tree | None = None

    tool = pydantic.TypeAdapter(Tree).json_schema()
    assert "$ref" in tool  # so the library writes models that contain themselves
    strict: Any = pydantic_function_tool(Tree, name="f")
    constraint = Constraint(tools=[strict], requires_call=True, parser=PARSERS[family])
    text = call(family, value=1, child={"value": 2, "child": None})
    assert ByteGrammar(constraint.grammar({}) or "").accepts(text)
    both = {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]}
    both["$defs"] = {"A": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}  # type: ignore[assignment]
    one = {"anyOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]}
    one["$defs"] = both["$defs"]  # type: ignore[assignment]
    good: list[tuple[Any, dict[str, Any]]] = [(tool, {"value": 1}), (tool, {"value": 1, "child": {"value": 2}})]
    good += [(both, {"a": True, "b": 1}), (one, {"a": True}), (one, {"b": 1})]
    bad: list[tuple[Any, dict[str, Any]]] = [(tool, {}), (tool, {"value": "x"}), (tool, {"value": 1, "other": 2})]
    bad += [(both, {"a": True}), (one, {}), (one, {"b": True})]
    for schema, arguments in good:
        text = call(family, **arguments)
        assert calls(family, schema).accepts(text), (schema, arguments)
        described = [{"name": "f", "parameters": schema}]
        [found] = PARSERS[family].parse(text, described).tool_calls
        assert json.loads(found.arguments) == arguments
    for schema, arguments in bad:
        assert not calls(family, schema).accepts(call(family, **arguments)), (schema, arguments)


UNENFORCED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}},
    "not": {"type": "array", "items": {"type": "integer"}, "not": {"maxItems": 0}},
    "if": {"type": "array", "items": {"type": "integer"}, "if": {"minItems": 1}, "then": {"maxItems": 9}},
    "oneOf with branches that overlap": {"oneOf": [{"type": "array"}, {"type": "array", "maxItems": 5}]},
    "format 'path'": {"anyOf": [{"type": "string", "format": "path"}, {"type": "array"}]},
    "pattern '(?!x)'": {"anyOf": [{"type": "string", "pattern": "(?!x)"}, {"type": "array"}]},
}
OF_OBJECTS: dict[str, Any] = {
    "dependentRequired": {"properties": {"x": {"type": "array"}}, "dependentRequired": {"x": ["y"]}},
    "propertyNames": {"properties": {"x": {"type": "array"}}, "propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": {"properties": {"x": {"type": "array"}}, "unevaluatedProperties": False},
}
SCHEMAS = {word: {"properties": {"x": schema}} for word, schema in UNENFORCED.items()} | OF_OBJECTS


@pytest.mark.parametrize("word", SCHEMAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_be_enforced_is_left_out_with_a_warning_unless_it_is_strict(
    family: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Titles make schemas of their own: the warning comes once for each schema.
    schema = {"type": "object", "title": f"{family} {word}", **SCHEMAS[word]}
    with caplog.at_level(logging.WARNING):
        for how in ({}, {"strict": False}):
            assert calls(family, schema, **how).accepts(call(family, x=[1, 1]))
    assert caplog.text.count("the schema of f is enforced without") == 1
    assert word in caplog.text
    with pytest.raises(GrammarError, match="strict to false"):
        calls(family, schema, strict=True)


@pytest.mark.parametrize("word", SCHEMAS)
def test_answers_in_a_schema_that_is_enforced_in_part(word: str, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "title": f"answers {word}", **SCHEMAS[word]}
    with caplog.at_level(logging.WARNING):
        assert answers(schema, strict=False).accepts('{"x": [1, 1]}')
    assert "the schema of response_format is enforced without" in caplog.text
    with pytest.raises(GrammarError, match="strict to false"):
        answers(schema)


def test_calls_beside_an_answer_in_json_are_relaxed_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS["uniqueItems"]}}]
    constraint = Constraint(response_format=response_format({"type": "integer"}), tools=tools, parser=PARSERS["hermes"])
    grammar = ByteGrammar(constraint.grammar({}) or "")
    assert grammar.accepts("5")
    assert grammar.accepts(call("hermes", x=[1, 1]))


def test_keywords_without_an_effect_are_no_reason_to_refuse() -> None:
    for schema in (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
        {"type": ["array", "string"], "then": {"type": "null"}, "$comment": "no if", "x-order": 3},
        {"anyOf": [{"type": "array"}, {"type": "object", "propertyNames": {"type": "string"}}]},
        {"anyOf": [{"type": "array"}, {"type": "object", "unevaluatedProperties": True}]},
        {"anyOf": [{"type": "array"}, {"type": "integer", "format": "int64", "uniqueItems": True}]},
    ):
        assert answers(schema).accepts("[1]"), schema


DECIMALS = [
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-1.50", "+.5", "007."], ["-", ".", "", "1e5", "a"]),
    (
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
        ["123", "-123.45", "0001.5000"],
        ["1234", "1.234", "+", "1.2.3"],
    ),
    (r"^[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)$", ["1.5e-7", ".5"], ["e5", "."]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), DECIMALS)
def test_the_patterns_of_decimals(pattern: str, good: list[str], bad: list[str]) -> None:
    schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]}
    for grammar in (answers(schema), answers(schema, strict=False)):
        assert accepted(grammar, [json.dumps(text) for text in [*good, *bad]]) == [json.dumps(text) for text in good]
    values = calls("qwen3_coder", {"type": "object", "properties": {"x": schema["anyOf"][1]}, "required": ["x"]})
    assert accepted(values, [call("qwen3_coder", x=text) for text in [*good, *bad]]) == [
        call("qwen3_coder", x=text) for text in good
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_ranges_of_64_bits(strict: bool) -> None:
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (2**53 + 1, 2**53 + 3), (-(2**100), 2**100)):
        grammar = answers({"type": "integer", "minimum": low, "maximum": high}, strict)
        assert accepted(grammar, [str(n) for n in (low - 1, low, low + 1, high - 1, high, high + 1)]) == [
            str(n) for n in (low, low + 1, high - 1, high)
        ]
    assert accepted(answers({"const": 2**64 - 1}), [str(2**64 - 1), str(2**64), str(2**63)]) == [str(2**64 - 1)]
    assert accepted(answers({"enum": [2**53 + 1]}), [str(2**53), str(2**53 + 1)]) == [str(2**53 + 1)]


def test_numbers_are_finite_wherever_they_stand() -> None:
    for schema, text in (({}, "{}"), ({"type": "object"}, '{{"a": {}}}'), ({"type": "number"}, "{}")):
        for grammar in (
            answers(schema),
            ByteGrammar(Constraint(response_format={"type": "json_object"}).grammar({}) or ""),
        ):
            assert not grammar.accepts(text.format("1e9999"))
    assert answers({"type": "number"}).accepts("1e-7")
    for family in FAMILIES:
        grammar = calls(family, {"properties": {"x": {"type": "number"}}, "required": ["x"]})
        assert grammar.accepts(call(family, x=2.5e300))
        assert not grammar.accepts(call(family, x=2.5e300).replace("2.5e+300", "1e9999"))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number"}, ["0", "0.0", "-0", "-0.0"], []),
        ({"type": "integer"}, ["0", "-0"], ["-0.0"]),
        ({"type": "number", "minimum": 0}, ["0", "0.0"], ["-0", "-0.0"]),
        ({"enum": [0]}, ["0"], ["-0"]),
        ({"enum": [-0.0]}, ["0", "-0.0"], []),
        ({"type": "string"}, ['"\x7f"', r'"\u007f"'], []),
        ({"type": "string", "pattern": "."}, [r'"\u007f"'], ['"\x7f"']),
        ({"enum": ["\x7f", "b"], "pattern": "."}, ['"b"', '"\x7f"', r'"\u007f"'], []),
    ],
)
def test_zeros_with_a_sign_and_the_character_del(schema: Any, good: list[str], bad: list[str]) -> None:
    assert accepted(answers(schema), [*good, *bad]) == good


def test_calls_in_python_escape_del_with_a_pattern() -> None:
    for word in ({}, {"pattern": "."}):
        grammar = calls("pythonic", {"properties": {"a": {"type": "string", **word}}, "required": ["a"]})
        assert [grammar.accepts(f'[f(a="{text}")]') for text in ("b", "\x7f", r"\u007f")] == [True, not word, True]


def test_a_reason_is_whole() -> None:
    with pytest.raises(GrammarError, match=r"regex parse error: .* look-behind, is not supported"):
        answers({"type": "string", "pattern": "^(?<=a)b"})
    with pytest.raises(GrammarError, match=r"regex parse error: .* unclosed character class"):
        answers({"type": "string", "pattern": "[a"})


def named(name: str) -> Any:
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # A branch may have what the object around it lists, or another part of allOf.
        ({**named("x"), "anyOf": [named("a"), named("b")]}, ['{"x": 1, "a": 1}', '{"x": 1, "b": 2}'], ['{"a": 1}']),
        ({"allOf": [named("a"), named("b")]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}']),
        (
            {**named("x"), "allOf": [{"anyOf": [named("a"), {}]}]},
            ['{"x": 1}', '{"x": 1, "a": 1}'],
            ['{"x": 1, "c": 1}'],
        ),
        # A branch may have what a branch beside it lists, unless no value is in both.
        ({"anyOf": [named("a"), named("b")]}, ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'], ["{}", '{"a": 1, "c": 2}']),
        (
            {"oneOf": [{"properties": {"k": {"const": k}, k: {}}, "required": ["k"], "type": "object"} for k in "pq"]},
            ['{"k": "p", "p": 1}', '{"k": "q", "q": 1}'],
            ['{"k": "p", "q": 1}', '{"k": "p", "p": 1, "x": 1}'],
        ),
        # What is required is listed.
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]},
            ['{"a": 1, "z": [true]}'],
            ['{"a": 1}', '{"a": 1, "z": 1, "y": 2}'],
        ),
        # Names and values are data, even if they are called like keywords.
        (
            {
                "type": "object",
                "properties": {name: {"enum": ["not", "if", "allOf"]} for name in ("not", "if", "allOf")},
            },
            ["{}", '{"not": "if", "allOf": "not"}'],
            ['{"not": "if", "x": 1}', '{"not": 1}'],
        ),
        ({"type": "object", "properties": {"a": {"const": {"allOf": 1}}}}, ['{"a": {"allOf": 1}}'], ['{"b": 1}']),
        # Nothing is closed that lists nothing, or says what else there may be.
        ({"type": "object", "required": ["a"]}, ['{"a": 1, "b": 2}'], ['{"b": 2}']),
        ({**named("a"), "additionalProperties": True}, ['{"a": 1, "b": 2}'], []),
        (
            {**named("a"), "patternProperties": {"^x-": {"type": "null"}}},
            ['{"a": 1, "x-b": null}'],
            ['{"a": 1, "b": 1}'],
        ),
    ],
)
def test_objects_are_closed_by_structure(schema: Any, good: list[str], bad: list[str]) -> None:
    assert accepted(answers(schema), [*good, *bad]) == good


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_anchors_in_the_parameters_of_a_tool(family: str) -> None:
    schema = {
        "$id": "https://example.com/tool",
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/whole"},
            "b": {"$ref": "#number"},
            "c": {"$ref": "inner"},
            "d": {"$ref": "https://example.com/tool#/properties/a"},
        },
        "required": ["a"],
        "$defs": {
            "whole": {"type": "integer"},
            "one": {"$anchor": "number", "type": "number"},
            "two": {"$id": "inner", "$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}},
        },
    }
    grammar = calls(family, schema)
    assert grammar.accepts(call(family, a=1, b=2.5, c=True, d=4))
    for wrong in ({"a": 1.5}, {"a": 1, "b": True}, {"a": 1, "c": 3}, {"a": 1, "d": False}):
        assert not grammar.accepts(call(family, **wrong))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "#none"}, "does not exist"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value of finite length"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no value of finite length"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no value of finite length"),
        ({"enum": [float("inf")], "multipleOf": 2}, "no value of finite length"),
        ({"minLength": "a"}, "minLength is 'a'; an integer from 0 on is expected"),
        ({"maximum": "a"}, "maximum is 'a'; a number is expected"),
        ({"required": "a"}, "required is 'a'; a list of names is expected"),
        ({"properties": []}, r"properties is \[\]; an object is expected"),
        ({"items": 3}, "3 is no schema"),
        ({"type": "array", "multipleOf": 0}, "multipleOf is 0; a number above 0 is expected"),
        ({"anyOf": [{"properties": {f"p{n}": {} for n in range(20)}, "allOf": [{"anyOf": [{}] * 70}] * 3}]}, "4,096"),
        (
            {"type": "number", "multipleOf": 1.5},
            "multipleOf 1.5 for numbers with fractions: a grammar cannot enforce it",
        ),
        ({"additionalProperties": {}, "minProperties": 2}, "minProperties 2: a grammar cannot enforce it"),
    ],
)
def test_schemas_that_are_none(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        answers(schema)


def test_a_schema_as_deep_as_python_can_go() -> None:
    schema: Any = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError, match="nested too deeply"):
        answers(schema)


def test_strings_in_xml_hold_their_schemas() -> None:
    schema = {"properties": {"x": {"type": "string", "maxLength": 3, "pattern": "^[a-z ]+$"}}, "required": ["x"]}
    texts = [call("qwen3_coder", x=text) for text in ("abc", "a b", "abcd", "A", "")]
    assert accepted(calls("qwen3_coder", schema), texts) == texts[:2]
    free = calls("qwen3_coder", {"properties": {"x": {"type": "string"}}, "required": ["x"]})
    assert free.accepts(call("qwen3_coder", x="a < b\n</function> & c"))
    for text in ("a</parameter>", "a\n<parameter=y>\nb", "<parameter=y>"):
        assert not free.accepts(call("qwen3_coder", x=text))
