"""What is to be done: how many prompts, how long, how often sampled; with random tokens in them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from areno.types import TrainSequence


@dataclass(frozen=True, kw_only=True)
class Work:
    """One batch. prompt_lens, new_lens: tokens of each prompt, and of each of its `n_samples` completions."""

    prompt_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    n_samples: int
    name: str

    @staticmethod
    def fixed(n_prompts: int, n_samples: int, prompt_len: int, new_tokens: int) -> Work:
        """All prompts of one length, and all completions."""
        name = f"{n_prompts} x {n_samples}, prompt {prompt_len}, {new_tokens} new tokens"
        prompt_lens, new_lens = (prompt_len,) * n_prompts, (new_tokens,) * n_prompts
        return Work(prompt_lens=prompt_lens, new_lens=new_lens, n_samples=n_samples, name=name)

    @staticmethod
    def uniform(n_prompts: int, n_samples: int, low: int, high: int) -> Work:
        """Both lengths drawn uniformly from low..high for each prompt, always the same ones."""
        draw = random.Random(0)
        lens = [draw.randint(low, high) for _ in range(2 * n_prompts)]
        name = f"{n_prompts} x {n_samples}, prompt and new tokens uniform in {low}..{high}"
        return Work(prompt_lens=tuple(lens[::2]), new_lens=tuple(lens[1::2]), n_samples=n_samples, name=name)

    @property
    def n_rows(self) -> int:
        return len(self.prompt_lens) * self.n_samples

    @property
    def n_new(self) -> int:
        """Sampled tokens of the whole batch."""
        return sum(self.new_lens) * self.n_samples

    @property
    def row_lens(self) -> list[int]:
        """Tokens of each row, a prompt with one of its completions."""
        lens = [a + b for a, b in zip(self.prompt_lens, self.new_lens, strict=True)]
        return [length for length in lens for _ in range(self.n_samples)]

    def with_new_at_most(self, most: int) -> Work:
        """The same prompts with shorter completions."""
        return dataclasses.replace(self, new_lens=tuple(min(most, new_len) for new_len in self.new_lens))

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random tokens."""
        draw = random.Random(seed)
        return [draw.choices(range(vocab_size), k=length) for length in self.prompt_lens]

    def random_rows(self, vocab_size: int, seed: int) -> list[TrainSequence]:
        """Rows for training or scoring without a rollout before it."""
        draw = random.Random(-1 - seed)
        return [
            row(prompt, draw.choices(range(vocab_size), k=new_len), [-10.0] * new_len, sample)
            for prompt, new_len in zip(self.prompts(vocab_size, seed), self.new_lens, strict=True)
            for sample in range(self.n_samples)
        ]


def row(prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], sample: int) -> TrainSequence:
    """A row to train on; odd samples are good, even ones bad."""
    n_prompt, advantage = len(prompt), 1.0 if sample % 2 else -1.0
    return TrainSequence(
        prompt_mask=[True] * n_prompt + [False] * len(response),
        tokens=[*prompt, *response],
        logprobs=[0.0] * n_prompt + list(logprobs),
        advantages=[0.0] * n_prompt + [advantage] * len(response),
    )
