"""Answers of the server against OpenAI's published description of its API, and against the types of its client."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import jsonschema
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from areno.agents.proxy import SessionProxy
from areno.server import response_bodies
from areno.server.errors import ApiError
from areno.types import GenerationOutput

OWN = {"areno", "reasoning_content", "max_model_len"}  # fields that the API does not have; clients keep what they get
HELLO = [{"role": "user", "content": "hello world"}]
TOOLS = [{"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}]


def an_object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """The schema of an object with these fields, and none beside our own."""
    fields = {**required, **optional, **{name: {} for name in OWN}}
    return {"type": "object", "required": list(required), "properties": fields, "additionalProperties": False}


def list_of(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


# The schemas of the published description (https://github.com/openai/openai-openapi): fields, and which are required.
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TOKEN = {"token": STRING, "logprob": {"type": "number", "maximum": 0}, "bytes": or_null(list_of(INTEGER))}
CHAT_LOGPROBS = an_object(
    {
        "content": or_null(list_of(an_object({**TOKEN, "top_logprobs": list_of(an_object(TOKEN))}))),
        "refusal": or_null(list_of(STRING)),
    }
)
FUNCTION = an_object({"name": STRING, "arguments": STRING})
CALL = {"id": STRING, "type": {"const": "function"}, "function": FUNCTION}
MESSAGE = an_object(
    {"role": {"const": "assistant"}, "content": or_null(STRING), "refusal": or_null(STRING)},
    tool_calls=list_of(an_object(CALL)),
    annotations=list_of({}),
)
DELTA = an_object(
    {},
    role={"const": "assistant"},
    content=or_null(STRING),
    refusal=or_null(STRING),
    tool_calls=list_of(an_object({"index": INTEGER}, **CALL)),
)
USAGE = an_object(
    {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER},
    prompt_tokens_details=an_object({}, cached_tokens=INTEGER),
)
CHAT_REASON = {"enum": ["stop", "length", "tool_calls"]}
TEXT_LOGPROBS = an_object(
    {},
    tokens=list_of(STRING),
    token_logprobs=list_of(or_null(NUMBER)),
    top_logprobs=or_null(list_of(or_null({"type": "object", "additionalProperties": NUMBER}))),
    text_offset=list_of(INTEGER),
)


def an_answer(kind: str, choice: dict[str, Any], usage: dict[str, Any] = USAGE) -> dict[str, Any]:
    head = {"id": STRING, "object": {"const": kind}, "created": INTEGER, "model": STRING}
    return an_object({**head, "choices": list_of(choice)}, usage=usage, system_fingerprint=or_null(STRING))


SCHEMAS = {
    "chat": an_answer(
        "chat.completion",
        an_object(
            {"index": INTEGER, "message": MESSAGE, "logprobs": or_null(CHAT_LOGPROBS), "finish_reason": CHAT_REASON}
        ),
    ),
    "chunk": an_answer(
        "chat.completion.chunk",
        an_object(
            {"index": INTEGER, "delta": DELTA, "finish_reason": or_null(CHAT_REASON)}, logprobs=or_null(CHAT_LOGPROBS)
        ),
        or_null(USAGE),
    ),
    "text": an_answer(
        "text_completion",
        an_object(
            {
                "index": INTEGER,
                "text": STRING,
                "logprobs": or_null(TEXT_LOGPROBS),
                "finish_reason": or_null({"enum": ["stop", "length"]}),  # null in the chunks of a stream
            }
        ),
        or_null(USAGE),
    ),
    "model": an_object({"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING}),
    "error": an_object(
        {"error": an_object({"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)})}
    ),
}
TYPES: dict[str, type[BaseModel]] = {
    "chat": ChatCompletion,
    "chunk": ChatCompletionChunk,
    "text": Completion,
    "model": Model,
}


def unknown_fields(value: Any) -> set[str]:
    """Fields that the client's types do not know, at any depth."""
    if isinstance(value, list):
        return set().union(*map(unknown_fields, value))
    if not isinstance(value, BaseModel):
        return set()
    own = set(value.model_extra or {}) - OWN
    return own.union(*(unknown_fields(getattr(value, name)) for name in type(value).model_fields))


def assert_is(kind: str, value: Any) -> None:
    jsonschema.validate(value, SCHEMAS[kind])
    if kind == "text":  # the type knows no null for the first token of a prompt and for chunks before the last
        value = json.loads(json.dumps(value))
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for name in ("token_logprobs", "top_logprobs"):
                if choice["logprobs"] and choice["logprobs"][name]:
                    choice["logprobs"][name] = [one for one in choice["logprobs"][name] if one is not None]
    assert unknown_fields(TYPES[kind].model_validate(value, strict=True)) == set()


