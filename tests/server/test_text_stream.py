"""Tokens of an answer to text: as the tokenizer decodes them, however they are cut into pieces."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from areno.data.encode import decode
from areno.server.detokenize import TextStream
from tests.helpers.tokenizers import load_tokenizer, shared_tokenizer

WORDS = "Hello, world ! It 's 3 o'clock . \u00e9t\u00e9 \U0001f600 \u4f60\u597d <|im_end|> don 't"


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer whose author decodes otherwise."""

    def _decode(self, *args: Any, **how: Any) -> str:
        return super()._decode(*args, **how).upper()


@pytest.mark.parametrize("name", ["tiny", "plain", "qwen2.5", "gpt2"])
def test_text_is_what_the_tokenizer_decodes(name: str) -> None:
    tokenizer = shared_tokenizer(name)
    draw = random.Random(0)
    tokens = tokenizer.encode(WORDS, add_special_tokens=False) + draw.choices(range(len(tokenizer)), k=200)
    expected = tokenizer.decode(tokens, skip_special_tokens=False)
    assert decode(tokenizer, tokens) == expected
    stream, at, text = TextStream(tokenizer, frozenset()), 0, ""
    while at < len(tokens):
        n = draw.randint(1, 9)
        text, at = text + stream.feed(tokens[at : at + n]), at + n
    assert text + stream.finish() == expected


@pytest.mark.parametrize("name", ["tiny", "plain", "qwen2.5", "gpt2"])
def test_long_pieces_are_decoded_about_once(name: str) -> None:
    tokenizer = shared_tokenizer(name)
    draw, n_decoded = random.Random(1), 0

    class Counted(TextStream):
        def _decode(self, tokens: list[int]) -> str:
            nonlocal n_decoded
            n_decoded += len(tokens)
            return super()._decode(tokens)

    for _ in range(20):
        tokens = draw.choices(range(len(tokenizer)), k=600)
        stream, at, text, n_decoded = Counted(tokenizer, frozenset()), 0, "", 0
        while at < len(tokens):
            n = draw.randint(20, 90)
            text, at = text + stream.feed(tokens[at : at + n]), at + n
        assert text + stream.finish() == tokenizer.decode(tokens, skip_special_tokens=False)
        assert n_decoded < 4 * len(tokens)


@pytest.mark.parametrize("stops", [["ab cde", "b c"], ["cd", "ab cdef"], ["e", "cd"]])
def test_overlapping_stop_strings_cut_alike_however_the_tokens_come(stops: list[str]) -> None:
    """Before `min_new_tokens` a stop string does not end a sample, so that tokens follow it."""
    tokenizer = load_tokenizer("tiny")
    tokens = [one for letter in "zab cdef" for one in tokenizer.encode(letter, add_special_tokens=False)]
    whole = TextStream(tokenizer, frozenset(), stops)
    expected = whole.feed(tokens) + whole.finish()
    for border in range(1, len(tokens)):
        stream = TextStream(tokenizer, frozenset(), stops)
        assert stream.feed(tokens[:border]) + stream.feed(tokens[border:]) + stream.finish() == expected


def test_runs_of_bytes_are_decoded_as_one() -> None:
    """If a run is no UTF-8, each of its bytes is replaced, also those that would be characters without the others."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a"]
    vocab = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    for last in (b"\xff", b"\xe5\xa5\xbd"):
        tokens = [vocab["a"], *(1 + byte for byte in "\u4f60".encode() + last), vocab["\u2581"], vocab["a"]]
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        assert ("\u4f60" in whole) == (last != b"\xff")
        for border in range(1, len(tokens)):
            stream = TextStream(tokenizer, frozenset())
            assert stream.feed(tokens[:border]) + stream.feed(tokens[border:]) + stream.finish() == whole


def test_what_a_tokenizer_does_beside_its_backend_is_kept(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("plain")
    tokenizer.save_pretrained(tmp_path)
    shouting = Shouting.from_pretrained(tmp_path)
    tokens = tokenizer.encode(WORDS, add_special_tokens=False)
    assert decode(shouting, tokens) == tokenizer.decode(tokens).upper()
    cleaning = PreTrainedTokenizerFast.from_pretrained(
        tmp_path,
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    assert decode(cleaning, tokens) == cleaning.decode(tokens) != tokenizer.decode(tokens)
