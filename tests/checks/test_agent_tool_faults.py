"""Faults of the tools of agents, through each API: found by name, and nothing in the agent whose tool works."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.checks.agent_tools import agent_tools
from areno.checks.inputs.findings import Finding
from areno.checks.inputs.scripted_endpoint import has_free_text, value_of
from tests.helpers import checked
from tests.helpers.checked import data_file, findings
from tests.helpers.checked_rows import QUESTIONS, chat_model

pytestmark = pytest.mark.slow

TOOL = """
import json
import time

FIELDS = {"type": "object", "required": ["a", "b"], "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOL = {"name": "multiply", "parameters": FIELDS}


def multiply(arguments):
    try:
        return RESULT
    except Exception as error:
        return f"error: {error!r}"
"""

CHAT = (
    TOOL
    + """
from openai import AsyncOpenAI


async def run_agent(ctx, batch):
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:
        for item in batch.iter_samples():
            messages = [{"role": "user", "content": item.prompt}]
            for _ in range(3):
                tools = [{"type": "function", "function": TOOL}]
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
                message = answer.choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    text = multiply(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                if not message.tool_calls:
                    break
"""
)

RESPONSES = (
    TOOL
    + """
from openai import AsyncOpenAI


async def run_agent(ctx, batch):
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0) as client:
        for item in batch.iter_samples():
            items = [{"role": "user", "content": item.prompt}]
            for _ in range(3):
                tools = [{"type": "function", **TOOL}]
                answer = await client.responses.create(model="policy", input=items, tools=tools, store=False)
                items += answer.output
                calls = [each for each in answer.output if each.type == "function_call"]
                for call in calls:
                    text = multiply(call.arguments)
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
                if not calls:
                    break
"""
)

ANTHROPIC = (
    TOOL
    + """
from anthropic import AsyncAnthropic


async def run_agent(ctx, batch):
    address = ctx.get_base_url().removesuffix("/v1")
    async with AsyncAnthropic(base_url=address, api_key=ctx.api_key, max_retries=0) as client:
        for item in batch.iter_samples():
            messages = [{"role": "user", "content": item.prompt}]
            for _ in range(3):
                tools = [{"name": "multiply", "input_schema": FIELDS}]
                async with client.messages.stream(
                    model="policy", max_tokens=64, messages=messages, tools=tools
                ) as stream:
                    answer = await stream.get_final_message()
                messages.append({"role": "assistant", "content": answer.content})
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [(call, multiply(json.dumps(call.input))) for call in calls]
                results = [{"type": "tool_result", "tool_use_id": call.id, "content": text} for call, text in results]
                messages.append({"role": "user", "content": results})
"""
)

PROGRAM = (
    TOOL
    + """
import sys
import urllib.request

prompt, url, key = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for _ in range(3):
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        text = multiply(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    if not message.get("tool_calls"):
        break
"""
)

RIGHT = "str(json.loads(arguments)['a'] * json.loads(arguments)['b'])"


@pytest.fixture
def found_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checked, "CHECKS", {"reward": [agent_tools]})

    def run(agent: str, *changes: tuple[str, str], settings: tuple[str, ...] = ()) -> Finding:
        for text, other in (*changes, ("RESULT", RIGHT)):
            assert text in agent or text == "RESULT"
            agent = agent.replace(text, other)
        file = tmp_path / "agent.py"
        file.write_text(agent, encoding="utf-8")
        how = f"agent.fn={file}"
        if "sys.argv" in agent:
            how = f"agent.command='python {file} {{prompt}} {{url}} {{key}}'"
        data = f"train_dataset.path={data_file(tmp_path / 'rows.jsonl', QUESTIONS)}"
        model = tmp_path / "model"
        files = [f"actor.path={model if model.exists() else chat_model(tmp_path)}", data, "reward.fn=math"]
        [found] = findings("gspo prompts", *files, how, "valid_dataset=null", *settings, only="reward")
        assert found.name == "agent-tools", found
        return found

    return run


@pytest.mark.parametrize("agent", [CHAT, RESPONSES, ANTHROPIC, PROGRAM])
def test_a_tool_that_never_works_is_found(agent, found_with):
    found = found_with(agent)
    assert found.verdict == "green"
    assert "each of 1 tools has a result: multiply" in found.line
    found = found_with(agent, ("RESULT", "str(arguments['a'] * arguments['b'])"))
    assert found.verdict == "red"
    assert "each call of `multiply` returned `error: TypeError(" in found.line


@pytest.mark.parametrize(
    ("agent", "changes", "said"),
    [
        (CHAT, [("RESULT", "''")], "each call of `multiply` returned nothing"),
        (CHAT, [("RESULT", "str(json.loads(arguments)['c'])")], "KeyError('c')"),
        (CHAT, [("RESULT", "(f'The product at {time.time_ns()} is one number. ' * 9)[:128]")], "as if it were cut"),
        (CHAT, [("RESULT", "json.dumps({'text': 'The product. ' * 9})[:90]")], "as if it were cut"),
        (CHAT, [('"role": "tool", "tool_call_id": call.id', '"role": "assistant"')], "as a message of the assistant"),
        (CHAT, [("messages.append({", "[].append({")], "never reaches the model"),
        (RESPONSES, [("items.append({", "[].append({")], "never reaches the model"),
        (ANTHROPIC, [('"content": results', '"content": "Go on."')], ""),
        (CHAT, [("messages=messages, tools=tools", "messages=messages")], "the file agent.py has tools (`multiply`)"),
        (CHAT, [("tools=tools)", 'tools=tools, tool_choice="none")')], "but tool_choice none"),
    ],
)
def test_a_result_that_is_lost_or_cut_is_found(agent, changes, said, found_with):
    found = found_with(agent, *changes)
    assert found.verdict == ("red" if said else "green"), found  # a text of the user may be the result
    assert said in found.line


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ("str(None)", "not checked"),  # a tool that sets something
        ("'[1] Title: Paris. The city is'", "green"),
        ("('The product of both is a number. ' * 9)[:100]", "green"),  # one text that has this length by chance
    ],
)
def test_results_that_may_be_right_are_not_red(result, verdict, found_with):
    assert found_with(CHAT, ("RESULT", result)).verdict == verdict


def test_trained_results_of_tools_are_found(found_with):
    found = found_with(CHAT, settings=("agent.train_tool_results=true", "agent.whole_batch=true"))
    assert found.verdict == "red"
    assert "agent.train_tool_results" in found.line


def test_tools_of_agents_that_end_with_a_call_are_not_checked(monkeypatch):
    monkeypatch.setattr(checked, "CHECKS", {"reward": [agent_tools]})
    [found] = findings("grpo tools", only="reward")
    assert (found.name, found.verdict) == ("agent-tools", "not checked")


def test_values_are_made_from_schemas():
    fields = {"a": {"type": "integer", "minimum": 5}, "b": {"enum": ["x", "y"]}, "c": {"type": ["string", "null"]}}
    fields |= {"d": {"type": "array", "items": {"type": "boolean"}}, "e": {"anyOf": [{"type": "number"}]}}
    schema = {"type": "object", "properties": {**fields, "f": {}}, "required": list(fields)}
    assert value_of(schema) == {"a": 5, "b": "x", "c": "1", "d": [True], "e": 6}
    assert has_free_text({"parameters": schema})
    assert not has_free_text({"parameters": {"properties": {"a": fields["a"], "b": fields["b"]}}})
    assert value_of({"properties": {"command": {"type": "string"}}}) == {"command": "echo 1"}
