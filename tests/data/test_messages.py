"""Messages in the form of the chat template: roles, parts, tool calls and weights, in training as on the server."""

from __future__ import annotations

import json

import pytest

from areno.config.datasets import DatasetConfig
from areno.data.chat_template import render
from areno.data.messages import decoded_arguments, template_messages
from areno.data.row_schema import VARIABLES
from areno.data.sources import prepare_script_rows
from areno.data.template_omissions import check_rendered
from areno.errors import DataError
from areno.server.messages import read_messages
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import PromptBuilder
from tests.helpers.encoded_rows import prompt_item, sft_item, sft_sequence
from tests.helpers.row_loaders import row_loader
from tests.helpers.tokenizers import load_tokenizer, plain_values, trl_templates

ARGUMENTS = {"city": "Zürich", "days": [1, 2], "deep": {"x": None}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, **trl_templates()}
pytestmark = pytest.mark.skipif(not trl_templates(), reason="trl is not installed; it is in the dev extra")
PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": " two"}]


def tokenizer_with(name):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def served(tokenizer, messages, tools=None, template=None):
    conversations = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))
    return conversations.build_prompt(read_messages(messages), tools, template).text


def called(arguments, content=""):
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [user("Hot?"), assistant(content, tool_calls=[call])]


ANSWERED = [{"role": "tool", "tool_call_id": "call00000", "name": "weather", "content": "20"}]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "qwen3_5_think", "glm4moe", "deepseekv3", "gptoss"])
def test_arguments_as_text_are_those_as_objects(name):
    tokenizer = tokenizer_with(name)
    as_text, as_object = (
        [*called(arguments), *ANSWERED] for arguments in (json.dumps(ARGUMENTS, ensure_ascii=False), ARGUMENTS)
    )
    items = [prompt_item(tokenizer, {"prompt": messages}, 0) for messages in (as_text, as_object)]
    assert items[0].tokens == items[1].tokens
    assert items[0].text == served(tokenizer, as_text)
    assert "Zürich" in items[0].text
    assert r"\"city" not in items[0].text  # not encoded twice
    assert items[0].messages == as_text  # as agents get them
    for text in ('{"city":"Z\\u00fcrich","days":[1,2]}', "no JSON", "[1]"):  # spelled otherwise than by json.dumps
        talk = [*called(text), *ANSWERED]
        try:
            sent = served(tokenizer, talk)
        except DataError:
            continue
        assert prompt_item(tokenizer, {"prompt": talk}, 0).text == sent
    if name in ("qwen2_5", "qwen3_5_think"):
        turns = [{"from": "human", "value": "Hot?"}, {"from": "function_call", "value": ""}]
        turns[1]["value"] = json.dumps({"name": "weather", "arguments": json.dumps(ARGUMENTS)})
        [shared] = prepare_script_rows([{"conversations": turns}], "sft")
        rows = [{"messages": called(ARGUMENTS)}, {"messages": called(json.dumps(ARGUMENTS))}, shared]
        found = [plain_values(sft_sequence(tokenizer, row)) for row in rows]
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("not json", "not json"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 99_999, "[" * 99_999),
    ],
)
def test_arguments_that_are_no_object_stay_text(given, expected):
    assert decoded_arguments(given) == expected


def test_other_forms_of_a_call_are_those_of_tool_calls():
    tokenizer = tokenizer_with("qwen2_5")
    flat = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
    in_form = template_messages(tokenizer, [assistant("", tool_calls=[{**flat, "id": "1", "type": "function"}])])
    assert in_form[0]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    ]
    for message in (assistant(None, function_call=flat), assistant("", tool_calls=[flat])):
        rows = prepare_script_rows([{"prompt": [user("Hot?"), message, *ANSWERED]}], "prompt")
        assert prompt_item(tokenizer, rows[0], 0).text == served(tokenizer, [*called(ARGUMENTS), *ANSWERED])
    legacy = [user("Hot?"), assistant(None, function_call=flat), *ANSWERED]
    assert served(tokenizer, legacy) == served(tokenizer, [*called(ARGUMENTS), *ANSWERED])


@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_are_joined_as_the_template_joins_them(name):
    tokenizer = tokenizer_with(name)
    for role in ("system", "user", "assistant"):
        messages = [user("a"), {"role": role, "content": PARTS}, user("a")]
        messages = messages[role != "assistant" : 2 if role == "user" else 3]
        joined = template_messages(tokenizer, messages)
        assert template_messages(tokenizer, joined) == joined
        [content] = [each["content"] for each in joined if each["content"] != "a"]
        try:
            as_parts, as_text = (render(tokenizer, each, None) for each in (messages, joined))
        except DataError:
            assert content == "one \n two"
            continue
        takes_parts = as_parts.count("one") == as_parts.count("two") == 1 and not any(
            x in as_parts for x in ("'text'", '"text"')
        )
        if takes_parts and "one" in as_text:
            assert "".join(as_parts.split()) == "".join(as_text.split())
            assert content in ("one  two", "onetwo", "one two", "one \n two")
        else:
            assert content == "one \n two" or "one" not in as_text


