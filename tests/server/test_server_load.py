"""A server under hundreds of clients of every kind at once, most of them bad: what they leave behind is nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import pytest
from openai import OpenAI

from areno import SamplingParams
from areno.agents.proxy import SessionProxy
from areno.server.sampling import ServerLimits
from tests.helpers.agent_model import made
from tests.helpers.processes import worker_of
from tests.helpers.tiny_decoder import assert_all_blocks_are_free
from tests.helpers.waiting import until

HELLO = [{"role": "user", "content": "hello"}]
LONG = {"max_tokens": 1900, "ignore_eos": True}
MOST_BODY = 2**20
REFUSED = {
    "not json": 400,
    "huge": 413,
    "huge in chunks": 413,
    "wrong key": 401,
    "no key": 401,
    "bad field": 400,
    "too many": 400,
    "unknown model": 404,
    "too long": 400,
}


class Storm:
    """Clients of one server. What they saw is counted in `seen`; `sent` counts the requests that the server saw."""

    def __init__(self, proxy: SessionProxy, http: aiohttp.ClientSession):
        self.proxy, self.http = proxy, http
        self.url = f"{proxy.base_url}/chat/completions"
        self.seen: Counter[str] = Counter()
        self.sent = 0
        self.ids: list[str] = []
        self.tokens: dict[int, list[int]] = {}  # by the number of the client, which is the seed

    async def client(self, number: int) -> None:
        """One client, of the kind that its number says."""
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * 2)
        kinds: list[tuple[str, Callable[..., Awaitable[None]]]] = [
            ("whole", self._whole),
            ("stream", self._stream),
            ("many", self._whole),
            ("cancelled", self._cancelled),
            ("left stream", self._left),
            *((kind, self._refused) for kind in REFUSED),
            ("half a body", self._half),
            ("no http", self._no_http),
            ("one after the other", self._pipelined),
            ("slow", self._slow),
        ]
        kind, act = kinds[number % len(kinds)]
        body = {"model": "policy", "messages": HELLO, "max_tokens": rng.randint(1, 30), "seed": number}
        await act(kind, body, rng)
        self.seen[kind] += 1

    def _post(self, data: Any, key: str | None = None) -> Any:
        self.sent += 1
        headers = {} if key == "" else {"Authorization": f"Bearer {key or self.proxy.api_key}"}
        return self.http.post(self.url, data=json.dumps(data) if isinstance(data, dict) else data, headers=headers)

    async def _whole(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        n = 4 if kind == "many" else 1
        async with self._post({**body, "n": n}) as response:
            answer = await response.json()
        assert response.status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(n))
        self.ids.append(answer["id"])
        if n == 1:
            self.tokens[body["seed"]] = answer["areno"]["choices"][0]["token_ids"]

    async def _stream(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        async with self._post({**body, "stream": True}) as response:
            events = [line[6:] for line in (await response.text()).split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1
        self.ids.append(chunks[0]["id"])
        self.tokens[body["seed"]] = chunks[-1]["areno"]["choices"][0]["token_ids"]

    async def _cancelled(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._post({**body, **LONG}), 0.2 + rng.random())

    async def _left(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        async with self._post({**body, **LONG, "stream": True}) as response:
            assert response.status == 200
            await response.content.readany()

    async def _refused(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * (MOST_BODY // 20)

        text = json.dumps(body)
        sent: Any = {
            "not json": text[: rng.randrange(len(text))],
            "huge": text + " " * (2 * MOST_BODY),
            "huge in chunks": chunks(),
            "bad field": {**body, "n": rng.choice([-1, 0, 0.5, "two", []])},
            "too many": {**body, "n": 10_000},
            "unknown model": {**body, "model": "gpt"},
            "too long": {**body, "messages": [{"role": "user", "content": "a " * 3000}]},
        }.get(kind, body)
        key = {"wrong key": "guess", "no key": ""}.get(kind)
        try:
            async with self._post(sent, key) as response:
                assert response.status == REFUSED[kind], (kind, await response.text())
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        except aiohttp.ClientOSError:  # the server has closed the connection over the body
            assert kind in ("huge", "huge in chunks")

    # -- without an HTTP library -----------------------------------------------------------------------------------

    def _head(self, length: int, more: str = "") -> bytes:
        self.sent += 1
        key = f"Authorization: Bearer {self.proxy.api_key}"
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{key}\r\nContent-Length: {length}\r\n{more}\r\n".encode()
        )

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.proxy.base_url.split("/")[2].partition(":")
        return await asyncio.open_connection(host, int(port))

    async def _half(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        data = json.dumps(body).encode()
        _, writer = await self._connect()
        writer.write(self._head(len(data)) + data[: rng.randrange(len(data))])
        await writer.drain()
        await asyncio.sleep(rng.random() / 10)
        writer.close()

    async def _no_http(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        reader, writer = await self._connect()
        writer.write(rng.randbytes(rng.randint(1, 2000)) + b"\r\n\r\n")
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert b" 200 " not in await reader.read()
        writer.close()

    async def _pipelined(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        data = json.dumps(body).encode()
        reader, writer = await self._connect()
        writer.write(self._head(len(data)) + data + self._head(len(data), "Connection: close\r\n") + data)
        answers = await reader.read()  # until the server closes the connection
        assert answers.count(b"HTTP/1.1 200") == answers.count(b'"object":"chat.completion"') == 2
        writer.close()

    async def _slow(self, kind: str, body: dict[str, Any], rng: random.Random) -> None:
        data = json.dumps(body).encode()
        reader, writer = await self._connect()
        writer.write(self._head(len(data), "Connection: close\r\n"))
        for at in range(0, len(data), 40):
            writer.write(data[at : at + 40])
            await asyncio.sleep(rng.random() / 20)
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200") == 1
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("n_clients", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_clients_of_every_kind_leave_nothing_behind(n_clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.agents.proxy.ServerLimits", partial(ServerLimits, max_body=MOST_BODY))
    with made() as trainer, trainer.rollout_session(sampling_params=SamplingParams(max_new_tokens=24)) as session:
        proxy, engine = session.proxy, trainer.engine
        decoder, sampler = worker_of(engine).decoder, proxy.server.sampler
        client = OpenAI(base_url=proxy.base_url, api_key=proxy.api_key, max_retries=0)

        def tokens_of(**how: Any) -> list[int]:
            answer: Any = client.chat.completions.create(model="policy", messages=HELLO, **how)  # type: ignore[arg-type]
            return answer.areno["choices"][0]["token_ids"]

        async def all_of_them() -> Storm:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:
                storm = Storm(proxy, http)
                await asyncio.gather(*(storm.client(number) for number in range(n_clients)))
            for _ in range(600):
                if not sampler.metrics.in_flight and not engine.dispatcher.n_unfinished_by_request:
                    break
                await asyncio.sleep(0.05)
            return storm

        before = tokens_of(temperature=0, max_tokens=20)
        until(lambda: sampler.metrics.in_flight == 0)  # a request is counted after its answer was sent
        n_before = sum(sampler.metrics.requests.values())
        storm = asyncio.run(all_of_them())
        assert sum(storm.seen.values()) == n_clients
        assert len(set(storm.ids)) == len(storm.ids) >= n_clients // 9
        n_gone = storm.seen["cancelled"] + storm.seen["half a body"]  # perhaps before the server had looked at them
        assert storm.sent - n_gone <= sum(sampler.metrics.requests.values()) - n_before <= storm.sent
        assert sampler.metrics.in_flight == sampler.n_samples == 0
        assert not engine.dispatcher.n_unfinished_by_request
        assert not decoder.has_work
        assert_all_blocks_are_free(decoder)
        assert tokens_of(temperature=0, max_tokens=20) == before
        for number, tokens in list(storm.tokens.items())[:6]:  # everyone got the answer to their own request
            assert tokens_of(seed=number, max_tokens=len(tokens)) == tokens
