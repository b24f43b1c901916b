"""Weights are used and saved as the files of a folder store them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from areno.cost.memory import model_bytes
from areno.engine.engine import Engine
from areno.errors import CheckpointError
from areno.kernels.delta import DeltaWeights, RowChunks, delta_rows
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.sft import sft_loss_fn
from areno.models.adapter_shapes import linear_shapes
from areno.models.adapters import read_adapter_config
from areno.models.parameters import n_parameters
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from areno.models.weights import check_weights, load_weights
from tests.helpers.family_cases import CASES, IMAGES, SHAPE, random_model
from tests.helpers.family_engines import step
from tests.helpers.fp8_blocks import COLUMNS, in_blocks
from tests.helpers.fp8_blocks import ROWS as BLOCK_ROWS
from tests.helpers.in_float64 import InFloat64
from tests.helpers.lora_models import ROWS, apart, engine_of, lora, of_peft, train
from tests.helpers.published import FLOAT32, assert_same_files, in_mixed_dtypes, publish, rewrite
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import saved_tensors, scored, spec, train_on
from tests.helpers.two_ranks import load
from tests.helpers.zero_ranks import ALONE, ONE_BY_ONE, backend, on_ranks, rows


def load_bf16(folder: Path) -> Transformer:
    model = build_model(load_config(folder), dtype=torch.bfloat16, device="cpu")
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("wide", [FLOAT32, FLOAT32[:1], ()])
def test_float32_among_bf16_is_loaded_and_saved_as_it_is_stored(wide: tuple[str, ...], tmp_path: Path) -> None:
    """Without any, as Qwen3.6 is stored, all weights are bfloat16."""
    random_model("qwen3.5-tied", tmp_path / "in")
    stored = in_mixed_dtypes(tmp_path / "in", wide)
    model = load_bf16(tmp_path / "in")
    assert model.config.float32 == wide
    assert {
        name.rpartition(".delta.")[2] for name, each in model.named_parameters() if each.dtype == torch.float32
    } == {name.removeprefix("linear_attn.") for name in wide}
    a_log = model.layers[1].delta.A_log
    assert torch.equal(a_log, stored["model.layers.1.linear_attn.A_log"])
    save_weights(model, tmp_path / "out")
    assert_same_files(tmp_path / "out", stored)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_than_bf16_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """No number is rounded to bfloat16, in silence or not."""
    random_model("qwen3.5-tied", tmp_path / "in")
    stored = in_mixed_dtypes(tmp_path / "in")
    wide = {name: each.to(dtype) for name, each in stored.items() if name.endswith(FLOAT32)}
    rewrite(tmp_path / "in", stored | wide)
    model = load_bf16(tmp_path / "in")
    assert model.config.float32 == FLOAT32
    save_weights(model, tmp_path / "out")
    assert_same_files(tmp_path / "out", stored | {name: each.float() for name, each in wide.items()})


def test_the_rule_is_that_of_float64(tmp_path: Path) -> None:
    """With the rates and the norm of the files, which rounding to bfloat16 would move far beyond other rounding."""
    random_model("qwen3.5-tied", tmp_path)
    stored = in_mixed_dtypes(tmp_path)
    delta = load_bf16(tmp_path).layers[1].delta
    weights = delta.weights(delta.norm.weight.detach())
    name = "model.layers.1.linear_attn."
    a_log, norm = stored[f"{name}A_log"], stored[f"{name}norm.weight"]
    given = torch.randn(1000, sum(weights.projection_sizes), generator=torch.Generator().manual_seed(2))
    given[:, -delta.delta.n_value_heads :] -= 6  # states that last for hundreds of tokens
    chunks = RowChunks.from_starts([0, 1000], torch.device("cpu"))

    def output(like: torch.Tensor, a_log: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        used = weights._replace(A_log_H=a_log, norm_V=norm)
        used = DeltaWeights(*(each.to(like) if isinstance(each, torch.Tensor) else each for each in used))
        with InFloat64() if like.dtype == torch.float64 else nullcontext(), torch.no_grad():
            return delta_rows(given.to(like), used, chunks)[0].double()

    exact = output(torch.zeros(0, dtype=torch.float64), a_log, norm)
    found = output(torch.zeros(0), delta.A_log, delta.norm.weight)
    rounded = output(torch.zeros(0), a_log.bfloat16(), norm.bfloat16())
    assert (found - exact).abs().max() < 0.01 * (rounded - exact).abs().max()


def test_float32_tensors_have_a_buffer_of_their_own(tmp_path: Path) -> None:
    """They are exactly their masters, and they take what a plan says."""
    random_model("qwen3.5-tied", tmp_path)
    in_mixed_dtypes(tmp_path)
    trained = backend(tmp_path, 0, ALONE, torch.bfloat16)
    flat = trained.flat
    assert flat is not None
    assert flat.wide is not None
    before = flat.wide.clone()
    train_on(trained, rows(5), sft_loss_fn, ONE_BY_ONE)
    assert (flat.wide - before).abs().max() > 1e-3
    assert torch.equal(flat.wide, flat.masters[: flat.wide.numel()])
    assert not torch.equal(flat.wide, flat.wide.bfloat16().float())
    config = trained.model.config
    held = sum(each.nbytes for each in trained.model.parameters())
    assert model_bytes(config, 2, None).weights == held > 2 * n_parameters(config)


@pytest.mark.parametrize(
    ("kind", "images", "fused"),
    [
        ("qwen3.5-experts", True, True),
        ("qwen3.5-experts", False, True),
        ("qwen3.5-experts", False, False),
        ("qwen3.5", True, False),
    ],
)
def test_a_folder_is_saved_as_it_was_read(kind: str, images: bool, fused: bool, tmp_path: Path) -> None:
    """Names, dtypes, bits and config.json, also of what areno does not use; transformers loads it."""
    stored = publish(kind, tmp_path / "in", images=images, fused=fused)
    save_weights(load_bf16(tmp_path / "in"), tmp_path / "out", max_shard_bytes=2**40)
    assert_same_files(tmp_path / "out", stored)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out")]
    assert configs[0] == configs[1]
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    models = [auto.from_pretrained(tmp_path / name, output_loading_info=True) for name in ("in", "out")]
    assert not models[1][1]["missing_keys"]
    assert not models[1][1]["unexpected_keys"]
    expected = models[0][0].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in models[1][0].state_dict().items())


@pytest.mark.parametrize("old", [False, True])
def test_a_gemma_with_images_is_saved_as_it_was_read(old: bool, tmp_path: Path) -> None:
    """With the names of today and with those of the published files. Its adapters are those of peft."""
    text = {**SHAPE, **CASES["gemma3"][1], "num_attention_heads": 8, "tie_word_embeddings": True}
    torch.manual_seed(0)
    whole = transformers.Gemma3Config(text_config=text, vision_config=IMAGES)
    transformers.Gemma3ForConditionalGeneration(whole).save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in/model.safetensors")
    if old:
        stored = {name.replace("model.language_model.", "language_model.model."): each for name, each in stored.items()}
        stored = {
            name.removeprefix("model.") if name.startswith(("model.vision", "model.multi")) else name: each
            for name, each in stored.items()
        }
        rewrite(tmp_path / "in", stored)
    save_weights(load(tmp_path / "in"), tmp_path / "out")
    assert_same_files(tmp_path / "out", stored)
    adapters = lora(tmp_path / "in", ("q_proj", "o_proj", "up_proj", "down_proj"))
    with engine_of(tmp_path / "in", adapters) as engine:
        before = scored(engine, "actor", ROWS)
        train(engine)
        engine.save(str(tmp_path / "a"))
        engine.save(str(tmp_path / "merged"), merge=True)
        found = scored(engine, "actor", ROWS)
    assert apart(before, found) > 0.1
    assert apart(found, of_peft(tmp_path / "in", tmp_path / "a")) < 1e-5
    assert saved_tensors(tmp_path / "merged").keys() == stored.keys()
    again = replace(adapters, init_from=str(tmp_path / "a"))
    assert read_adapter_config(tmp_path / "a", load_config(tmp_path / "in")).adapters == adapters.adapters
    for path, with_adapters in (("merged", None), ("in", again)):
        with engine_of(tmp_path / path, with_adapters) as engine:
            assert apart(scored(engine, "actor", ROWS), found) < 1e-5


def test_both_layouts_of_experts_are_the_same_model(tmp_path: Path) -> None:
    """Ranks read only their own experts, of either."""
    publish("qwen3.5-experts", tmp_path / "each", images=False)
    publish("qwen3.5-experts", tmp_path / "fused", images=False, fused=True)
    for tp in (None, ParallelGroup(1, 2)):
        expected = load(tmp_path / "each", tp).state_dict()
        for name, tensor in load(tmp_path / "fused", tp).state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_merged_adapters_are_saved_in_the_layout_that_was_read(tmp_path: Path) -> None:
    """On experts, the shared one included, and on attention and delta rule."""
    stored = publish("qwen3.5-experts", tmp_path / "in", images=True, fused=True)
    adapters = lora(tmp_path / "in", tuple(linear_shapes(load_config(tmp_path / "in"))), alpha=4.0)
    with engine_of(tmp_path / "in", adapters) as engine:
        before = scored(engine, "actor", ROWS)
        train(engine)
        engine.save(str(tmp_path / "merged"), merge=True)
        found = scored(engine, "actor", ROWS)
    assert apart(before, found) > 0.1
    merged = saved_tensors(tmp_path / "merged")
    assert merged.keys() == stored.keys()
    for name, tensor in stored.items():
        assert merged[name].shape == tensor.shape
        if name.startswith(("mtp.", "model.visual.")):
            assert merged[name].equal(tensor)
    with engine_of(tmp_path / "merged", None) as again:
        assert apart(scored(again, "actor", ROWS), found) < 5e-5


def in_fp8(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Write tensors whose names end in "_proj.weight", or in "_proj", in blocks with scales. Returns their values."""
    written, values = {}, {}
    for name, tensor in tensors.items():
        written[name] = values[name] = tensor
        if name.endswith(("_proj.weight", "experts.down_proj")):
            flat = tensor.float().flatten(0, -2)
            written[name], scales, values[name] = in_blocks(flat)
            written[name] = written[name].view(tensor.shape)
            written[f"{name}_scale_inv"] = scales
    size = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK_ROWS, COLUMNS]}
    rewrite(folder, written, quantization_config=size)
    return values


