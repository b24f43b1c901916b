"""Build models of published sizes with random weights, and random texts for prompts.

A benchmark needs only the sizes of a model, so `model_folder` writes a configuration for the name of a shape. `Texts`
draws words that a tokenizer knows, so that they are encoded as fast as natural language.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from areno.bench.work import Work
from areno.errors import ConfigError, Problem
from areno.models.known_shapes import SHAPES, known_shape


def model_folder(shape: str, folder: Path, **changes: Any) -> tuple[str, bool]:
    """Return a model folder for the name of a shape or a path.

    Args:
        shape: Path of a model folder, or a name such as "qwen3-4b". A size alone, such as "4b", means Qwen3.
        folder: Folder to which the configuration of a named shape is written.
        **changes: Values of config.json that replace those of a named shape, such as vocab_size.

    Returns:
        (path of the model folder, whether the weights have to be drawn at random because the folder has none).

    Raises:
        ConfigError: The shape is unknown.
    """
    if Path(shape).is_dir():
        return shape, not any(Path(shape).glob("*.safetensors"))
    if (config := known_shape(shape)) is None:
        expected = ", ".join(SHAPES)
        raise ConfigError([Problem("--shape", f"is {shape!r}; expected a model folder or one of {expected}")])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder), True


class Texts:
    """A source of random texts, whose words are mostly one token each.

    A text has about as many tokens as words.

    Args:
        tokenizer: Tokenizer from transformers.
    """

    def __init__(self, tokenizer: Any):
        texts = (tokenizer.decode([token]) for token in range(len(tokenizer)))
        words = (text[1:] for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha())
        self._words = sorted(set(words)) or ["a"]

    def of(self, work: Work, name: str, seed: int) -> list[str]:
        """Return a random text for each prompt of a batch. The same arguments always give the same texts.

        Args:
            work: The batch, whose `prompt_lens` are the numbers of words.
            name: Text that is hashed into the seed, such as the name of a way of sampling.
            seed: Number that is hashed into the seed, such as the number of a repeat.
        """
        draw = random.Random(f"{name} {seed}")
        return [" ".join(draw.choices(self._words, k=length)) for length in work.prompt_lens]
