"""The learning rate of each update."""

from __future__ import annotations

import math

from areno.config.models import OptimizerConfig

DECAY_STEPS = 1000
"""Number of updates in a learning-rate schedule without lr_decay_steps, as in a script that uses Trainer."""


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of update `step`, counted from 0.

    The first W = round(warmup_steps_proportion * lr_decay_steps) updates warm up linearly, and the last of these W
    updates has the full rate. Then the rate falls to min_lr_ratio * lr at update `lr_decay_steps`, and stays there.
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
