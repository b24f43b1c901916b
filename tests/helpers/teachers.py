"""The mean divergence from a teacher, computed by transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno.config.models import OptimizerConfig
from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence
from areno.types import TrainSequence

SGD = OptimizerConfig(
    type="sgd",
    lr=1.0,
    lr_scheduler_type="constant",
    warmup_steps_proportion=0.0,
    weight_decay=0.0,
    gradient_clipping=0.0,
)


def of_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def by_transformers(
    student: Any,
    teacher: Any,
    rows: list[TrainSequence],
    divergence: Divergence,
    sampling: SamplingConfig,
    ids: list[int] | None = None,
) -> torch.Tensor:
    """The mean of the divergence over trained tokens, in the words of the formula. With `ids`, over these tokens."""
    total, n_tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        tokens, trained = torch.tensor(np.asarray(row.tokens)), ~np.asarray(row.prompt_mask)
        first = int(np.argmax(trained))
        theirs = tokens
        if row.teacher_prompt is not None:
            theirs = torch.cat([torch.tensor(row.teacher_prompt), tokens[first:]])
        shift = len(theirs) - len(tokens)
        q = torch.log_softmax(student(tokens[None]).logits[0] / sampling.temperature, -1)
        with torch.no_grad():
            p = torch.log_softmax(teacher(theirs[None]).logits[0] / sampling.temperature, -1)
        for t in np.flatnonzero(trained):
            ours, their = q[t - 1], p[t - 1 + shift]
            if ids is not None:
                ours, their = ours[ids].log_softmax(-1), their[ids].log_softmax(-1)
            if divergence.kind == "forward_kl":
                found = (their.exp() * (their - ours)).sum()
            elif divergence.kind == "reverse_kl":
                found = (ours.exp() * (ours - their)).sum()
            else:
                m = (divergence.beta * their.exp() + (1 - divergence.beta) * ours.exp()).log()
                found = divergence.beta * (their.exp() * (their - m)).sum()
                found = found + (1 - divergence.beta) * (ours.exp() * (ours - m)).sum()
            total, n_tokens = total + found, n_tokens + 1
    return total / n_tokens
