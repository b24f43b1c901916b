"""The learning rate of each optimizer update: warm-up, then decay."""

from __future__ import annotations

import math

from areno.config.models import OptimizerConfig

DECAY_STEPS = 1000
"""Of a schedule without a length, in a script that calls Trainer itself."""


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the rate of update number `step`, counted from 0.

    Linear warm-up over the first W = round(warmup_steps_proportion * lr_decay_steps) updates, the last of which has the
    full rate; then the chosen shape down to min_lr_ratio * lr at update `lr_decay_steps`, and constant from there.
    """
    length = config.lr_decay_steps or DECAY_STEPS
    warmup = round(config.warmup_steps_proportion * length)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, length - warmup))
    share = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
