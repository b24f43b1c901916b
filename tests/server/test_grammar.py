"""Grammars of requests: whatever is drawn from their masks is what was asked for."""

from __future__ import annotations

import json
import random
import re
import string
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areno.engine.decoder.grammar import GrammarCompiler
from areno.errors import GrammarError
from areno.server.output_grammars import Constraint, Grammar, compile_grammar, reasoning_after
from areno.server.parsers import PARSERS, ParsedMessage
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.schemas import SchemaDocument
from tests.helpers.grammars import allowed, response_format, schemas

FAMILIES = ["hermes", "qwen3_coder", "llama3_json", "pythonic", "glm4_moe"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "str", "enum": ["A", "B c"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 12},
        "exact": {"type": "boolean"},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 6},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "exact"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}},
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
TOOLS.append({"type": "function", "function": {"name": "now"}})


def drawn(grammar: Grammar | None, tokenizer: Any, seed: int, most: int = 200) -> tuple[str, bool]:
    """A text whose tokens were drawn evenly from the masks, and whether it ended by itself."""
    assert grammar is not None
    rng, state, tokens = random.Random(seed), grammar.start(), []
    for _ in range(most):
        token = rng.choice(allowed(state.allowed_token_mask()))
        state.accept(token)
        assert not state.error
        if state.finished:
            return tokenizer.decode(tokens), True
        tokens.append(token)
    return tokenizer.decode(tokens), False


def valid_calls(message: ParsedMessage) -> bool:
    """Whether there are calls, all of them as the tools want them."""
    schemas = {"get_weather": json.loads(json.dumps(WEATHER).replace('"str"', '"string"')), "now": {"maxProperties": 0}}
    for call in message.tool_calls:
        schema = {**schemas[call.name], "additionalProperties": False} if call.name == "get_weather" else schemas["now"]
        jsonschema.validate(json.loads(call.arguments), schema)
    return bool(message.tool_calls) and message.content is None


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def test_the_work_for_a_schema_grows_like_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[int] = []
    own = SchemaDocument.kinds
    monkeypatch.setattr(SchemaDocument, "kinds", lambda *asked: (visited.append(1), own(*asked))[1])

    def n_visited(levels: int, **more: Any) -> int:
        visited.clear()
        assert Constraint(**more).grammar({})
        return len(visited)

    for levels in (5, 10, 16):
        assert n_visited(levels, response_format=response_format(nested(levels))) < 6 * levels + 10
        for family in FAMILIES:
            how: Any = {"tools": [{"function": {"name": "f", "parameters": nested(levels)}}], "requires_call": True}
            assert n_visited(levels, parser=PARSERS[family], **how) < 20 * levels + 20


def test_a_grammar_that_would_be_too_large_is_refused_before_it_is_made() -> None:
    schema = {"properties": {"a": {"enum": [f"{number:01000}" for number in range(3000)]}}}
    constraint = Constraint(
        tools=[{"function": {"name": "f", "parameters": schema}}], requires_call=True, parser=PARSERS["pythonic"]
    )
    with pytest.raises(GrammarError, match="more than 2,000,000 characters"):
        constraint.grammar({})


def test_special_tokens_of_a_literal_are_found_once_and_the_longest_first() -> None:
    special = {"<a>": 1, "<a><b>": 2, "<c>": 3}
    assert LarkBuilder(special).literal("x<a><b><a>y<c>") == '"x" <[2]> <[1]> "y" <[3]>'
    assert LarkBuilder(special).literal("") == LarkBuilder({}).literal("") == '""'
    assert LarkBuilder({}).literal("x<a>") == '"x<a>"'


