"""Masters and moments in host memory: parts, windows, and updates equal to the bit to those on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from areno.cost.memory import WINDOW, WINDOWS
from areno.engine.train import optimizer_offload
from areno.engine.train.optimizer_offload import HostBuffer, StateStream, buffer_range_views, split_at_parts
from areno.kernels.adam import BLOCK
from tests.helpers import tp_ranks, zero_ranks
from tests.helpers.tiny_engine import folder_with, model_folder
from tests.helpers.zero_ranks import ALONE, assert_same_in_host, backend, three_steps

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_offload, "WINDOW", BLOCK)
    monkeypatch.setattr(optimizer_offload, "PART", 2 * BLOCK)


def test_parts_hold_whole_windows_and_blocks() -> None:
    assert optimizer_offload.PART % WINDOW == 0 == WINDOW % BLOCK
    assert (
        optimizer_offload.PART.bit_count() == (optimizer_offload.PART // BLOCK).bit_count() == 1
    )  # nothing is rounded up


def test_a_buffer_in_parts(small: None) -> None:
    buffer = HostBuffer(5 * BLOCK + 3, torch.float32, pinned=False)
    assert [len(part) for part in buffer.parts] == [512, 512, 259]
    assert (buffer.numel(), buffer.nbytes) == (1283, 4 * 1283)
    assert not any(part.any() for part in buffer.parts)
    for part, start in zip(buffer.parts, (0, 512, 1024), strict=True):
        part.copy_(torch.arange(start, start + len(part)))
    for place in (slice(0, 1283), slice(500, 1030), slice(512, 1024), slice(7, 8), slice(1024, 1283)):
        expected = torch.arange(place.start, place.stop).float()
        assert torch.equal(torch.cat(buffer_range_views(buffer, place)), expected)
        cut = list(split_at_parts(place))
        assert torch.equal(torch.cat([buffer[each] for each in cut]), expected)
        assert len(cut) == len(buffer_range_views(buffer, place))
    with pytest.raises(ValueError, match="unpack"):
        buffer[500:600]  # from two parts
    assert [part.tolist() for part in buffer.fill_(2).parts] == [[2.0] * 512] * 2 + [[2.0] * 259]
    assert len(HostBuffer(3, torch.float32, pinned=False, per_block=True).parts) == 2
    assert HostBuffer(0, torch.uint8, pinned=False).parts == []


def test_windows_bring_every_element_once_and_store_changes(small: None) -> None:
    n = 5 * BLOCK + 3
    masters, codes = (HostBuffer(n, dtype, pinned=False) for dtype in (torch.float32, torch.uint8))
    scales = HostBuffer(6, torch.float32, pinned=False, per_block=True)
    on_device = torch.zeros(n)
    buffers = {"masters": masters, "exp_avg": codes, "exp_avg_sq": on_device, "exp_avg_scale": scales}
    places, memory = [], set()
    for window in StateStream(CPU).windows(buffers, n):
        places.append((window.place.start, window.place.stop))
        memory.add(window.buffers["masters"].data_ptr())
        for name, tensor in window.buffers.items():
            assert len(tensor) == (1 if name == "exp_avg_scale" else window.place.stop - window.place.start)
            tensor += len(places)
    assert places == [(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)]
    assert len(memory) == WINDOWS
    expected = torch.arange(n) // BLOCK + 1
    for buffer in (masters, codes):
        assert torch.equal(torch.cat(buffer.parts).long(), expected)
    assert torch.equal(on_device.long(), expected)
    assert torch.cat(scales.parts).tolist() == [1, 2, 3, 4, 5, 6]


def test_buffers_on_the_device_are_one_window() -> None:
    buffers = {"masters": torch.arange(9.0)}
    [window] = StateStream(CPU).windows(buffers, 9)
    assert window.place == slice(0, 9)
    assert window.buffers["masters"] is buffers["masters"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "adam_8bit", "muon", "sgd"])
def test_updates_are_those_on_the_device(
    folder: Path, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_offload, "WINDOW", 768)
    monkeypatch.setattr(optimizer_offload, "PART", 1536)
    plain, in_host = (backend(folder, 0, ALONE, dtype, kind=kind, offload=away) for away in (False, True))
    before = zero_ranks.state_of(in_host)
    assert torch.equal(before["masters"], before["params"].float())
    assert three_steps(in_host) == three_steps(plain)
    assert not torch.equal(zero_ranks.state_of(in_host)["masters"], before["masters"])
    if kind == "sgd":
        assert not in_host.optimizer.moments  # type: ignore[union-attr]
    assert_same_in_host(plain, in_host)
    for each in (plain, in_host):
        each.optimizer.clear_moments()  # type: ignore[union-attr]
        each.flat.params.zero_()  # type: ignore[union-attr]
        if each.flat.masters is not each.flat.params:  # type: ignore[union-attr]
            each.flat.update_from_masters()  # type: ignore[union-attr]
    assert_same_in_host(plain, in_host)


@pytest.mark.slow
def test_ranks_that_divide_the_optimizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    zero_ranks.on_ranks(2, zero_ranks.compare_in_host, folder)


@pytest.mark.slow
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_tensor_parallel_ranks(tmp_path: Path, n_kv_heads: int) -> None:
    """With one key-value head, both ranks hold a copy of it."""
    changes: dict[str, Any] = {"num_key_value_heads": n_kv_heads}
    tp_ranks.on_ranks(2, tp_ranks.compare_in_host, folder_with(tmp_path, 64, **changes), 2)
