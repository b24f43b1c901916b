"""Checkpoints in FP8 and MXFP4 with a scale for each block of a weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areno.engine.engine import Engine
from areno.errors import CheckpointError
from areno.layers.parallel import ParallelGroup
from areno.models.block_scales import MXFP4Slice
from areno.models.folder import open_safetensors
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from areno.models.weights import check_weights, load_weights
from tests.helpers.fp8_blocks import COLUMNS, ROWS, in_blocks
from tests.helpers.tiny_engine import folder_with_weights, saved_tensors, spec


def written(folder: Path) -> dict[str, Tensor]:
    """Write a model whose linear layers are in FP8, their scales in another file, and return its values."""
    folder_with_weights(folder)
    [file] = folder.glob("*.safetensors")
    tensors, of_scales, expected = load_file(file), {}, {}
    for name, weight in list(tensors.items()):
        expected[name] = weight
        if name.endswith("_proj.weight"):
            tensors[name], of_scales[f"{name}_scale_inv"], expected[name] = in_blocks(weight)
    parts = {"model-1.safetensors": tensors, "model-2.safetensors": of_scales}
    for name, part in parts.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    file.unlink()
    index = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    write_config(folder, quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[ROWS, COLUMNS])
    return expected


def write_config(folder: Path, **quantization: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def loaded(folder: Path, rank: int = 0, n_ranks: int = 1) -> Transformer:
    model = build_model(load_config(folder), dtype=torch.float32, device="cpu", tp=ParallelGroup(rank, n_ranks))
    load_weights(model, folder)
    return model


def test_they_are_loaded_and_saved_as_their_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = written(tmp_path / "in")
    check_weights(build_model(load_config(tmp_path / "in"), dtype=torch.float32, device="meta"), tmp_path / "in")
    with caplog.at_level("INFO"), Engine(spec(tmp_path / "in", random_init=False), "inline") as engine:
        engine.save(str(tmp_path / "out"))
    assert f"weights in FP8 with blocks of {ROWS} x {COLUMNS} are loaded as float32" in caplog.text
    saved = saved_tensors(tmp_path / "out")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_each_rank_loads_its_part(tmp_path: Path) -> None:
    expected = written(tmp_path)
    for rank in range(2):
        model = loaded(tmp_path, rank, 2)
        down = model.layers[1].mlp.down.weight  # type: ignore[union-attr]
        assert torch.equal(down, expected["model.layers.1.mlp.down_proj.weight"].chunk(2, dim=1)[rank])
        up = model.layers[1].mlp.gate_up.weight[24:]  # type: ignore[union-attr]
        assert torch.equal(up, expected["model.layers.1.mlp.up_proj.weight"].chunk(2, dim=0)[rank])


@pytest.mark.parametrize("wrong", ["fewer", "more", "turned", "one", "integers", "no codes"])
def test_scales_that_do_not_fit_are_named(wrong: str, tmp_path: Path) -> None:
    written(tmp_path)
    of_scales, name = load_file(tmp_path / "model-2.safetensors"), "model.layers.1.mlp.down_proj.weight"
    scales = of_scales[f"{name}_scale_inv"]
    changed = {
        "fewer": scales[:1, :1],
        "more": torch.ones(scales.shape[0] + 1, scales.shape[1]),
        "turned": scales.t(),
        "one": scales.flatten()[:1],
        "integers": scales.to(torch.uint8),
    }
    of_scales[f"{name}_scale_inv"] = changed.get(wrong, scales).contiguous()
    save_file(of_scales, tmp_path / "model-2.safetensors")
    if wrong == "no codes":
        weights = load_file(tmp_path / "model-1.safetensors")
        save_file({**weights, name: weights[name].bfloat16()}, tmp_path / "model-1.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight in FP8 is .* for each block"
    ) as raised:
        check_weights(build_model(load_config(tmp_path), dtype=torch.float32, device="meta"), tmp_path)
    assert "\n" not in str(raised.value)
    with pytest.raises(CheckpointError, match="for each block"):
        loaded(tmp_path)


@pytest.mark.parametrize("wrong", [{"fmt": "e5m2"}, {"weight_block_size": None}, {"quant_method": "gptq"}])
def test_other_quantized_weights_are_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    written(tmp_path)
    write_config(tmp_path, **{"quant_method": "fp8", "weight_block_size": [ROWS, COLUMNS], **wrong})
    with pytest.raises(CheckpointError, match=r"quantization_config.*or in fp8 with a weight_block_size"):
        load_config(tmp_path)


def test_values_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    """All codes, and all scales but the largest, of which 6 times is no finite number."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.randint(256, (3, 85, 2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = torch.arange(3 * 85 * 2).remainder(254).view(3, 85, 2).to(torch.uint8)
    codes[0, 0].flatten()[:16] = torch.arange(16, dtype=torch.uint8) * 17
    save_file({"codes": codes, "scales": scales}, tmp_path / "in.safetensors")
    expected = convert_moe_packed_tensors(codes, scales)
    with open_safetensors(tmp_path / "in.safetensors") as tensors:
        stored = MXFP4Slice.checked("w", tensors.get_slice("codes"), tensors.get_tensor("scales"))
        assert tuple(stored.get_shape()) == expected.shape == (3, 64, 85)
        found = stored[0:3, :, 0:85]
        assert torch.equal(stored[1:2, :, 5:9], expected[1:2, :, 5:9])
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))
