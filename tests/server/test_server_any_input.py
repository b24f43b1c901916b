"""Whatever a client sends, each endpoint answers with no error of the server, and serves the next request."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno import SamplingParams
from areno.server.app import Server, build_server
from areno.server.sampling import EngineClient, ServerLimits
from areno.server.threads import ServerThread
from tests.helpers.agent_model import VOCAB, made
from tests.helpers.waiting import until

KEY = "key \u00e9"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SLOW_S = 20.0  # for an answer, on a busy machine


def nested(levels: int, inner: Any = None) -> Any:
    """The schema of an object in an object in an object."""
    schema = inner or {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def call(arguments: Any) -> list[Any]:
    function = {"name": "move", "arguments": arguments}
    return [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}, *HELLO]


def form(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


def tool(schema: Any, name: str = "move") -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


SCHEMAS = [
    {},
    {"type": "strange"},
    {"type": "object"},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}},
    {"enum": ["a", 1, None]},
    {"enum": []},
    {"const": "\ud800"},
    {"pattern": "("},
    {"pattern": "a{1000}{1000}"},
    {"type": "string", "minLength": -1},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"properties": {"\n<": {}}},
    {"type": "object", "required": "a"},
    {"properties": 1},
    {"allOf": [1]},
    {"anyOf": []},
    {"items": 1},
    nested(3),
    nested(40),
    nested(60),
    nested(400),
    True,
    [],
]
VALUES: list[Any] = [
    *(None, True, False),
    *(0, 1, -1, 2, 0.5, 1e-40, 1e308, 2**31, 2**63, 2**70, 10**400),
    *("", "a", "model", "\ud800", "\x00", "<|im_end|>", "1" * 5000, "\u00e9" * 300, "none", "auto", "required"),
    *([], [[]], [None], [1, "a"], ["a"] * 20, [0, VOCAB], [-1], [2**70]),
    *({}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"": ""}),
]
OF_FIELDS: dict[str, list[Any]] = {
    "messages": [
        HELLO,
        [{"role": "system", "content": "a"}],
        [{"role": "tool", "content": "a", "tool_call_id": "b"}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        call("{}"),
        call("["),
        call({"a": {"b": [1]}}),
        call('{"a": ' * 900 + "1" + "}" * 900),
        call("1" * 5000),
        [{"role": "user", "content": "a " * 5000}],
        HELLO * 1001,
        [{"role": "user", "content": "\n" * 3000}],
    ],
    "prompt": ["a", "", "a b " * 5000, ["a", "b"], [5, 6], [[5], [6, 7]], [5] * 5000, ["a"] * 1025, ["a", [5]]],
    "tools": [[tool(schema)] for schema in SCHEMAS] + [[tool(nested(2), f"t{n}") for n in range(3)], [tool({})] * 2],
    "tool_choice": ["required", {"type": "function", "function": {"name": "move"}}],
    "response_format": [form(schema) for schema in SCHEMAS],
    "chat_template_kwargs": [
        {name: "a"}
        for name in (
            "opened",
            "tokenizer",
            "messages",
            "thinking",
            "enable_thinking",
            "self",
            "kwargs",
            "tokenize",
            "return_dict",
            "return_tensors",
            "documents",
            "conversation",
            "chat_template",
            "bos_token",
            "range",
        )
    ],
    "logit_bias": [{"5": 1}, {"1" * 5000: 1}, {"-1": 1}, {str(VOCAB): 1}, {"\u0663": 1}, {"5": "a"}, {"5": 1e308}],
    "stop": ["a", ["a", "b"], ["\ud800"], "\x00", "a" * 100_000],
    "stop_token_ids": [[5], [-1], [2**70], ["a"], [True]],
    "stream_options": [{"include_usage": True}, {"a": 1}],
    "n": [1, 3, 128, 129],
    "max_tokens": [1, 3, 10**6],
    "temperature": [0, 2, 1e-39],
    "top_p": [0, 1e-45],
    "top_k": [0, -1, 5],
    "min_p": [1e-45, 1],
    "min_tokens": [2],
    "seed": [-(2**63), 2**63 - 1],
    "echo": [True],
    "stream": [True],
    "logprobs": [True, 0, 3, 20],
    "top_logprobs": [3],
    "ignore_eos": [True],
    "frequency_penalty": [2, -2],
    "presence_penalty": [2, -2],
    "return_token_ids": [True],
    "model": ["model"],
    "parallel_tool_calls": [False],
    "skip_special_tokens": [False],
    "user": ["a"],
    "suffix": ["a"],
    "\ud800": [1],
}
ENDPOINTS = {
    "/v1/chat/completions": {"model": "model", "messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"model": "model", "prompt": "hello", "max_tokens": 2},
}
FREE = st.recursive(
    st.sampled_from(VALUES) | st.text(max_size=5) | st.floats() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a request: most of them as they are meant, and some with anything."""
    chosen = draw(st.lists(st.sampled_from(sorted(OF_FIELDS)), max_size=4, unique=True))
    return {name: draw(st.sampled_from(OF_FIELDS[name]) | st.sampled_from(OF_FIELDS[name]) | FREE) for name in chosen}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """An endpoint, a body and its headers; now and then with damaged bytes."""
    path = draw(st.sampled_from(sorted(ENDPOINTS)))
    body = json.dumps({**ENDPOINTS[path], **draw(fields())}).encode()
    kind = draw(st.sampled_from(["as it is"] * 12 + ["gzip", "deflate", "bare", "damaged", "cut", "bytes", "unknown"]))
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "bare": lambda data: zlib.compress(data)[2:-4]}
    if kind in packed:
        return path, packed[kind](body), {"Content-Encoding": kind.replace("bare", "deflate")}
    if kind == "damaged":
        place = draw(st.integers(0, 40))
        return path, gzip.compress(body)[:place] + b"\xff\x00", {"Content-Encoding": "gzip"}
    if kind == "cut":
        return path, body[: draw(st.integers(0, len(body)))], {}
    if kind == "bytes":
        return path, draw(st.binary(max_size=60)), {}
    return path, body, {"Content-Encoding": "br"} if kind == "unknown" else {}


