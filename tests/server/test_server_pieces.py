"""Answers of the server that are written while they are sampled, and requests that are equal."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai import OpenAI

from areno import SamplingParams
from areno.agents.trajectories import AgentItem
from areno.engine.decoder import decoder
from areno.server import app
from areno.server import response_bodies as answers
from areno.server.prompt_builder import PromptBuilder
from areno.server.requests import read_chat
from areno.server.returned_responses import message_digest
from areno.types import GenerationOutput, GenerationRequest
from tests.helpers.agent_model import made
from tests.helpers.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "hello world"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
]


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "policy", "messages": HELLO, **fields})


@pytest.mark.parametrize(
    "fields",
    [{"n": 3}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"stop": ["e"]}, {"max_tokens": 1}, {"tools": TOOLS}],
)
def test_an_answer_is_the_same_however_often_the_engine_tells_of_it(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch, fields: Any
) -> None:
    told: list[int] = []
    add = answers.TokenFieldWriter.add
    monkeypatch.setattr(answers.TokenFieldWriter, "add", lambda self, output: (told.append(1), add(self, output)))

    def body() -> str:
        text = client.chat.completions.with_raw_response.create(
            model="policy", messages=HELLO, seed=3, **{"max_tokens": 24, **fields}
        ).text
        return re.sub(r'"(id|created)":[^,]*,', "", text)

    body()  # so that both find the prompt in the cache
    told.clear()
    monkeypatch.setattr(decoder, "PIECE_STEPS", 1000)
    whole, n_whole = body(), len(told)
    monkeypatch.setattr(decoder, "PIECE_STEPS", 3)
    assert body() == whole
    assert n_whole == fields.get("n", 1)
    assert len(told) - n_whole > n_whole or fields.get("max_tokens") == 1
    found = json.loads(whole)
    outputs = [
        GenerationOutput(
            request_id=0,
            sample=0,
            tokens=choice["token_ids"],
            logprobs=choice["logprobs"],
            versions=choice["versions"],
            finish_reason=choice["finish_reason"],
        )
        for choice in found["areno"]["choices"]
    ]
    digests = [message_digest(choice["message"]) for choice in found["choices"]]
    assert answers.token_field({}, outputs, digests)["choices"] == found["areno"]["choices"]  # as streams tell it


def test_equal_requests_are_read_once_and_draw_for_themselves(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(app, "read_chat", lambda *given: read.append(read_chat(*given)) or read[-1])
    asked: list[Any] = [{"role": "user", "content": "once and again"}]
    first, second = (chat(client, messages=asked, max_tokens=20).areno for _ in range(2))
    assert len(read) == 1
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert first["choices"] != second["choices"]
    with pytest.raises(openai.BadRequestError):
        chat(client, messages=asked, max_tokens=0)
    assert chat(client, messages=asked, max_tokens=3).usage.completion_tokens <= 3
    monkeypatch.setattr(app, "SMALL_BODY", 10)
    chat(client, messages=asked, max_tokens=20)
    assert len(read) == 3


def test_the_turns_of_a_task_have_one_scope_of_drafts(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes: list[int | None] = []
    submit = decoder.Decoder.submit

    def seen(self: decoder.Decoder, request: GenerationRequest) -> None:
        scopes.append(request.draft_scope)
        submit(self, request)

    monkeypatch.setattr(decoder.Decoder, "submit", seen)
    task: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the first task"}]
    for more in ([], [*turn("a"), *turn("b")], turn("c"), turn("a")):
        chat(client, messages=[*task, *more], max_tokens=2)
    assert len(scopes) == 4
    assert {type(scope) for scope in scopes} == {int}
    assert len({*scopes}) == 1
    chat(client, messages=[task[0], {"role": "user", "content": "the second task"}], max_tokens=2)
    chat(client, messages=[{"role": "assistant", "content": "begins"}, *task], max_tokens=2)
    assert len({*scopes}) == 3


def turn(text: str) -> list[Any]:
    return [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


def test_prompts_of_agents_that_begin_are_made_before_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    with made() as trainer, trainer.rollout_session(sampling_params=SamplingParams(max_new_tokens=4)) as session:
        client = OpenAI(base_url=session.proxy.base_url, api_key=session.proxy.api_key, max_retries=0)
        conversations = session.proxy.server.chat.prompts
        rows: list[Any] = [[{"role": "system", "content": "be brief"}, *HELLO], [{"role": "tool"}], None]
        items = [
            AgentItem(f"text {number}", {}, [], number, sample, messages)
            for number, messages in enumerate(rows)
            for sample in range(2)
        ]
        session.proxy.prefetch(items)
        until(lambda: len(conversations.cache) >= 2)
        assert 6 in trainer.engine.batcher._announced.values()
        monkeypatch.setattr(conversations, "_render_draft", None)  # would be called for a prompt that is not there
        for messages in (rows[0], [{"role": "user", "content": "text 2"}]):
            told = chat(client, messages=messages).areno["prompt_token_ids"]
            assert told == PromptBuilder(conversations.tokenizer, conversations.parser).build_prompt(messages).tokens
