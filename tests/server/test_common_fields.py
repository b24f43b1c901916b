"""Fields that clients of other servers send: each is done, or refused by name."""

from __future__ import annotations

import json
import zlib
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from openai import OpenAI

from areno.agents.proxy import SessionProxy
from areno.server.requests import read_chat
from areno.types import SamplingParams
from tests.helpers.conversations import USER

MOVE: Any = {"type": "function", "function": {"name": "move"}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("move", "stay", "jump")
]


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "policy", "messages": [USER], "max_tokens": 4, **fields})


def prompt_of(proxy: SessionProxy, client: OpenAI, **fields: Any) -> str:
    tokenizer = proxy.server.chat.prompts.tokenizer
    return tokenizer.decode(chat(client, **fields).areno["prompt_token_ids"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: value}, name) for name in ("stream_options", "chat_template_kwargs") for value in ("", [], 0, False)),
        ({"best_of": 2}, "best_of"),
        ({"response_format": {"type": "json_object", "schema": ""}}, "response_format.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        *(
            ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", **choice}}, f"tool_choice.allowed_tools{param}")
            for choice, param in (
                ({}, ""),
                ({"allowed_tools": []}, ""),
                ({"allowed_tools": {"tools": [MOVE]}}, ".mode"),
                ({"allowed_tools": {"mode": "none", "tools": [MOVE]}}, ".mode"),
                ({"allowed_tools": {"mode": "auto", "tools": []}}, ".tools"),
                ({"allowed_tools": {"mode": "auto", "tools": ["move"]}}, ".tools[0]"),
                ({"allowed_tools": {"mode": "auto", "tools": [MOVE, {"type": "custom"}]}}, ".tools[1].type"),
                (
                    {"allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]}},
                    ".tools[0].function.name",
                ),
            )
        ),
    ],
)
def test_what_is_wrong_is_named(proxy: SessionProxy, fields: dict[str, Any], param: str) -> None:
    for path, prompt in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "a"})):
        if path == "completions" and not fields.keys() <= {"stream_options", "best_of"}:
            continue
        body = json.dumps({"model": "policy", **prompt, **fields})
        answer = httpx2.post(
            f"{proxy.base_url}/{path}", content=body, headers={"Authorization": f"Bearer {proxy.api_key}"}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


# reasoning_effort

READS = "{{ 'effort ' ~ reasoning_effort if reasoning_effort is defined else 'none given' }}"
SWITCH = "{{ 'thinks' if enable_thinking is not defined or enable_thinking else 'answers' }}"


@pytest.mark.parametrize(
    ("template", "effort", "rendered"),
    [
        (READS, None, "none given"),
        (READS, "high", "effort high"),
        (READS, "none", "effort none"),
        (SWITCH, "none", "answers"),
        (SWITCH, None, "thinks"),
        (READS + SWITCH, "none", "none givenanswers"),
        (READS + SWITCH, "low", "effort lowthinks"),
        ("{# no reasoning_effort #}reasoning_effort", "low", None),
        ("{{ 'reasoning_effort enable_thinking' }}", "none", None),
        (SWITCH, "high", None),
        (READS, "most", None),
    ],
)
def test_the_effort_of_reasoning_is_the_templates(
    proxy: SessionProxy,
    client: OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    effort: str | None,
    rendered: str | None,
) -> None:
    content = f"hello {zlib.crc32(template.encode())}: "  # the prompts of other templates are cached
    own = "{% for message in messages %}{{ message.content }}{% endfor %}" + template
    monkeypatch.setattr(proxy.server.chat.prompts.tokenizer, "chat_template", own)
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    fields["messages"] = [{"role": "user", "content": content}]
    if rendered is None:
        with pytest.raises(openai.BadRequestError, match="reasoning_effort is") as caught:
            chat(client, **fields)
        assert caught.value.param == "reasoning_effort"
    else:
        assert prompt_of(proxy, client, **fields) == content + rendered


def test_the_effort_of_reasoning_beside_the_variables_of_the_template(proxy: SessionProxy, client: OpenAI) -> None:
    """The model's own template has enable_thinking."""
    off, on = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))
    expected = prompt_of(proxy, client, extra_body=off)
    assert expected != prompt_of(proxy, client)
    assert prompt_of(proxy, client, reasoning_effort="none") == expected
    assert prompt_of(proxy, client, reasoning_effort="none", extra_body=off) == expected
    with pytest.raises(openai.BadRequestError, match="is none, but chat_template_kwargs sets another enable_thinking"):
        chat(client, reasoning_effort="none", extra_body=on)


# tool_choice and response_format


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_the_allowed_tools_the_prompt_is_made(proxy: SessionProxy, client: OpenAI, mode: str) -> None:
    allowed = {"mode": mode, "tools": [MOVE, {"type": "function", "function": {"name": "jump"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = prompt_of(proxy, client, tools=TOOLS, tool_choice=choice)
    assert found == prompt_of(proxy, client, tools=[TOOLS[0], TOOLS[2]], tool_choice=mode)
    request = read_chat({"model": "a", "messages": [USER], "tools": TOOLS, "tool_choice": choice}, SamplingParams())
    assert ([tool["function"]["name"] for tool in request.tools], request.requires_call) == (
        ["move", "jump"],
        mode == "required",
    )
    assert request.named is None


def test_a_json_object_may_have_a_schema(proxy: SessionProxy, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(proxy.server.chat, "_is_training", False)  # as in the public server
    schema = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form: Any = {"type": "json_object", "schema": schema}
    for seed in range(4):
        answer = chat(
            client,
            response_format=form,
            max_tokens=40,
            seed=seed,
            reasoning_effort="none",
            extra_body={"ignore_eos": False},
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content), {"type": "object", **schema})


# best_of and echo


def test_best_of_n_may_be_n(client: OpenAI) -> None:
    how: Any = {"model": "policy", "prompt": "hello", "seed": 1, "max_tokens": 4}
    for n in (1, 3):
        found = client.completions.create(n=n, best_of=n, **how)
        assert [one.text for one in found.choices] == [
            one.text for one in client.completions.create(n=n, **how).choices
        ]


@pytest.mark.parametrize("prompt", ["hello world", ["hello", "w\u00f6rld"], [[64, 65, 66]], [[0xC3 - 3, 64]]])
@pytest.mark.parametrize(
    "more", [{}, {"n": 2}, {"logprobs": 2}, {"logprobs": 0, "n": 2}, {"logprobs": 1, "max_tokens": 0}]
)
def test_a_stream_with_echo_is_the_whole_answer_in_pieces(client: OpenAI, prompt: Any, more: dict[str, Any]) -> None:
    fields: Any = {"model": "policy", "prompt": prompt, "echo": True, "seed": 3, "max_tokens": 12, **more}
    whole = client.completions.create(**fields).choices
    texts, reasons = [""] * len(whole), [None] * len(whole)
    lists: list[dict[str, list[Any]]] = [{} for _ in whole]
    for chunk in client.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                lists[choice.index].setdefault(name, []).extend(values or [])
    assert texts == [choice.text for choice in whole]
    assert reasons == [choice.finish_reason for choice in whole]
    for choice, found in zip(whole, lists, strict=True):
        expected = choice.logprobs.model_dump() if choice.logprobs else {}
        for name in ("tokens", "text_offset"):
            assert found.get(name) == expected.get(name)
        assert found.get("token_logprobs", []) == pytest.approx(expected.get("token_logprobs", []), nan_ok=True)