class Asked:
    """A server and its client."""

    def __init__(self, server: Server, url: str):
        self.server, self.url = server, url
        self.http = httpx2.Client(base_url=url, timeout=SLOW_S)

    def send(self, method: str, path: str, body: bytes = b"", headers: Any = None, key: bytes = KEY.encode()) -> int:
        """Ask, and check that the answer is one: its status."""
        own = [(b"Authorization", (b"Bearer " + key).strip()), (b"Content-Type", b"application/json")]
        given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        answer = self.http.request(method, path, content=body, headers=own + given)
        assert answer.status_code < 500, (path, body[:500], answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert len(error["message"].splitlines()) == 1
            assert len(answer.content) < 20_000
        return answer.status_code


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    params = SamplingParams(max_new_tokens=8)
    with made() as trainer, trainer.rollout_session(sampling_params=params, max_running_prompts=16) as session:
        room = replace(session.proxy.server.sampler.request_limits, context_len=96)
        limits = ServerLimits(max_body=2**17, max_messages=1000)
        sampler = EngineClient(trainer.engine, room, replace(params, max_context_len=96), limits, seed=0)
        server = build_server(sampler, session.proxy.server.chat.prompts.tokenizer, models=["model"], keys=[KEY])
        thread = ServerThread(server.application)
        yield Asked(server, thread.start())
        thread.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(asked: Asked, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After each test the server serves, has nothing under way, and has logged nothing."""
    caplog.set_level(logging.WARNING)
    yield
    assert asked.send("GET", "/health") == 200
    assert asked.send("POST", "/v1/chat/completions", json.dumps(ENDPOINTS["/v1/chat/completions"]).encode()) == 200
    until(lambda: not asked.server.sampler.n_samples)
    assert [record.getMessage()[:500] for record in caplog.records] == []


EVERY = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slow
@settings(EVERY, max_examples=2500)
@given(bodies())
def test_any_body(asked: Asked, sent: Any) -> None:
    asked.send("POST", *sent)


@settings(EVERY, max_examples=60)
@given(
    st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"]),
    st.sampled_from(
        ["/health", "/metrics", "/v1/models", "/v1/models/model", "/v1/models/%ff%00", "/v1/chat/completions"]
    )
    | st.text(max_size=8).map(lambda text: "/" + text.encode("utf-8", "replace").hex()),
    st.binary(max_size=20).map(lambda key: bytes(byte for byte in key if byte > 31 and byte != 127).strip()),
)
def test_any_path_and_key(asked: Asked, method: str, path: str, key: bytes) -> None:
    status = asked.send(method, path, key=key) if method != "HEAD" else asked.http.head(path).status_code
    assert status in (200, 401, 404, 405)


@pytest.mark.parametrize("field", sorted(OF_FIELDS))
def test_each_value_of_a_field(asked: Asked, field: str) -> None:
    for path, body in ENDPOINTS.items():
        for value in OF_FIELDS[field]:
            more = {"tools": OF_FIELDS["tools"][4]} if field == "tool_choice" else {}
            more = {"tool_choice": "required"} if field == "tools" else more
            asked.send("POST", path, json.dumps({**body, **more, field: value}).encode())
