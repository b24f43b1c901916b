"""Parsers and grammars for the tool-call formats of model families."""

from __future__ import annotations

import copy

from areno.server.parsers.glm4_moe import Glm4MoeParser
from areno.server.parsers.harmony import HarmonyParser
from areno.server.parsers.hermes import HermesParser, LlamaJsonParser
from areno.server.parsers.message import (
    MessageDelta,
    MessageStream,
    ParsedMessage,
    ToolCall,
    ToolCallParser,
    join_deltas,
)
from areno.server.parsers.pythonic import PythonicParser
from areno.server.parsers.qwen3_coder import Qwen3CoderParser

__all__ = [
    "PARSERS",
    "MessageDelta",
    "MessageStream",
    "ParsedMessage",
    "ToolCall",
    "ToolCallParser",
    "join_deltas",
    "parser_for_template",
    "parser_of_settings",
]

PARSERS = {
    parser.name: parser
    for parser in (
        HermesParser(),
        Qwen3CoderParser(),
        LlamaJsonParser(),
        PythonicParser(),
        Glm4MoeParser(),
        HarmonyParser(),
        ToolCallParser(),
    )
}


def parser_for_template(chat_template: str | None) -> ToolCallParser:
    """Return the parser for the format that a chat template describes, else "text", which finds no calls."""
    template = chat_template or ""
    if "<|channel|>" in template and "<|message|>" in template:
        return PARSERS["harmony"]
    if "<function=" in template and "<parameter=" in template:
        return PARSERS["qwen3_coder"]
    if "<tool_call>" in template:
        return PARSERS["glm4_moe" if "<arg_key>" in template else "hermes"]
    if "<|tool_call_start|>" in template or "params_name1=" in template:
        return PARSERS["pythonic"]
    if "<|start_header_id|>" in template and "parameters" in template:
        return PARSERS["llama3_json"]
    return PARSERS["text"]


def parser_of_settings(chat_template: str | None, tool_calls: str | None, reasoning: str) -> ToolCallParser:
    """Return the parser that agent.tool_call_parser and agent.reasoning_parser choose."""
    parser = PARSERS[tool_calls] if tool_calls is not None else parser_for_template(chat_template)
    if reasoning == "none":
        parser = copy.copy(parser)
        parser.reads_reasoning = False
    return parser
