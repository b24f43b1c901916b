"""An endpoint whose model is a script: it calls each tool of a request once, and then answers."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace
from typing import Any, cast

from areno.checks.inputs.talks import text_of
from areno.server.anthropic_messages import MESSAGES
from areno.server.chat import OpenChat
from areno.server.dialects import EventAnswer
from areno.server.openai_responses import RESPONSES
from areno.server.parsers import MessageDelta
from areno.server.parsers.message import ToolCall

Json = dict[str, Any]
_LAST = "1"  # the answer after the calls
_DIALECTS = {"/responses": RESPONSES, "/messages": MESSAGES}
_TEXT = "1"  # for an argument
_BY_NAME = {"command": "echo 1", "cmd": "echo 1", "code": "print(1)"}  # for arguments of these names


@dataclass(frozen=True)
class Result:
    """What the request after a call has for it. `role` is "" if it has nothing."""

    text: str
    role: str


@dataclass
class _Episode:
    called: dict[str, str] = field(default_factory=dict)  # id of a call -> name of the tool
    waiting: str = ""  # id of the call whose result comes next
    seen: list[Json] = field(default_factory=list)  # the messages of the last request


class ScriptedEndpoint:
    """Answers requests of OpenAI's and Anthropic's APIs. Those with the same key belong to one episode."""

    def __init__(self) -> None:
        self.tools: dict[str, Json] = {}  # name -> its function, as requests have it
        self.results: dict[str, list[Result]] = {}  # name -> what requests have for its calls
        self.texts: list[str] = []  # of all requests
        self.n_with_tools = self.n_forbidden = 0  # requests, and those whose tools may not be called
        self._episodes: dict[str, _Episode] = {}  # API key -> its episode
        self._lock = threading.Lock()
        self._open = ExitStack()

    def __enter__(self) -> ScriptedEndpoint:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._serve(server)
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def open_socket(self, key: str) -> str:
        """Return a Unix socket whose requests belong to the episode with this key."""
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="areno-"))
        path = str(Path(folder) / "socket")
        self._serve(ThreadingUnixStreamServer(path, _handler_of(self, key)))
        return path

    def _serve(self, server: Any) -> None:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True, name="scripted-endpoint").start()
        self._open.callback(_close, server)

    def answer(self, key: str, request: Json) -> Json:
        """Return the message that answers a request."""
        with self._lock:
            episode = self._episodes.setdefault(key, _Episode())
            messages: list[Json] = list(request.get("messages") or ())
            self.texts += [text_of(message) for message in messages]
            if episode.waiting:
                name = episode.called[episode.waiting]
                self.results.setdefault(name, []).append(_result(episode, messages))
            episode.waiting, episode.seen = "", messages
            functions = [tool["function"] for tool in request.get("tools") or () if tool.get("function")]
            self.tools |= {function["name"]: function for function in functions}
            number = len(self._episodes) - 1  # episodes begin with different tools, as some allow few calls
            start = number % len(functions) if functions else 0
            called = episode.called
            left = [each for each in functions[start:] + functions[:start] if each["name"] not in called.values()]
            is_forbidden = request.get("tool_choice") == "none"
            self.n_with_tools += bool(functions)
            self.n_forbidden += bool(functions) and is_forbidden
            if not left or is_forbidden:
                return {"role": "assistant", "content": _LAST}
            function, call_id = left[0], f"call_{key}_{len(called)}"
            called[call_id], episode.waiting = function["name"], call_id
            arguments = json.dumps(value_of(function.get("parameters") or {}, number + 2))
            call = {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(episode: _Episode, messages: list[Json]) -> Result:
    """Return what is new in the messages of the request after a call."""
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") == episode.waiting:
            return Result(text_of(message), "tool")
    new = [message for message in messages if message not in episode.seen and not message.get("tool_calls")]
    said = [message for message in new if text_of(message).strip() and text_of(message).strip() != _LAST]
    roles = {str(message.get("role")) for message in said}
    role = next((role for role in ("tool", "user", "system", "assistant") if role in roles), "")
    return Result("\n".join(text_of(message) for message in said if message.get("role") == role), role)


def _close(server: Any) -> None:
    server.shutdown()
    server.server_close()


def value_of(schema: Mapping[str, Any], number: int = 2) -> Any:
    """Return a value of a JSON schema. Numbers begin at `number`, and each is one larger than that before it."""
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    for name in ("enum", "examples"):
        if schema.get(name):
            return schema[name][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return value_of(schema[name][0], number)
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        fields = schema.get("properties") or {}
        wanted = [name for name in fields if name in schema.get("required", fields)]
        values = {name: value_of(fields[name], number + index) for index, name in enumerate(wanted)}
        return {name: _BY_NAME.get(name, value) if value == _TEXT else value for name, value in values.items()}
    if kind == "array":
        return [value_of(schema.get("items") or {}, number)]
    if kind in ("integer", "number"):
        least = max(number, schema.get("minimum", number))
        return int(min(least, schema.get("maximum", least)))
    return {"boolean": True, "null": None}.get(kind, _TEXT)


def has_free_text(function: Mapping[str, Any]) -> bool:
    """Whether a tool takes a text of its own, so that one that is made from its schema may be wrong for it."""
    return _has_text(value_of(function.get("parameters") or {}))


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_has_text, value.values() if isinstance(value, Mapping) else value))
    return value == _TEXT


def _handler_of(endpoint: ScriptedEndpoint, key: str = "") -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            path = self.path.partition("?")[0].rstrip("/")
            if path.endswith("/count_tokens"):
                self._send(200, {"input_tokens": 1})
            elif path.endswith("/chat/completions"):
                self._send_chat(request, endpoint.answer(self._key(), request))
            elif dialect := next((each for end, each in _DIALECTS.items() if path.endswith(end)), None):
                chat, answer = dialect.read(request, True)
                said = _Scripted(chat, endpoint.answer(self._key(), chat))
                data = asyncio.run(said.written_by(cast(EventAnswer, answer)))
                self._send_bytes(200, data, "text/event-stream" if chat.get("stream") else "application/json")
            else:
                self._send(404, {"error": {"message": f"the script does not answer {path}"}})

        def _key(self) -> str:
            bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            given = (self.headers.get("X-Session-ID"), bearer, self.headers.get("x-api-key"))
            return key or next(filter(None, given), "")

        def _send_chat(self, request: Json, message: Json) -> None:
            finish = "tool_calls" if message.get("tool_calls") else "stop"
            body: Json = {"id": "scripted", "created": 0, "model": request.get("model") or "policy"}
            if not request.get("stream"):
                choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                self._send(200, body | {"object": "chat.completion", "choices": [choice], "usage": usage})
                return
            if message.get("tool_calls"):
                message["tool_calls"] = [{"index": 0, **call} for call in message["tool_calls"]]
            parts = [{"index": 0, "delta": message, "finish_reason": None}]
            parts.append({"index": 0, "delta": {}, "finish_reason": finish})
            chunks = [json.dumps(body | {"object": "chat.completion.chunk", "choices": [part]}) for part in parts]
            data = "".join(f"data: {chunk}\n\n" for chunk in (*chunks, "[DONE]")).encode()
            self._send_bytes(200, data, "text/event-stream")

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})

        def _send(self, status: int, body: Json) -> None:
            self._send_bytes(status, json.dumps(body).encode(), "application/json")

        def _send_bytes(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


class _Scripted:
    """A chat that has its answer, in place of one that samples it."""

    def __init__(self, request: Json, message: Json):
        self._message, self.id_suffix = message, "scripted"
        options = SimpleNamespace(stream=bool(request.get("stream")))
        self.request = SimpleNamespace(model=request.get("model") or "policy", options=options)
        self.prompt = SimpleNamespace(tokens=[0])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        self.choices = [SimpleNamespace(finish_reason=lambda: reason, matched_stop=lambda stops: None)]

    def usage(self) -> Json:
        return {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}

    async def deltas(self) -> AsyncIterator[tuple[int, MessageDelta]]:
        if self._message.get("content"):
            yield 0, MessageDelta(content=self._message["content"])
        for call in self._message.get("tool_calls") or ():
            function = call["function"]
            yield 0, MessageDelta(tool_call=ToolCall(call["id"], function["name"], function["arguments"]))

    async def written_by(self, answer: EventAnswer) -> bytes:
        return b"".join([piece async for piece in answer.pieces(cast(OpenChat, self))])
