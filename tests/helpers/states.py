"""Saved engine states: write one, read its tensors, and compare them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from areno.engine.engine import Engine

# Kind and number format meet each other in the slow tests; each of them is here once.
FORMATS = [
    ("adam", "bfloat16"),
    ("adam_8bit", "float32"),
    ("sgd", "bfloat16"),
    ("muon", "bfloat16"),
    ("adam_bf16", "bfloat16"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("adam", "float32"), ("adam_8bit", "bfloat16"), ("sgd", "float32"))
    ),
]


def saved(engine: Engine, folder: Path) -> Path:
    engine.save_state(folder)
    assert engine.is_state_written(wait=True)
    return folder


def content(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a state, read from its files by what its index says."""
    index = json.loads((folder / "index.json").read_text().splitlines()[1])
    tensors = {}
    for name, tensor in index["tensors"].items():
        tensors[name] = whole = torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        missing = whole.numel()
        for offsets, sizes, file, start in tensor["chunks"]:
            box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            data = bytearray((folder / file).read_bytes()[start : start + box.numel() * whole.element_size()])
            box.copy_(torch.frombuffer(data, dtype=whole.dtype).view(sizes))
            missing -= box.numel()
        assert missing == 0, name
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
