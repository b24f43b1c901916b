"""An OpenAI-compatible endpoint whose model is a script: it calls each tool of a request once, and then answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from areno.checks.inputs.talks import text_of

Json = dict[str, Any]
_LAST = "1"  # the answer after the calls


class ScriptedEndpoint:
    """Answers requests of chat completions. Requests with the same API key belong to one episode."""

    def __init__(self) -> None:
        self.tools: dict[str, Json] = {}  # name -> its function, as requests have it
        self.results: dict[str, list[str]] = {}  # name -> texts that agents sent back for its calls
        self._called: dict[str, dict[str, str]] = {}  # API key -> id of a call -> name
        self._read: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> ScriptedEndpoint:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True, name="scripted-endpoint").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, key: str, request: Json) -> Json:
        """Return the message that answers a request."""
        with self._lock:
            called = self._called.setdefault(key, {})
            for message in request.get("messages") or ():
                name = called.get(message.get("tool_call_id") or "")
                if message.get("role") == "tool" and name and (key, message["tool_call_id"]) not in self._read:
                    self._read.add((key, message["tool_call_id"]))
                    self.results.setdefault(name, []).append(text_of(message))
            functions = [tool["function"] for tool in request.get("tools") or () if tool.get("function")]
            self.tools |= {function["name"]: function for function in functions}
            number = len(self._called) - 1  # episodes begin with different tools, as some allow few calls
            start = number % len(functions) if functions else 0
            left = [each for each in functions[start:] + functions[:start] if each["name"] not in called.values()]
            if not left or request.get("tool_choice") == "none":
                return {"role": "assistant", "content": _LAST}
            function, call_id = left[0], f"call_{key}_{len(called)}"
            called[call_id] = function["name"]
            arguments = json.dumps(value_of(function.get("parameters") or {}, number + 2))
            call = {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}


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
        return {name: value_of(fields[name], number + index) for index, name in enumerate(wanted)}
    if kind == "array":
        return [value_of(schema.get("items") or {}, number)]
    if kind in ("integer", "number"):
        least = max(number, schema.get("minimum", number))
        return int(min(least, schema.get("maximum", least)))
    return {"boolean": True, "null": None}.get(kind, "1")


def has_free_text(function: Mapping[str, Any]) -> bool:
    """Whether a tool takes a text of its own, so that one that is made from its schema may be wrong for it."""
    return _has_text(value_of(function.get("parameters") or {}))


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_has_text, value.values() if isinstance(value, Mapping) else value))
    return value == "1"


def _handler_of(endpoint: ScriptedEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if not self.path.rstrip("/").endswith("/chat/completions"):
                self._send(404, {"error": {"message": "the script answers chat completions alone"}})
                return
            key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            message = endpoint.answer(key, request)
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
