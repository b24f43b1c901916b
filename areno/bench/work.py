"""The batch of work that the benchmark times: prompts of random tokens, their lengths, and samples of each prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areno.types import TrainSequence


@dataclass(frozen=True, kw_only=True)
class Work:
    """One batch of prompts and completions, described by their lengths.

    Attributes:
        prompt_lens: Number of tokens in each prompt.
        new_lens: For each prompt, the number of tokens in each of its completions.
        n_samples: Number of completions for each prompt.
        name: Description for reports.
    """

    prompt_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    n_samples: int
    name: str

    @staticmethod
    def fixed(n_prompts: int, n_samples: int, prompt_len: int, new_tokens: int) -> Work:
        """Return a batch whose prompts all have one length, and whose completions all have one length.

        Args:
            n_prompts: Number of prompts.
            n_samples: Number of completions for each prompt.
            prompt_len: Number of tokens in each prompt.
            new_tokens: Number of tokens in each completion.
        """
        name = f"{n_prompts} x {n_samples}, prompt {prompt_len}, {new_tokens} new tokens"
        prompt_lens, new_lens = (prompt_len,) * n_prompts, (new_tokens,) * n_prompts
        return Work(prompt_lens=prompt_lens, new_lens=new_lens, n_samples=n_samples, name=name)

    @staticmethod
    def uniform(n_prompts: int, n_samples: int, low: int, high: int) -> Work:
        """Return a batch whose prompt and completion lengths are drawn uniformly for each prompt.

        The same arguments always give the same lengths.

        Args:
            n_prompts: Number of prompts.
            n_samples: Number of completions for each prompt.
            low: Shortest length, in tokens.
            high: Longest length, in tokens.
        """
        draw = random.Random(0)
        lens = [draw.randint(low, high) for _ in range(2 * n_prompts)]
        name = f"{n_prompts} x {n_samples}, prompt and new tokens uniform in {low}..{high}"
        return Work(prompt_lens=tuple(lens[::2]), new_lens=tuple(lens[1::2]), n_samples=n_samples, name=name)

    @property
    def n_rows(self) -> int:
        """Number of samples in the batch."""
        return len(self.prompt_lens) * self.n_samples

    @property
    def n_new(self) -> int:
        """Number of sampled tokens in the whole batch."""
        return sum(self.new_lens) * self.n_samples

    @property
    def row_lens(self) -> list[int]:
        """Number of tokens in each row. A row is a prompt with one of its completions."""
        lens = [a + b for a, b in zip(self.prompt_lens, self.new_lens, strict=True)]
        return [length for length in lens for _ in range(self.n_samples)]

    def with_new_at_most(self, max_new: int) -> Work:
        """Return the same prompts with completions of at most `max_new` tokens.

        Args:
            max_new: Largest number of tokens in a completion, without the prompt.
        """
        return replace(self, new_lens=tuple(min(max_new, new_len) for new_len in self.new_lens))

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Draw the prompts as random token ids.

        Args:
            vocab_size: Number of token ids to draw from.
            seed: Seed of the random generator.

        Returns:
            Token ids of each prompt, in the lengths `prompt_lens`.
        """
        draw = random.Random(seed)
        return [draw.choices(range(vocab_size), k=length) for length in self.prompt_lens]

    def random_rows(self, vocab_size: int, seed: int) -> list[TrainSequence]:
        """Draw training rows of random tokens, to train or score without a rollout.

        Args:
            vocab_size: Number of token ids to draw from.
            seed: Seed of the random generator.

        Returns:
            A row for each sample.
        """
        draw = random.Random(-1 - seed)
        return [
            row(prompt, draw.choices(range(vocab_size), k=new_len), [-10.0] * new_len, sample)
            for prompt, new_len in zip(self.prompts(vocab_size, seed), self.new_lens, strict=True)
            for sample in range(self.n_samples)
        ]


def row(prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float], sample: int) -> TrainSequence:
    """Build a training row from a prompt and a completion, with a made-up advantage.

    Args:
        prompt: Token ids of the prompt.
        response: Token ids of the completion.
        logprobs: Log-probability of each token in the completion.
        sample: Index of the sample among those of its prompt. The advantage is 1 for odd and -1 for even indices.
    """
    n_prompt, advantage = len(prompt), 1.0 if sample % 2 else -1.0
    return TrainSequence(
        prompt_mask=[True] * n_prompt + [False] * len(response),
        tokens=[*prompt, *response],
        logprobs=[0.0] * n_prompt + list(logprobs),
        advantages=[0.0] * n_prompt + [advantage] * len(response),
    )
