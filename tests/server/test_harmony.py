"""The harmony format of gpt-oss: its answers as messages, and conversations that continue the sampled tokens.

The cases follow https://github.com/openai/harmony/blob/main/docs/format.md. Where the packages `openai-harmony` and
`bpe-openai` are installed, the former reads the same texts (tokens of the latter, since both are offline).
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from areno.agents.trajectories import LossMaskPolicy
from areno.agents.turns_to_rows import RowBuilder
from areno.data.turn_ends import stop_token_ids
from areno.errors import DataError
from areno.server.messages import read_messages
from areno.server.output_grammars import Constraint, compile_grammar, reasoning_after
from areno.server.parsers import PARSERS, ParsedMessage, ToolCall, join_deltas, parser_for_template
from areno.server.prompt_builder import PromptBuilder
from tests.helpers.encoded_rows import prompt_item, sft_item
from tests.helpers.grammars import allowed, response_format
from tests.helpers.scripted_engine import scripted_server
from tests.helpers.tokenizers import load_tokenizer, trl_templates

HARMONY = PARSERS["harmony"]
CONTROL = [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")]
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PLAN = "<|channel|>commentary<|message|>"
WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
SUNNY = '{"location":"San Francisco"}'
PARAMETERS = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}
]


def parsed(content: str | None = None, reasoning: str | None = None, *calls: str) -> ParsedMessage:
    """A message whose calls are of get_weather, with these arguments."""
    made = [ToolCall(f"call_m_{number}", "get_weather", arguments) for number, arguments in enumerate(calls)]
    return ParsedMessage(content, reasoning, made)


SF = '{"location": "San Francisco"}'
CASES = {
    # The examples of the format's page.
    f"{THOUGHT}Simple arithmetic.{NEXT}{FINAL}2 + 2 = 4.": parsed("2 + 2 = 4.", "Simple arithmetic."),
    f"{THOUGHT}Use get_weather.{NEXT}{WEATHER}{SUNNY}<|call|>": parsed(None, "Use get_weather.", SF),
    f"{THOUGHT}Long.{NEXT}{PLAN}**Plan**:\n1. Look{NEXT}{WEATHER}{SUNNY}<|call|>": parsed(
        "**Plan**:\n1. Look", "Long.", SF
    ),
    # The recipient in the role, as the chat template writes it, and headers that models write otherwise.
    f" to=functions.get_weather<|channel|>commentary json<|message|>{SUNNY}<|call|>": parsed(None, None, SF),
    f"{THOUGHT}Hm.{NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{SUNNY}": parsed(None, "Hm.", SF),
    f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{SUNNY}": parsed(None, None, SF),
    f"<|channel|>analysis to=functions.get_weather code<|message|>{SUNNY}": parsed(None, None, SF),
    f"<|channel|>commentary to=get_weather<|message|>{SUNNY}": parsed(None, None, SF),
    "<|channel|>final <|constrain|>json<|message|>[1]": parsed("[1]"),
    "<|message|>No channel.": parsed("No channel."),
    # Several messages of a channel, several calls.
    f"{THOUGHT}One.{NEXT}{THOUGHT}Two.{NEXT}{PLAN}A{NEXT}{FINAL}B<|return|>": parsed("A\n\nB", "One.\n\nTwo."),
    f"{WEATHER}{SUNNY}<|call|><|start|>assistant{WEATHER}{{}}<|call|>": parsed(None, None, SF, "{}"),
    f"{WEATHER}{SUNNY}<|call|><|start|>assistant{FINAL}Done.": parsed("Done.", None, SF),
    # White space and text that looks like control tokens are part of a text.
    f"{FINAL}\n a <|en \n": parsed("\n a <|en \n"),
    f"{FINAL}Write <|message|> or <|start|>.": parsed("Write <|message|> or <|start|>."),
    f"{THOUGHT}{NEXT}{FINAL}": parsed(""),
    "": parsed(""),
}
# What the reference refuses, or reads as a message of another role or channel. Nothing of it is lost.
ODD = {
    "Plain text, <|channel|> or not.": parsed("Plain text, <|channel|> or not."),
    f"{FINAL}a<|end|>b": parsed("a<|end|>b"),
    f"{FINAL}a<|end|><|start|>user<|message|>b": parsed("a<|end|><|start|>user<|message|>b"),
    "<|channel|>thoughts<|message|>a": parsed("<|channel|>thoughts<|message|>a"),
    "<|channel|>analysis<|channel|>final<|message|>a": parsed("<|channel|>analysis<|channel|>final<|message|>a"),
    "<|channel|>final and more words<|message|>a": parsed("<|channel|>final and more words<|message|>a"),
    f"{THOUGHT}a{NEXT}<|channel|>fin": parsed("<|channel|>fin", "a"),
    f"{THOUGHT}a{NEXT[:-4]}": parsed(None, "a"),
    f"{THOUGHT}a{NEXT}": parsed(None, "a"),
    f"{WEATHER}{SUNNY}<|call|>commentary": parsed("commentary", None, SF),
    f"{WEATHER}{SUNNY}<|start|>assistant{FINAL}a": parsed("a", None, SF),  # the server hides <|call|>
    "<|channel|>commentary to=python<|message|>print(1)": parsed("<|channel|>commentary to=python<|message|>print(1)"),
    **{
        f"{THOUGHT}Hm.{NEXT}{WEATHER}{bad}<|call|>": parsed(f"{WEATHER}{bad}", "Hm.")
        for bad in ("", SUNNY[:-1], "[1]", '{"a": NaN}', "{'a': 1}", f"{SUNNY} and more", '{"a": "b\nc"}')
    },
    f"<|channel|>commentary to=functions.<|message|>{SUNNY}": parsed(
        f"<|channel|>commentary to=functions.<|message|>{SUNNY}"
    ),
}


def in_pieces(pieces: list[str], **how: Any) -> ParsedMessage:
    stream = HARMONY.stream(**how)
    deltas = [delta for piece in pieces for delta in stream.feed(piece)]
    for delta in deltas:
        assert [delta.content, delta.reasoning_content, delta.tool_call].count(None) == 2
    return join_deltas(deltas + stream.finish())


@pytest.mark.parametrize("text", [*CASES, *ODD])
def test_answers_are_read_however_they_are_cut(text: str) -> None:
    expected = (CASES | ODD)[text]
    assert HARMONY.parse(text, TOOLS, message_id="m") == expected
    assert HARMONY.parse(text, message_id="m") == HARMONY.parse(f"<|start|>assistant{text}", message_id="m") == expected
    for cut in range(len(text) + 1):
        assert in_pieces([text[:cut], text[cut:]], tools=TOOLS, message_id="m") == expected
        cut_off = HARMONY.parse(text[:cut], TOOLS, message_id="m")
        assert in_pieces(list(text[:cut]), tools=TOOLS, message_id="m") == cut_off
        if text in CASES:
            assert expected.tool_calls[: len(cut_off.tool_calls)] == cut_off.tool_calls
            thoughts = (cut_off.reasoning_content or "").partition("<")[0]  # a control token that is cut, is text
            assert (expected.reasoning_content or "").startswith(thoughts)


def test_texts_stream_as_they_arrive() -> None:
    stream = HARMONY.stream(TOOLS)
    pieces = ["<|channel|>", "analysis", "<|message|>", "Let", " me", "<|end|>", "<|start|>", "assistant"]
    pieces += ["<|channel|>", "final", "<|message|>", "A", "B"]
    told = [[delta.reasoning_content or delta.content for delta in stream.feed(piece)] for piece in pieces]
    assert told == [[], [], [], ["Let"], [" me"], *[[]] * 6, ["A"], ["B"]]


def test_without_tools_calls_are_text_and_without_a_reasoning_parser_analysis_is() -> None:
    text = f"{THOUGHT}Hm.{NEXT}{WEATHER}{SUNNY}"
    assert HARMONY.parse(text, []) == ParsedMessage(f"{WEATHER}{SUNNY}", "Hm.")
    plain = type(HARMONY)()
    plain.reads_reasoning = False
    assert plain.parse(text, TOOLS, message_id="m") == parsed("Hm.", None, SF)


def test_random_texts_lose_no_words() -> None:
    rng = random.Random(61)
    pieces = [*CONTROL, " to=functions.f", " to=", "analysis", "final", "commentary", " json", "assistant", '{"a": 1}']
    pieces += ["\n", " ", "<|", "{", THOUGHT, FINAL, PLAN, WEATHER, *CONTROL]
    pieces += [NEXT, NEXT, f"{NEXT}{WEATHER}{SUNNY}", f"{WEATHER}{SUNNY}<|call|><|start|>assistant"] * 2
    n_calls = 0
    for _ in range(4_000):
        parts = [rng.choice([*pieces, f"w{n}w"]) for n in range(rng.randrange(14))]
        text, how = "".join(parts), {"tools": rng.choice([None, TOOLS, []]), "message_id": "m"}
        whole = HARMONY.parse(text, **how)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(5)))
        split = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert in_pieces(split, **how) == whole, text
        assert HARMONY.first_call_index(text) <= len(text)
        n_calls += len(whole.tool_calls)
        shown = (
            f"{whole.content} {whole.reasoning_content} {[(call.name, call.arguments) for call in whole.tool_calls]}"
        )
        heads = [head.rpartition("<|start|>")[2] for head in text.split("<|message|>")[:-1]]  # may hold a type
        for word in (part for part in parts if part[:1] == "w"):
            assert word in shown or any(word in head for head in heads), text
    assert n_calls > 100


@pytest.mark.slow
def test_the_reference_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harmony, vocabulary = pytest.importorskip("openai_harmony"), pytest.importorskip("bpe_openai")
    encoding = vocabulary.get_encoding("o200k_base")
    lines = [base64.b64encode(encoding.decode_bytes([token])) + b" %d\n" % token for token in range(199_998)]
    (tmp_path / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    reference = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    ends = {reference.encode(text, allowed_special="all")[0] for text in ("<|call|>", "<|return|>")}
    assert set(reference.stop_tokens_for_assistant_actions()) == ends
    for text, expected in CASES.items():
        tokens = reference.encode(text, allowed_special="all")
        messages = reference.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT) if text else []
        texts: dict[str, list[str]] = {"analysis": [], "final": []}
        calls = []
        for message in messages:
            body = "".join(each.text for each in message.content)
            if (recipient := message.recipient) and not recipient.startswith("<|constrain|>"):
                calls.append((recipient.removeprefix("functions."), json.loads(body)))
            elif body:
                texts["analysis" if message.channel == "analysis" else "final"].append(body)
        found = [(call.name, json.loads(call.arguments)) for call in expected.tool_calls]
        assert calls == found, text
        assert "\n\n".join(texts["final"]) == (expected.content or ""), text
        assert "\n\n".join(texts["analysis"]) == (expected.reasoning_content or ""), text


# The chat template ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt_oss() -> Any:
    """A small vocabulary with the control tokens, the chat template and the end tokens of gpt-oss."""
    if "gptoss" not in trl_templates():
        pytest.skip("trl ships no template gptoss")
    tokenizer = load_tokenizer("tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
    tokenizer.eos_token, tokenizer.chat_template = "<|return|>", trl_templates()["gptoss"]
    return tokenizer


ASKED: list[Any] = [{"role": "user", "content": "Weather?"}]
CALL = {"id": "call_m_0", "type": "function", "function": {"name": "get_weather", "arguments": SF}}
RESULT = {"role": "tool", "tool_call_id": "call_m_0", "content": '{"sunny": true}'}


def sampled(prompts: PromptBuilder, messages: list[Any], said: str) -> tuple[list[int], dict[str, Any]]:
    """(tokens of prompt and answer, message that a client sends back) of a turn whose model says this."""
    tokenizer = prompts.tokenizer
    prompt, tokens = prompts.build_prompt(read_messages(messages), TOOLS), tokenizer.encode(said)
    ends = frozenset(stop_token_ids(tokenizer))
    shown = tokenizer.decode([token for token in tokens if token not in ends])
    found = prompts.parser.parse(shown, TOOLS, message_id="m")
    answer: dict[str, Any] = {"role": "assistant", "content": found.content}
    answer |= {"reasoning_content": found.reasoning_content} if found.reasoning_content else {}
    calls = [{"id": one.id, "function": {"name": one.name, "arguments": one.arguments}} for one in found.tool_calls]
    answer |= {"tool_calls": calls} if calls else {}
    [kept] = read_messages([answer])
    prompts.cache_turn(prompt, tokens, ends, kept, ends)
    return prompt.tokens + tokens, answer


def test_a_turn_ends_at_call_and_return_alone(gpt_oss: Any) -> None:
    assert parser_for_template(gpt_oss.chat_template) is HARMONY
    assert gpt_oss.convert_ids_to_tokens(sorted(stop_token_ids(gpt_oss))) in (
        ["<|call|>", "<|return|>"],
        ["<|im_end|>", "<|call|>", "<|return|>"],
    )


@pytest.mark.parametrize("thoughts", ["", f"{THOUGHT}Hm.{NEXT}", f"{THOUGHT}Hm.{NEXT}{THOUGHT}So.{NEXT}"])
@pytest.mark.parametrize("plan", ["", f"{PLAN}I look.{NEXT}"])
def test_the_prompt_after_a_call_continues_the_sampled_tokens(gpt_oss: Any, thoughts: str, plan: str) -> None:
    prompts = PromptBuilder(gpt_oss, HARMONY)
    told, answer = sampled(prompts, ASKED, f"{thoughts}{plan}{WEATHER}{SUNNY}<|call|>")
    assert answer["tool_calls"][0]["function"]["arguments"] == SF
    after = prompts.build_prompt(read_messages([*ASKED, answer, RESULT]), TOOLS)
    assert after.tokens[: len(told)] == told
    written = '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"{\\"sunny\\": true}"<|end|>'
    assert gpt_oss.decode(after.tokens[len(told) :]) == f"{written}<|start|>assistant"
    # Another server, which has not sampled it, renders the same words.
    other = PromptBuilder(gpt_oss, HARMONY).build_prompt(read_messages([*ASKED, answer, RESULT]), TOOLS)
    assert other.text == after.text
    for part in (answer["content"], answer.get("reasoning_content")):
        assert (part or "") in other.text


def test_an_answer_begins_a_new_trajectory_because_its_thoughts_are_dropped(gpt_oss: Any) -> None:
    prompts = PromptBuilder(gpt_oss, HARMONY)
    told, answer = sampled(prompts, ASKED, f"{THOUGHT}Hm.{NEXT}{FINAL}Sunny.<|return|>")
    assert answer == {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm."}
    after = prompts.build_prompt(read_messages([*ASKED, answer, *ASKED]), TOOLS)
    assert after.tokens == gpt_oss.encode(after.text)
    assert f"assistant{FINAL}Sunny.<|end|>" in after.text
    assert "Hm." not in after.text
    row = sft_item(gpt_oss, {"messages": [*ASKED, answer], "tools": TOOLS}).rows[0]
    assert np.asarray(row.tokens).tolist() == told  # what is trained in a row is what a model samples


def test_a_row_is_trained_as_a_model_samples_it(gpt_oss: Any) -> None:
    """Thoughts before a call are kept until the answer. What is said beside both is a part of them."""
    call = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    talk = [*ASKED, call, RESULT, {"role": "assistant", "content": "Sunny."}]
    [row] = sft_item(gpt_oss, {"messages": talk, "tools": TOOLS}).rows
    assert row.prompt_mask is not None
    trained = ~np.asarray(row.prompt_mask)
    words = gpt_oss.decode(np.asarray(row.tokens)[trained])
    header = " to=functions.get_weather<|channel|>commentary json<|message|>"
    assert words == f"{THOUGHT}Hm.\n\nI look.{NEXT}{header}{SF}<|call|>{FINAL}Sunny.<|return|>"
    prompt = PromptBuilder(gpt_oss, HARMONY).build_prompt(read_messages(talk[:3]), TOOLS).tokens
    assert np.asarray(row.tokens)[: len(prompt)].tolist() == prompt


def test_the_training_mask_finds_the_call_in_an_answer(gpt_oss: Any) -> None:
    rows = RowBuilder(PromptBuilder(gpt_oss, HARMONY), LossMaskPolicy(), len(gpt_oss), "s")
    before = f"{THOUGHT}Hm.{NEXT}{PLAN}I look.<|end|>"
    tokens = gpt_oss.encode(f"{before}<|start|>assistant{WEATHER}{SUNNY}<|call|>")
    assert rows._tool_call_start(tokens) == len(gpt_oss.encode(before))
    assert rows._tool_call_start(gpt_oss.encode(f"{WEATHER}{SUNNY}<|call|>")) == 0
    words = gpt_oss.encode(f"{THOUGHT}Hm.{NEXT}{FINAL}No.<|return|>")
    assert rows._tool_call_start(words) == len(words)


def test_several_calls_of_a_message_are_all_written(gpt_oss: Any) -> None:
    other = {"id": "b", "type": "function", "function": {"name": "now", "arguments": {}}}
    talk = [*ASKED, {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, other]}]
    talk += [{"role": "tool", "tool_call_id": "b", "content": "noon"}, RESULT]
    text = PromptBuilder(gpt_oss, HARMONY).build_prompt(read_messages(talk), TOOLS).text
    words = ["Hm.", "to=functions.get_weather", "functions.get_weather to=assistant", "sunny", "to=functions.now"]
    words += ["functions.now to=assistant", "noon"]
    places = [text.index(word, text.index("Weather?")) for word in words]
    assert places == sorted(places)
    assert text.count("Hm.") == 1
    item = prompt_item(gpt_oss, {"prompt": talk, "tools": TOOLS}, 0)
    assert gpt_oss.decode(item.tokens) == text
    # Data often has no ids. Results then come in the order of the calls.
    called = [{key: each[key] for key in ("type", "function")} for each in (CALL, other)]
    results = [{"role": "tool", "content": content} for content in (RESULT["content"], "noon")]
    bare = [*ASKED, {"role": "assistant", "content": "Hm.", "tool_calls": called}, *results]
    assert gpt_oss.decode(prompt_item(gpt_oss, {"prompt": bare, "tools": TOOLS}, 0).tokens) == text
    wrong = [*ASKED, {"role": "assistant", "content": "", "tool_calls": ["now", "later"]}]
    with pytest.raises(DataError):
        prompt_item(gpt_oss, {"prompt": wrong, "tools": TOOLS}, 0)
    answered = {"messages": [*talk, {"role": "assistant", "content": "Sunny."}], "tools": TOOLS}
    with pytest.raises(DataError, match=r"leaves out a part of messages\[1\].tool_calls\[1\]"):
        sft_item(gpt_oss, answered)
    answered["messages"][1] = {**talk[1], "weight": 0}
    with pytest.raises(DataError, match=r"writes only the first tool call of messages\[1\]; give each call a message"):
        sft_item(gpt_oss, answered)


@pytest.mark.parametrize(("asked", "kind"), [({"requires_call": True}, "call"), ({}, "content"), ({}, "either")])
def test_grammars_write_the_format(gpt_oss: Any, asked: dict[str, Any], kind: str) -> None:
    pytest.importorskip("llguidance")
    if kind != "call":
        asked = {"response_format": response_format({"enum": ["A", 1]})}
    tools = [] if kind == "content" else TOOLS
    reasoning = reasoning_after("<|start|>assistant", gpt_oss.chat_template)
    how: dict[str, Any] = {"parser": HARMONY, "tools": tools, "reasoning": reasoning, **asked}
    grammar = compile_grammar(Constraint(**how), gpt_oss, len(gpt_oss), stop_token_ids(gpt_oss))
    assert grammar is not None

    def accepts(text: str) -> bool:
        state = grammar.start()
        for token in gpt_oss.encode(text):
            if token not in allowed(state.allowed_token_mask()):
                return False
            state.accept(token)
        return state.finished

    for thought in ("", f"{THOUGHT}Hm. {{}} {NEXT}"):
        for arguments in (SUNNY, SF):
            assert accepts(f"{thought}{WEATHER}{arguments}<|call|>") == (kind != "content")
        assert accepts(f'{thought}{FINAL}"A"<|return|>') == (kind != "call")
    assert not accepts(f"{WEATHER}{{}}<|call|>")
    assert not accepts(f"{FINAL}B<|return|>")
    assert not accepts(f"{SUNNY}<|return|>")


def test_the_server_answers_in_channels_and_takes_the_effort(gpt_oss: Any) -> None:
    def say(prompt: str) -> str:
        if "Reasoning: high" in prompt:
            return f"{THOUGHT}Much.{NEXT}{FINAL}Done.<|return|>"
        return f"{THOUGHT}Hm.{NEXT}{PLAN}I look.{NEXT}{WEATHER}{SUNNY}<|call|>"

    with scripted_server(say, tokenizer=gpt_oss, session=None) as (server, engine):
        client = OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        fields: Any = {"model": "policy", "messages": ASKED, "tools": TOOLS}
        whole: Any = client.chat.completions.create(**fields).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look.")
        assert whole.message.reasoning_content == "Hm."
        assert [call.function.arguments for call in whole.message.tool_calls] == [SF]
        told = engine.requests[0].prompt + gpt_oss.encode(say(""))
        result = {**RESULT, "tool_call_id": whole.message.tool_calls[0].id}
        client.chat.completions.create(**{**fields, "messages": [*ASKED, whole.message, result]})
        assert engine.requests[1].prompt[: len(told)] == told
        deltas: list[Any] = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **fields)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        assert [call.function.name for delta in deltas for call in delta.tool_calls or []] == ["get_weather"]
        hard: Any = client.chat.completions.create(reasoning_effort="high", **fields).choices[0]
        assert (hard.finish_reason, hard.message.content) == ("stop", "Done.")