def test_what_is_copied_in_fp8_is_saved_as_its_values(tmp_path: Path) -> None:
    stored = publish("qwen3.5", tmp_path / "in", images=True, mtp=False)
    stored |= {"mtp.layers.0.mlp.up_proj.weight": torch.randn(24, 30), "mtp.norm.weight": torch.ones(3).bfloat16()}
    values = in_fp8(stored, tmp_path / "in")
    save_weights(load_bf16(tmp_path / "in"), tmp_path / "out")
    wide = {name: each for name, each in values.items() if name.endswith(FLOAT32)}
    assert_same_files(tmp_path / "out", {name: each.bfloat16() for name, each in values.items()} | wide)
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()


def test_no_section_of_a_saved_config_speaks_of_fp8(tmp_path: Path) -> None:
    stored = publish("qwen3.5", tmp_path / "in", images=True)
    values = json.loads((tmp_path / "in/config.json").read_text())
    size = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK_ROWS, COLUMNS]}
    rewrite(tmp_path / "in", stored, text_config={**values["text_config"], "quantization_config": size})
    save_weights(load_bf16(tmp_path / "in"), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == values


@pytest.mark.parametrize("wrong", ["of three dimensions", "without scales", "scales of other blocks"])
def test_what_is_copied_in_fp8_has_values(wrong: str, tmp_path: Path) -> None:
    stored = publish("qwen3.5", tmp_path, images=True, mtp=False)
    in_fp8({**stored, "mtp.up_proj.weight": torch.randn(24, 30)}, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    codes, scales = written["mtp.up_proj.weight"], written["mtp.up_proj.weight_scale_inv"]
    if wrong == "of three dimensions":
        written["mtp.up_proj.weight"], written["mtp.up_proj.weight_scale_inv"] = codes[None], scales[None]
    elif wrong == "without scales":
        del written["mtp.up_proj.weight_scale_inv"]
    else:
        written["mtp.up_proj.weight_scale_inv"] = scales[:1, :1]
    rewrite(tmp_path, written)
    with pytest.raises(CheckpointError, match=r"mtp\.up_proj\.weight: FP8 that areno would copy; expected matrices"):
        load_config(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"3", b'{"a": 3}', b'{"a": {}}', b"\xff{", b"[" * 10**5])
def test_a_damaged_header_is_an_error_of_one_line(header: bytes, tmp_path: Path) -> None:
    publish("qwen3.5-experts", tmp_path, images=False, fused=True)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    model = build_model(load_config(tmp_path), dtype=torch.bfloat16, device="meta")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*") as raised:
        check_weights(model, tmp_path)
    assert "\n" not in str(raised.value)


def test_experts_of_one_tensor_in_fp8_are_refused_in_one_line(tmp_path: Path) -> None:
    stored = publish("qwen3.5-experts", tmp_path, images=False, fused=True, mtp=False)
    in_fp8(stored, tmp_path)
    with pytest.raises(CheckpointError, match=r"down_proj_scale_inv.*which its config.json has no place for"):
        load_bf16(tmp_path)


def test_what_is_copied_must_still_be_there(tmp_path: Path) -> None:
    publish("qwen3.5", tmp_path / "in", images=True)
    model = load_bf16(tmp_path / "in")
    (tmp_path / "in/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot write the model .* no longer holds .*put the weight") as caught:
        save_weights(model, tmp_path / "out")
    assert "free some space" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "adam_8bit", "muon"])
