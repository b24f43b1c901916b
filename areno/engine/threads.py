"""The number of threads of a rank on the CPU. For small passes of a tiny model, one thread is faster than several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_ONE_BELOW = 5_000_000  # parameters
_ALL_FROM = 600_000_000  # parameters x tokens: where all threads began to pay in training of a tiny model


class Threads:
    """Sets the number of threads of this process for the models of a rank. No effect on a CUDA device.

    Args:
        device: The device of the rank.
        n_ranks: Number of ranks on this machine, which share its threads.
        size: Returns the number of parameters of the rank's largest model.
        one_number: Whether a model always has the same number of threads, as exact arithmetic needs.
    """

    def __init__(self, device: torch.device, n_ranks: int, size: Callable[[], int], one_number: bool):
        self._on_cpu, self._size, self._one_number = device.type == "cpu", size, one_number
        self._most = max(1, torch.get_num_threads() // n_ranks)
        self.set()

    def set(self) -> None:
        """Set the number of threads for decoding, after the models have changed."""
        if self._on_cpu:
            torch.set_num_threads(1 if self._size() < _ONE_BELOW else self._most)

    @contextmanager
    def for_pass(self, n_tokens: int) -> Iterator[None]:
        """Return a context with the number of threads for a pass of training or scoring.

        Args:
            n_tokens: Number of tokens that the pass computes.
        """
        if self._on_cpu and not self._one_number and self._size() * n_tokens >= _ALL_FROM:
            torch.set_num_threads(self._most)
        try:
            yield
        finally:
            self.set()