def ask(proxy: SessionProxy, path: str, body: Any) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {proxy.api_key}"}
    return httpx2.post(f"{proxy.base_url}/{path}", json={"model": "policy", **body}, headers=headers, timeout=60)


def events(answer: httpx2.Response) -> list[Any]:
    *chunks, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


CHAT: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "n": 2},
    {"tools": TOOLS, "tool_choice": "auto"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "move"}}, "max_tokens": 60},
    {"max_tokens": 1},
    {"stop": ["a", "e"]},
    {"return_token_ids": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
]
TEXT: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": 2},
    {"logprobs": 0},
    {"prompt": ["a", "b"], "n": 2},
    {"prompt": [64, 65], "max_tokens": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", CHAT)
def test_chat_completions(proxy: SessionProxy, fields: Any) -> None:
    answer = ask(proxy, "chat/completions", {"messages": HELLO, **fields})
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert_is("chat", answer.json())
    assert ("areno" in answer.json()) == fields.get("return_token_ids", True)
    stream = ask(proxy, "chat/completions", {"messages": HELLO, **fields, "stream": True})
    assert stream.headers["content-type"] == "text/event-stream"
    chunks = events(stream)
    for chunk in chunks:
        assert_is("chunk", chunk)
        assert "usage" not in chunk
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(fields.get("n", 1)):
        of_choice = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert of_choice[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] is not None for choice in of_choice] == [False] * (len(of_choice) - 1) + [True]


@pytest.mark.parametrize("fields", [*TEXT, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0}])
def test_completions(proxy: SessionProxy, fields: Any) -> None:
    answer = ask(proxy, "completions", {"prompt": "hello", **fields}).json()
    assert_is("text", answer)
    assert all(choice["finish_reason"] is not None for choice in answer["choices"])
    if "echo" not in fields:
        for chunk in events(ask(proxy, "completions", {"prompt": "hello", **fields, "stream": True})):
            assert_is("text", chunk)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_last_chunk_tells_the_usage_and_those_before_say_null(proxy: SessionProxy, path: str) -> None:
    prompt = {"messages": HELLO} if path == "chat/completions" else {"prompt": "hello"}
    asked = {**prompt, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(ask(proxy, path, asked))
    kind = "chunk" if path == "chat/completions" else "text"
    assert_is(kind, last)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    for chunk in chunks:
        assert_is(kind, chunk)
        assert chunk["usage"] is None


def test_models(proxy: SessionProxy) -> None:
    headers = {"Authorization": f"Bearer {proxy.api_key}"}
    found = httpx2.get(f"{proxy.base_url}/models", headers=headers).json()
    assert set(found) == {"object", "data"}
    assert found["object"] == "list"
    for model in found["data"]:
        assert_is("model", model)
        assert httpx2.get(f"{proxy.base_url}/models/{model['id']}", headers=headers).json() == model


def test_errors(proxy: SessionProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    body: dict[str, Any] = {"messages": HELLO}

    def status_of(answer: httpx2.Response) -> int:
        jsonschema.validate(answer.json(), SCHEMAS["error"])
        return answer.status_code

    assert status_of(ask(proxy, "chat/completions", {**body, "n": 0})) == 400
    assert status_of(ask(proxy, "chat/completions", {**body, "model": "other"})) == 404
    assert status_of(ask(proxy, "nothing", body)) == 404
    assert status_of(httpx2.post(f"{proxy.base_url}/completions", content="{}")) == 401
    monkeypatch.setattr(proxy.server.sampler, "n_samples", proxy.server.sampler.limits.max_samples)
    assert status_of(ask(proxy, "chat/completions", body)) == 429

    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(proxy.server.sampler, "reserve", broken)
    assert status_of(ask(proxy, "chat/completions", body)) == 500
    assert set(ApiError(400, "a").body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("reason", "told"), [("stop", "stop"), ("length", "length"), ("abort", "length")])
def test_the_api_knows_no_abort(reason: Any, told: str) -> None:
    """The reason of a sample whose grammar has become too complex: it is cut off."""
    output = GenerationOutput(request_id=0, sample=0, tokens=[], logprobs=[], versions=[], finish_reason=reason)
    assert response_bodies.finish_reason(output) == told
