"""The parsers that agent.tool_call_parser and agent.reasoning_parser name."""

from __future__ import annotations

from typing import Any

import pytest

from areno.config.agent import AgentConfig
from areno.server.parsers import PARSERS, ToolCallParser, join_deltas, parser_for_template, parser_of_settings
from tests.helpers.tokenizers import load_tokenizer

CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "look", "parameters": {"at": 1}}',
    "pythonic": "<|tool_call_start|>[look(at=1)]<|tool_call_end|>",
    "glm4_moe": "<tool_call>look<arg_key>at</arg_key><arg_value>1</arg_value></tool_call>",
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}',
}
NAMES = {
    "hermes": ["hermes", "qwen", "qwen25"],
    "qwen3_coder": ["qwen3_coder", "qwen3_xml"],
    "llama3_json": ["llama3_json", "llama3"],
    "pythonic": ["pythonic", "lfm2"],
    "glm4_moe": ["glm4_moe", "glm", "glm45", "glm47"],
    "harmony": ["harmony", "openai", "gpt-oss"],
    "text": ["text"],
}
LOOK = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]


def chosen(template: str | None = None, **settings: Any) -> ToolCallParser:
    values = AgentConfig.canonical({"fn": "agent.py", **settings})
    fields = {row: AgentConfig.__dataclass_fields__[row].metadata["declared"]["aliases"] for row in settings}
    config = AgentConfig(**{name: fields.get(name, {}).get(value, value) for name, value in values.items()})
    return parser_of_settings(template, config.tool_call_parser, config.reasoning_parser)


def test_each_name_chooses_a_format_whatever_the_template() -> None:
    assert NAMES.keys() == PARSERS.keys()
    template = load_tokenizer("qwen3").chat_template
    for name, call in CALLS.items():
        for alias in NAMES[name]:
            message = chosen(template, tool_call_parser=alias).parse(call, TOOLS)
            assert [(each.name, each.arguments) for each in message.tool_calls] == [("look", '{"at": 1}')], alias
        assert chosen(template, tool_call_parser="text").parse(call, TOOLS).content == call
    assert chosen(template) is parser_for_template(template) is PARSERS["hermes"]


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_without_a_reasoning_parser_reasoning_is_content(in_reasoning: bool) -> None:
    text = f"{'' if in_reasoning else '<think>'}Perhaps.</think>\n\nYes. {CALLS['hermes']}"
    plain, none = chosen(tool_call_parser="hermes"), chosen(tool_call_parser="hermes", reasoning_parser="none")
    assert plain.parse(text, TOOLS, in_reasoning=in_reasoning).reasoning_content == "Perhaps."
    whole = none.parse(text, TOOLS, in_reasoning=in_reasoning, message_id="a")
    assert (whole.reasoning_content, whole.content) == (None, text.partition("<tool_call>")[0].rstrip())
    assert len(whole.tool_calls) == 1
    stream = none.stream(TOOLS, in_reasoning=in_reasoning, message_id="a")
    assert join_deltas([delta for letter in text for delta in stream.feed(letter)] + stream.finish()) == whole
    assert PARSERS["hermes"].reads_reasoning  # the shared parser is as before
    for name in ("qwen3", "deepseek_r1", "deepseek-r1"):
        assert chosen(reasoning_parser=name).reads_reasoning
