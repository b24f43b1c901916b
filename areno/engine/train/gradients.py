"""The gradient and the statistics of an optimizer step, summed over micro-batches and data-parallel ranks.

If the optimizer is divided over data-parallel ranks, a rank needs only the sum of the elements that it owns. Then
buckets are reduce-scattered during the backward pass (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areno.engine.train.micro_batches import StepMicroBatches
from areno.engine.train.zero_buffers import CHUNK, Bucket, FlatParameters
from areno.layers.parallel import ParallelGroup, wait_for
from areno.models.transformer import Transformer


class Gradients:
    """Accumulates the gradient of a step, and sums it over all ranks once, after the last micro-batch.

    Call `begin`, then `backward` for each forward pass, then `finish` on all ranks.
    """

    def __init__(self, flat: FlatParameters, dp: ParallelGroup, tp: ParallelGroup):
        self._flat, self._dp, self._tp = flat, dp, tp

    def begin(self, step: StepMicroBatches, again: bool = False) -> None:
        """Clear the gradients before a step. With `again`, this is a second attempt after memory ran out."""
        self._flat.grads.zero_()

    def backward(self, output: Tensor, gradient: Tensor | None = None) -> None:
        """Add to the gradients. If `output` is not the loss, `gradient` is the loss's gradient with respect to it."""
        output.backward(gradient)

    def finish(self) -> None:
        self._dp.all_reduce(self._flat.grads)
        self._sum_partial_gradients()

    def _sum_partial_gradients(self) -> None:
        """Sum, over tensor-parallel ranks, the gradients of which each rank has computed only a part."""
        found = sorted(self._flat.replicated_chunks(), key=lambda pair: pair[1])
        for n, same in itertools.groupby(found, key=lambda pair: pair[1]):
            parts = [self._flat.grads[chunk.grads] for chunk, _ in same]
            while parts:  # about CHUNK elements in each collective
                size = list(itertools.accumulate(map(len, parts)))
                taken = max(1, sum(end <= CHUNK for end in size))
                joined = torch.cat(parts[:taken])
                self._tp.sum_over_replicas(joined, n)
                for part, total in zip(parts, joined.split([len(part) for part in parts[:taken]]), strict=False):
                    part.copy_(total)
                del parts[:taken]