@pytest.mark.parametrize(("name", "separator"), [("qwen2_5", "\n"), ("qwen3_5_think", ""), ("glm4moe", "")])
def test_parts_are_the_same_in_rows_and_requests(name, separator):
    tokenizer = tokenizer_with(name)
    messages = [{"role": "system", "content": PARTS}, user(PARTS), assistant(PARTS), user(PARTS)]
    item = prompt_item(tokenizer, {"prompt": messages}, 0)
    assert item.text == served(tokenizer, messages)
    assert item.text.count(f"one {separator} two") == 4
    assert {message["content"] for message in item.messages} == {f"one {separator} two"}


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "llava_next", "llava_next_training"])
def test_a_template_that_reads_only_parts_gets_parts(name):
    tokenizer = tokenizer_with(name)
    for content in ("one \n two", PARTS):
        messages = [{"role": "system", "content": content}, user(content), assistant(content), user(content)]
        item = prompt_item(tokenizer, {"prompt": messages}, 0)
        assert item.text == served(tokenizer, messages)
        assert item.text.count("one ") == item.text.count(" two") == 4
        [only] = sft_item(tokenizer, {"messages": messages[:3]}).rows
        assert tokenizer.decode(only.tokens).startswith(served(tokenizer, messages[:2]))
    as_parts = [{**user(""), "content": [{"type": "text", "text": "Hi"}]}]
    assert served(tokenizer, [user("Hi")]) == tokenizer.apply_chat_template(
        as_parts, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("name", "role", "rendered"),
    [
        ("qwen2_5", "developer", "system"),
        ("qwen3_5_think", "developer", "system"),
        ("chatml", "developer", "developer"),
        ("gptoss", "developer", "developer"),
        ("qwen2_5", "function", "tool"),
        ("chatml", "function", "function"),
    ],
)
def test_a_role_is_renamed_only_where_the_template_does_not_render_it(name, role, rendered):
    tokenizer = tokenizer_with(name)
    message = {"role": role, "content": "Be brief.", "name": "f"}
    messages = [message, user("x")] if role == "developer" else [*called(ARGUMENTS), message]
    assert [each["role"] for each in template_messages(tokenizer, messages)].count(rendered) == 1
    item = prompt_item(tokenizer, {"prompt": messages}, 0)
    assert "Be brief." in item.text
    assert item.text == served(tokenizer, messages)


@pytest.mark.parametrize(
    ("name", "messages", "at", "role"),
    [
        ("qwen2_5", [{"role": "human", "content": "a"}], 0, "human"),  # a text that occurs elsewhere, too
        ("qwen2_5", [{"role": "System", "content": "Be brief."}, user("x")], 0, "System"),
        ("gptoss", [user("x"), assistant("y"), {"role": "system", "content": "Be brief."}, user("x")], 2, "system"),
        (
            "deepseek_r1_distill",
            [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, user("x")],
            0,
            "system",
        ),
        (
            "phi3",
            [user("x"), assistant("y"), {"role": "tool", "content": "z", "tool_call_id": "1"}, user("x")],
            2,
            "tool",
        ),
    ],
)
def test_a_message_that_is_not_rendered_is_refused_with_its_row(name, messages, at, role):
    tokenizer = tokenizer_with(name)
    shown = rf"rows row 1: the chat template does not render messages\[{at}\], whose role is '{role}'; give it a role"
    config = DatasetConfig(path="rows", batch_size=2, shuffle=False)
    for kind, good, bad in (
        ("prompt", {"prompt": [user("x")]}, {"prompt": messages}),
        ("sft", {"prompt": "x", "response": "y"}, {"messages": [*messages, assistant("y")]}),
        ("sft", {"prompt": "x", "response": "y"}, {"prompt": messages, "response": "y"}),
        ("dpo", {"prompt": "x", "chosen": "y", "rejected": "z"}, {"prompt": messages, "chosen": "y", "rejected": "z"}),
        ("kto", {"prompt": "x", "response": "y", "label": True}, {"prompt": messages, "response": "y", "label": True}),
    ):
        loader = row_loader(kind, prepare_script_rows([good, bad], kind), tokenizer, config)
        with pytest.raises(DataError, match=shown):
            list(loader.batches())
    if role in ("system", "tool"):
        with pytest.raises(DataError, match=rf"messages\[{at}\], whose role is '{role}'"):
            served(tokenizer, messages)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3_1", "qwen3_5_think", "gptoss", "gemma3", "deepseekv3", "glm4moe"]
)
def test_what_is_trimmed_escaped_or_dropped_reasoning_is_rendered(name):
    tokenizer = tokenizer_with(name)
    tool = [*called(ARGUMENTS, "Let me see."), *ANSWERED] if name != "gemma3" else []
    if tool:
        tool[-1] = {**tool[-1], "content": '  {"a": "<b>"}\n'}  # written as JSON, or trimmed
    thought = assistant("<think>\nhm\n</think>\n\n 4 ", reasoning_content="hm")
    messages = [{"role": "system", "content": " A "}, user("2+2?\n"), thought, *tool, assistant(""), user(" ")]
    messages += [user("<tool_response>\nx"), assistant("y")] if name != "gemma3" else []
    in_form = template_messages(tokenizer, messages)
    check_rendered(tokenizer, in_form, None, None, True)
    check_rendered(tokenizer, in_form[:3], None, None, True)


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen2_5_training"])
def test_a_turn_of_weight_0_is_not_trained(name):
    tokenizer = tokenizer_with(name)
    talk = [user("1+1?"), assistant("2"), user("2+2?"), assistant("4"), user("3+3?"), assistant("6")]

    def trained(*weights):
        weighted = [{**each} for each in talk]
        for at, weight in zip((1, 3, 5), weights, strict=True):
            weighted[at] |= {} if weight is None else {"weight": weight}
        [row] = prepare_script_rows([{"messages": weighted}], "sft")
        sequence = sft_sequence(tokenizer, row)
        words = [
            word
            for token, masked in zip(sequence.tokens, sequence.prompt_mask, strict=True)
            if not masked
            for word in [tokenizer.decode([token])]
        ]
        return sequence.tokens.tolist(), [word for word in words if word in ("2", "4", "6")]

    assert trained(None, None, None)[1] == trained(1, 1.0, None)[1] == ["2", "4", "6"]
    assert trained(0, None, 1) == (trained(None, None, None)[0], ["4", "6"])
    assert trained(None, 0.0, None)[1] == ["2", "6"]
    for weight, shown in ((0.5, "float 0.5"), ("0", "str '0'"), (True, "bool True"), (2, "int 2")):
        with pytest.raises(DataError, match=rf"row 0: field messages \[3\].weight is {shown}, not 0"):
            trained(None, weight, None)
    with pytest.raises(DataError, match="has no assistant message to train on"):
        trained(0, 0, 0)
    with pytest.raises(DataError, match=r"\[0\].weight is 1, but only messages of the assistant are trained"):
        prepare_script_rows([{"messages": [{**talk[0], "weight": 1}, talk[1]]}], "sft")


