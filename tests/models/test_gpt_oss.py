"""gpt-oss: experts with biases that the files store transposed, in bfloat16 or MXFP4, and attention with sinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from areno.errors import CheckpointError
from areno.layers.parallel import ParallelGroup
from areno.models.adapter_shapes import linear_shapes
from areno.models.known_shapes import published_config
from areno.models.parameters import n_active_body_parameters, n_parameters
from areno.models.registry import build_model, load_config, parse_config
from areno.models.weights import check_weights, load_weights
from tests.helpers.family_cases import logits_of, random_model
from tests.helpers.lora_models import ROWS, apart, engine_of, lora, of_peft, train
from tests.helpers.published import assert_same_files, in_mixed_dtypes, rewrite
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import scored
from tests.helpers.two_ranks import load, packed, random_rows

QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write a random model whose experts are in MXFP4, with fields of the published files. Returns its values."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random_model("gpt-oss-experts", folder, intermediate_size=64)
    written, values = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in in_mixed_dtypes(folder, ()).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            written[name] = values[name] = tensor
            continue
        n_experts, n_in, n_out = tensor.shape
        shape = (n_experts, n_out, n_in // 32)
        codes = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        written[f"{name}_blocks"], written[f"{name}_scales"] = codes, scales
        values[name] = convert_moe_packed_tensors(codes, scales).contiguous()
    more = {"experts_per_token": 2, "initial_context_length": 32, "router_aux_loss_coef": 0.9}
    rewrite(folder, written, quantization_config=QUANTIZED, **more)
    return values


def load_bf16(folder: Path, tp: ParallelGroup | None = None) -> Any:
    model = build_model(load_config(folder), dtype=torch.bfloat16, device="cpu", tp=tp)
    load_weights(model, folder)
    return model


def test_a_published_folder_is_read_and_written_bit_for_bit(tmp_path: Path) -> None:
    random_model("gpt-oss-experts", tmp_path / "in")
    stored = in_mixed_dtypes(tmp_path / "in", ())
    assert stored["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 32, 96)
    assert stored["model.layers.1.mlp.experts.gate_up_proj_bias"].shape == (6, 96)
    config = load_config(tmp_path / "in")
    assert "tensors in 1 file" in check_weights(
        build_model(config, dtype=torch.bfloat16, device="meta"), tmp_path / "in"
    )
    model = load_bf16(tmp_path / "in")
    save_weights(model, tmp_path / "out")
    assert_same_files(tmp_path / "out", stored)
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters(config)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_mxfp4_is_read_as_transformers_reads_it_and_saved_in_bf16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = in_mxfp4(tmp_path / "in")
    config = load_config(tmp_path / "in")
    assert "tensors in 1 file" in check_weights(
        build_model(config, dtype=torch.bfloat16, device="meta"), tmp_path / "in"
    )
    with caplog.at_level("INFO"):
        save_weights(load_bf16(tmp_path / "in"), tmp_path / "out")
    assert "experts in MXFP4 are loaded as bfloat16" in caplog.text
    assert_same_files(tmp_path / "out", values)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    rows, found = random_rows(101), []
    for name in ("in", "out"):
        reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            found.append(logits_of(reference, rows))
    assert torch.equal(*found)
    model = load(tmp_path / "in")
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(*packed(rows))), found[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_rank_reads_its_own_experts(is_packed: bool, tmp_path: Path) -> None:
    if is_packed:
        in_mxfp4(tmp_path)
    else:
        random_model("gpt-oss-experts", tmp_path)
    whole, half = load(tmp_path).layers[2], load(tmp_path, ParallelGroup(1, 2)).layers[2]
    for name in ("experts_gate_up.weight", "experts_gate_up.bias", "experts_down.weight", "experts_down.bias"):
        assert torch.equal(half.mlp.get_parameter(name), whole.mlp.get_parameter(name).chunk(2)[1]), name
    assert torch.equal(half.mlp.router.bias, whole.mlp.router.bias)
    assert torch.equal(half.attention.sinks, whole.attention.sinks[2:])  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stored: stored.pop("model.layers.0.mlp.experts.down_proj_scales"), "lack .*down_proj_scales"),
        (
            lambda stored: stored.update(
                {"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(6, 32, 1, dtype=torch.uint8)}
            ),
            r"down_proj in MXFP4 has blocks U8 \(6, 32, 2, 16\) and scales \(6, 32, 1\); expected",
        ),
        (
            lambda stored: stored.update(
                {
                    "model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(6, 32, 3, 16, dtype=torch.uint8),
                    "model.layers.0.mlp.experts.down_proj_scales": torch.zeros(6, 32, 3, dtype=torch.uint8),
                }
            ),
            r"down_proj has shape \(6, 96, 32\), expected \(6, 64, 32\)",
        ),
        (
            lambda stored: stored["model.layers.0.mlp.experts.down_proj_scales"].fill_(255),
            r"down_proj: numbers that are nan, infinite",
        ),
        (
            lambda stored: stored.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(6, 64, 32)}),
            r"hold both \S+down_proj(_blocks)? and \S+down_proj(_blocks)?$",
        ),
    ],
)
def test_damaged_mxfp4_is_named(change: Any, named: str, tmp_path: Path) -> None:
    in_mxfp4(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    rewrite(tmp_path, stored)
    with pytest.raises(CheckpointError, match=named) as caught:
        load_bf16(tmp_path)
    assert "\n" not in str(caught.value)


def test_adapters_on_experts_in_mxfp4(tmp_path: Path) -> None:
    in_mxfp4(tmp_path / "in")
    adapters = lora(tmp_path / "in", tuple(linear_shapes(load_config(tmp_path / "in"))), alpha=4.0)
    with engine_of(tmp_path / "in", adapters) as engine:
        before = scored(engine, "actor", ROWS)
        train(engine)
        engine.save(str(tmp_path / "alone"))
        engine.save(str(tmp_path / "merged"), merge=True)
        found = scored(engine, "actor", ROWS)
    assert apart(before, found) > 0.1
    assert apart(found, of_peft(tmp_path / "in", tmp_path / "alone")) < 1e-5
    with engine_of(tmp_path / "merged", None) as merged:
        assert apart(scored(merged, "actor", ROWS), found) < 1e-5


@pytest.mark.parametrize(("size", "n_all", "n_active"), [("20b", 20.9e9, 3.6e9), ("120b", 116.8e9, 5.1e9)])
def test_the_published_models_have_their_sizes(size: str, n_all: float, n_active: float) -> None:
    """Their authors do not count the embedding among the active parameters."""
    values = published_config(f"openai/gpt-oss-{size}")
    assert values is not None
    config = parse_config(values, "config.json")
    assert n_parameters(config) == pytest.approx(n_all, rel=0.003)
    head = config.vocab_size * config.hidden_size
    assert n_active_body_parameters(config) + head == pytest.approx(n_active, rel=0.02)
    assert [config.layer_kind(index).window for index in range(3)] == [128, None, 128]
    assert not config.rope.truncate
    tiny = parse_config(published_config("tiny-gpt-oss") or {}, "config.json")
    assert tiny.experts is not None
    assert config.experts is not None
    assert (tiny.experts.clamped, tiny.experts.biased) == (config.experts.clamped, True)
    assert {kind.window for kind in tiny.kinds} == {16, None}


def test_positions_that_are_null_are_those_that_transformers_assumes() -> None:
    values = published_config("openai/gpt-oss-20b")
    assert values is not None
    expected = parse_config(values, "config.json").rope
    for nulls in ({"rope_scaling": None}, {"rope_scaling": None, "rope_parameters": None}):
        assert parse_config({**values, **nulls}, "config.json").rope == expected


def test_two_fields_of_one_number_must_agree() -> None:
    values = published_config("openai/gpt-oss-20b")
    assert values is not None
    parse_config({**values, "experts_per_token": 4}, "config.json")
    with pytest.raises(CheckpointError, match="experts_per_token is 3, which is not supported; expected num_experts"):
        parse_config({**values, "experts_per_token": 3}, "config.json")
