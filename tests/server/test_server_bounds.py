"""Requests of any size and number: the server goes on for the others, keeps little, and ends when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from typing import Any

import httpx2
import pytest

from areno.agents.proxy import SessionProxy
from areno.server import sampling
from areno.server.threads import ServerThread
from tests.helpers.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "hello world"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
]


LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt of 7 MB": ("completions", {"prompt": "hello world " * 600_000}),
    "a prompt of 1 MB": ("completions", {"prompt": "hello world " * 80_000}),
    "a million tokens": ("completions", {"prompt": [65, 66] * 500_000}),
    "an echo": ("completions", {"prompt": "hello world " * 150, "echo": True, "logprobs": 5, "max_tokens": 1}),
    "a message of 7 MB": ("chat/completions", {"messages": [{"role": "user", "content": "hello world " * 600_000}]}),
    "10,000 messages": ("chat/completions", {"messages": HELLO * 10_000}),
    "100,000 messages": ("chat/completions", {"messages": HELLO * 100_000}),
    "10,000 tools": ("chat/completions", {"messages": HELLO, "tools": TOOLS * 10_000}),
    "a million lists": ("chat/completions", {"messages": HELLO, "stop": [[[""] * 9] * 9] * 9999}),
}


# As long as others of them, or shorter.
SIMILAR = ("a prompt of 1 MB", "a message of 7 MB", "10,000 messages")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SIMILAR else name for name in LARGE]
)
def test_the_event_loop_is_not_held_up(proxy: SessionProxy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the work of its own thread: that of others, and of other programs, would make the test depend on them."""
    path, fields = LARGE[name]
    took: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        begun = time.thread_time()
        run(handle)
        if threading.current_thread().name == "areno-server":
            took.append(time.thread_time() - begun)

    body = json.dumps({"model": "policy", "max_tokens": 1, **fields}).encode()
    headers = {"Authorization": f"Bearer {proxy.api_key}"}
    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    remembered = proxy.server.chat.prompts.cache
    n_before = remembered.n_tokens
    answer = httpx2.post(f"{proxy.base_url}/{path}", content=body, headers=headers, timeout=60)
    assert answer.status_code == (200 if "echo" in fields else 400), answer.text
    assert took
    assert max(took) < 0.05
    assert remembered.n_tokens - n_before <= 300 + 2048


def test_how_often_a_prompt_came_is_known_of_the_latest_prompts(
    proxy: SessionProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = proxy.server.sampler
    monkeypatch.setattr(sampling, "MAX_SEEN", 3)
    sampler = sampling.EngineClient(server.engine, server.request_limits, server.defaults, server.limits, 7)
    seeds = [sampler.next_seed([number], None) for number in (1, 1, 2, 1, 3, 1)]
    assert len(set(seeds)) == 6
    for number in range(4, 100):
        sampler.next_seed([number], None)
    assert len(sampler._seen) == 3
    assert sampler.next_seed([1], None) == seeds[0]


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_bytes_that_are_no_http_are_answered_and_not_logged(
    proxy: SessionProxy, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {proxy.api_key}\r\n"
    sent = [
        "\0\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        f"{head}X: {'a' * 20_000}\r\n\r\n",
        f"{head}Content-Length: -1\r\n\r\n",
        f"{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
        f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ]
    for each in sent:
        with connected(proxy.base_url) as client:
            client.sendall(each.encode())
            assert b" 400 " in client.recv(100)
    with connected(proxy.base_url) as client:
        client.sendall(f"{head}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    assert httpx2.get(f"{proxy.base_url.removesuffix('/v1')}/health").status_code == 200
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_an_error_of_the_server_has_a_short_traceback(
    proxy: SessionProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def one(*given: Any) -> Any:
        return other(*given)

    def other(*given: Any) -> Any:  # two functions, so that Python does not fold their frames
        return one(*given)

    monkeypatch.setattr(proxy.server.chat, "prepare", one)
    answer = httpx2.post(
        f"{proxy.base_url}/chat/completions",
        json={"model": "policy", "messages": HELLO},
        headers={"Authorization": f"Bearer {proxy.api_key}"},
    )
    assert answer.status_code == 500
    [record] = [record for record in caplog.records if record.levelno > logging.INFO]
    assert "RecursionError" in record.getMessage()
    assert len(record.getMessage().splitlines()) < 40


def test_a_request_that_does_not_arrive_does_not_hold_the_end(proxy: SessionProxy) -> None:
    server = ServerThread(proxy.server.application, grace_s=1000.0)
    url = server.start()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {proxy.api_key}\r\n"
    parts = ["", "POST /v1", head, f"{head}Content-Length: 100\r\n\r\n{{", f"{head}Content-Length: 9\r\n\r\n"]
    parts.append(f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(url)) for _ in parts]
        for client, part in zip(clients, parts, strict=True):
            client.sendall(part.encode())
        until(lambda: len(proxy.server._reading) == 3)
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 500
        answers = [client.recv(10_000) for client in clients]
    assert answers[:3] == [b""] * 3
    assert all(b" 503 " in answer and b"before this request has arrived" in answer for answer in answers[3:])
