"""What a rank reads of the weight files, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from areno import heartbeat
from areno.layers.parallel import ParallelGroup
from areno.models import folder as weight_files
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from areno.models.weights import load_weights
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import folder_with
from tests.helpers.train_backend import train_backend

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}


def model_of(folder: Path, tp: ParallelGroup | None = None) -> Transformer:
    return build_model(load_config(folder), dtype=torch.float32, device="cpu", tp=tp)


def saved(folder: Path) -> Path:
    model = model_of(folder)
    model.init_weights(1)
    save_weights(model, folder)
    return folder


class CountedSlice:
    """A safetensors slice that adds up what is taken of it."""

    def __init__(self, stored: Any, taken: list[int]):
        self.stored, self.taken = stored, taken
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, place: Any) -> torch.Tensor:
        piece: torch.Tensor = self.stored[place]
        self.taken.append(piece.nbytes)
        return piece


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_rank_reads_its_own_pieces_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    folder = saved(folder_with(tmp_path))
    taken: list[int] = []

    class Counted:
        def __init__(self, opened: Any):
            self.keys = opened.keys
            self.get_slice = lambda name: CountedSlice(opened.get_slice(name), taken)  # and no get_tensor

    @contextmanager
    def counting(*args: Any, **how: Any) -> Iterator[Counted]:
        with safe_open(*args, **how) as opened:
            yield Counted(opened)

    monkeypatch.setattr(weight_files, "safe_open", counting)
    whole = sum(parameter.nbytes for parameter in model_of(folder).parameters())
    for rank in range(tp_size):
        taken.clear()
        model = model_of(folder, ParallelGroup(rank, tp_size))
        load_weights(model, folder)
        padding = 4 * 32 * (len(model.embed.weight) - model.embed.n_valid)
        assert sum(taken) == sum(parameter.nbytes for parameter in model.parameters()) - padding < 0.6 * whole


def mapped_bytes() -> int:
    """Pages of files that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_what_was_read_of_a_file_does_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(folder_with(tmp_path, **LARGE))
    size = (folder / "model.safetensors").stat().st_size
    assert size > 40e6
    model = model_of(folder, ParallelGroup(0, 2))
    seen: list[int] = []
    monkeypatch.setattr("areno.models.weights.MAPPED_BYTES", size // 10)
    monkeypatch.setattr(heartbeat, "beat", lambda: seen.append(mapped_bytes()))
    before = mapped_bytes()
    load_weights(model, folder)
    assert max(seen) - before < size / 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_that_moves_to_one_buffer_is_not_in_memory_before(tmp_path: Path, device: str) -> None:
    folder = saved(folder_with(tmp_path, **LARGE))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model = build_model(load_config(folder), dtype=torch.float32, device=device, placed=False)
    held = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert held == 4 * len(list(model.parameters()))
    train_backend(model, None, fill=lambda: load_weights(model, folder))
    if device == "cuda":
        n_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert torch.cuda.max_memory_allocated() - before < 1.2 * n_bytes
    load_weights(expected := model_of(folder), folder)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.is_contiguous()
        assert torch.equal(one.cpu(), other)
