"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from areno.schema.values import format_value
from areno.server.chat import OpenChat
from areno.server.dialects import (
    Answer,
    Dialect,
    EventAnswer,
    Json,
    block_type,
    ignore_unread,
    json_text,
    log_ignored,
    messages_for_template,
    text_of,
)
from areno.server.errors import CONTEXT_FULL, ApiError, invalid_field_error
from areno.server.json_bodies import RequestFields
from areno.server.parsers import MessageDelta

# Claude Code begins its system prompt with this block. It has a hash of the prompt, so that samples of different
# prompts would share no prefix.
_BILLING = "x-anthropic-billing-header:"
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "areno"  # of reasoning; clients send it back unread
_IGNORED = (
    *("metadata", "context_management", "service_tier", "container", "mcp_servers", "betas", "cache_control"),
    *("output_config", "thinking", "speed", "inference_geo"),
)


def _read(values: Any, takes_later_system: bool) -> tuple[Json, Answer]:
    fields = RequestFields(values)
    messages = _system_message(fields.get("system"))
    for number, given in enumerate(fields.array("messages", 100_000) or []):
        messages += _read_message(given, f"messages[{number}]")
    chat: Json = {"model": fields.get("model"), "messages": messages_for_template(messages, takes_later_system)}
    for name, of_chat in {"max_tokens": "max_tokens", "stop_sequences": "stop", "stream": "stream"}.items():
        chat[of_chat] = fields.get(name)
    chat |= {name: fields.get(name) for name in ("temperature", "top_p", "top_k")}
    chat["tools"] = _read_tools(fields.array("tools", 1024) or [])
    chat |= _read_tool_choice(fields.get("tool_choice"), bool(chat["tools"]))
    config = RequestFields(fields.get("output_config") or {}, "output_config")
    if (form := config.get("format")) is not None:
        given = RequestFields(form, "output_config.format")
        given.choice("type", ("json_schema",))
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": given.get("schema")},
        }
    ignore_unread(fields, "/v1/messages", _IGNORED)
    return chat, MessagesAnswer(chat["stop"])


def _system_message(value: Any) -> list[Json]:
    blocks = value if isinstance(value, list) else [value] if value else []
    kept = [block for block in blocks if not _text(block).startswith(_BILLING)]
    text = text_of(kept, "system", separator="\n\n")
    return [{"role": "system", "content": text}] if text else []


def _text(block: Any) -> str:
    text = block.get("text") if isinstance(block, dict) else block
    return text if isinstance(text, str) else ""


def _read_message(given: Any, where: str) -> list[Json]:
    fields = RequestFields(given, where)
    role, content = fields.choice("role", ("user", "assistant", "system")), fields.get("content")
    if role is None:
        raise invalid_field_error(f"{where}.role", "is missing; user or assistant is expected")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, f"{where}.content")}]
    read = _read_assistant if role == "assistant" else _read_user
    return read(content, f"{where}.content", role)


def _read_user(blocks: list[Any], where: str, role: str) -> list[Json]:
    """Return a message for each result of a tool and for each stretch of other blocks, in their order."""
    messages: list[Json] = []
    others: list[Any] = []

    def end_others() -> None:
        if others:
            messages.append({"role": role, "content": text_of(list(others), where)})
            others.clear()

    for number, block in enumerate(blocks):
        fields = RequestFields(block, f"{where}[{number}]")
        if block_type(fields) != "tool_result":
            others.append(block)
            continue
        end_others()
        content = text_of(fields.get("content"), fields.path("content"))
        messages.append({"role": "tool", "tool_call_id": fields.text("tool_use_id") or "", "content": content})
    end_others()
    return messages


def _read_assistant(blocks: list[Any], where: str, role: str) -> list[Json]:
    content, thoughts, calls = "", "", list[Json]()
    for number, block in enumerate(blocks):
        fields = RequestFields(block, f"{where}[{number}]")
        kind = block_type(fields)
        if kind == "text":
            content += fields.text("text") or ""
        elif kind == "thinking":
            thoughts += fields.text("thinking") or ""
        elif kind == "tool_use":
            function = {"name": fields.get("name"), "arguments": json_text(fields.get("input") or {})}
            calls.append({"id": fields.get("id"), "type": "function", "function": function})
        else:
            log_ignored("/v1/messages", f"a block of type {format_value(kind)} in an assistant message")
    message: Json = {"role": role, "content": content or None}
    return [message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})]


