"""A critic and a reference model beside the tiny engine, and rows to train the critic on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from areno.config.models import OptimizerConfig
from areno.specs.role import RoleSpec
from areno.types import TrainSequence
from tests.helpers.tiny_engine import VOCAB, model_folder

ROWS = [[3, 4, 5, 6], [7, 8], [9] * 30, [10, 11, 12], [13]]


OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0)


def reference(path: Path, **changes: Any) -> RoleSpec:
    return RoleSpec(**{"path": str(path), "head": "lm", "key": "ref.path", **changes})


def critic(path: Path, **changes: Any) -> RoleSpec:
    return RoleSpec(
        **{
            "path": str(path),
            "head": "value",
            "key": "critic.path",
            "optimizer": OPTIMIZER,
            "gradient_checkpointing": False,
            **changes,
        }
    )


def critic_rows(n: int = 7) -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(n):
        size = 5 + 3 * index
        draws = torch.randn(2, size, generator=generator)
        rows.append(
            TrainSequence(
                tokens=torch.randint(2, VOCAB, (size,), generator=generator).tolist(),
                prompt_mask=[t < 3 or t % 5 == 0 for t in range(size)],
                values=(0.1 * draws[0]).tolist(),
                returns=(1 + draws[1]).tolist(),
            )
        )
    return rows


def large_shape(folder: Path) -> Path:
    """About 25M parameters: enough for memory to be told from noise."""
    return model_folder(folder, hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
