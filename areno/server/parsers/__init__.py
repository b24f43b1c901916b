"""Parsers and grammars for the tool-call formats of model families."""

from __future__ import annotations

from areno.errors import ConfigError, did_you_mean
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
    "MessageDelta",
    "MessageStream",
    "ParsedMessage",
    "ToolCall",
    "ToolCallParser",
    "join_deltas",
    "parser_for",
    "parser_for_template",
    "parser_names",
]

_PARSERS = {
    parser.name: parser
    for parser in (HermesParser(), Qwen3CoderParser(), LlamaJsonParser(), PythonicParser(), ToolCallParser())
}
_BY_MODEL_TYPE = {"qwen2": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes"}


def parser_names() -> list[str]:
    return list(_PARSERS)


def parser_for(name: str) -> ToolCallParser:
    """Return the parser with a name from `parser_names`. Raises ConfigError for another name."""
    if name not in _PARSERS:
        hint = did_you_mean(name, _PARSERS, f"; there are {', '.join(_PARSERS)}")
        raise ConfigError("there is no tool-call parser {!r}" + hint.replace("{", "{{").replace("}", "}}"), name)
    return _PARSERS[name]


def parser_for_template(chat_template: str | None, model_type: str = "") -> ToolCallParser:
    """Return the parser for the format that a chat template describes, else "text", which finds no calls.

    Without a template, `model_type` of the model's configuration selects the parser.
    """
    if chat_template is None:
        return _PARSERS[_BY_MODEL_TYPE.get(model_type, "text")]
    if "<function=" in chat_template and "<parameter=" in chat_template:
        return _PARSERS["qwen3_coder"]
    if "<tool_call>" in chat_template and "<arg_key>" not in chat_template:
        return _PARSERS["hermes"]
    if "<|tool_call_start|>" in chat_template or "params_name1=" in chat_template:
        return _PARSERS["pythonic"]
    if "<|start_header_id|>" in chat_template and "parameters" in chat_template:
        return _PARSERS["llama3_json"]
    return _PARSERS["text"]