@pytest.fixture(params=["tiny", "minimind"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_of: Any) -> Any:
    return tokenizer_of(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_are_calls_in_the_format_of_the_family(family: str, tokenizer: Any) -> None:
    constraint = Constraint(tools=TOOLS, requires_call=True, parser=PARSERS[family])
    grammar = compile_grammar(constraint, tokenizer, len(tokenizer))
    most, n_finished = 0, 0
    for seed in range(25):
        text, finished = drawn(grammar, tokenizer, seed)
        if finished:
            n_finished += 1
            message = PARSERS[family].parse(text, TOOLS)
            assert valid_calls(message), text
            most = max(most, len(message.tool_calls))
    assert n_finished > 10
    assert most > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_are_not_parallel_are_one_call(family: str, tiny: Any) -> None:
    how: Any = {"requires_call": True, "parallel_tool_calls": False, "parser": PARSERS[family]}
    grammar = compile_grammar(Constraint(tools=TOOLS, **how), tiny, len(tiny))
    for seed in range(5):
        text, finished = drawn(grammar, tiny, seed)
        calls = PARSERS[family].parse(text, TOOLS).tool_calls
        assert not finished or len(calls) == 1
        assert {call.name for call in calls} <= {"now", "get_weather"}


@pytest.mark.slow
def test_reasoning_comes_first_where_the_model_reasons(tokenizer: Any) -> None:
    parser = PARSERS["hermes"]
    for reasoning, opened in (("open", "<think>"), ("optional", "")):
        constraint = Constraint(tools=TOOLS[1:], requires_call=True, parser=parser, reasoning=reasoning)
        grammar = compile_grammar(constraint, tokenizer, len(tokenizer))
        assert grammar is not None
        state = grammar.start()
        text = 'hm {}\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        text = text if opened else f"<think>{text}"
        for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
            assert token in allowed(state.allowed_token_mask()), tokenizer.decode([token])
            state.accept(token)
        assert state.finished
    finished = [drawn(grammar, tokenizer, seed) for seed in range(30)]
    assert any(ends and not text.startswith("<think>") for text, ends in finished)


def test_what_reasoning_a_prompt_leaves_open(tokenizer_of: Any) -> None:
    template = tokenizer_of("minimind").chat_template
    assert reasoning_after("assistant\n<think>\n", template) == "open"
    assert reasoning_after("assistant\n<think>\n\n</think>\n\n", template) == "none"
    assert reasoning_after("assistant\n", template) == "optional"
    assert reasoning_after("assistant\n", None) == "none"


@pytest.mark.slow
def test_fifty_schemas_of_growing_size(tokenizer_of: Any) -> None:
    tokenizer, n_finished = tokenizer_of("minimind"), 0
    for number, schema in enumerate(schemas()):
        text, finished = drawn(
            compile_grammar(Constraint(response_format=response_format(schema)), tokenizer, len(tokenizer)),
            tokenizer,
            number,
        )
        if finished:
            n_finished += 1
            jsonschema.validate(json.loads(text), schema)
    assert n_finished > 30


@pytest.mark.slow
def test_any_object(tokenizer: Any) -> None:
    grammar = compile_grammar(Constraint(response_format={"type": "json_object"}), tokenizer, len(tokenizer))
    finished = [text for text, ends in (drawn(grammar, tokenizer, seed) for seed in range(40)) if ends]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


def test_an_answer_in_json_or_a_call(tiny: Any) -> None:
    constraint = Constraint(response_format=response_format({"const": 1}), tools=TOOLS[1:], parser=PARSERS["hermes"])
    texts = {drawn(compile_grammar(constraint, tiny, len(tiny)), tiny, seed)[0] for seed in range(20)}
    assert "1" in texts
    assert any(PARSERS["hermes"].parse(text).tool_calls for text in texts)


def test_objects_end_with_their_properties_unless_the_schema_says_more(tiny: Any) -> None:
    def accepts(schema: Any, text: str) -> bool:
        grammar = compile_grammar(Constraint(response_format=response_format(schema)), tiny, len(tiny))
        assert grammar is not None
        state = grammar.start()
        for token in [*tiny.encode(text, add_special_tokens=False), tiny.eos_token_id]:
            if token not in allowed(state.allowed_token_mask()):
                return False
            state.accept(token)
        return state.finished

    one = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(one, '{"a": 1}')
    assert accepts(one, '{\n  "a": 1\n}')
    assert not accepts(one, '{"a": 1, "b": 2}')
    assert accepts({**one, "additionalProperties": True}, '{"a": 1, "b": 2}')
    both = {"allOf": [one, {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}]}
    assert accepts(both, '{"a": 1, "b": 2}')


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed(tiny: Any) -> None:
    grammar = compile_grammar(Constraint(response_format={"type": "json_object"}), tiny, len(tiny) + 50)
    assert grammar is not None
    mask = grammar.start().allowed_token_mask()
    assert mask.dtype == np.int32
    assert mask.shape == (-(-(len(tiny) + 50) // 32),)
    assert max(allowed(mask)) < len(tiny)


def test_nothing_is_constrained_where_nothing_was_asked(tiny: Any) -> None:
    for constraint in (
        Constraint(),
        Constraint(tools=TOOLS, parser=PARSERS["hermes"]),
    ):
        assert compile_grammar(constraint, tiny, len(tiny)) is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"response_format": response_format({"type": "nothing"})}, "cannot be compiled.*Invalid type: nothing"),
        ({"response_format": response_format({"$ref": "#/x"})}, "cannot be compiled.*'/x' does not exist"),
        ({"response_format": response_format({"type": "array", "uniqueItems": True})}, "Unimplemented.*uniqueItems"),
        ({"requires_call": True, "parser": PARSERS["text"]}, "no format for tool calls"),
    ],
)
def test_requests_that_are_none(how: dict[str, Any], message: str, tiny: Any) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_grammar(Constraint(**{"parser": PARSERS["hermes"], "tools": TOOLS, **how}), tiny, len(tiny))


