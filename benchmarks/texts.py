"""Random texts of words that a tokenizer knows, so that they are encoded as fast as natural language."""

from __future__ import annotations

import argparse
import random
from typing import Any

from areno.bench.work import Workload


def add_tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", metavar="FOLDER", required=True, help="tokenizer folder, for texts")


class RandomTexts:
    """Draws random texts from words that the tokenizer mostly encodes as one token each."""

    def __init__(self, tokenizer: Any):
        texts = (tokenizer.decode([token]) for token in range(len(tokenizer)))
        words = (text[1:] for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha())
        self._words = sorted(set(words)) or ["a"]

    def draw(self, work: Workload, name: str, seed: int) -> list[str]:
        """Return a random text for each prompt of a batch, always the same for the same arguments."""
        draw = random.Random(f"{name} {seed}")
        return [" ".join(draw.choices(self._words, k=length)) for length in work.prompt_lens]
