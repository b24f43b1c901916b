"""AdamW (arXiv 1711.05101) on flat buffers, the global gradient norm, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from areno.config.model_roles import OptimizerConfig
from areno.engine.train.flat import FlatParameters
from areno.layers.parallel import TensorParallel


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of update number `step`, counted from 0.

    Linear warm-up over the first W = round(warmup_steps_proportion * lr_decay_steps) updates, the last of which has the
    full rate; then the chosen shape down to min_lr_ratio * lr at update `lr_decay_steps`, and constant from there.
    """
    warmup = round(config.warmup_steps_proportion * config.lr_decay_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, config.lr_decay_steps - warmup))
    share = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


@dataclass(frozen=True)
class GradientStats:
    """Of the whole model, all tensor-parallel ranks together."""

    norm: float  # global 2-norm, before clipping
    zero_frac: float  # share of entries that are exactly 0


class AdamW:
    """Updates `flat.masters` from `flat.grads` and writes the result into `flat.params`, in place.

    steps: updates applied; the schedule and the bias correction count these. skipped_steps: updates that were not
    applied. exp_avg, exp_avg_sq: float32 moments in the layout of the flat buffers, there from the start, since the KV
    cache is sized by what is free before the first update.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, tp: TensorParallel):
        self.flat, self.config, self.tp = flat, config, tp
        self.steps = 0
        self.skipped_steps = 0
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(flat.grads), torch.zeros_like(flat.grads)

    @property
    def lr(self) -> float:
        """The rate that the next update will have."""
        return learning_rate(self.config, self.steps)

    def gradient_stats(self) -> GradientStats:
        """Waits for the device. A collective call over the tensor-parallel ranks."""
        flat = self.flat
        totals_3 = torch.zeros(3, dtype=torch.float64, device=flat.grads.device)  # squares, non-zeros, entries
        for place, segment in flat.chunks():
            grads = flat.grads[place]
            norm = torch.linalg.vector_norm(grads).double()
            found_2 = torch.stack([norm.square(), grads.count_nonzero().double()])
            # Equal copies on every rank are counted once. Dividing before the sum, rather than leaving them out of it,
            # makes the result, and with it the clipping, the same number on every rank.
            totals_3[:2] += found_2 if segment.sharded else found_2 / self.tp.size
        for segment in flat.segments:
            totals_3[2] += segment.n_params if segment.sharded else segment.n_params / self.tp.size
        squares, nonzeros, entries = self.tp.all_reduce(totals_3).tolist()
        return GradientStats(math.sqrt(squares), 1.0 - nonzeros / entries)

    def skip(self) -> None:
        """Count an update that must not be applied. Nothing else changes."""
        self.skipped_steps += 1

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """One update. grad_norm: finite, of `gradient_stats`; gradients are scaled down to gradient_clipping."""
        config, flat = self.config, self.flat
        lr = self.lr
        self.steps += 1
        scale = min(1.0, config.gradient_clipping / (grad_norm + 1e-6)) if config.gradient_clipping else 1.0
        correction_1 = 1.0 - config.beta1**self.steps
        correction_2 = math.sqrt(1.0 - config.beta2**self.steps)
        for place, segment in flat.chunks():
            grad, master = flat.grads[place], flat.masters[place]
            first, second = self.exp_avg[place], self.exp_avg_sq[place]
            first.mul_(config.beta1).add_(grad, alpha=(1.0 - config.beta1) * scale)
            second.mul_(config.beta2).addcmul_(grad, grad, value=(1.0 - config.beta2) * scale**2)
            if segment.decayed and config.weight_decay:
                master.mul_(1.0 - lr * config.weight_decay)
            # The bias corrections are folded into the step size and eps: one pass over memory less.
            root = second.sqrt().add_(config.eps * correction_2)
            master.addcdiv_(first, root, value=-lr * correction_2 / correction_1)
            if flat.masters is not flat.params:
                flat.params[place].copy_(master)
