"""How long completions are likely to be, as far as earlier ones tell. Only used to divide work between devices."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 200_000  # prompts that are remembered


class ExpectedLengths:
    """Tokens of a completion: the mean of those drawn last for its prompt; without any, that of the last rollout.

    A run that goes on begins without them. That changes which device draws a sample, and no sample.
    """

    def __init__(self) -> None:
        self._of_prompt: dict[int, float] = {}
        self._mean: float | None = None

    def of(self, prompt: Sequence[int]) -> float | None:
        """None where nothing is known."""
        return self._of_prompt.get(hash(tuple(prompt)), self._mean)

    def note(self, prompts: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]) -> None:
        """Take those of a rollout: of each prompt the tokens of its completions."""
        if len(self._of_prompt) + len(prompts) > _MOST:
            self._of_prompt.clear()
        for prompt, drawn in zip(prompts, lengths, strict=True):
            self._of_prompt[hash(tuple(prompt))] = sum(drawn) / len(drawn)
        n_samples = sum(map(len, lengths))
        self._mean = sum(map(sum, lengths)) / n_samples if n_samples else self._mean
