"""Prompts as texts: words that a tokenizer knows, so that they are read as fast as natural language."""

from __future__ import annotations

import random
from typing import Any

from areno.bench.work import Work


class Texts:
    """Random words. Most have one token each, so that a text has about as many tokens as words."""

    def __init__(self, tokenizer: Any):
        texts = (tokenizer.decode([token]) for token in range(len(tokenizer)))
        words = (text[1:] for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha())
        self._words = sorted(set(words)) or ["a"]

    def of(self, work: Work, name: str, seed: int) -> list[str]:
        """A text for each prompt of the work. Other names and seeds have other texts, whose beginnings differ."""
        draw = random.Random(f"{name} {seed}")
        return [" ".join(draw.choices(self._words, k=length)) for length in work.prompt_lens]
