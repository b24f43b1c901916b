"""OpenAI's API /v1/responses. It is stateless: each request has the whole conversation."""

from __future__ import annotations

import base64
import binascii
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from areno.data.row_schema import json_value_problem
from areno.schema.values import format_value
from areno.server.chat import OpenChat
from areno.server.dialects import (
    Answer,
    Dialect,
    EventAnswer,
    Json,
    ignore_unread,
    json_text,
    log_ignored,
    messages_for_template,
    text_of,
)
from areno.server.errors import ApiError, invalid_field_error
from areno.server.json_bodies import RequestFields
from areno.server.parsers import MessageDelta

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_SEALED = "areno:"  # begins the field encrypted_content, which some clients send back in place of reasoning
_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
_IGNORED = (
    *("include", "store", "metadata", "user", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
    *("truncation", "client_metadata", "safety_identifier", "stream_options", "max_tool_calls", "reasoning"),
)


@dataclass
class _Tools:
    """The tools of a request. Tools of namespaces, and tools whose input is a text, become functions."""

    functions: list[Json] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # function -> namespace, name in it
    customs: set[str] = field(default_factory=set)

    def function_name(self, name: Any, namespace: Any) -> Any:
        flat = f"{namespace}__{name}"
        return flat if flat in self.namespaces else name


def _read(values: Any, takes_later_system: bool) -> tuple[Json, Answer]:
    fields = RequestFields(values)
    if problem := json_value_problem(values):  # the answer repeats parts of it
        raise invalid_field_error(None, f"the request {problem}")
    for name in _STATEFUL:
        if fields.get(name):
            raise invalid_field_error(name, "is not supported: this server keeps no responses; send the whole input")
    tools = _read_tools(fields.array("tools", 1024) or [])
    messages: list[Json] = []
    if instructions := text_of(fields.get("instructions"), "instructions"):
        messages.append({"role": "system", "content": instructions})
    messages += _read_input(fields.get("input"), tools)
    chat: Json = {
        "model": fields.get("model"),
        "messages": messages_for_template(messages, takes_later_system),
        "tools": tools.functions,
        "max_tokens": fields.get("max_output_tokens"),
    }
    chat |= {name: fields.get(name) for name in ("temperature", "top_p", "stream", "parallel_tool_calls")}
    if (choice := _read_tool_choice(fields.get("tool_choice"), tools)) is not None:
        chat["tool_choice"] = choice
    text = RequestFields(fields.get("text") or {}, "text")
    chat["response_format"] = _response_format(text.get("format"))
    fields.get("top_logprobs")
    ignore_unread(fields, "/v1/responses", _IGNORED)
    return chat, ResponsesAnswer(values, tools)


def _read_input(value: Any, tools: _Tools) -> list[Json]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid_field_error("input", f"is {format_value(value)}; a string or a list of items is expected")
    messages: list[Json] = []
    answer: Json | None = None  # the items of one answer become one message
    for number, item in enumerate(value):
        fields = RequestFields(item, f"input[{number}]")
        part = _part_of_answer(fields, tools)
        if part is None:
            answer = None
            messages += _read_item(fields)
            continue
        if answer is None:
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        for name, found in part.items():
            answer[name] = found if answer.get(name) is None else answer[name] + found
    return messages


def _part_of_answer(fields: RequestFields, tools: _Tools) -> Json | None:
    """Return the part of an assistant message that an item holds, or None if it is no part of an answer."""
    kind = fields.text("type") or "message"
    if kind == "message":
        if fields.get("role") != "assistant":
            return None
        return {"content": text_of(fields.get("content"), fields.path("content"), _TEXTS, "")}
    if kind == "reasoning":
        text = text_of(fields.get("content"), fields.path("content"), _TEXTS, "")
        text = text or _unsealed(fields.get("encrypted_content"))
        return {"reasoning_content": text} if text else {}
    if kind == "function_call":
        name, arguments = tools.function_name(fields.get("name"), fields.get("namespace")), fields.get("arguments")
    elif kind == "custom_tool_call":
        name, arguments = fields.get("name"), json.dumps({"input": fields.get("input")}, ensure_ascii=False)
    else:
        return None
    function = {"name": name, "arguments": arguments or "{}"}
    return {"tool_calls": [{"id": fields.get("call_id"), "type": "function", "function": function}]}


def _read_item(fields: RequestFields) -> list[Json]:
    kind = fields.text("type") or "message"
    if kind == "message":
        role = fields.choice("role", ("user", "system", "developer", "assistant"))
        if role is None:
            raise invalid_field_error(fields.path("role"), "is missing")
        return [{"role": role, "content": text_of(fields.get("content"), fields.path("content"), _TEXTS)}]
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = fields.get("output")
        if isinstance(output, dict):  # an earlier form of Codex
            output = output.get("content")
        content = text_of(output, fields.path("output"), _TEXTS)
        return [{"role": "tool", "tool_call_id": fields.text("call_id") or "", "content": content}]
    if kind == "item_reference":
        raise invalid_field_error(fields.path("type"), "is item_reference, but this server keeps no items; send them")
    log_ignored("/v1/responses", f"an item of type {format_value(kind)}")
    return []


def _read_tools(given: list[Any]) -> _Tools:
    tools = _Tools()
    inner: list[tuple[Json, str, str | None]] = []
    for number, tool in enumerate(given):
        fields = RequestFields(tool, f"tools[{number}]")
        if fields.text("type") != "namespace":
            inner.append((tool, f"tools[{number}]", None))
            continue
        namespace = fields.text("name") or ""
        members = fields.array("tools", 1024) or []
        inner += [(one, f"tools[{number}].tools[{at}]", namespace) for at, one in enumerate(members)]
    names = Counter(tool["name"] for tool, *_ in inner if isinstance(tool, dict) and isinstance(tool.get("name"), str))
    for tool, where, namespace in inner:
        _add_tool(tools, RequestFields(tool, where), namespace, names)
    return tools


def _add_tool(tools: _Tools, fields: RequestFields, namespace: str | None, names: Counter[str]) -> None:
    kind, name = fields.text("type"), fields.text("name")
    if kind not in ("function", "custom"):
        log_ignored("/v1/responses", f"a tool of type {format_value(kind)}, which needs OpenAI's servers,")
        return
    if name is not None and namespace is not None:
        flat = name if names[name] == 1 else f"{namespace}__{name}"
        tools.namespaces[flat] = namespace, name
        name = flat
    function: Json = {"name": name, "parameters": fields.get("parameters")}
    if (about := fields.text("description")) is not None:
        function["description"] = about
    if kind == "custom":
        tools.customs.add(name or "")
        function["parameters"] = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        }
    tools.functions.append({"type": "function", "function": function})