def _read_tools(given: list[Any]) -> list[Json]:
    tools = []
    for number, tool in enumerate(given):
        fields = RequestFields(tool, f"tools[{number}]")
        kind = fields.text("type") or "custom"
        if kind != "custom":
            log_ignored("/v1/messages", f"a tool of type {format_value(kind)}, which needs Anthropic's servers,")
            continue
        function = {"name": fields.get("name"), "parameters": fields.get("input_schema")}
        if (about := fields.text("description")) is not None:
            function["description"] = about
        tools.append({"type": "function", "function": function})
    return tools


def _read_tool_choice(value: Any, has_tools: bool) -> Json:
    if value is None or not has_tools:
        return {}
    fields = RequestFields(value, "tool_choice")
    kind = fields.choice("type", ("auto", "any", "tool", "none"))
    choice: Any = {"any": "required", "tool": {"type": "function", "function": {"name": fields.get("name")}}}
    return {
        "tool_choice": choice.get(kind, kind or "auto"),
        "parallel_tool_calls": not fields.flag("disable_parallel_tool_use"),
    }


class MessagesAnswer(EventAnswer):
    def __init__(self, stop: Any):
        self._stop = stop  # checked before it is used
        self._blocks: list[Json] = []

    def start(self, chat: OpenChat) -> list[Json]:
        self._head: Json = {
            "id": f"msg_{chat.id_suffix}",
            "type": "message",
            "role": "assistant",
            "model": chat.request.model,
        }
        usage = _usage(len(chat.prompt.tokens), 0, 0)
        first = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": first}]

    def feed(self, delta: MessageDelta) -> Iterator[Json]:
        if (call := delta.tool_call) is not None:
            yield from self._close_block()
            yield self._open_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self._blocks[-1]["input"] = json.loads(call.arguments)
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            return
        kind, text = ("thinking", delta.reasoning_content) if delta.content is None else ("text", delta.content)
        if not self._blocks or self._blocks[-1]["type"] != kind:
            yield from self._close_block()
            extra = {"signature": ""} if kind == "thinking" else {}
            yield self._open_block({"type": kind, kind: "", **extra})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open_block(self, block: Json) -> Json:
        self._blocks.append(dict(block))
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close_block(self) -> Iterator[Json]:
        if not self._blocks:
            return
        if self._blocks[-1]["type"] == "thinking":
            self._blocks[-1]["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def finish(self, chat: OpenChat) -> Iterator[Json]:
        yield from self._close_block()
        body = self.body(chat)
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": body["usage"]}
        yield {"type": "message_stop"}

    def body(self, chat: OpenChat) -> Json:
        [choice] = chat.choices
        reason, matched = _STOP_REASONS[choice.finish_reason()], choice.matched_stop(self._stop or [])
        usage = chat.usage()
        return {
            **self._head,
            "content": self._blocks,
            "stop_reason": "stop_sequence" if matched is not None else reason,
            "stop_sequence": matched,
            "usage": _usage(
                usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
            ),
        }

    def idle_events(self) -> Iterator[Json]:
        """Yield an empty increment, in an empty block if there is none: Claude Code does not count pings as events."""
        yield {"type": "ping"}
        if not self._blocks or self._blocks[-1]["type"] == "tool_use":
            yield from self._close_block()
            yield self._open_block({"type": "text", "text": ""})
        kind = self._blocks[-1]["type"]
        yield self._delta({"type": f"{kind}_delta", kind: ""})

    def error_event(self, error: ApiError) -> Json:
        return _error_body(error)


def _usage(n_prompt: int, n_completion: int, n_cached: int) -> Json:
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_completion,
    }


def _error_body(error: ApiError) -> Json:
    message = error.message
    if error.code == CONTEXT_FULL:  # clients look for these words
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, "api_error"), "message": message}}


MESSAGES = Dialect(_read, _error_body)
