"""A server without a key and the web pages that its user visits: what a browser sends for them is refused."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from openai import OpenAI

from areno import SamplingParams, Trainer
from areno.agents.proxy import SessionProxy
from areno.cli.__main__ import main
from areno.server.access import OriginGuard
from areno.server.app import build_server
from areno.server.sampling import EngineClient, ServerLimits
from areno.server.threads import ServerThread
from tests.helpers.conversations import USER

PAGE = "https://page.example"
GUARD = OriginGuard(frozenset({"my.host", "other.host:99"}), frozenset({PAGE, "null"}))
CHAT = {"model": "policy", "messages": [USER], "max_tokens": 2}


@pytest.fixture(scope="module")
def url(trainer: Trainer, proxy: SessionProxy) -> Iterator[str]:
    """A server without a key, as `areno serve` starts it, over the engine of the session."""
    limits, tokenizer = proxy.server.sampler.request_limits, proxy.server.chat.prompts.tokenizer
    sampler = EngineClient(trainer.engine, limits, SamplingParams(max_new_tokens=4), ServerLimits(), seed=0)
    thread = ServerThread(build_server(sampler, tokenizer, models=["policy"], keys=[], guard=GUARD).application)
    yield thread.start()
    thread.stop()


def send(
    url: str, headers: dict[str, str], method: str = "POST", path: str = "/v1/chat/completions"
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the answer to a request with exactly these headers."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    body = json.dumps(CHAT).encode() if method == "POST" else b""
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    found = {name.lower(): value for name, value in answer.getheaders()}
    return (
        answer.status,
        found,
        json.loads(text) if found.get("content-type", "").startswith("application/json") else None,
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(
            ({"Host": host}, 200)
            for host in ("localhost", "localhost:8000", "127.0.0.1:1", "LOCALHOST", "[::1]", "[::1]:8000")
        ),
        *(({"Host": host}, 200) for host in ("my.host", "my.host:1234", "other.host:99", "My.Host")),
        *(
            ({"Host": host}, 403)
            for host in ("page.example", "page.example:8000", "localhost.page.example", "other.host", "")
        ),
        *(
            ({"Host": host}, 403)
            for host in ("127.0.0.1.page.example:80", "localhost:80:80", "1.2.3.4", "[::2]", "::1")
        ),
        ({}, 400),  # the parser's own error
        *(
            ({"Host": "localhost", "Origin": origin}, 200)
            for origin in ("http://localhost:3000", "http://[::1]:5", PAGE, "null")
        ),
        *(
            ({"Host": "localhost", "Origin": origin}, 403)
            for origin in (
                "https://other.example",
                "http://page.example",
                "https://localhost.page.example",
                "localhost@a",
                "",
            )
        ),
        ({"Host": "page.example", "Origin": PAGE}, 403),
    ],
)
def test_what_a_foreign_page_sends_is_refused(url: str, headers: dict[str, str], status: int) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/health"),
    ):
        found, _, body = send(url, headers, method, path)
        assert found == status, (method, path)
        if status == 403:
            assert body["error"]["type"] == "permission_error"
            assert "--allowed-" in body["error"]["message"]


def test_the_browser_passes_answers_on_to_an_allowed_page_alone(url: str) -> None:
    own = {"Host": "localhost"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    status, headers, _ = send(url, {**own, "Origin": PAGE, **asks}, "OPTIONS")
    assert status == 204
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in headers["access-control-allow-methods"]
    assert send(url, {**own, "Origin": PAGE})[1]["access-control-allow-origin"] == PAGE
    assert send(url, {**own, "Origin": PAGE}, "GET", "/nothing")[1]["access-control-allow-origin"] == PAGE
    assert send(url, {**own, "Origin": "https://other.example", **asks}, "OPTIONS")[0] == 403
    for origin in ({}, {"Origin": "http://localhost:3000"}):
        assert "access-control-allow-origin" not in send(url, {**own, **origin})[1]
    assert send(url, own, "OPTIONS")[0] == 405


def test_clients_on_this_machine_are_served(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert client.chat.completions.create(**CHAT).choices[0].message  # type: ignore[call-overload]
    stream = client.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
    assert [chunk.choices[0].finish_reason for chunk in stream][-1]

    async def ask() -> int:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=CHAT) as answer:
            return answer.status

    assert asyncio.run(ask()) == 200
    if curl := shutil.which("curl"):
        for host in ("127.0.0.1", "localhost"):
            where = f"{url.replace('127.0.0.1', host)}/v1/models"
            said = subprocess.run([curl, "-sS", "-4", where], capture_output=True, text=True, timeout=60, check=True)
            assert json.loads(said.stdout)["data"][0]["id"] == "policy"


def test_a_session_answers_whoever_has_its_key(proxy: SessionProxy) -> None:
    """An agent may come through a tunnel. What needs no key is for this machine."""
    key = {"Authorization": f"Bearer {proxy.api_key}"}
    for headers in ({"Host": "tunnel.example"}, {"Host": "localhost", "Origin": PAGE}):
        assert send(proxy.base_url, {**headers, **key})[0] == 200
        assert send(proxy.base_url, headers)[0] == 401
        assert send(proxy.base_url, headers, "GET", "/metrics")[0] == 403
    assert send(proxy.base_url, {"Host": "localhost"}, "GET", "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", "a", "--allowed-hosts", "b"], "--allowed-hosts: is for a server without --api-key"),
        (["--api-key", "a", "--allowed-origins", "https://b"], "--allowed-origins: is for a server without --api-key"),
        (["--allowed-hosts", "https://b"], "argument --allowed-hosts: is https://b; a name such as"),
        (["--allowed-origins", "b.example"], "argument --allowed-origins: is b.example; an origin such as"),
        (["--allowed-origins", "https://b.example/"], "an origin such as https://example.com is expected"),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):  # by argparse
        assert main(["serve", "nowhere", *words]) == 2
    assert message in capsys.readouterr().err
