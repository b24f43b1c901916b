"""An OpenAI-compatible endpoint whose model is a function."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Say = Callable[[dict[str, Any]], Any]
"""From a request to the reply: a text, (text, {token: probability} of its first token) or an HTTP status."""


@contextmanager
def endpoint(say: Say) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose model is a function. Yields its address and the requests that it has got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**request, "key": self.headers["Authorization"]})
            said = say(request)
            body: dict[str, Any] = {"error": {"message": "no such field"}}
            if not isinstance(said, int):
                text, top = said if isinstance(said, tuple) else (said, {})
                tops = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in top.items()]
                first = {"token": text[:1], "logprob": 0.0, "bytes": None, "top_logprobs": tops}
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                choice["logprobs"] = {"content": [first]} if top else None
                body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps(body).encode()
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", requests
        finally:
            server.shutdown()
