"""Rows to tokens, through the chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.data.encode import encode_generation_prompt
from areno.data.sources import read_rows
from areno.data.trained_turns import training_texts
from areno.errors import DataError
from tests.helpers.encoded_rows import prompt_item, sft_item, sft_sequence
from tests.helpers.tokenizers import plain_values

DATA = Path(__file__).parents[3] / "shared/data"

# Prompts to tokens ---------------------------------------------------------------------------------------------------


def test_text_goes_through_the_template_as_one_user_message(chatml, plain):
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "hi"}]
    assert chatml.decode(encode_generation_prompt(chatml, "hi")) == text
    assert chatml.decode(encode_generation_prompt(chatml, messages)) == text
    assert chatml.decode(encode_generation_prompt(chatml, "hi", enable_thinking=True)) == text
    assert (
        chatml.decode(encode_generation_prompt(chatml, "hi", enable_thinking=False)) == text + "<think>\n\n</think>\n\n"
    )
    assert encode_generation_prompt(plain, "hi there") == plain("hi there")["input_ids"]
    with pytest.raises(DataError, match=r"need a tokenizer with a chat template.*tokenizer_path"):
        encode_generation_prompt(plain, messages)


def test_tokenizer_that_does_not_know_enable_thinking(plain):
    class Plain:
        chat_template = "there is one"
        encode = staticmethod(plain.encode)

        def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt):
            return f"[{messages[-1]['content']}]"

    assert plain.decode(encode_generation_prompt(Plain(), "hi", enable_thinking=False)) == "[hi]"


def test_prompt_items(chatml):
    item = prompt_item(chatml, {"prompt": "What is 3+3?", "solutions": "6", "level": 3}, 3)
    assert (item.prompt, item.solutions, item.index, item.messages) == ("What is 3+3?", "6", 3, None)
    assert (
        item.text == chatml.decode(item.tokens) == f"<|im_start|>user\n{item.prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert item.record["level"] == 3
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    item = prompt_item(chatml, {"prompt": messages}, 0)
    assert item.prompt == item.text == chatml.decode(item.tokens)
    assert "Be brief." in item.text
    assert item.messages == messages


# Supervised rows -----------------------------------------------------------------------------------------------------


def trained_text(tokenizer, row, **options) -> list[str]:
    """The trained stretches of the sequences of a row, decoded."""
    stretches: list[list[int]] = []
    for sequence in sft_item(tokenizer, row, **options).rows:
        last = True
        for token, masked in zip(sequence.tokens, sequence.prompt_mask, strict=True):
            if not masked:
                if last:
                    stretches.append([])
                stretches[-1].append(token)
            last = masked
    return [tokenizer.decode(stretch) for stretch in stretches]


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def test_prompt_response_trains_on_the_response_and_its_end(chatml, plain):
    row = {"prompt": "hi", "response": "hello you"}
    # The template writes an empty block of reasoning; a model that thinks would have to write it.
    assert trained_text(chatml, row) == ["<think>\n\n</think>\n\nhello you<|im_end|>"]
    assert trained_text(chatml, row, enable_thinking=False) == ["hello you<|im_end|>"]
    sequence = sft_sequence(chatml, row)
    assert plain_values(sequence) == plain_values(sft_sequence(chatml, {"messages": turns("hi", "hello you")}))
    prompt = encode_generation_prompt(chatml, "hi")
    assert sequence.tokens[: len(prompt)].tolist() == prompt
    assert sequence.prompt_mask.tolist().index(False) == len(prompt)
    assert trained_text(plain, row) == ["hello you<|endoftext|>"]
    assert plain.decode(sft_sequence(plain, row).tokens) == "hihello you<|endoftext|>"


def test_conversation_trains_on_assistant_turns_only(chatml):
    messages = [{"role": "system", "content": "Be brief."}, *turns("a b", "c d", "e f", "g h")]
    row, empty = {"messages": messages}, "<think>\n\n</think>\n\n"
    assert trained_text(chatml, row) == [empty + "c d<|im_end|>", empty + "g h<|im_end|>"]
    assert trained_text(chatml, row, enable_thinking=False) == ["c d<|im_end|>", "g h<|im_end|>"]
    assert trained_text(chatml, row, changed="as_rendered") == ["c d<|im_end|>", empty + "g h<|im_end|>"]
    assert trained_text(chatml, row, changed="last_turn") == [empty + "g h<|im_end|>"]
    with pytest.raises(DataError, match=r"messages\[2\] differently.*train_dataset.changed_turns"):
        sft_item(chatml, row, changed="error")
    texts = [chatml.apply_chat_template(messages[:n], tokenize=False) for n in (3, 5)]
    assert [chatml.decode(sequence.tokens) for sequence in sft_item(chatml, row).rows] == texts
    as_rendered = sft_sequence(chatml, row, changed="as_rendered")
    assert chatml.decode(as_rendered.tokens) == texts[-1]


REASONED = turns("a", "<think>\nearly\n</think>\n\nb", "c", "<think>\nlate\n</think>\n\nd")


def test_reasoning_of_earlier_turns_is_trained(chatml):
    row, late = {"messages": REASONED}, "<think>\nlate\n</think>\n\nd<|im_end|>"
    assert trained_text(chatml, row) == ["<think>\nearly\n</think>\n\nb<|im_end|>", late]
    assert trained_text(chatml, row, changed="as_rendered") == ["b<|im_end|>", late]
    prompts = [encode_generation_prompt(chatml, REASONED[:n]) for n in (1, 3)]
    for sequence, prompt in zip(sft_item(chatml, row).rows, prompts, strict=True):
        assert sequence.tokens[: len(prompt)].tolist() == prompt
        assert sequence.prompt_mask.tolist().index(False) == len(prompt)


@pytest.mark.parametrize("name", ["tiny", "minimind"])
def test_template_whose_prompt_ends_the_reasoning(tokenizer_of, name):
    """Its generation prompt opens with an empty block of reasoning, after which no model reasons."""
    tokenizer = tokenizer_of(name)
    if name == "tiny":
        opened = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            f"{{% if add_generation_prompt %}}{opened}{{% endif %}}"
        )
    with pytest.raises(DataError, match=r"ends the reasoning in the prompt before messages\[1\], which has reasoning"):
        sft_item(tokenizer, {"messages": REASONED})
    assert trained_text(tokenizer, {"messages": turns("a", "b", "c", "d")}) == ["b<|im_end|>", "d<|im_end|>"]


def test_tool_calls_are_trained_and_results_are_not(chatml):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    first, second = trained_text(chatml, {"messages": messages, "tools": [call]})
    empty = "<think>\n\n</think>\n\n"
    assert first == empty + '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert second == empty + "Two.<|im_end|>"


def test_template_that_marks_generation(tokenizer_of):
    tokenizer = tokenizer_of("tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    assert trained_text(tokenizer, {"messages": turns("a", "b c", "d", "e f")}) == ["b c<|im_end|>", "e f<|im_end|>"]


def test_template_without_end_of_turn_token(tokenizer_of):
    plain = tokenizer_of("plain")
    opened = "{% if add_generation_prompt %}assistant: {% endif %}"
    plain.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content|trim }}\n{% endfor %}" + opened
    assert trained_text(plain, {"messages": turns("a ", "b ")}) == ["b<|endoftext|>"]
    with pytest.raises(DataError, match=r"no token at the end of messages\[1\], so a model would not learn to stop"):
        sft_item(plain, {"messages": turns("a ", "b", "c", "d ")})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "qwen2.5"])
def test_end_of_turn_that_is_not_the_end_token(tokenizer_of, name):
    base = tokenizer_of(name)
    base.eos_token = "<|endoftext|>"  # as in the base models, whose template ends turns with <|im_end|>
    messages = turns("a", "b c", "d", "e f")
    assert trained_text(base, {"messages": messages}, enable_thinking=False) == ["b c<|im_end|>", "e f<|im_end|>"]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked = [*messages, {"role": "user", "content": "g"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert trained_text(base, {"messages": asked})[2].endswith("</tool_call><|im_end|>")
    # A template that also closes the whole conversation: the turn ends before that.
    base.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
    )
    assert trained_text(base, {"messages": messages}) == ["b c<|im_end|>", "e f<|im_end|>"]
    with pytest.raises(DataError, match=r"leaves out the tool calls of messages\[5\]"):  # and would train on silence
        sft_sequence(base, {"messages": asked})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}<{{ m.content }}{{ loop.revindex }}>{% endfor %}",
            r"the start of messages\[1\] cannot be found",
        ),
        ("{% for m in messages %}<{{ m.content|upper }}>{% endfor %}", "rewrites assistant messages"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages.*roles must alternate"),
    ],
)
def test_template_in_which_turns_cannot_be_found(tokenizer_of, template, message):
    tokenizer = tokenizer_of("plain")
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        sft_sequence(tokenizer, {"messages": turns("a", "b", "c", "d")})


def test_conversation_needs_a_template(plain):
    with pytest.raises(DataError, match="need a tokenizer with a chat template"):
        sft_sequence(plain, {"messages": turns("a", "b")})


def test_spans_of_real_conversations(chatml):
    path = DATA / "toolcall/reason_tool_use_demo_50.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    for row in read_rows(str(path)):
        messages = [{"role": m["role"], "content": "".join(map(part_text, m["content"]))} for m in row["messages"]]
        text = chatml.apply_chat_template(messages, tokenize=False)
        [(rendered, spans)] = training_texts(chatml, messages, changed="as_rendered")
        assert rendered == text
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert len(spans) == len(answers) > 0
        for (start, end), answer in zip(spans, answers, strict=True):
            assert text[:start].endswith("<|im_start|>assistant\n")
            assert text[start:end].endswith("<|im_end|>")
            assert text[start:end].count("<|im_") == 1
            assert answer.split("</think>")[-1].strip() in text[start:end]


def part_text(part: dict) -> str:
    return f"<think>\n{part['value']}\n</think>\n\n" if part["type"] == "reasoning" else part["value"]


def test_tools_may_be_json_text(chatml):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    row = {"prompt": "Go", "response": "Gone"}
    as_list, as_text, without = (
        plain_values(sft_sequence(chatml, each))
        for each in ({**row, "tools": [tool]}, {**row, "tools": json.dumps([tool])}, row)
    )
    assert as_text == as_list
    assert as_list != without
    with pytest.raises(DataError, match="tools is text, but not JSON"):
        sft_sequence(chatml, {**row, "tools": "[look"})


@pytest.mark.parametrize("name", ["tiny", "plain"])
def test_tokenizers_of_the_tests_keep_any_text(tokenizer_of, name):
    tokenizer = tokenizer_of(name)
    for text in ("Wörter 词\n\t\x00", " user  assistant", "<|im_start|>tool\n<tool_call>{}</tool_call><|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) < 512
