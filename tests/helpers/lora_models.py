"""A base model with LoRA adapters, trained by areno and loaded by peft."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno.engine.engine import Engine
from areno.layers.config import AdapterSpec
from areno.loss_fns.grpo import grpo_loss_fn
from areno.specs.role import LoraSpec
from tests.helpers.in_float64 import InFloat64
from tests.helpers.tiny_engine import (
    request,
    rollout,
    spec,
    train_rows,
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


SOME = ("q_proj", "v_proj", "up_proj", "down_proj")  # fused layers have an adapter on some of their projections


REQUESTS = [request(index, n_samples=3, length=4 + 7 * index) for index in range(4)]


ROWS = [[3, 4, 5, 6], [7, 8], list(range(2, 40))]


def lora(folder: Path, targets: tuple[str, ...] = ALL, rank: int = 4, **more: Any) -> LoraSpec:
    """Adapters that are to be felt: of a large scale."""
    how = {"alpha": 16.0, "use_rslora": False, **more}
    init_from = how.pop("init_from", "")
    return LoraSpec(adapters=AdapterSpec(rank=rank, targets=targets, **how), base=str(folder), init_from=init_from)


def engine_of(folder: Path, adapters: LoraSpec | None, **settings: Any) -> Engine:
    workers = "spawn" if settings.get("devices", 1) > 1 else "inline"
    return Engine(spec(folder, **{"random_init": False, "lora": adapters, **settings}), workers)


def train(engine: Engine, times: int = 2) -> dict[str, float]:
    """Rollouts, and a step on each."""
    stats: dict[str, float] = {}
    for _ in range(times):
        stats = engine.train(train_rows(rollout(engine, REQUESTS), REQUESTS), grpo_loss_fn)
    return stats


def of_peft(
    folder: Path, adapters: Path, rows: list[list[int]] = ROWS, dtype: torch.dtype = torch.float32
) -> list[list[float]]:
    """Log-probabilities of each token but the first, by transformers and peft."""
    import peft
    import transformers

    how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # grouped products have no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    model = peft.PeftModel.from_pretrained(model, str(adapters)).eval().to(dtype)
    out = []
    for row in rows:
        with torch.no_grad(), InFloat64() if dtype == torch.float64 else nullcontext():
            logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
        out.append([0.0, *logprobs[:-1].gather(-1, torch.tensor(row[1:])[:, None])[:, 0].tolist()])
    return out


def apart(rows: Any, others: Any) -> float:
    pairs = zip(rows, others, strict=True)
    return max(float(np.abs(np.asarray(row) - np.asarray(other)).max()) for row, other in pairs)
