"""Fewer key-value heads than tensor-parallel ranks: several ranks hold the same head, and all is as on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.layout import Layout
from areno.cost.memory import kv_bytes_per_token
from areno.layers.config import AdapterSpec
from areno.layers.parallel import ParallelGroup
from areno.models.adapter_shapes import linear_shapes, n_adapter_parameters
from areno.models.adapters import add_adapters
from areno.models.parameters import n_parameters
from areno.models.registry import build_model, layout_problems, load_config
from tests.helpers.tiny_engine import folder_with
from tests.helpers.tp_ranks import Groups, compare, on_ranks

BIASED = {"num_key_value_heads": 2, "attention_bias": True}


def compare_forms(folder: Path, forms: list[dict[str, Any]]) -> None:
    layout = Groups.of(tp=4)
    for alone in forms:
        compare(folder, layout, alone)


@pytest.mark.slow
def test_four_ranks_train_two_heads_as_one_rank_does(tmp_path: Path) -> None:
    """The gradient of a head is the sum over its ranks, and counts once in the norm. With 8-bit moments, too, whose
    blocks a head shares with others."""
    on_ranks(4, compare_forms, folder_with(tmp_path, 64, **BIASED), [{"kind": "adam_8bit"}])


def compare_copies(folder: Path) -> None:
    layout = Groups.of(tp=2)
    compare(folder, layout, {"head": "value"}, zero_stage=1)
    compare(folder, layout, {"kind": "adam_8bit"}, zero_stage=2)


@pytest.mark.slow
def test_with_two_copies_of_the_model(tmp_path: Path) -> None:
    on_ranks(4, compare_copies, folder_with(tmp_path, 64, num_key_value_heads=1))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen3", "phi3"])  # whose files keep q, k and v as one
def test_what_a_rank_holds_is_told_beforehand(tmp_path: Path, family: Any, n_kv_heads: int) -> None:
    config = replace(load_config(folder_with(tmp_path, num_key_value_heads=n_kv_heads)), family=family)
    layout = Layout.single_replica(4)
    assert layout_problems(config, layout) == []
    adapters = AdapterSpec(rank=3, alpha=6.0, targets=tuple(linear_shapes(config)))
    for rank in range(4):
        model = build_model(config, dtype=torch.float32, device="meta", tp=ParallelGroup(rank, 4))
        assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters(config, layout)
        head = rank * n_kv_heads // 4
        for part in model.tensor_parts("layers.0.attention.qkv.weight")[1:]:
            assert (part.start, part.size) == (head * config.head_dim, config.head_dim)
        add_adapters(model, adapters)
        held = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert held == n_adapter_parameters(config, adapters, layout)
    assert kv_bytes_per_token(config, 4, layout) == kv_bytes_per_token(config, 4) // n_kv_heads


def test_ranks_that_do_not_share_heads_evenly_are_refused(tmp_path: Path) -> None:
    config = load_config(folder_with(tmp_path, num_attention_heads=6, num_key_value_heads=2))
    assert layout_problems(config, Layout.single_replica(6)) == []
    (problem,) = layout_problems(config, Layout.single_replica(3))
    assert problem.key == "engine.tp_size"
    assert "2 (key-value heads)" in problem.message
    (problem,) = layout_problems(config, Layout(4, 2, 2))
    assert "3 attention heads and 1 key-value heads" in problem.message


def test_heads_that_a_context_does_not_divide(tmp_path: Path) -> None:
    config = load_config(folder_with(tmp_path, num_attention_heads=8, num_key_value_heads=4))
    assert layout_problems(config, Layout(4, 2, 2)) == []
    (problem,) = layout_problems(config, Layout(8, 2, 4))
    assert problem.key == "engine.cp_size"
    assert problem.message == (
        "is 4, which does not divide the 2 key-value heads of the model on each device (config.json: "
        "num_key_value_heads=4; engine.tp_size=2)"
    )
