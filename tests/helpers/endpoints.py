"""An OpenAI-compatible endpoint whose model is a function."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Say = Callable[[dict[str, Any]], Any]
"""From a request to the reply.

It is a text, (text, {token: probability} of its first token), a body, an HTTP status, (status, body), or
("drip", seconds), whose bytes come one by one without end.
"""


def _completion(said: Any) -> dict[str, Any]:
    text, top = said if isinstance(said, tuple) else (said, {})
    tops = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in top.items()]
    first = {"token": "", "logprob": 0.0, "bytes": None, "top_logprobs": tops}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    choice["logprobs"] = {"content": [first]} if top else None
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


@contextmanager
def endpoint(say: Say) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose model is a function. Yields its address and the requests that it has got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**request, "key": self.headers["Authorization"], "headers": dict(self.headers)})
            said, status = say(request), 200
            if isinstance(said, tuple) and isinstance(said[0], int):
                status, said = said
            elif isinstance(said, int):
                status, said = said, b'{"error": {"message": "no such field"}}'
            if isinstance(said, tuple) and said[0] == "drip":
                return self._drip(said[1])
            data = said if isinstance(said, bytes) else json.dumps(_completion(said)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if data[:1] == b"<" else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _drip(self, seconds: float) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "100000")
            self.end_headers()
            with contextlib.suppress(OSError):  # when the client has gone
                for _ in range(10_000):
                    self.wfile.write(b" ")
                    time.sleep(seconds)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", requests
        finally:
            server.shutdown()
