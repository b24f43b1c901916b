"""Which linear layers are in FP8: whole parts of names, and settings that leave nothing in FP8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areno.config.fp8 import FP8Config
from areno.config.layout import Layout
from areno.models.fp8_layers import emulated_linears, fp8_problems, is_in_fp8, linears_in_fp8, names_in_checkpoint
from areno.models.known_shapes import published_config
from areno.models.registry import parse_config

QWEN = parse_config(published_config("qwen3-0.6b"), "config.json")
EXCLUDE = "actor.fp8_config.exclude_modules"


@pytest.mark.parametrize(
    ("part", "layers", "each"),
    [
        ("layers.1", {1}, 4),  # and not layers.10
        ("layers.1.mlp", {1}, 2),
        ("up_proj", {*range(28)}, 1),
        ("model.layers.27.mlp.gate_proj", {27}, 1),  # one layer with up_proj
        ("model", {*range(28)}, 4),
    ],
)
def test_names_match_by_whole_parts(part: str, layers: set[int], each: int) -> None:
    fp8 = FP8Config(exclude_modules=[part])
    assert {layer for layer in range(28) if not is_in_fp8(f"layers.{layer}.mlp.gate_up", QWEN, fp8)} == layers
    assert len(list(linears_in_fp8(QWEN, fp8))) == 4 * 28 - each * len(layers)


def test_names_of_fused_matrices_match_too() -> None:
    phi = replace(QWEN, family="phi3")
    assert not [*fp8_problems(phi, FP8Config(exclude_modules=["qkv_proj"]))]
    within, left_out = names_in_checkpoint(phi, FP8Config(exclude_modules=["layers.2.self_attn.qkv_proj"]))
    assert left_out == ["layers.2.self_attn.qkv_proj"]
    assert len(within) == 4 * 28 - 1


@pytest.mark.parametrize(
    ("settings", "key", "told"),
    [
        ({"exclude_modules": ["v_pro", "o_proj", "layers.28", "lm_head", "output"]}, EXCLUDE, "has v_pro, layers.28,"),
        ({"exclude_modules": [""]}, EXCLUDE, "q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj, mlp."),
        ({"exclude_modules": ["mlp", "self_attn"]}, EXCLUDE, "leaves out all linear layers"),
        (
            {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 20, "num_layers_at_end_in_bf16": 8},
            *("actor.fp8_config.first_last_layers_bf16", "leaves out all 28 layers"),
        ),
    ],
)
def test_settings_that_leave_nothing_are_errors(settings: dict[str, Any], key: str, told: str) -> None:
    [problem] = fp8_problems(QWEN, FP8Config(**settings))
    assert problem.key == key
    assert told in problem.message


def test_layers_whose_sizes_are_emulated() -> None:
    odd = replace(QWEN, intermediate_size=3080)
    assert not emulated_linears(QWEN, FP8Config())
    assert {name.split(".", 2)[2] for name in emulated_linears(odd, FP8Config())} == {"mlp.down"}  # 2 x 3080 fits
    found = emulated_linears(odd, FP8Config(exclude_modules=["layers.0"]), Layout(2, 2, 1))
    assert found["layers.27.mlp.gate_up"] == (3080, 1024)
    assert "layers.0.mlp.down" not in found
