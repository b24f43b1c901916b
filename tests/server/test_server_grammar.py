"""Answers in JSON of a schema over HTTP, from random weights: whole and streamed, beside answers in free text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI

from areno import SamplingParams
from tests.helpers.agent_model import made
from tests.helpers.grammars import response_format, schemas

pytest.importorskip("llguidance")


@pytest.mark.slow
def test_fifty_schemas_of_growing_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list(schemas())

    async def answer(client: AsyncOpenAI, number: int, schema: Any) -> tuple[str, str]:
        how: Any = {
            "model": "policy",
            "messages": [{"role": "user", "content": "hello"}],
            "seed": number,
            "temperature": 2.0,
            "max_tokens": 300,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        }
        if schema is not None:
            how["response_format"] = response_format(schema)
        if number % 2:
            whole = await client.chat.completions.create(**how)
            return whole.choices[0].finish_reason, whole.choices[0].message.content or ""
        text, reason = "", ""
        async for chunk in await client.chat.completions.create(stream=True, **how):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return reason, text

    async def all_of_them(proxy: Any) -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=proxy.base_url, api_key=proxy.api_key, max_retries=0) as client:
            beside = [None] * 10
            return await asyncio.gather(*(answer(client, *one) for one in enumerate([*asked, *beside])))

    params = SamplingParams(max_new_tokens=300)
    with made() as trainer, trainer.rollout_session(sampling_params=params, max_running_prompts=16) as session:
        monkeypatch.setattr(session.proxy.server.chat, "_is_training", False)  # as in the public server
        found = asyncio.run(all_of_them(session.proxy))[: len(asked)]
    finished = [(text, schema) for (reason, text), schema in zip(found, asked, strict=True) if reason == "stop"]
    for text, schema in finished:
        jsonschema.validate(json.loads(text), schema)
    assert len(finished) > 25
    assert {reason for reason, _ in found} <= {"stop", "length"}