def _read_tool_choice(value: Any, tools: _Tools) -> Any:
    if value is None or not tools.functions:
        return None
    if isinstance(value, str):
        return value
    fields = RequestFields(value, "tool_choice")
    kind = fields.text("type")
    if kind in ("function", "custom"):
        name = tools.function_name(fields.get("name"), fields.get("namespace"))
        return {"type": "function", "function": {"name": name}}
    if kind == "allowed_tools":
        allowed = [
            {"type": "function", "function": {"name": RequestFields(one, "tool_choice.tools").get("name")}}
            for one in fields.array("tools", 1024) or []
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": fields.get("mode"), "tools": allowed}}
    raise invalid_field_error(
        "tool_choice.type", f"is {format_value(kind)}; function, custom or allowed_tools is expected"
    )


def _response_format(value: Any) -> Json | None:
    if value is None:
        return None
    fields = RequestFields(value, "text.format")
    if fields.choice("type", ("text", "json_object", "json_schema")) != "json_schema":
        return {"type": fields.get("type")}
    schema = {"name": fields.get("name"), "schema": fields.get("schema"), "strict": fields.get("strict")}
    return {"type": "json_schema", "json_schema": schema}


def _unsealed(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


class ResponsesAnswer(EventAnswer):
    def __init__(self, values: Json, tools: _Tools):
        self._values, self._tools = values, tools
        self._items: list[Json] = []
        self._n_events = 0

    def idle_events(self) -> list[Json]:
        return [self._event("response.in_progress", response=self._response("in_progress"))]

    def start(self, chat: OpenChat) -> list[Json]:
        self._id, self._created, self._model = f"resp_{chat.id_suffix}", int(time.time()), chat.request.model
        return [
            self._event(f"response.{name}", response=self._response("in_progress"))
            for name in ("created", "in_progress")
        ]

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _response(self, status: str, **fields: Any) -> Json:
        given = self._values
        echoed: Json = {"instructions": None, "max_output_tokens": None, "metadata": {}, "temperature": None}
        echoed |= {"top_p": None, "tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "user": None}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "text": given.get("text") or {"format": {"type": "text"}},
            "reasoning": given.get("reasoning") or {"effort": None, "summary": None},
            "usage": None,
            **{name: default if given.get(name) is None else given[name] for name, default in echoed.items()},
            **fields,
        }

    def feed(self, delta: MessageDelta) -> Iterator[Json]:
        if delta.tool_call is not None:
            yield from self._close_item()
            yield from self._call_item(delta)
            return
        is_text = delta.content is not None
        kind, part, text = ("message", "output_text", delta.content) if is_text else _reasoning_part(delta)
        if not self._items or self._items[-1]["type"] != kind:
            yield from self._close_item()
            yield from self._open_text_item(kind, part)
        self._items[-1]["content"][0]["text"] += text
        extra = {"logprobs": []} if is_text else {}
        yield self._event(f"response.{part}.delta", **self._place(), content_index=0, delta=text, **extra)

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open_text_item(self, kind: str, part: str) -> Iterator[Json]:
        content: Json = {"type": part, "text": ""} | ({"annotations": [], "logprobs": []} if kind == "message" else {})
        item: Json = {"id": f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}", "type": kind}
        item |= {"status": "in_progress"} | ({"role": "assistant"} if kind == "message" else {"summary": []})
        self._items.append({**item, "content": [content]})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item, "content": []})
        yield self._event("response.content_part.added", **self._place(), content_index=0, part={**content, "text": ""})

    def _call_item(self, delta: MessageDelta) -> Iterator[Json]:
        call = delta.tool_call
        assert call is not None
        is_custom = call.name in self._tools.customs
        kind, name, value = (
            ("custom_tool_call", "input", _custom_input(call.arguments))
            if is_custom
            else ("function_call", "arguments", call.arguments)
        )
        item: Json = {"id": f"fc_{uuid.uuid4().hex}", "type": kind, "call_id": call.id, "name": call.name}
        if call.name in self._tools.namespaces:
            item["namespace"], item["name"] = self._tools.namespaces[call.name]
        self._items.append({**item, name: value, "status": "in_progress"})
        yield self._event(
            "response.output_item.added",
            output_index=len(self._items) - 1,
            item={**item, name: "", "status": "in_progress"},
        )
        event = f"response.{'custom_tool_call_input' if is_custom else 'function_call_arguments'}"
        yield self._event(f"{event}.delta", **self._place(), delta=value)
        yield self._event(f"{event}.done", **self._place(), **{name: value}, name=item["name"])

    def _close_item(self) -> Iterator[Json]:
        if not self._items or self._items[-1].get("status") == "completed":
            return
        item = self._items[-1]
        item["status"] = "completed"
        if "content" in item:
            part = item["content"][0]
            yield self._event(f"response.{part['type']}.done", **self._place(), content_index=0, text=part["text"])
            yield self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        if item["type"] == "reasoning":
            item["encrypted_content"] = _SEALED + base64.b64encode(item["content"][0]["text"].encode()).decode()
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def finish(self, chat: OpenChat) -> Iterator[Json]:
        if not self._items:  # an empty answer is a message, too
            yield from self._open_text_item("message", "output_text")
        yield from self._close_item()
        # Also if it was cut off: clients take the event response.incomplete for a failure.
        yield self._event("response.completed", response=self.body(chat))

    def body(self, chat: OpenChat) -> Json:
        [choice] = chat.choices
        is_whole, usage = choice.finish_reason() != "length", chat.usage()
        n_prompt, n_completion = usage["prompt_tokens"], usage["completion_tokens"]
        return self._response(
            "completed" if is_whole else "incomplete",
            incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
            output=self._items,
            usage={
                "input_tokens": n_prompt,
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": n_completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n_prompt + n_completion,
            },
        )

    def error_event(self, error: ApiError) -> Json:
        shown = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=shown))


def _reasoning_part(delta: MessageDelta) -> tuple[str, str, str]:
    return "reasoning", "reasoning_text", delta.reasoning_content or ""


def _custom_input(arguments: str) -> str:
    value = json.loads(arguments).get("input", "")
    return json_text(value)


RESPONSES = Dialect(_read)
