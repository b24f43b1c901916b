"""Special tokens that are sampled inside a turn: the client's text lacks them, and the next prompt does not."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from areno import Trainer
from areno.server.detokenize import special_ids
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import PromptBuilder
from tests.helpers.conversations import OTHER, USER, turn_of
from tests.helpers.tokenizers import shared_tokenizer


@pytest.mark.parametrize("name", ["tiny", "qwen2.5", "qwen3", "minimind"])
@pytest.mark.parametrize("end", ["<|im_end|>", ""])
@pytest.mark.parametrize(
    "said",
    [
        "{0}hello",
        "hel{0}lo",
        "hello{0}",
        "{0}",
        "hello{1}{0} hello",
        '{0}<tool_call>\n{{"name": {1}"f", "arguments": {{}}}}\n</tool_call>',
    ],
)
def test_special_tokens_that_the_client_does_not_see_stay_in_the_prompt(name: str, end: str, said: str) -> None:
    tokenizer = shared_tokenizer(name)
    conversations = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))
    special = special_ids(tokenizer, keep=conversations.parser.tags)
    sampled = said.format("<|im_start|>", "<|endoftext|>") + end
    shown = said.format("", "")
    answer: dict[str, Any] = {"role": "assistant", "content": shown}
    if "tool_call" in shown:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    tokens = tokenizer.encode(sampled, add_special_tokens=False)
    assert len(special & set(tokens)) >= 1 + bool(end)
    first = turn_of(conversations, [USER], sampled, None, answer, special)
    second = turn_of(conversations, [USER, answer, OTHER], "fine<|im_end|>", None)["tokens"]["prompt_token_ids"]
    told = first["tokens"]["prompt_token_ids"] + tokens
    assert second[: len(told)] == told
    rest = tokenizer.decode(second[len(told) :])
    assert rest.startswith("<|im_end|>\n<|im_start|>user\nand you?" if not end else "\n<|im_start|>user\nand you?")


def test_the_next_prompt_holds_the_special_tokens_that_were_sampled(client: OpenAI, trainer: Trainer) -> None:
    special, *tags = trainer.get_tokenizer().convert_tokens_to_ids(["<|im_start|>", "<think>", "</think>"])
    bias = {str(special): 4} | {str(tag): -100 for tag in tags}  # the template drops reasoning
    fields = {"logit_bias": bias, "n": 8, "seed": 1}
    answer: Any = client.chat.completions.create(model="policy", messages=[USER], **fields)  # type: ignore[call-overload]
    told = [choice["token_ids"] for choice in answer.areno["choices"]]
    assert sum(special in tokens for tokens in told) > 4
    for choice, tokens in zip(answer.choices, told, strict=True):
        asked = [USER, choice.message, {"role": "user", "content": "and you?"}]
        following: Any = client.chat.completions.create(model="policy", messages=asked, max_tokens=1)
        prompt = following.areno["prompt_token_ids"]
        expected = [*answer.areno["prompt_token_ids"], *tokens]
        assert prompt[: len(expected)] == expected
