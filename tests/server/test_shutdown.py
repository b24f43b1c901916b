"""The edges of the server: what aiohttp answers itself, and how answers end whose time is over."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from areno.agents.proxy import SessionProxy
from areno.server.threads import ServerThread
from tests.helpers.conversations import USER
from tests.helpers.waiting import until

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": "null"},
                "code": {"type": "null"},
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    with socket.create_connection((host, int(port))) as client:
        client.settimeout(60)
        yield client


def received(client: socket.socket) -> tuple[str, str]:
    """Head and body of all that is sent until the connection is closed."""
    data = b""
    while part := client.recv(65536):
        data += part
    head, _, body = data.decode().partition("\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello of TLS\r\n\r\n", 400),
        (b"GET /v1/models HTTP/9\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nbroken\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nExpect: miracles\r\nConnection: close\r\n\r\n", 417),
    ],
)
def test_what_is_no_request_is_answered_in_the_form_of_the_api(
    proxy: SessionProxy, sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(proxy.base_url) as client:
        client.sendall(sent)
        head, body = received(client)
    assert head.startswith((f"HTTP/1.1 {status} ", f"HTTP/1.0 {status} "))
    assert "content-type: application/json" in head.lower()
    found = json.loads(body)
    jsonschema.validate(found, ERROR)
    assert len(found["error"]["message"].splitlines()) == 1
    assert not [record for record in caplog.records if record.levelno > 20]


@pytest.fixture
def server(proxy: SessionProxy) -> Iterator[ServerThread]:
    server = ServerThread(proxy.server.application, grace_s=0.2)
    server.start()
    yield server
    server.stop()


def test_each_open_stream_ends_with_an_error_event(proxy: SessionProxy, server: ServerThread) -> None:
    clients = 12
    ends: list[Any] = []
    begun = threading.Barrier(clients + 1)

    def read(number: int) -> None:
        client = OpenAI(base_url=f"{server.url}/v1", api_key=proxy.api_key, max_retries=0)
        fields: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}, "stream": True}
        stream: Any = client.chat.completions.create(model="policy", messages=[USER], **fields)  # type: ignore[list-item]
        next(iter(stream))
        begun.wait(60)
        try:
            ends.append(list(stream)[-1])
        except openai.OpenAIError as error:
            ends.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    server.stop()
    for thread in threads:
        thread.join(60)
    assert [type(end) for end in ends] == [openai.APIError] * clients, ends
    assert {str(end) for end in ends} == {"the server shuts down, and this answer did not end in time"}
    until(lambda: proxy.server.sampler.n_samples == 0)


def test_an_answer_that_is_not_streamed_becomes_an_error(proxy: SessionProxy, server: ServerThread) -> None:
    body = json.dumps({"model": "policy", "messages": [USER], "max_tokens": 2000, "ignore_eos": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {proxy.api_key}\r\n"
    with connected(server.url) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: proxy.server.sampler.n_samples > 0)
        server.stop()
        answered, text = received(client)
    assert answered.startswith("HTTP/1.1 503 ")
    jsonschema.validate(json.loads(text), ERROR)
    until(lambda: proxy.server.sampler.n_samples == 0)


@pytest.mark.slow
def test_what_is_frozen_is_not_reported_as_leaked_at_exit() -> None:
    pytest.importorskip("triton")
    code = "import triton, areno.engine.device_memory as memory; memory.RolloutGarbageCollector().begin()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
