"""A small model with adapters that differ from zero, and what a pass through its fused or plain layers computes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from areno.engine.train.zero_buffers import FlatParameters
from areno.kernels.attention import choose_backend
from areno.layers.adapter import Adapter
from areno.layers.attention import PackedAttend
from areno.layers.config import AdapterSpec, MoEConfig
from areno.layers.experts import ExpertAdapter
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import WeightSpec
from areno.models.adapter_shapes import linear_shapes
from areno.models.adapters import add_adapters, init_adapters
from areno.models.config import TransformerConfig
from areno.models.transformer import Transformer
from tests.helpers.fused_layers import LENGTHS, SMALL

ALONE = ParallelGroup()
EXPERTS = MoEConfig(n_experts=6, top_k=2, inner_size=20, normalised=True, dense_layers=frozenset({0}))
LIKE_EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "experts": EXPERTS, "mlp_bias": False}


def adapted(tp: ParallelGroup, targets: tuple[str, ...], **changes: Any) -> Transformer:
    """With every adapter away from zero, and a buffer for the gradients. Without targets: on all."""
    torch.manual_seed(0)
    config = TransformerConfig(**{**SMALL, "num_heads": 4, "num_kv_heads": 2, **changes})
    targets = targets or tuple(linear_shapes(config))
    model = Transformer(config, WeightSpec(torch.float32, "cpu", tp))
    model.init_weights(1)
    add_adapters(model, AdapterSpec(rank=3, alpha=6.0, targets=targets))
    init_adapters(model, 2)
    for module in model.modules():
        if isinstance(module, (Adapter, ExpertAdapter)):
            generator = torch.Generator().manual_seed(4)
            for part in module.layout["b"]:
                part.region(module.b).copy_(part.shard_of(torch.randn(part.full_shape, generator=generator)))
    FlatParameters(model, model.is_sharded)
    return model


def passed(model: Transformer, fused: bool, split: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the full gradients of the adapters."""
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    attend = PackedAttend(cu, max(LENGTHS), choose_backend("native", model.device, torch.float32))
    tokens = torch.arange(sum(LENGTHS)) * 7 % model.config.vocab_size
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    with mock.patch.object(Transformer, "runs_fused", return_value=fused):
        hidden = model(tokens, positions, attend, split=split)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
        (hidden * weights).sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            for index, part in enumerate(model.tensor_parts(name)):
                full = torch.empty(part.full_shape)
                for owner in range(model.tp.size):
                    part.gather(parameter.grad, model.tp, owner, full if model.tp.rank == owner else None)
                grads[f"{name}.{index}"] = full
    assert all("adapter" in name for name in grads)
    return hidden.detach(), grads
