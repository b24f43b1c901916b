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
        self._sums: dict[str, Tensor] = {}  # 0-dim float64 shares
        self._moments: dict[str, Tensor] = {}  # (count, sum, sum of squares) float64
        self._maxima: dict[str, Tensor] = {}  # 0-dim float64

    def add(self, stats: Mapping[str, Tensor]) -> None:
        """0-dim tensors are shares and are summed; 1-dim tensors are observations, reported as mean, std and max."""
        for name, value in stats.items():
            value = value.detach().double()
            if value.dim() == 0:
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                moments = torch.stack([value.new_tensor(value.numel()), value.sum(), value.square().sum()])
                self._moments[name] = self._moments.get(name, 0.0) + moments
                self.maximum(f"{name}_max", value)

    def maximum(self, name: str, values: Tensor) -> None:
        """Report the largest of all values given under this name; 0 where there were none."""
        low = torch.full((1,), -torch.inf, dtype=torch.float64, device=self.device)
        seen = self._maxima.get(name, low[0])
        self._maxima[name] = torch.cat([values.detach().double(), seen.view(1)]).amax()

    def finish(self, dp: ParallelGroup) -> dict[str, float]:
        """Waits for the device. A collective call over the data-parallel ranks."""
        empty = [torch.zeros(0, dtype=torch.float64, device=self.device)]
        added = dp.all_reduce(torch.cat(empty + [v.view(-1) for v in (*self._sums.values(), *self._moments.values())]))
        largest = torch.cat(empty + [v.view(-1) for v in self._maxima.values()])
        if dp.size > 1:
            largest = dp.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        numbers = torch.cat([added, largest]).tolist()
        n = len(self._sums)
        out = dict(zip(self._sums, numbers, strict=False))
        for i, name in enumerate(self._moments):
            count, total, squares = numbers[n + 3 * i : n + 3 * i + 3]
            mean = total / max(count, 1)
            out[f"{name}_mean"] = mean
            out[f"{name}_std"] = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
        for name, value in zip(self._maxima, numbers[len(added) :], strict=True):
            out[name] = value if value != -torch.inf else 0.0
        return out


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Several optimizer steps as one: mean; the largest of `*_max`; the last `lr`; the number of `skipped_steps`."""
    out: dict[str, float] = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name.endswith("_max"):
            out[name] = max(values)
        elif name == "lr":
            out[name] = values[-1]
        elif name == "skipped_steps":
            out[name] = sum(values)
        else:
            out[name] = sum(values) / len(values)
    return out
