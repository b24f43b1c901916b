"""AdamW (arXiv 1711.05101), Muon and SGD on flat buffers, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from areno.config.models import OptimizerConfig
from areno.config.optimizers import OPTIMIZERS
from areno.engine.train.learning_rate import learning_rate
from areno.engine.train.optimizer_offload import Buffer, StateStream, UpdateWindow
from areno.engine.train.optimizer_updates import UPDATES
from areno.engine.train.zero_buffers import Bucket, FlatParameters
from areno.kernels.adam import AdamUpdate, squares_and_nonzeros
from areno.layers.parallel import ParallelGroup, wait_for


@dataclass(frozen=True)
class GradientStats:
    """Statistics of the gradient of the whole model, over all tensor-parallel ranks."""

    norm: float  # before clipping
    zero_frac: float  # of elements that are exactly 0


class Optimizer:
    """AdamW, Muon or SGD. Updates `flat.masters` from `flat.grads`, and writes the rounded result into `flat.params`.

    With `flat.in_host`, masters and moments are streamed through the device in windows (see StateStream), with bitwise
    equal results. If the buffers are divided over data-parallel ranks, each rank updates the elements that it owns, and
    gathers all others.

    `moments_from` is the value of `steps` when the moments were last zero. Adam's bias correction counts from there.
    `empty_steps` counts skipped steps without a trained token, which advance the schedule. The next update first calls
    the functions in `before_step`.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, tp: ParallelGroup):
        self.flat, self.config, self.tp = flat, config, tp
        self.steps = self.skipped_steps = self.empty_steps = self.moments_from = 0
        self.before_step: list[Callable[[], None]] = []
        self._stream = StateStream(flat.params.device)
        self._update = UPDATES[config.type](flat, config, tp)
        self.is_in_blocks = OPTIMIZERS[config.type].block > 1
        self.clear_moments()

    def clear_moments(self) -> None:
        """Set the moments to zero, as before the first update. The learning-rate schedule continues."""
        self._update.clear()
        self.moments_from = self.steps

    @property
    def moments(self) -> dict[str, Buffer]:
        """The buffers of the moments by name. With 8-bit moments also the buffers of their scales."""
        return self._update.moments

    def has_moment(self, name: str, parameter: str) -> bool:
        """Return whether a parameter has the moment `name`. Some moments are only those of the first parameters."""
        return self.moments[name].numel() >= self.flat.n_local or parameter not in self.flat.matrices

    @property
    def lr(self) -> float:
        return learning_rate(self.config, self.steps + self.empty_steps)

    def gradient_stats(self) -> GradientStats:
        """Return the gradient's norm and fraction of zeros. All ranks of the model must call this."""
        flat = self.flat
        totals_3 = torch.zeros(3, dtype=torch.float64, device=flat.grads.device)  # squares, non-zeros, entries
        for chunk in flat.chunks():
            found_2 = squares_and_nonzeros(flat.grads[chunk.grads])
            # Equal copies on every rank count once. They are divided before the sum, not left out on some ranks, so
            # that the result, and with it the clipping, is the same number on every rank.
            totals_3[:2] += found_2 if chunk.segment.sharded else found_2 / self.tp.size
        for segment in flat.segments:
            n_params = segment.n_params / flat.dp.size
            totals_3[2] += n_params if segment.sharded else n_params / self.tp.size
        for chunk, n in flat.replicated_chunks():
            if chunk.segment.sharded:  # counted above by each of n ranks
                grads = flat.grads[chunk.grads]
                totals_3[:2] -= squares_and_nonzeros(grads) * (1 - 1 / n)
                totals_3[2] -= len(grads) * (1 - 1 / n)
        squares, nonzeros, entries = flat.dp.all_reduce(self.tp.all_reduce(totals_3)).tolist()
        return GradientStats(math.sqrt(squares), 1.0 - nonzeros / entries)

    def skip_update(self, is_empty: bool = False) -> float:
        """Count an update that is not applied, and return its lr. With `is_empty`, the schedule of lr advances."""
        lr = self.lr
        self.skipped_steps += 1
        self.empty_steps += is_empty
        return lr

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Apply one update. All ranks of the model must call this."""
        config, flat = self.config, self.flat
        while self.before_step:
            self.before_step.pop(0)()
        lr = self.lr
        self.steps += 1
        n_updates = self.steps - self.moments_from
        update = AdamUpdate(
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            decay=1.0,
            scale=min(1.0, config.gradient_clipping / (grad_norm + 1e-6)) if config.gradient_clipping else 1.0,
            correction_1=1.0 - config.beta1**n_updates,
            correction_2=math.sqrt(1.0 - config.beta2**n_updates),
            step=self.steps,
        )
        decayed = replace(update, decay=1.0 - lr * config.weight_decay)
        self._update.prepare(self._stream, update)
        works = []
        for window in self._stream.windows({"masters": flat.masters, **self.moments}, flat.n_local):
            for bucket in flat.buckets:
                if bucket.local.start >= window.place.stop or bucket.local.stop <= window.place.start:
                    continue
                for chunk in flat.chunks(bucket, window.place):
                    how = decayed if chunk.segment.decayed else update
                    self._update.apply(window, chunk, how)
                if self.is_in_blocks:
                    self._broadcast_replicas(bucket, window)
                if bucket.local.stop <= window.place.stop:
                    works.append(flat.gather(bucket))  # runs while the next bucket is updated
        for work in works:
            wait_for(work)

    def _broadcast_replicas(self, bucket: Bucket, window: UpdateWindow) -> None:
        """Make the copies of a shard equal on all tensor-parallel ranks that hold the same shard.

        The first of these ranks sends its values to the others. Without this the copies may drift apart: a block of
        8-bit moments also contains elements that other ranks do not hold, so the scale of the block differs between
        ranks.
        """
        flat = self.flat
        for chunk, n in flat.replicated_chunks(bucket, window.place):
            if chunk.segment.sharded:
                masters = window.state("masters", chunk.local)
                masters.copy_(self.tp.gather_from_replicas(masters, n)[0])
                flat.weights(chunk.place).copy_(masters)
