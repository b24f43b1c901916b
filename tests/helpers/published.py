"""Folders as models are published: tensors of several dtypes, in the layout of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")


def in_mixed_dtypes(folder: Path, wide: tuple[str, ...] = FLOAT32) -> dict[str, torch.Tensor]:
    """Round the weights of a folder to bfloat16, except those whose names end in `wide`. Returns what is stored."""
    tensors = {
        name: tensor if name.endswith(wide) else tensor.bfloat16()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    return rewrite(folder, tensors, dtype="bfloat16")


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> dict[str, torch.Tensor]:
    """Replace the weights of a folder, and fields of its config.json."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **fields}))
    return tensors


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def with_experts_in_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the matrices of a layer's experts in two tensors with three dimensions, as Qwen3.5 is published."""
    found, parts = {}, dict[str, dict[int, dict[str, torch.Tensor]]]()
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".mlp.experts.")
        if rest:
            expert, kind, _ = rest.split(".")
            parts.setdefault(layer, {}).setdefault(int(expert), {})[kind] = tensor
        else:
            found[name] = tensor
    for layer, experts in parts.items():
        of = [experts[index] for index in sorted(experts)]
        both = [torch.cat((each["gate_proj"], each["up_proj"])) for each in of]
        found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        found[f"{layer}.mlp.experts.down_proj"] = torch.stack([each["down_proj"] for each in of])
    return found


def publish(
    kind: str, folder: Path, *, images: bool, fused: bool = False, mtp: bool = True, **more: Any
) -> dict[str, torch.Tensor]:
    """Write a random Qwen3.5 as it is published, and return its tensors.

    `kind`: "qwen3.5" or "qwen3.5-experts". `more`: fields of config.json.
    """
    import transformers

    from tests.helpers.family_cases import CASES, SHAPE, random_model

    if images:
        torch.manual_seed(0)
        like = "Qwen3_5Moe" if kind.endswith("experts") else "Qwen3_5"
        text = {**SHAPE, **CASES[kind][1], **more}
        config = getattr(transformers, f"{like}Config")(text_config=text, vision_config=VISION)
        model = getattr(transformers, f"{like}ForConditionalGeneration")(config)
        model.save_pretrained(folder)
    else:
        random_model(kind, folder, **more)
    tensors = in_mixed_dtypes(folder)
    if fused:
        tensors = with_experts_in_one(tensors)
    if mtp:
        tensors["mtp.fc.weight"] = torch.rand(8, 4).bfloat16()
        tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.rand(2, 3, 4)
    if images:
        values = json.loads((folder / "config.json").read_text())
        return rewrite(folder, tensors, text_config={**values["text_config"], "dtype": "bfloat16"})
    return rewrite(folder, tensors)


def assert_same_files(found: Path, expected: dict[str, torch.Tensor]) -> None:
    """The weights of a folder have the names, dtypes and bits that are expected."""
    tensors = load_file(found / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
