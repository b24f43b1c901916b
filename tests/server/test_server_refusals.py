"""What the server refuses: with the status 400, at once, and in the words of the request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from areno import SamplingParams
from areno.agents.proxy import SessionProxy
from areno.errors import ConfigError
from tests.helpers.agent_model import VOCAB, made

OF_OTHERS = re.compile(
    r"gconfig|SamplingParams|rollout\.|actor\.|tokenizer_path|max_new|min_new|max_context|top_logprobs|request \d"
)
"""Words that are ours, not those of a request to /v1/completions."""
HELLO = [{"role": "user", "content": "hello world"}]
OBJECT = {"type": "json_object"}


@pytest.fixture(scope="module")
def proxy() -> Iterator[SessionProxy]:
    with (
        made() as trainer,
        trainer.rollout_session(sampling_params=SamplingParams(max_new_tokens=4), max_running_prompts=4) as session,
    ):
        yield session.proxy


def refused(proxy: SessionProxy, path: str, **fields: Any) -> tuple[str, str]:
    """The field and the message of the error."""
    body = json.dumps({"model": "policy", **fields})
    headers = {"Authorization": f"Bearer {proxy.api_key}"}
    answer = httpx2.post(f"{proxy.base_url}/{path}", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert not OF_OTHERS.search(error["message"])
    assert proxy.server.sampler.n_samples == 0
    return error["param"], error["message"]


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [2**70], [5, -(2**70)], [1.5], ["5"], [True], [[5]], [None]])
@pytest.mark.parametrize("more", [{}, {"min_tokens": 2}])
def test_stop_token_ids_that_the_model_does_not_have(proxy: SessionProxy, ids: list[Any], more: Any) -> None:
    for path, fields in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
        param, message = refused(proxy, path, stop_token_ids=ids, **fields, **more)
        assert param == "stop_token_ids"
        assert "tokens=" not in message


@pytest.mark.parametrize("token", ["-1", str(VOCAB), str(2**70), "1.0", "", "x", "٣"])
def test_logit_bias_of_tokens_that_the_model_does_not_have(proxy: SessionProxy, token: str) -> None:
    for path, fields in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
        assert refused(proxy, path, logit_bias={"5": 1, token: 1}, **fields)[0] == "logit_bias"


def test_a_script_is_refused_the_same_tokens(proxy: SessionProxy) -> None:
    with made() as trainer:
        for ids, message in (
            ([5, VOCAB], "holds 389; the vocabulary has 389 tokens"),
            ([-1], "token ids are at least"),
        ):
            params = SamplingParams(stop_token_ids=ids)
            with pytest.raises(ConfigError, match=f"SamplingParams.stop_token_ids: .*{message}"):
                trainer.rollout_session(sampling_params=params)
            with (
                trainer.rollout_session(sampling_params=SamplingParams(), proxy=False),
                pytest.raises(ConfigError, match=f"SamplingParams.stop_token_ids: .*{message}"),
            ):
                trainer.rollout_token_batch([[5]], 1, params)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": [65] * 3000}, "prompt", "more than 2047 tokens, which leaves no room .*; shorten the prompt$"),
        ({"prompt": ["a", [65] * 2048]}, "prompt", "more than 2047 tokens, which leaves no room"),
        ({"prompt": ""}, "prompt", "the prompt has no tokens"),
        ({"prompt": [5, VOCAB]}, "prompt", f"prompt holds the token id {VOCAB}; the model's vocabulary is 0..388"),
        ({"stop": "\ud800"}, "stop", "stop holds .* half of a surrogate pair"),
        ({"stop": ["a", "b\udfff"]}, "stop", "half of a surrogate pair"),
        ({"stop": [""]}, "stop", "a string or a list"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9, more than max_tokens=8"),
        (
            {"prompt": ["a"] * 1024, "n": 128},
            "n",
            "asks for 131072 samples, and at most 65536 .*; lower n or send fewer",
        ),
    ],
)
def test_errors_speak_of_the_request(proxy: SessionProxy, fields: Any, param: str, message: str) -> None:
    found, said = refused(proxy, "completions", **{"prompt": "a", **fields})
    assert found == param
    assert re.search(message, said), said


def test_errors_of_a_chat_speak_of_its_messages(proxy: SessionProxy) -> None:
    long = [*HELLO, {"role": "assistant", "content": "a"}, {"role": "user", "content": "word " * 3000}]
    param, message = refused(proxy, "chat/completions", messages=long)
    assert param == "messages"
    assert re.search(r"; shorten the prompt \(messages=3 assistant_turns=1 tool_results=0\)$", message)


@pytest.mark.parametrize("name", ["self", "tools", "tokenize"])
def test_arguments_of_the_template_that_are_the_servers(proxy: SessionProxy, name: str) -> None:
    said = refused(proxy, "chat/completions", messages=HELLO, chat_template_kwargs={name: "a", "other": 1})
    expected = f"chat_template_kwargs may not set {name}; it holds extra variables of the chat template"
    assert said == ("chat_template_kwargs", expected)


def test_what_the_cache_has_no_room_for(proxy: SessionProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = proxy.server.sampler
    monkeypatch.setattr(sampler, "request_limits", replace(sampler.request_limits, kv_tokens=64, vocab_size=12))
    for path, fields in (("completions", {"prompt": [5]}), ("chat/completions", {"messages": HELLO})):
        param, message = refused(proxy, path, max_tokens=500, **fields)
        assert param == "max_tokens"
        assert re.search(
            r"500 new ones does not fit .* of 64 tokens .*; shorten the prompt or lower max_tokens", message
        )
    assert "asks for 13 top log-probabilities" in refused(proxy, "completions", prompt=[5], logprobs=13)[1]


def test_a_shortest_length_beside_a_grammar(proxy: SessionProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(proxy.server.chat, "_is_training", False)  # as in the public server
    param, message = refused(proxy, "chat/completions", messages=HELLO, response_format=OBJECT, min_tokens=2)
    assert param == "min_tokens"
    assert message.endswith("its grammar decides when a completion ends; leave min_tokens out")
