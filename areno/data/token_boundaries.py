"""Encode a text of which some parts are trained.

The tokens before a trained part are those of the preceding text alone, which is the prompt of a rollout. So a token
must end where a trained part begins. If that is so in the tokens of the whole text, these tokens are used. Otherwise
the part is encoded as a continuation of the prompt. Texts between control tokens are encoded independently, so no
prompt is encoded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areno.data.control_tokens import control_token_texts, control_tokens
from areno.data.encode import RenderedRow, Text, encode_continuation
from areno.types import TrainSequence

Pieces = list[tuple[list[int], bool]]
"""(token ids, whether the tokens are trained) for consecutive pieces of a sequence."""
Join = Callable[[list[list[int]]], Pieces]
Spans = Sequence[tuple[int, int]]


def render_sequence(tokenizer: Any, text: str, spans: Spans, *, plain: bool = False) -> RenderedRow[TrainSequence]:
    """Render a training sequence. The spans (start, end) of `text` are trained.

    `plain` is for a text without a chat template: the tokenizer adds its special tokens, and eos ends the sequence.
    """
    divide = _split_parts if control_tokens(tokenizer).adds_no_space else _split_parts_with_prefix
    texts, join = divide(tokenizer, text, spans, plain)
    eos = tokenizer.eos_token_id or 0

    def finish(found: list[list[int]]) -> TrainSequence:
        pieces = join(found) + ([([eos], True)] if plain else [])
        tokens = np.array([token for piece, _ in pieces for token in piece], dtype=np.int64)
        prompt_mask, at = np.ones(len(tokens), dtype=bool), 0
        for piece, trained in pieces:
            prompt_mask[at : at + len(piece)] = not trained
            at += len(piece)
        return TrainSequence(tokens=tokens, prompt_mask=prompt_mask, eos_token_id=eos)

    return RenderedRow(texts, finish)


def _split_parts(tokenizer: Any, text: str, spans: Spans, plain: bool) -> tuple[list[Text], Join]:
    """Return the texts to encode, each trained part by itself, and a function that joins their tokens."""
    pieces, at = list[tuple[str, bool]](), 0
    for start, end in spans:
        pieces += [(text[at:start], False), (text[start:end], True)]
        at = end
    pieces = [piece for piece in [*pieces, (text[at:], False)] if piece[0]]
    texts = [(piece, plain and not at) for at, (piece, _) in enumerate(pieces)]
    return texts, lambda found: [(tokens, trained) for tokens, (_, trained) in zip(found, pieces, strict=True)]


def _split_parts_with_prefix(tokenizer: Any, text: str, spans: Spans, plain: bool) -> tuple[list[Text], Join]:
    """Like `_split_parts`, for tokenizers that add a space at the start: encode a part with the text before it.

    The text before a part begins with the control token that ends the previous part. This token is encoded with each of
    the two parts, and dropped from the later one.
    """
    names, at, texts, parts = control_token_texts(tokenizer), 0, list[Text](), list[tuple[int, int, int, int]]()
    for start, end in [*spans, (len(text), len(text))]:
        parts.append((at, start, end, parts[-1][2] if parts else 0))
        texts += [(text[at:start], plain), (text[at:end], plain)]
        ending = max((len(name) for name in names if text.endswith(name, start, end)), default=0)
        at = end - ending if ending else 0

    def join(found: list[list[int]]) -> Pieces:
        pieces, known = Pieces(), list[int]()
        for (at, start, end, before), head, whole in zip(parts, found[::2], found[1::2], strict=True):
            skipped = known[-1:] if at else known
            if head[: len(skipped)] != skipped:
                head, whole = [*skipped, *encode_continuation(tokenizer, text[before:start])], []
            fits = whole[: len(head)] == head
            part = whole[len(head) :] if fits else encode_continuation(tokenizer, text[start:end])
            pieces += [(head[len(skipped) :], False), (part, True)]
            known += head[len(skipped) :] + part
        return pieces

    return texts, join