def test_what_cannot_be_enforced_is_left_out_unless_it_is_strict(tiny: Any) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 1, "uniqueItems": True}
    assert drawn(
        compile_grammar(Constraint(response_format=response_format(schema, strict=False)), tiny, len(tiny)), tiny, 1
    )[1]


def test_without_the_library(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"llguidance, which is not installed: pip install 'areno\[grammar\]'"):
        GrammarCompiler(tiny, len(tiny))


def words_of(*words: str) -> Any:
    """A tokenizer of transformers with these tokens alone."""
    words = ("<unk>", "</s>", *words)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_a_tokenizer_that_cannot_write_what_an_answer_must_contain() -> None:
    letters = [*string.ascii_lowercase, *string.digits, *' ":,[]{}']
    tokenizer = words_of(*letters)
    schema = {"type": "object", "properties": {"name": {"enum": ["a"]}}, "required": ["name"]}
    assert compile_grammar(Constraint(response_format=response_format(schema)), tokenizer, len(tokenizer)) is not None
    for missing, shown in (("{", "{"), ("m", '"name"')):
        short = words_of(*(letter for letter in letters if letter != missing))
        with pytest.raises(GrammarError, match=re.escape(f"the tokenizer cannot write {shown!r}")):
            compile_grammar(Constraint(response_format=response_format(schema)), short, len(short))
    constraint = Constraint(tools=TOOLS[1:], requires_call=True, parser=PARSERS["hermes"])
    with pytest.raises(GrammarError, match="the tokenizer cannot write '<tool_call>"):
        compile_grammar(constraint, tokenizer, len(tokenizer))


def test_the_text_of_a_constraint_is_kept(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = Constraint(response_format=response_format({"const": "kept"}))
    first = compile_grammar(constraint, tiny, len(tiny))
    monkeypatch.setattr(Constraint, "add_rules", None)
    assert compile_grammar(Constraint(response_format=response_format({"const": "kept"})), tiny, len(tiny)) is first


def test_compiled_grammars_are_kept(tiny: Any) -> None:
    first, second = (
        compile_grammar(Constraint(response_format={"type": "json_object"}), tiny, len(tiny)) for _ in range(2)
    )
    assert first is second
