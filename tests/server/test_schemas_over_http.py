"""Schemas that the real client of OpenAI sends: enforced, enforced in part with a warning, or refused with a reason."""

from __future__ import annotations

import contextlib
import logging
from typing import Annotated, Any

import pytest
from openai import BadRequestError, LengthFinishReasonError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from areno.agents.proxy import SessionProxy

pytest.importorskip("llguidance")

HELLO: Any = [{"role": "user", "content": "hello"}]
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}}}
HOW: Any = {"model": "policy", "messages": HELLO, "max_tokens": 300, "temperature": 2.0}
HOW["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}


class Price(BaseModel):
    amount: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    value: Annotated[float, Field(ge=0, lt=10)]
    is_low: bool


class Node(BaseModel):
    is_leaf: bool
    child: Node | None


@pytest.fixture(autouse=True)
def enforced(proxy: SessionProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.server.chat, "_is_training", False)  # as in the public server


@pytest.mark.slow
def test_models_of_pydantic_come_back(client: OpenAI) -> None:
    found: list[Any] = []
    for seed in range(6):
        with contextlib.suppress(LengthFinishReasonError):
            answer = client.chat.completions.parse(response_format=Price, seed=seed, **HOW)
            found.append(answer.choices[0].message.parsed)
            called = client.chat.completions.parse(
                tools=[pydantic_function_tool(Node)],
                tool_choice="required",
                parallel_tool_calls=False,
                seed=seed,
                **HOW,
            )
            [call] = called.choices[0].message.tool_calls or ()
            found.append(call.function.parsed_arguments)
    assert {type(each) for each in found} == {Price, Node}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}, "auto"])
def test_a_tool_that_is_enforced_in_part(client: OpenAI, choice: Any, caplog: pytest.LogCaptureFixture) -> None:
    kind = str(choice)[:4]
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {**UNIQUE, "title": f"over HTTP {kind}"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "boolean"}}}
    how = {
        **HOW,
        "max_tokens": 1,
        "tools": [tool],
        "tool_choice": choice,
        **({"response_format": form} if choice == "auto" else {}),
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert client.chat.completions.create(**how).choices[0].finish_reason == "length"
    assert caplog.text.count("the schema of f is enforced without uniqueItems") == 1
    tool["function"]["strict"] = True
    with pytest.raises(BadRequestError, match="uniqueItems: a grammar cannot enforce it"):
        client.chat.completions.create(**how)
