"""Statistics of an optimizer step, gathered on the device over micro-batches and ranks, read once at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areno.layers.parallel import ParallelGroup


class StepStats:
    """Adds up what micro-batches report. Names arrive in the same order on every data-parallel rank."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sums: dict[str, Tensor] = {}  # float64: a share, 0-dim; of observations (count, sum, sum of squares)
        self._maxima: dict[str, Tensor] = {}  # (1,) float64

    def add(self, stats: Mapping[str, Tensor]) -> None:
        """0-dim tensors are shares and are summed; 1-dim tensors are observations, reported as mean, std and max."""
        for name, value in stats.items():
            value = value.detach().double()
            if value.dim():
                self.maximum(f"{name}_max", value)
                value = torch.stack([value.new_tensor(value.numel()), value.sum(), value.square().sum()])
            self._sums[name] = self._sums.get(name, 0.0) + value

    def maximum(self, name: str, values: Tensor) -> None:
        """Report the largest of all values given under this name; 0 where there were none."""
        low = torch.full((1,), -torch.inf, dtype=torch.float64, device=self.device)
        self._maxima[name] = torch.cat([values.detach().double(), self._maxima.get(name, low)]).amax(0, keepdim=True)

    def finish(self, dp: ParallelGroup) -> dict[str, float]:
        """Waits for the device. A collective call over the data-parallel ranks."""
        empty = torch.zeros(0, dtype=torch.float64, device=self.device)
        added = dp.all_reduce(torch.cat([empty, *(value.view(-1) for value in self._sums.values())]))
        largest = dp.all_reduce(torch.cat([empty, *self._maxima.values()]), torch.distributed.ReduceOp.MAX)
        numbers = iter(torch.cat([added, largest]).tolist())
        out: dict[str, float] = {}
        for name, value in self._sums.items():
            if value.dim() == 0:
                out[name] = next(numbers)
                continue
            count, total, squares = (next(numbers) for _ in range(3))
            mean = out[f"{name}_mean"] = total / max(count, 1)
            out[f"{name}_std"] = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
        for name, value in zip(self._maxima, numbers, strict=True):
            out[name] = value if value != -torch.inf else 0.0
        return out


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the statistics of several optimizer steps.

    Returns:
        The mean of each number over the steps that have it, which the first one does; the largest of `*_max`, the last
        `lr` and the sum of `skipped_steps`.
    """
    found = {name: [step[name] for step in steps if name in step] for name in steps[0]}
    out = {name: max(of) if name.endswith("_max") else sum(of) / len(of) for name, of in found.items()}
    return {**out, "lr": steps[-1]["lr"], "skipped_steps": sum(step["skipped_steps"] for step in steps)}
