"""/v1/messages and /v1/responses, asked by the clients of Anthropic and OpenAI and by handwritten requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from areno.agents.proxy import SampleServer
from areno.server.sample_sessions import SampleSession
from areno.types import SamplingParams
from tests.helpers.scripted_engine import ScriptedEngine, scripted_server

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"path": "%s"}}\n</tool_call>'
TWO_CALLS = f"<think>\nTwo places.\n</think>\n\nI look.\n{LOOK % 'a'}\n{LOOK % 'b'}"


def say(prompt: str) -> str:
    return "<think>\nSeen.\n</think>\n\nA cat and a dog." if "<tool_response>" in prompt else TWO_CALLS


@pytest.fixture(params=["public", "session"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[SampleServer, ScriptedEngine, str, str]]:
    """The server of `areno serve` with its key, or a session of a sample, which any key will do for."""
    is_public = request.param == "public"
    with scripted_server(say, session=None if is_public else "training") as (server, engine):
        if is_public:
            yield server, engine, server.url, "secret"
        else:
            session = SampleSession(max_requests=50, uses_run_sampling=True, returns_tokens=False)
            yield server, engine, server.open_sample(session), "any"


def claude(served: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served[2], api_key=served[3], max_retries=0)


def gpt(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served[2]}/v1", api_key=served[3], max_retries=0)


CLAUDE_TOOLS: Any = [{"name": "look", "description": "Look at it.", "input_schema": SCHEMA}]
GPT_TOOLS: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": None}]


def messages(client: anthropic.Anthropic, given: list[Any], streams: bool, **more: Any) -> Any:
    asked: Any = {"model": "policy", "max_tokens": 400, "messages": given, "tools": CLAUDE_TOOLS, **more}
    if not streams:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_anthropics_client_goes_on_from_its_tokens(served: Any, streams: bool) -> None:
    _, engine, *_ = served
    client, asked = claude(served), [{"role": "user", "content": "What is there?"}]
    first = messages(client, asked, streams, system=[{"type": "text", "text": "Be brief."}])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.content[0].thinking, first.content[1].text) == ("Two places.", "I look.")
    assert [block.input for block in first.content[2:]] == [{"path": "a"}, {"path": "b"}]
    assert (first.stop_reason, first.stop_sequence, first.model) == ("tool_use", None, "policy")
    assert first.content[0].signature
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    results = [
        {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "a cat"},
        {
            "type": "tool_result",
            "tool_use_id": first.content[3].id,
            "content": [{"type": "text", "text": "dog"}, image],
        },
    ]
    asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = messages(client, asked, streams, system="Be brief.")
    assert (second.content[-1].text, second.stop_reason) == ("A cat and a dog.", "end_turn")
    before, after = engine.requests
    assert after.prompt[: len(before.prompt)] == before.prompt
    assert f"{TWO_CALLS}<|im_end|>\n<|im_start|>user\n<tool_response>\na cat\n</tool_response>" in engine.prompts[1]
    assert "dog\n[image (image/png): not shown, since this model reads text only]" in engine.prompts[1]
    assert first.usage.input_tokens + first.usage.cache_read_input_tokens == len(before.prompt)
    assert first.usage.output_tokens == len(engine.tokenizer.encode(TWO_CALLS)) + 1


def test_what_anthropics_api_has_besides(served: Any) -> None:
    _, engine, url, key = served
    client, asked = claude(served), [{"role": "user", "content": "What is there?"}]
    n_tokens = client.messages.count_tokens(model="policy", messages=asked, tools=CLAUDE_TOOLS).input_tokens
    answer = messages(client, asked, False, stop_sequences=["look"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "look")
    assert n_tokens == len(engine.requests[0].prompt)
    assert messages(client, asked, True, max_tokens=3).stop_reason == "max_tokens"
    body = {"model": "policy", "max_tokens": 5, "thinking": {"type": "adaptive"}, "context_management": {"edits": []}}
    billing = [{"type": "text", "text": "x-anthropic-billing-header: cc=1.abc"}, {"type": "text", "text": "Be brief."}]
    later = [*asked, {"role": "system", "content": "Agents: none."}]
    more = {"output_config": {"effort": "high"}, "metadata": {"user_id": "me"}, "tool_choice": {"type": "auto"}}
    given = {
        **body,
        **more,
        "system": billing,
        "messages": later,
        "tools": [{"type": "web_search_20250305", "name": "w"}],
    }
    sent = httpx2.post(f"{url}/v1/messages?beta=true", json=given, headers={"x-api-key": key})
    assert sent.status_code == 200, sent.text
    assert "billing" not in engine.prompts[-1]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in engine.prompts[-1]
    assert "<|im_start|>system\nAgents: none.<|im_end|>" in engine.prompts[-1]


def test_templates_without_later_system_messages_get_them_as_the_users() -> None:
    with scripted_server(say, tokenizer="minimind", session=None) as (server, engine):
        talk = [{"role": "user", "content": "What?"}, {"role": "system", "content": "Agents: none."}]
        body = {"model": "policy", "max_tokens": 5, "system": "Be brief.", "messages": talk}
        sent = httpx2.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "secret"})
        assert sent.status_code == 200, sent.text
        assert engine.prompts[-1].count("Agents: none.") == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "a JSON object is expected"),
        ({"messages": []}, "messages is missing or empty"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role is 'robot'"),
        ({"messages": [{"content": ""}]}, "messages[0].role is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type is missing"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "a b"}]}, "tools[0].function.name"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": "x"}, "max_tokens is 'x'"),
        ({"messages": [{"role": "user", "content": "a"}], "system": [{"type": "text", "text": 1}]}, "system[0].text"),
    ],
)
def test_errors_have_anthropics_form(served: Any, body: Any, words: str) -> None:
    _, engine, url, key = served
    body = {"model": "policy", "max_tokens": 5, **body} if isinstance(body, dict) else body
    text = json.dumps(body).encode()
    answer = httpx2.post(f"{url}/v1/messages", content=text, headers={"x-api-key": key})
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


def respond(client: openai.OpenAI, given: Any, streams: bool, **more: Any) -> Any:
    asked: Any = {"model": "policy", "input": given, "tools": GPT_TOOLS, **more}
    if not streams:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("keeps", ["content", "sealed"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_openais_client_goes_on_from_its_tokens(served: Any, streams: bool, keeps: str) -> None:
    _, engine, *_ = served
    client, talk = gpt(served), list[Any]([{"role": "user", "content": "What is there?"}])
    first = respond(client, talk, streams, instructions="Be brief.", store=False)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output_text == "I look."
    assert [json.loads(item.arguments) for item in first.output[2:]] == [{"path": "a"}, {"path": "b"}]
    assert (first.status, first.usage.input_tokens) == ("completed", len(engine.requests[0].prompt))
    items = [item.model_dump(exclude_unset=True) for item in first.output]
    assert items[0]["content"][0]["text"] == "Two places."
    del items[0]["encrypted_content" if keeps == "content" else "content"]
    talk += items
    talk += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "a cat"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = respond(client, talk, streams, instructions="Be brief.")
    assert second.output_text == "A cat and a dog."
    before, after = engine.requests
    assert after.prompt[: len(before.prompt)] == before.prompt
    assert f"{TWO_CALLS}<|im_end|>" in engine.prompts[1], "the items of one answer are one message"


def test_tools_in_namespaces_and_tools_of_text(served: Any) -> None:
    _, engine, url, key = served
    spawn = {"type": "function", "name": "look", "parameters": SCHEMA}
    tools = [
        {"type": "namespace", "name": "team", "tools": [spawn]},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "web_search"},
    ]
    item = {"type": "function_call", "call_id": "c", "name": "look", "namespace": "team", "arguments": "{}"}
    talk = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "What?"},
        item,
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "*** a"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "yes"}]},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "ok"},
    ]
    for streams in (False, True):
        body = {"model": "policy", "input": talk[:2] if not streams else talk, "tools": tools, "stream": streams}
        sent = httpx2.post(f"{url}/v1/responses", json=body, headers={"Authorization": f"Bearer {key}"})
        assert sent.status_code == 200, sent.text
        if not streams:
            calls = [item for item in sent.json()["output"] if item["type"] == "function_call"]
            assert [(call["name"], call["namespace"]) for call in calls] == [("look", "team")] * 2
    assert '"arguments": {"input": "*** a"}' in engine.prompts[1]
    assert engine.prompts[1].count("<|im_start|>assistant") == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"input": "a", "background": True}, "background is not supported"),
        ({"input": None}, "input is null"),
        ({"input": [3]}, "input[0] is 3"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "keeps no items"),
        ({"input": "a", "tool_choice": {"type": "mcp"}, "tools": GPT_TOOLS}, "tool_choice.type is 'mcp'"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type is 'xml'"),
    ],
)
def test_errors_of_responses(served: Any, body: Any, words: str) -> None:
    _, engine, url, key = served
    answer = httpx2.post(
        f"{url}/v1/responses", json={"model": "policy", **body}, headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


def test_an_answer_that_is_cut_off_is_incomplete(served: Any) -> None:
    answer = respond(gpt(served), "What?", False, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


# Token ids


@pytest.mark.parametrize("streams", [False, True])
def test_token_ids_have_the_form_of_vllm(served: Any, streams: bool) -> None:
    _, engine, url, key = served
    body = {"model": "policy", "messages": [{"role": "user", "content": "What?"}], "return_token_ids": True}
    sent = httpx2.post(
        f"{url}/v1/chat/completions", json={**body, "stream": streams}, headers={"Authorization": f"Bearer {key}"}
    )
    if streams:
        chunks = [json.loads(line[6:]) for line in sent.text.splitlines() if line.startswith("data: {")]
        prompt = chunks[0]["prompt_token_ids"]
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    else:
        prompt, tokens = sent.json()["prompt_token_ids"], sent.json()["choices"][0]["token_ids"]
    assert prompt == engine.requests[0].prompt
    assert tokens == [*engine.tokenizer.encode(TWO_CALLS), engine.tokenizer.eos_token_id]


def test_token_ids_are_continued(served: Any) -> None:
    _, engine, url, key = served
    params = {"max_tokens": 9, "temperature": 1.0, "logprobs": 1, "stop_token_ids": [engine.tokenizer.eos_token_id]}
    params |= {"skip_special_tokens": False, "routed_experts_prompt_start": 3}  # as verifiers sends them
    body = {"model": "policy", "token_ids": [5, 6, 7], "sampling_params": params}
    headers = {"Authorization": f"Bearer {key}"}
    if key == "any":
        refused = httpx2.post(f"{url}/inference/v1/generate", json=body, headers=headers)
        assert "this session records conversations alone" in refused.json()["error"]["message"]
        return
    choice = httpx2.post(f"{url}/inference/v1/generate", json=body, headers=headers).json()["choices"][0]
    assert choice["token_ids"] == engine.tokenizer.encode(TWO_CALLS)[:9]
    assert choice["logprobs"]["content"][0] == {
        "token": f"token_id:{choice['token_ids'][0]}",
        "logprob": -0.25,
        "bytes": None,
        "top_logprobs": [],
    }
    wrong = httpx2.post(f"{url}/inference/v1/generate", json={**body, "token_ids": "a"}, headers=headers)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "token_ids")


def test_defaults_of_the_server_hold() -> None:
    with scripted_server(say, params=SamplingParams(max_new_tokens=7), session=None) as (server, engine):
        headers = {"Authorization": "Bearer secret"}
        httpx2.post(f"{server.url}/v1/responses", json={"model": "policy", "input": "a"}, headers=headers)
        assert engine.requests[0].params.max_new_tokens == 7
        wrong = httpx2.post(f"{server.url}/v1/responses", json={"model": "other", "input": "a"}, headers=headers)
        assert wrong.status_code == 404
