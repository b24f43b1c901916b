"""The work that the benchmark times: prompts of random tokens, their lengths, and samples of each prompt.

A benchmark needs only the sizes of a model, so `model_folder` writes a configuration for the name of a shape, and
weights are drawn at random.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areno.errors import ConfigError, Problem
from areno.models.known_shapes import SHAPES, published_config
from areno.types import GenerationOutput, TrainSequence


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One batch of prompts and completions, described by their lengths in tokens."""

    prompt_lens: tuple[int, ...]
    new_lens: tuple[int, ...]  # of each completion, by prompt
    n_samples: int  # for each prompt
    name: str

    @staticmethod
    def fixed(n_prompts: int, n_samples: int, prompt_len: int, new_tokens: int) -> Workload:
        name = f"{n_prompts} x {n_samples}, prompt {prompt_len}, {new_tokens} new tokens"
        prompt_lens, new_lens = (prompt_len,) * n_prompts, (new_tokens,) * n_prompts
        return Workload(prompt_lens=prompt_lens, new_lens=new_lens, n_samples=n_samples, name=name)

    @staticmethod
    def uniform(n_prompts: int, n_samples: int, low: int, high: int) -> Workload:
        """Return a batch with uniform lengths for each prompt, always the same for the same arguments."""
        draw = random.Random(0)
        lens = [draw.randint(low, high) for _ in range(2 * n_prompts)]
        name = f"{n_prompts} x {n_samples}, prompt and new tokens uniform in {low}..{high}"
        return Workload(prompt_lens=tuple(lens[::2]), new_lens=tuple(lens[1::2]), n_samples=n_samples, name=name)

    @property
    def n_rows(self) -> int:
        return len(self.prompt_lens) * self.n_samples

    @property
    def n_new_tokens(self) -> int:
        """Number of sampled tokens in the whole batch."""
        return sum(self.new_lens) * self.n_samples

    @property
    def row_lens(self) -> list[int]:
        """Number of tokens in each row. A row is a prompt with one of its completions."""
        lens = [a + b for a, b in zip(self.prompt_lens, self.new_lens, strict=True)]
        return [length for length in lens for _ in range(self.n_samples)]

    def with_max_new_tokens(self, max_new: int) -> Workload:
        return replace(self, new_lens=tuple(min(max_new, new_len) for new_len in self.new_lens))

    def random_prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [draw.choices(range(vocab_size), k=length) for length in self.prompt_lens]

    def random_rows(self, vocab_size: int, seed: int) -> list[TrainSequence]:
        """Draw training rows of random tokens, to train or score without a rollout."""
        draw = random.Random(-1 - seed)
        return [
            synthetic_row(prompt, draw.choices(range(vocab_size), k=new_len), [-10.0] * new_len, sample)
            for prompt, new_len in zip(self.random_prompts(vocab_size, seed), self.new_lens, strict=True)
            for sample in range(self.n_samples)
        ]


def rows_of_outputs(
    prompts: Sequence[Sequence[int]], outputs: Mapping[int, Sequence[GenerationOutput]]
) -> list[TrainSequence]:
    """Build a training row from each sample of a rollout. The advantages are made up, see `synthetic_row`."""
    samples = [each for of_prompt in outputs.values() for each in of_prompt]
    if not samples:
        return []
    parts: list[Any] = []  # prompt, completion, prompt, completion, ...
    for index, of_prompt in outputs.items():
        prompt = np.array(prompts[index], dtype=np.int64)
        for each in of_prompt:  # vars gives the arrays; each.tokens would build a list
            parts += prompt, vars(each)["tokens"]
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    is_prompt = np.repeat(np.arange(len(parts)) % 2 == 0, lengths)
    tokens = np.concatenate(parts, dtype=np.int64, casting="unsafe")
    drawn, advantages = np.zeros(len(tokens)), np.zeros(len(tokens))
    drawn[~is_prompt] = np.concatenate([vars(each)["logprobs"] for each in samples])
    advantages[~is_prompt] = np.repeat([1.0 if each.sample % 2 else -1.0 for each in samples], lengths[1::2])
    ends = np.cumsum(lengths)[1::2].tolist()
    places = map(slice, [0, *ends], ends)
    return [
        TrainSequence(
            prompt_mask=is_prompt[place],
            tokens=tokens[place],
            logprobs=drawn[place],
            advantages=advantages[place],
            routes=each.routes,
        )
        for place, each in zip(places, samples, strict=True)
    ]


def synthetic_row(prompt: Sequence[int], response: Any, logprobs: Any, sample: int) -> TrainSequence:
    """Build a training row of arrays. The advantage is made up: 1 for odd and -1 for even indices of samples."""
    n_prompt, n_tokens = len(prompt), len(prompt) + len(response)
    tokens, drawn, advantages = np.empty(n_tokens, np.int64), np.zeros(n_tokens), np.zeros(n_tokens)
    tokens[:n_prompt], tokens[n_prompt:], drawn[n_prompt:] = prompt, response, logprobs
    advantages[n_prompt:] = 1.0 if sample % 2 else -1.0
    prompt_mask = np.arange(n_tokens) < n_prompt
    return TrainSequence(prompt_mask=prompt_mask, tokens=tokens, logprobs=drawn, advantages=advantages)


def model_folder(shape: str, folder: Path, **changes: Any) -> tuple[str, bool]:
    """Return (model folder, whether its weights have to be drawn at random) for a path or a shape, such as "qwen3-4b".

    A size alone, such as "4b", means Qwen3. The configuration of a named shape, with `changes`, is written to `folder`.
    """
    if Path(shape).is_dir():
        return shape, not any(Path(shape).glob("*.safetensors"))
    if (config := published_config(shape)) is None:
        expected = ", ".join(SHAPES)
        raise ConfigError([Problem("--shape", f"is {shape!r}; expected a model folder or one of {expected}")])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder), True
