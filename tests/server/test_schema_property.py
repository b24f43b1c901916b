"""The contract of schemas: what a grammar writes validates, and what validates can be written, for drawn schemas."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno.errors import GrammarError
from areno.server.output_grammars import Constraint
from areno.server.parsers import PARSERS
from areno.server.parsers.json_rules import JsonRules, JsonStyle
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.schemas import SchemaDocument
from tests.helpers.drawn_schemas import NAMES, Draw, NoValue, is_valid
from tests.helpers.grammars import ByteGrammar

pytest.importorskip("llguidance")

FAMILIES = ["hermes", "llama3_json", "pythonic", "qwen3_coder", "glm4_moe"]
HOW: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def json_grammar(schema: Any, is_free: bool) -> ByteGrammar:
    lark = LarkBuilder({})
    return ByteGrammar(lark.grammar_text(JsonRules(lark, SchemaDocument(schema), JsonStyle(is_free=is_free)).root()))


def written(family: str, arguments: dict[str, Any], quotes: bool) -> str:
    """A call as a model of this family writes it. In XML, strings have no quotes where the parameter is a string."""
    if family == "hermes":
        return f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>"
    if family == "llama3_json":
        return json.dumps({"name": "f", "parameters": arguments})
    shown = {name: json.dumps(value, ensure_ascii=False) for name, value in arguments.items()}
    shown = {name: text.replace("\x7f", r"\u007f") for name, text in shown.items()}
    if family == "pythonic":
        return f"[f({', '.join(f'{name}={text}' for name, text in shown.items())})]"
    texts = {name: shown[name] if quotes or not isinstance(each, str) else each for name, each in arguments.items()}
    if family == "glm4_moe":
        pairs = (f"<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n" for name, text in texts.items())
        return f"<tool_call>f\n{''.join(pairs)}</tool_call>"
    parameters = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def check_json(rng: random.Random, n_texts: int = 4) -> tuple[int, int]:
    """The numbers of texts and of values that were compared."""
    draw, n_drawn, n_written = Draw(rng), 0, 0
    try:
        grammar = json_grammar(draw.schema, is_free=rng.randrange(3) == 0)
    except GrammarError as error:  # otherwise the schema needs what no grammar can enforce
        for _ in range(n_texts if "no value of finite length" in str(error) else 0):
            with pytest.raises(NoValue):
                draw.value()
        return 0, 0
    for _ in range(n_texts):
        text = grammar.drawn(rng)
        assert text is None or is_valid(json.loads(text), draw.schema), (draw.schema, text)
        n_drawn += text is not None
        try:
            value = draw.value()
        except NoValue:
            continue
        has_pattern = "pattern" in json.dumps(draw.schema)  # whose strings have no escapes of characters that need none
        for ascii_only in (False,) if has_pattern else (False, True):
            text = json.dumps(value, ensure_ascii=ascii_only)
            text = text.replace("\x7f", r"\u007f") if has_pattern else text
            assert grammar.accepts(text), (draw.schema, text)
            n_written += 1
    return n_drawn, n_written


def check_calls(family: str, rng: random.Random, n_texts: int = 4) -> tuple[int, int]:
    draw, parser, n_drawn, n_written = Draw(rng, NAMES), PARSERS[family], 0, 0
    if not isinstance(draw.schema, dict) or draw.schema.get("type", "object") != "object":
        return 0, 0
    draw.schema = {"properties": {}, **draw.schema, "type": "object"}
    tool = {"type": "function", "function": {"name": "f", "parameters": draw.schema, "strict": True}}
    constraint = Constraint(tools=[tool], requires_call=True, parallel_tool_calls=False, parser=parser)
    try:
        grammar = ByteGrammar(constraint.grammar({}) or "")
    except GrammarError:
        return 0, 0
    for _ in range(n_texts):
        if (text := grammar.drawn(rng)) is not None:
            [call] = parser.parse(text, [tool]).tool_calls
            assert is_valid(json.loads(call.arguments), draw.schema), (draw.schema, text)
            n_drawn += 1
        try:
            value = draw.value()
        except NoValue:
            continue
        if not isinstance(value, dict) or (
            family in ("pythonic", "qwen3_coder", "glm4_moe") and {*value} & {"u", "v", "日", "p7", "kz"}
        ):
            continue
        has_plain_strings = family in ("qwen3_coder", "glm4_moe")
        texts = [written(family, value, quotes) for quotes in ((False, True) if has_plain_strings else (True,))]
        calls = [parser.parse(text, [tool]).tool_calls for text in texts]
        texts = [text for text, [call] in zip(texts, calls, strict=True) if json.loads(call.arguments) == value]
        if texts and not ("pattern" in str(draw.schema) and "\\u" in texts[0]):
            assert any(map(grammar.accepts, texts)), (draw.schema, texts)
            n_written += 1
    return n_drawn, n_written


@settings(max_examples=40, **HOW)
@given(st.randoms(use_true_random=False))
def test_what_is_written_validates_and_what_validates_can_be_written(rng: random.Random) -> None:
    check_json(rng)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, **HOW)
@given(st.randoms(use_true_random=False))
def test_calls_hold_their_schemas(family: str, rng: random.Random) -> None:
    check_calls(family, rng)


def test_a_range_is_refused_where_no_multiple_lies_in_it() -> None:
    rng, n_empty = random.Random(3), 0
    for _ in range(60):
        low, step = rng.randrange(-20, 20) / 10, rng.choice([0.5, 0.25, 0.05, 0.02])
        high = low + rng.randrange(4) / 10
        number = {"type": "number", "minimum": low, "maximum": high, "multipleOf": step}
        schema = {"type": "object", "properties": {"a": number}, "required": ["a"]}
        low_, high_, step_ = (Fraction(repr(each)) for each in (low, high, step))
        if math.ceil(low_ / step_) * step_ <= high_:
            text = json_grammar(schema, is_free=False).drawn(rng)
            assert text is None or is_valid(json.loads(text), schema), (schema, text)
        else:
            n_empty += 1
            with pytest.raises(GrammarError, match="no value of finite length"):
                json_grammar(schema, is_free=False)
    assert n_empty > 10


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_many_schemas(start: int) -> None:
    found = [check_json(random.Random(seed)) for seed in range(start, start + 250)]
    assert sum(drawn for drawn, _ in found) > 200
    assert sum(n for _, n in found) > 200


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_calls(family: str) -> None:
    found = [check_calls(family, random.Random(seed)) for seed in range(500)]
    assert sum(drawn for drawn, _ in found) > 200
    assert sum(n for _, n in found) > 100
