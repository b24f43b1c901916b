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


def assert_same_files(found: Path, expected: dict[str, torch.Tensor]) -> None:
    """The weights of a folder have the names, dtypes and bits that are expected."""
    tensors = load_file(found / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