SHOWN = "{% macro shown(m) %}{{ m.content }}{% if style is defined %}{{ style.tone }}{% endif %}{% endmacro %}"
VARIED = SHOWN + CHATML.replace("{{ m.content }}", "{{ shown(m) }}")


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3_5_think", {"enable_thinking": False}),
        ("gptoss", {"reasoning_effort": "high", "model_identity": 'I\'m "new" %} {{ x }} 😀\n'}),
        ("varied", {"style": {"tone": " <!>", "n": [1, 2.5, None, True]}}),
    ],
)
def test_variables_of_a_row_are_those_of_a_request(name, variables):
    tokenizer = tokenizer_with("chatml" if name == "varied" else name)
    if name == "varied":
        tokenizer.chat_template = VARIED
    template = tokenizer.chat_template
    given = [
        {"prompt": [user("x")]} | more for more in ({}, {VARIABLES: variables}, {VARIABLES: json.dumps(variables)})
    ]
    config = DatasetConfig(path="rows", batch_size=3, shuffle=False)
    [batch] = row_loader("prompt", prepare_script_rows(given, "prompt"), tokenizer, config, thinking=True).batches()
    texts = [item.text for item in batch.items]
    assert texts[1] == texts[2] == served(tokenizer, [user("x")], None, variables)
    assert texts[0] != texts[1]
    assert tokenizer.chat_template == template
    for kind, row in (
        ("sft", {"messages": [user("x"), assistant("y")]}),
        ("dpo", {"prompt": "x", "chosen": "y", "rejected": "z"}),
        ("kto", {"prompt": "x", "response": "y", "label": True}),
        ("rw", {"prompt": "x", "chosen": "y", "rejected": "z"}),
        ("prm", {"prompt": "x", "completions": ["y"], "labels": [True]}),
    ):
        rows = prepare_script_rows([{**row, VARIABLES: variables}], kind)
        [item] = row_loader(kind, rows, tokenizer, DatasetConfig(path="rows", batch_size=1)).items()
        if kind != "sft" or name == "varied":
            tokens = item.tokens if kind in ("sft", "dpo") else item.rows[0].tokens
            assert tokenizer.decode(tokens).startswith(texts[1])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "field chat_template_kwargs is int 3, not an object"),
        ("{", "field chat_template_kwargs is text, but not JSON"),
        ({"messages": []}, "field chat_template_kwargs may not set messages; it holds variables"),
        ({"a b": 1}, "field chat_template_kwargs may not set a b"),
    ],
)
def test_wrong_variables_of_a_row(value, message):
    with pytest.raises(DataError, match=f"row 1: {message}"):
        prepare_script_rows([{"prompt": "x"}, {"prompt": "x", VARIABLES: value}], "prompt")


def test_variables_need_a_template(plain):
    rows = prepare_script_rows([{"prompt": "x", VARIABLES: {"a": 1}}], "prompt")
    with pytest.raises(DataError, match="rows row 0: field chat_template_kwargs needs a tokenizer with a"):
        row_loader("prompt", rows, plain, DatasetConfig(path="rows", batch_size=1))
