"""Texts of single tokens in answers: they add up to the text, also where a token alone reads otherwise."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from areno import SamplingParams
from areno.server.detokenize import (
    TextStream,
    TokenText,
    TokenTextCache,
    TokenTextStream,
    n_partial_tokens,
    prompt_token_texts,
)
from areno.server.response_bodies import text_logprobs
from tests.helpers.agent_model import made, model_folder
from tests.helpers.tokenizers import load_tokenizer

SHARED = Path(__file__).parents[3] / "shared/data"
STORIES = SHARED / "models/stories260K-hf"
NAMES = ["tiny", "qwen2.5", "gpt2", "phi3-v", "stories"]
PROMPT = "  Tom saw the été: 你好\n"


@cache
def tokenizer_of(name: str) -> Any:
    if name != "stories":
        return load_tokenizer(name)
    if not STORIES.exists():
        pytest.skip(f"the tokenizer is not at {STORIES}")
    return AutoTokenizer.from_pretrained(STORIES)


def draw_tokens(tokenizer: Any, draw: random.Random) -> list[int]:
    """Words, parts of characters, and anything else."""
    words = tokenizer.encode("It was\n\n a 🌧 day. <|im_end|> été", add_special_tokens=False)
    return [*words[draw.randrange(4) :], *draw.choices(range(len(tokenizer)), k=9), *words]


@pytest.mark.parametrize("name", NAMES)
def test_the_texts_of_tokens_add_up_however_they_come(name: str) -> None:
    tokenizer = tokenizer_of(name)
    texts, special = TokenTextCache(tokenizer), frozenset(tokenizer.all_special_ids)
    for seed in range(40):
        draw = random.Random(seed)
        hidden = special if seed % 2 else frozenset()
        before = draw.choice([[], tokenizer.encode(PROMPT), tokenizer.encode("a")])
        tokens = draw_tokens(tokenizer, draw)
        all_of_it = [token for token in [*before, *tokens] if token not in hidden]
        visible = [token for token in before if token not in hidden]
        expected = tokenizer.decode(all_of_it)[len(tokenizer.decode(visible)) :]
        for size in (1, 3, 100):
            stream, spelling = TextStream(tokenizer, hidden, before=before), TokenTextStream(texts, hidden, before)
            text, found = "", list[TokenText]()
            for at in range(0, len(tokens), size):
                text += stream.feed(tokens[at : at + size])
                spelling.feed(tokens[at : at + size])
                found += spelling.pop_tokens(len(text))
                assert text.startswith("".join(one.text for one in found))
            text += stream.finish()
            found += spelling.finish(len(text))
            assert text == "".join(one.text for one in found) == expected
            assert len(found) == len(tokens)
            assert b"".join(one.data for one in found).decode() == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_spelled_as_it_was_sent(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in (PROMPT, " ", "a", "e\u0301 and <s>", "été 🌧🌧"):
        found = prompt_token_texts(tokenizer, text)
        assert "".join(one.text for one in found) == text
        assert len(found) == len(tokenizer.encode(text))
    if name in ("phi3-v", "stories"):
        assert [one.text for one in prompt_token_texts(tokenizer, "the the")][-2:] in (["the", " the"], [" t", "he"])


def test_names_of_likely_tokens_differ() -> None:
    """Byte by byte, where a token alone is a part of a character; by id, where two tokens have one text."""
    tokenizer = tokenizer_of("phi3-v")
    texts = TokenTextCache(tokenizer)
    t, space_t, capital = (tokenizer.convert_tokens_to_ids(name) for name in ("t", "▁t", "<0x41>"))
    letter, part, other = (tokenizer.convert_tokens_to_ids(name) for name in ("A", "<0xC3>", "<0xC4>"))
    top = [(space_t, -1.0), (t, -2.0), (capital, -3.0), (letter, -4.0), (part, -5.0), (other, -6.0)]
    expected = {" t": -1.0, "t": -2.0, "A": -3.0, f"token_id:{letter}": -4.0, "bytes:\\xc3": -5.0, "bytes:\\xc4": -6.0}
    said = text_logprobs(texts, [((t, -2.0, top), TokenText("t", b"t", False))], 6)
    assert said["top_logprobs"] == [expected]
    # At the start of a text, both are "t".
    said = text_logprobs(texts, [((t, -2.0, top[:2]), TokenText("t", b"t", True))], 2)
    assert said["top_logprobs"] == [{"t": -2.0, f"token_id:{space_t}": -1.0}]


def test_a_stop_string_cuts_the_texts_of_tokens() -> None:
    tokenizer = load_tokenizer("tiny")
    tokens = tokenizer.encode("hello you hello", add_special_tokens=False)
    stream, spelling = (
        TextStream(tokenizer, frozenset(), ["ou h"]),
        TokenTextStream(TokenTextCache(tokenizer), frozenset()),
    )
    text = stream.feed(tokens) + stream.finish()
    spelling.feed(tokens)
    found = spelling.finish(len(text))
    assert text == "".join(one.text for one in found) == "hello y"
    assert len(found) == len(tokens)
    assert found[-1].text == ""


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """A random model with the tokenizer of Llama 2."""
    tokenizer = tokenizer_of("stories")
    with made(folder=model_folder(STORIES, 512, tokenizer.eos_token_id)) as trainer:
        sampling = SamplingParams(max_new_tokens=24)
        with trainer.rollout_session(sampling_params=sampling, max_running_prompts=16) as session:
            yield OpenAI(base_url=session.proxy.base_url, api_key=session.proxy.api_key, max_retries=0)


def check_logprobs(text: str, told: Any, n_top: int) -> None:
    assert "".join(told.tokens) == text
    assert told.text_offset == [len("".join(told.tokens[:n])) for n in range(len(told.tokens))]
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        if top is not None:
            assert top[token] == logprob
            assert n_top <= len(top) <= n_top + 1


@pytest.mark.parametrize(
    "prompt", ["Tom saw the", "", " Tom\n", "<s>été 🌧 ", [1, 403, 407], [403, 198], [403, 198, 185]]
)
def test_prompt_and_completion_read_as_the_decoding_of_all_tokens(client: OpenAI, prompt: Any) -> None:
    tokenizer = tokenizer_of("stories")
    how: Any = {"model": "policy", "prompt": prompt, "seed": 3, "n": 3, "logprobs": 5, "max_tokens": 12}
    whole: Any = client.completions.create(**how)
    echoed: Any = client.completions.create(echo=True, **how)
    [asked] = whole.areno["prompt_token_ids"]
    special = not isinstance(prompt, str)
    said = (
        prompt
        if isinstance(prompt, str)
        else tokenizer.decode(prompt[: len(prompt) - n_partial_tokens(tokenizer, prompt)])
    )
    for choice, beside, told in zip(whole.choices, echoed.choices, whole.areno["choices"], strict=True):
        assert beside.text == said + choice.text
        tokens = [token for token in told["token_ids"] if token not in tokenizer.all_special_ids]
        read = tokenizer.decode([*asked, *tokens], skip_special_tokens=not special)
        if prompt != "<s>été 🌧 ":
            assert read.endswith(choice.text)
            if special and prompt[-1] != 185:  # a byte behind those of the prompt changes how they read
                assert said + choice.text == read
        check_logprobs(choice.text, choice.logprobs, 5)
        check_logprobs(beside.text, beside.logprobs, 5)
        assert len(beside.logprobs.tokens) == len(asked) + len(told["token_ids"])
    if prompt == "Tom saw the":
        assert [choice.text for choice in whole.choices] == [
            tokenizer.decode([*asked, *told["token_ids"]], skip_special_tokens=True)[len(prompt) :]
            for told in whole.areno["choices"]
        ]
    texts, tokens, offsets = [""] * 3, [[] for _ in range(3)], [[] for _ in range(3)]
    for chunk in client.completions.create(stream=True, **how):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_tokens_of_a_chat_are_its_text(client: OpenAI) -> None:
    how: Any = {"model": "policy", "messages": [{"role": "user", "content": "Tom saw the"}], "logprobs": True}
    how |= {"top_logprobs": 3, "seed": 2, "max_tokens": 20}
    answer: Any = client.chat.completions.create(**how)
    [choice] = answer.choices
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert bytes(byte for one in choice.logprobs.content for byte in one.bytes).decode() == choice.message.content
    for one in choice.logprobs.content:
        assert all(other.token == one.token for other in one.top_logprobs if other.logprob == one.logprob)
    streamed = [
        one
        for chunk in client.chat.completions.create(stream=True, **how)
        for part in chunk.choices
        for one in (part.logprobs.content if part.logprobs else None) or []
    ]
    assert [(one.token, one.bytes) for one in streamed] == [(one.token, one.bytes) for one in choice.logprobs.content]
