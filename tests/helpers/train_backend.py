"""A train backend of any model, from the settings that a test is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areno.config.models import OptimizerConfig
from areno.config.run import EngineConfig
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.train.backend import TrainBackend
from areno.layers.parallel import ParallelGroup
from areno.models.transformer import Transformer
from areno.specs.engine import EngineSpec, SharePrefixes
from areno.specs.role import RoleSpec

ALONE = ParallelGroup()


def train_backend(
    model: Transformer,
    optimizer: OptimizerConfig | None,
    *,
    attn_backend: str = "sdpa",
    dp: Any = ALONE,
    cp: Any = ALONE,
    data: Any = None,
    zero_stage: int = 0,
    sequence_parallel: bool = False,
    share_prefixes: SharePrefixes = "off",
    fill: Callable[[], object] = lambda: None,
    **role: Any,
) -> TrainBackend:
    """role: fields of its RoleSpec. Without `gradient_checkpointing`, all activations are kept."""
    tp = model.tp
    spec = RoleSpec(path="", optimizer=optimizer, **{"gradient_checkpointing": False, **role})
    engine = EngineConfig(tp_size=tp.size, cp_size=cp.size, zero_stage=zero_stage, sequence_parallel=sequence_parallel)
    devices = ["cpu"] * (tp.size * dp.size)
    of_engine = EngineSpec(actor=spec, devices=devices, engine=engine, share_prefixes=share_prefixes)
    context = ParallelContext(dp.rank, model.device, tp, dp, cp, dp if data is None else data)
    return TrainBackend(model, spec, of_engine, context, attn_backend, fill)
