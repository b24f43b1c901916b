"""Calls that models write in another form than that of their template, and values whose type a schema tells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areno.server.messages import read_messages
from areno.server.parsers import PARSERS, ParsedMessage, join_deltas, parser_for_template
from areno.server.prompt_builder import PromptBuilder
from tests.helpers.conversations import USER
from tests.helpers.tokenizers import load_tokenizer, trl_templates

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}}
TOOLS = [{"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES}}]


def calls_of(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def test_the_arguments_of_hermes_may_be_called_parameters() -> None:
    parser = PARSERS["hermes"]
    for text in (
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1}, "parameters": {}}',
        '{"type": "function", "name": "f", "parameters": "{\\"a\\": 1}"}',
    ):
        assert calls_of(parser.parse(f"<tool_call>{text}</tool_call>")) == [("f", {"a": 1})], text
    assert calls_of(parser.parse('<tool_call>{"name": "f"}</tool_call>')) == [("f", {})]
    other = '<tool_call>{"name": "f", "input": {"a": 1}}</tool_call>'
    assert parser.parse(other) == ParsedMessage(content=other)  # a call without its arguments would be another one


def in_xml(*parameters: str) -> str:
    return f"<tool_call>\n<function=get_weather>\n{''.join(parameters)}</function>\n</tool_call>"


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_closing_tag_of_a_parameter_may_be_missing(tools: Any) -> None:
    parser = PARSERS["qwen3_coder"]
    city, days, unit = "<parameter=city>\nDallas\n", "<parameter=days>\n3\n", "<parameter=unit>\nF\n"
    end = "</parameter>\n"
    expected = {"city": "Dallas", "days": 3 if tools else "3", "unit": "F"}
    for text in (in_xml(city, days, end, unit, end), in_xml(city, end, days, unit, end), in_xml(city, days, unit, end)):
        for cut in range(len(text)):
            stream = parser.stream(tools)
            found = join_deltas(stream.feed(text[:cut]) + stream.finish(text[cut:]))
            assert calls_of(found) == [("get_weather", expected)], text
    # What is no parameter of the function, or stands amid a line, belongs to the value.
    for inner in ("\n<parameter=>", " <parameter=days>", "\n<parameter=" + ("other>" if tools else "a\nb>")):
        text = in_xml(f"<parameter=city>\na{inner} b\n</parameter>\n")
        assert calls_of(parser.parse(text, tools)) == [("get_weather", {"city": f"a{inner} b"})]


def test_values_in_xml_without_a_type_and_in_the_form_of_python() -> None:
    parameters = {
        "k": {"const": 5},
        "t": {"const": "5"},
        "n": {"const": None},
        "l": {"const": [1, "a"]},
        "e": {"enum": [True, "yes", 2]},
        "a": {"type": "array"},
        "o": {"type": ["object", "null"]},
        "r": {"$ref": "#/$defs/i"},
        "m": {"anyOf": [{"const": 7}, {"type": "string"}]},
    }
    schema = {"allOf": [{"properties": parameters}], "$defs": {"i": {"allOf": [{"type": "integer"}]}}}
    cases = [("k", "5", 5), ("t", "5", "5"), ("n", "null", None), ("l", '[1, "a"]', [1, "a"]), ("e", "true", True)]
    cases += [("e", "yes", "yes"), ("e", "2", 2), ("a", "['a', 1]", ["a", 1]), ("a", "[True, None]", [True, None])]
    cases += [
        ("a", "('a', 1)", ["a", 1]),
        ("a", "__import__('os')", "__import__('os')"),
        ("o", "{'b': 'c'}", {"b": "c"}),
    ]
    cases += [("a", "['a', 1", "['a', 1"), ("a", "[1e999]", "[1e999]"), ("o", "None", None)]
    cases += [("m", "7", 7), ("m", "8", "8")]
    for key, text, expected in cases:
        call = f"<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
        found = PARSERS["qwen3_coder"].parse(call, [{"name": "f", "parameters": schema}])
        assert calls_of(found) == [("f", {key: expected})], (key, text)
        assert type(json.loads(found.tool_calls[0].arguments)[key]) is type(expected), (key, text)


def test_a_schema_that_means_nothing_tells_no_types() -> None:
    text = "<function=f>\n<parameter=a>\n5\n</parameter>\n</function>"
    for schema in ({"$ref": "#/none"}, {"type": "nothing"}, {"properties": {"a": {"$ref": "#/none"}}}, {"anyOf": 3}):
        assert calls_of(PARSERS["qwen3_coder"].parse(text, [{"name": "f", "parameters": schema}])) == [
            ("f", {"a": "5"})
        ]


def test_after_a_call_of_glm_the_prompt_continues_the_sampled_tokens() -> None:
    tokenizer, mark = load_tokenizer("tiny"), "<|observation|>"
    tokenizer.add_special_tokens({"additional_special_tokens": [mark]})
    tokenizer.chat_template = trl_templates().get("glm4moe") or pytest.skip("trl ships no template glm4moe")
    prompts = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))
    prompt = prompts.build_prompt([USER])
    said = "<think>Hm.</think>\nI look.\n<tool_call>find<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"
    tokens, end = tokenizer.encode(said + mark), tokenizer.convert_tokens_to_ids(mark)
    found = prompts.parser.parse(said, message_id="m")
    assert (found.content, found.reasoning_content) == ("I look.", "Hm.")
    calls = [{"id": one.id, "function": {"name": one.name, "arguments": one.arguments}} for one in found.tool_calls]
    answer = {"role": "assistant", "content": found.content, "reasoning_content": "Hm.", "tool_calls": calls}
    prompts.cache_turn(prompt, tokens, frozenset([end]), read_messages([answer])[0])
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "2"}
    further = prompts.build_prompt(read_messages([USER, answer, result]))
    assert further.tokens[: len(prompt.tokens) + len(tokens)] == [*prompt.tokens, *tokens]
    assert further.text.endswith("<tool_response>\n2\n</tool_response><|assistant|>")
