"""Whatever a client sends to the other APIs, the answer is no error of the server, and names what is wrong."""

from __future__ import annotations

import copy
import json
import logging
import random
from typing import Any

import httpx2
import pytest

from areno.server.sample_sessions import SampleSession
from tests.helpers.scripted_engine import scripted_server

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ANTHROPIC: Any = {
    "model": "policy",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image", "source": {"type": "url"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Well.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "a cat", "is_error": False}],
        },
        {"role": "system", "content": "Go on."},
    ],
    "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}, {"type": "web_search_20250305"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "temperature": 1,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high", "format": None},
    "metadata": {"user_id": "me"},
    "stream": False,
}
RESPONSES: Any = {
    "model": "policy",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "Hello."}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Well."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        {"role": "user", "content": "Go on."},
    ],
    "tools": [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "high", "summary": "auto"},
    "max_output_tokens": 9,
    "include": ["reasoning.encrypted_content"],
    "stream": False,
}
GENERATE: Any = {"model": "policy", "token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "logprobs": 1}}
BODIES = {"messages": ANTHROPIC, "messages/count_tokens": ANTHROPIC, "responses": RESPONSES, "generate": GENERATE}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2, 0.5, 2**31, 2**63, 2**70, 1e308),
    *("", "a", "user", "assistant", "tool", "text", "function", "\ud800", "\x00", "<|im_end|>", "\u00e9" * 3000),
    *([], [[]], [None], [1, "a"], ["a"] * 20, {}, {"a": 1}, {"type": "text"}, {"type": "function"}),
]


def mutated(body: Any, draw: random.Random) -> Any:
    """A copy with one to three values replaced, removed or doubled, anywhere."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        at = body
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            if not keys:
                break
            key = draw.choice(list(keys))
            if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.7:
                at = at[key]
                continue
            action = draw.random()
            if action < 0.2:
                del at[key]
            elif action < 0.3 and isinstance(at, list):
                at.append(copy.deepcopy(at[key]))
            else:
                at[key] = draw.choice(VALUES)
            break
    return body


@pytest.mark.parametrize("endpoint", BODIES)
def test_hostile_requests_are_no_errors_of_the_server(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    draw, path = random.Random(7), "inference/v1/generate" if endpoint == "generate" else f"v1/{endpoint}"
    with scripted_server(lambda prompt: "yes", tokenizer="tiny", context=2048) as (server, engine):
        session = SampleSession(max_requests=10_000, uses_run_sampling=endpoint != "generate", returns_tokens=False)
        address = server.open_sample(session)
        with httpx2.Client(timeout=20) as client, caplog.at_level(logging.ERROR):
            assert client.post(f"{address}/{path}", json=BODIES[endpoint]).status_code == 200
            statuses = []
            for number in range(500):
                body = json.dumps(mutated(BODIES[endpoint], draw)).encode()
                where, key = (address, "") if number % 2 else (server.url, "secret")
                answer = client.post(f"{where}/{path}", content=body, headers={"x-api-key": key} if key else {})
                statuses.append(answer.status_code)
                assert answer.status_code in (200, 400, 404), (body, answer.text)
                if answer.status_code != 200:
                    message = answer.json()["error"]["message"]
                    assert message
                    assert "\n" not in message
        assert engine.n_running == 0
    assert caplog.records == []
    assert 50 < statuses.count(200) < 450
