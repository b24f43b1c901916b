"""Turn texts into tokens and tokens into texts, faster than transformers.

A row is first rendered as a `RenderedRow`: its texts, and a function that makes a training item from their token ids.
So `encode_rows` can encode the texts of many rows by a single call of the tokenizer, which then uses all CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic

from areno.data.chat_template import Prompt, render_generation_prompt
from areno.data.control_tokens import BREAK, control_tokens, warn_of_unknown_tokens
from areno.types import Item

# Fewer tokens are decoded by one thread, in about 1 ms. Several threads share the cores with torch, which can make the
# result 1 ms late.
_MIN_TOKENS_FOR_THREADS = 2048

Text = tuple[str, bool]
"""(text rendered by `areno.data.chat_template`, whether the tokenizer adds its special tokens, such as BOS)."""


@dataclass(slots=True)
class RenderedRow(Generic[Item]):
    """A rendered row whose texts are not encoded yet. `finish` makes the item from the token ids of each text.

    `finish` raises DataError if the row makes no valid item, such as a pair with an answer that has no token to train
    on.
    """

    texts: list[Text]
    finish: Callable[[list[list[int]]], Item]

    def encode(self, tokenizer: Any) -> Item:
        return self.finish([encode_text(tokenizer, text) for text in self.texts])


def encode_rows(
    tokenizer: Any, rows: Sequence[Any], indices: Sequence[int], draft: Callable[[Any, int], RenderedRow[Item]]
) -> list[Item | Exception]:
    """Render rows by `draft`, and encode them with few tokenizer calls. Returns each row's item or exception."""
    drafts = [_result_or_exception(draft, row, index) for row, index in zip(rows, indices, strict=True)]
    texts = [text for each in drafts if isinstance(each, RenderedRow) for text in each.texts]
    try:
        encoded = iter(encode_texts(tokenizer, texts))
    except Exception:  # one text cannot be encoded, so each row is encoded by itself
        return [
            each if isinstance(each, Exception) else _result_or_exception(each.encode, tokenizer) for each in drafts
        ]
    return [
        each if isinstance(each, Exception) else _result_or_exception(each.finish, [next(encoded) for _ in each.texts])
        for each in drafts
    ]


def _result_or_exception(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return error


def encode_texts(tokenizer: Any, texts: Sequence[Text]) -> list[list[int]]:
    """Encode texts together. The Rust backend of a tokenizer encodes them on all CPU cores."""
    found = _encode_distinct(tokenizer, texts)
    for (text, _), tokens in zip(texts, found, strict=True):
        warn_of_unknown_tokens(tokenizer, text, tokens)
    return found


def _encode_distinct(tokenizer: Any, texts: Sequence[Text]) -> list[list[int]]:
    if not _encodes_by_backend(type(tokenizer)):
        return [encode_text(tokenizer, text) for text in texts]
    known = {text: list[int]() for text in texts}  # many rows end alike, and answers may share a prompt
    for special in (False, True):
        plain = [text for text, adds_special in known if adds_special == special and BREAK not in text]
        for text, tokens in zip(plain, _encode_batch(tokenizer, plain, special), strict=True):
            known[text, special] = tokens
    for text in known:
        if BREAK in text[0]:
            known[text] = encode_text(tokenizer, text)
    return [list(known[text]) for text in texts]


_CONTEXTS = ("\n", "a", "0", ".")  # after one of them, nearly any text begins at a token edge


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Encode a text that follows other text, without the space that some tokenizers add at the start of a text."""
    for context in _CONTEXTS if text and not control_tokens(tokenizer).adds_no_space else ():
        before = encode_text(tokenizer, (context, False))
        found = encode_text(tokenizer, (context + text, False))
        if found[: len(before)] == before:
            return found[len(before) :]
    return encode_text(tokenizer, (text, False))


def encode_continuations(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    if control_tokens(tokenizer).adds_no_space:
        return encode_texts(tokenizer, [(text, False) for text in texts])
    return [encode_continuation(tokenizer, text) for text in texts]


def encode_text(tokenizer: Any, text: Text) -> list[int]:
    words, adds_special = text
    if adds_special:
        return tokenizer.encode(words)
    if BREAK in words:
        return control_tokens(tokenizer).encode(words)
    return tokenizer.encode(words, add_special_tokens=False)


def _encode_batch(tokenizer: Any, texts: Sequence[str], adds_special: bool) -> list[list[int]]:
    if not texts:
        return []
    # transformers encodes the first text, and so turns off the truncation and padding of the backend.
    first = tokenizer.encode(texts[0], add_special_tokens=adds_special)
    rest = tokenizer.backend_tokenizer.encode_batch_fast(list(texts[1:]), add_special_tokens=adds_special)
    return [first, *(each.ids for each in rest)]


@cache
def _encodes_by_backend(kind: type) -> bool:
    """Return whether a tokenizer class inherits the encoding of PreTrainedTokenizerFast without changes."""
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast
    return issubclass(kind, own) and kind.encode is own.encode and kind._encode_plus is own._encode_plus


def encode_generation_prompt(tokenizer: Any, prompt: Prompt, enable_thinking: bool | None = None) -> list[int]:
    """Encode a prompt as `render_generation_prompt` renders it."""
    text = render_generation_prompt(tokenizer, prompt, enable_thinking)
    return encode_text(tokenizer, (text, tokenizer.chat_template is None))


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Decode token ids to text, special tokens included."""
    if _decodes_like_transformers(tokenizer):  # transformers checks each token first, which takes as long as decoding
        return tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return tokenizer.decode(tokens, skip_special_tokens=False)


def decode_all(tokenizer: Any, token_rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
    """Decode rows of token ids as `tokenizer.batch_decode` does. Many tokens are decoded on all CPU cores."""
    if _decodes_like_transformers(tokenizer):
        backend = tokenizer.backend_tokenizer
        if sum(map(len, token_rows)) < _MIN_TOKENS_FOR_THREADS:
            return [backend.decode(tokens, skip_special_tokens=skip_special_tokens) for tokens in token_rows]
        return backend.decode_batch(list(token_rows), skip_special_tokens=skip_special_tokens)
    return tokenizer.batch_decode(list(token_rows), skip_special_tokens=skip_special_tokens)


def _decodes_like_transformers(tokenizer: Any) -> bool:
    """Return whether the tokenizer's Rust backend decodes to the same text as transformers does."""
    return _decodes_by_backend(type(tokenizer)) and not tokenizer.clean_up_tokenization_spaces


@cache
def _decodes_by_backend(kind: type) -> bool:
    """Return whether a tokenizer class inherits the decoding of PreTrainedTokenizerFast without changes."""
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast
    return issubclass(kind, own) and kind._decode is own._decode and kind.decode is own.decode