class ReducedGradients(Gradients):
    """Accumulates the gradient of a step with ZeRO. Each rank gets the sum of the elements that it owns.

    A bucket whose gradients are not divided (ZeRO-1) is reduced once, in the last backward pass. A bucket whose
    gradients are divided (ZeRO-2) is reduced in every backward pass. Such buckets accumulate by turns in two slots,
    which are buffers in `flat.workspace`. While one bucket is reduced, the next bucket fills the other slot. Then the
    sum is added to the gradients of the owned elements.

    All ranks must start the same reductions in the same order. So each rank takes part in the reductions of
    `step.rounds` backward passes, even if it has fewer of its own. A rank that repeats a step after running out of
    memory skips the reductions that it has already taken part in, because its contribution would be the same.
    """

    def __init__(self, flat: FlatParameters, model: Transformer):
        super().__init__(flat, flat.dp, model.tp)
        self._order = flat.buckets[::-1]  # in the order of the backward pass
        self._divided = [bucket for bucket in self._order if not bucket.is_whole]
        self._rounds = self._round = 0
        self._left: Iterator[Bucket] = iter(())  # buckets to reduce in this round after `_next`
        self._next: Bucket | None = None
        self._at = self._begun = 0  # reductions so far: in this pass over the step, and in any
        self._works: list[tuple[Bucket, Any]] = []  # under way
        self._kept: list[tuple[Bucket, Tensor]] = []  # reduced before the step began again, in host memory
        model.on_stage_backward = self._on_stage_backward

    def begin(self, step: StepMicroBatches, again: bool = False) -> None:
        flat = self._flat
        if again:
            whole = [bucket for bucket, _ in self._works if bucket.is_whole]
            self._wait_for_reductions()
            self._kept += [(bucket, flat.grads[bucket.own_grads_range].to("cpu", copy=True)) for bucket in whole]
        else:
            self._wait_for_reductions()
            self._kept, self._begun = [], 0
        for bucket in self._order:
            if bucket.is_whole or not again:
                flat.grads[bucket.grads].zero_()
        self._at, self._round = 0, 0
        self._rounds = step.rounds if self._divided else step.max_backward_passes

    def backward(self, output: Tensor, gradient: Tensor | None = None) -> None:
        self._open_round()
        output.backward(gradient)
        self._close_round()

    def finish(self) -> None:
        while self._round < self._rounds:
            self._open_round()
            self._close_round()
        self._wait_for_reductions()
        for bucket, piece in self._kept:
            self._flat.grads[bucket.own_grads_range].copy_(piece)
        self._sum_partial_gradients()

    def _open_round(self) -> None:
        """Start a backward pass: list its buckets, and clear the workspace slot of the first one."""
        self._left = iter(self._order if self._round == self._rounds - 1 else self._divided)
        self._next = next(self._left, None)
        for bucket in self._divided[:1]:
            self._free_slot(bucket)

    def _close_round(self) -> None:
        """Reduce the buckets of this round that the backward pass has not reported as complete.

        If this rank has no backward pass while other ranks still have one, all buckets are reduced here.
        """
        while self._next is not None:
            self._reduce(self._next)
        self._round += 1

    def _on_stage_backward(self, stage: int) -> None:
        while self._next is not None and self._next.stage >= stage:
            self._reduce(self._next)

    def _reduce(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket, unless it was done in an earlier attempt at the step."""
        if self._at >= self._begun:
            self._works.append((bucket, self._dp.reduce_scatter(self._flat.gradient_slot(bucket))))
            self._begun += 1
        self._at += 1
        self._next = next(self._left, None)
        if not bucket.is_whole and (at := self._divided.index(bucket) + 1) < len(self._divided):
            self._free_slot(self._divided[at])

    def _free_slot(self, bucket: Bucket) -> None:
        """Wait until all reductions that use the workspace slot of a bucket are done, and clear the slot."""
        slot = self._flat.gradient_slot(bucket)
        users = [each for each, _ in self._works if each in self._divided]
        self._wait_for_reductions(
            [each for each in users if self._flat.gradient_slot(each).data_ptr() == slot.data_ptr()]
        )
        slot.zero_()

    def _wait_for_reductions(self, buckets: list[Bucket] | None = None) -> None:
        """Wait for reductions, and add the sums to the gradients. On CUDA the stream waits, not the host."""
        done, self._works = self._works, []
        if buckets is not None:
            self._works = [pair for pair in done if pair[0] not in buckets]
            done = [pair for pair in done if pair[0] in buckets]
        for bucket, work in done:
            wait_for(work)
            if not bucket.is_whole:
                size = bucket.own.stop - bucket.own.start
                start = bucket.own.start - bucket.place.start
                self._flat.grads[bucket.grads].add_(self._flat.gradient_slot(bucket)[start : start + size])


class StepStats:
    """Sums the statistics of micro-batches. All data-parallel ranks must add the same names in order."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sums: dict[str, Tensor] = {}  # float64: a 0-dim sum, or (count, sum, sum of squares) of observations
        self._maxima: dict[str, Tensor] = {}  # (1,) float64

    def add(self, stats: Mapping[str, Tensor]) -> None:
        """Add tensors by name. Scalars are summed. 1-D tensors are reported as mean, std and max."""
        for name, value in stats.items():
            value = value.detach().double()
            if value.dim():
                self.add_maximum(f"{name}_max", value)
                count = value.new_full((), value.numel())  # new_tensor would copy from the host, and wait
                value = torch.stack([count, value.sum(), value.square().sum()])
            self._sums[name] = self._sums.get(name, 0.0) + value

    def add_maximum(self, name: str, values: Tensor) -> None:
        """Add values to a statistic that reports the largest value, or 0 if it has no values."""
        low = torch.full((1,), -torch.inf, dtype=torch.float64, device=self.device)
        self._maxima[name] = torch.cat([values.detach().double(), self._maxima.get(name, low)]).amax(0, keepdim=True)

    def finish(self, dp: ParallelGroup) -> dict[str, float]:
        """Return the statistics over all data-parallel ranks, which must all call this. Waits for the device."""
        empty = torch.zeros(0, dtype=torch.float64, device=self.device)
        added = dp.all_reduce(torch.cat([empty, *(value.view(-1) for value in self._sums.values())]))
        largest = dp.all_reduce(torch.cat([empty, *self._maxima.values()]), torch.distributed.ReduceOp.MAX)
        numbers = iter(torch.cat([added, largest]).tolist())
        out: dict[str, float] = {}
        unseen = set()
        for name, value in self._sums.items():
            if value.dim() == 0:
                out[name] = next(numbers)
                continue
            count, total, squares = (next(numbers) for _ in range(3))
            if count == 0:
                unseen.add(f"{name}_max")
                continue
            mean = out[f"{name}_mean"] = total / count
            out[f"{name}_std"] = max(squares / count - mean**2, 0.0) ** 0.5
        for name, value in zip(self._maxima, numbers, strict=True):
            if name not in unseen:
                out[name] = value if value != -torch.inf else 0.0
        return out


def average_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the statistics of optimizer steps. Keeps the largest *_max and the last lr, and sums skipped_steps."""
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [step[name] for step in steps if name in step] for name in names}
    out = {name: max(of) if name.endswith("_max") else sum(of) / len(of) for name, of in found.items()}
    return {**out, "lr": steps[-1]["lr"], "skipped_steps": sum(step["skipped_steps"] for step in steps)}
