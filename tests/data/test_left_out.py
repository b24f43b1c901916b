"""Parts of trained messages that a chat template leaves out are found, whatever else the rendered text contains."""

from __future__ import annotations

import pytest

from areno.data.chat_template import render
from areno.data.messages import template_messages
from areno.data.template_omissions import check_rendered, missing_text
from areno.errors import DataError
from tests.helpers.encoded_rows import sft_item
from tests.helpers.tokenizers import load_tokenizer, trl_templates

TEMPLATES = trl_templates()
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="trl is not installed; it is in the dev extra")
WITH_CALLS = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ m.content }}{%% if m.tool_calls %%}%s{%% endif %%}"
    "<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
FIRST_CALL = WITH_CALLS % "{{ m.tool_calls[0].function | tojson }}"
ONLY_TEXTS = WITH_CALLS % (
    "{% set f = m.tool_calls[0].function %}{{ f.name }}"
    "{% for k, v in f.arguments.items() if v is string %} {{ k }}={{ v }}{% endfor %}"
)
NO_VALUES = WITH_CALLS % (
    "{% set f = m.tool_calls[0].function %}{{ f.name }}"
    "{% for k, v in f.arguments.items() %} {{ k }}={{ v if v is string }}{% endfor %}"
)


def tokenizer_with(template):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template, tokenizer.bos_token = TEMPLATES.get(template, template), "<|endoftext|>"
    return tokenizer


def call(name, arguments, number=1):
    return {"type": "function", "id": f"f0000000{number}", "function": {"name": name, "arguments": arguments}}


def row(content, *calls, **more):
    answer = {"role": "assistant", "content": content, **more}
    return {"messages": [{"role": "user", "content": "Weather?"}, answer | ({"tool_calls": [*calls]} if calls else {})]}


CALLS, CONTENT = r"the tool calls of messages\[1\]", r"a part of messages\[1\].content"
SPOKEN = row("I call get_weather with city Paris.", call("get_weather", {"city": "Paris"}))
LEFT_OUT = [
    *[(name, SPOKEN, CALLS) for name in ("gemma3", "llama3", "lfm2", "qwen2_5_vl", "cohere")],
    ("gemma3", row("I will add them.", call("add", {"i": 1})), CALLS),
    ("llama3", row("I will add them.", call("add", {"i": 1})), CALLS),
    ("gemma4", row("The answer is 4.", reasoning_content="4"), r"the reasoning of messages\[1\]"),
    ("llama3_1", row("ca", call("call", {"n": "x"})), CONTENT),
    (FIRST_CALL, row("", call("roll", {"n": 6}), call("roll", {"n": 8}, 2)), r"messages\[1\].tool_calls\[1\]"),
    ("gptoss", row("", call("roll", {"n": 6}), call("roll", {"n": 6}, 2)), r"messages\[1\].tool_calls\[1\]"),
    (ONLY_TEXTS, row("", call("roll", {"o": 6})), r"messages\[1\].tool_calls\[0\]"),
    (ONLY_TEXTS, row("", call("roll", {"o": [None]})), r"messages\[1\].tool_calls\[0\]"),
    (NO_VALUES, row("", call("roll", {"o": 6})), r"messages\[1\].tool_calls\[0\]"),
    (NO_VALUES, row("", call("roll", {"o": 1.5})), r"messages\[1\].tool_calls\[0\]"),
    (NO_VALUES, row("", call("roll", {"o": True})), CALLS),
]


@pytest.mark.parametrize(("template", "given", "name"), LEFT_OUT)
def test_a_part_that_occurs_elsewhere_is_missed(template, given, name):
    tokenizer = tokenizer_with(template)
    for _ in range(2):  # found, and remembered
        with pytest.raises(DataError, match=f"the chat template leaves out .*{name}, which should be trained"):
            sft_item(tokenizer, given)


@pytest.mark.parametrize("template", ["gemma3", "llama3_1", "phi3", "cohere2", "lfm2"])
def test_reasoning_that_the_content_repeats_is_trained(template):
    tokenizer = tokenizer_with(template)
    [sequence] = sft_item(tokenizer, row("The answer is 4.", reasoning_content="4")).rows
    text = tokenizer.decode(sequence.tokens[~sequence.prompt_mask])
    assert text.startswith("<think>\n4\n</think>\n\nThe answer is 4.")


MANY = {"a": 1, "b": 2.5, "c": True, "d": None, "e": [1, {"f": -3e-9, "h": 10**30}], "g": ' x "ß"\n', "": "", "i": " "}


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_what_is_rendered_is_not_missed(template):
    """All values of a call are missed, or none: no template writes a part of them."""
    tokenizer = tokenizer_with(template)
    for arguments in (MANY, {}, '{"x":1}'):
        [question, answer] = template_messages(tokenizer, row("", call("roll", arguments))["messages"])
        left_out = check_rendered(tokenizer, [question, answer], None, None, False, (1,))
        text = render(tokenizer, [question, answer], None)
        assert left_out.as_last == ({} if "roll" in text else {1: "the tool calls of messages[1]"})
        if "roll" in text:
            assert missing_text(answer, text, 1) is None


def test_conversations_of_one_shape_are_rendered_once(monkeypatch):
    tokenizer = tokenizer_with("qwen3")
    rendered, apply = [], type(tokenizer).apply_chat_template

    def counted(*given, **how):
        rendered.append(given)
        return apply(*given, **how)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    numbers = []
    for city, n in (("Paris", 1), ("Rome", 2), ("Oslo", 3)):
        rendered.clear()
        sft_item(tokenizer, row(f"In {city}.", call("get_weather", {"city": city, "n": n}), reasoning_content=city))
        numbers.append(len(rendered))
    assert numbers[0] > numbers[1] == numbers[2] == 2
