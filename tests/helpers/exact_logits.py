"""The logits from which a decoder computes exact log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from areno.engine.decoder.runner import Runner
from areno.kernels.sampling import SamplingFlags


def logits_to_score(local_BV: Tensor, n_columns: int, overwrites: bool = False, is_exact: bool = True) -> Tensor:
    """What a runner returns for logits of a rank whose head has `n_columns` rows; sampling may overwrite them."""
    runner: Any = SimpleNamespace(
        is_exact=is_exact,
        model=SimpleNamespace(lm_head=SimpleNamespace(weight=torch.zeros(n_columns, 1))),
        sampler=SimpleNamespace(tensors=SimpleNamespace(overwrites_logits=lambda flags: overwrites)),
    )
    return Runner._logits_to_score(cast(Runner, runner), local_BV, SamplingFlags())