def test_a_run_goes_on_and_saves_in_float32(kind: str, tmp_path: Path) -> None:
    random_model("qwen3.5-tied", tmp_path / "in")
    in_mixed_dtypes(tmp_path / "in")
    settings = spec(tmp_path / "in", random_init=False, dtype="bfloat16")
    assert settings.actor.optimizer is not None
    actor = replace(settings.actor, optimizer=replace(settings.actor.optimizer, type=kind))
    settings = replace(settings, actor=actor)
    with Engine(settings, "inline") as engine:
        step(engine)
        engine.save(str(tmp_path / "out"))
        engine.save_state(str(tmp_path / "state"))
        expected = step(engine)[2]
        assert engine.is_state_written(wait=True)
    with Engine(settings, "inline") as engine:
        engine.load_state(str(tmp_path / "state"))
        engine.save(str(tmp_path / "again"))
        assert step(engine)[2] == expected
    saved = load_bf16(tmp_path / "out").state_dict()
    for name, tensor in load_bf16(tmp_path / "again").state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert not torch.equal(saved["layers.1.delta.A_log"], saved["layers.1.delta.A_log"].bfloat16().float())


def compare_ranks(folder: Path, dp: ParallelGroup) -> None:
    """The float32 tensors of two ranks that divide the optimizer are those of one, to the bit on both."""
    alone = backend(folder, 0, ALONE, torch.bfloat16)
    train_on(alone, rows(3), sft_loss_fn, ONE_BY_ONE)
    assert alone.flat is not None
    assert alone.flat.wide is not None
    for stage in (1, 2):
        divided = backend(folder, stage, dp, torch.bfloat16)
        train_on(divided, rows(3), sft_loss_fn, ONE_BY_ONE)
        assert divided.flat is not None
        wide = divided.flat.wide
        assert wide is not None
        torch.testing.assert_close(wide[: alone.flat.wide.numel()], alone.flat.wide, atol=2e-2, rtol=0)
        other = wide.clone()
        torch.distributed.broadcast(other, 0)
        assert torch.equal(other, wide)


@pytest.mark.slow
def test_ranks_that_divide_the_optimizer_have_the_same_float32_tensors(tmp_path: Path) -> None:
    random_model("qwen3.5-tied", tmp_path)
    in_mixed_dtypes(tmp_path)
    on_ranks(2, compare_ranks, tmp_path)
