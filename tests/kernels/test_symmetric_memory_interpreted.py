"""Kernels in which ranks reach each other's memory, interpreted: the ranks are processes that share files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areno.kernels.symmetric_memory import SymmetricMemory
from areno.kernels.symmetric_memory.triton import EMPTY
from areno.layers.attention import PackedAttend
from areno.layers.parallel import ParallelGroup
from tests.helpers.interpreted import on_ranks, run_interpreted


def open_shared(folder: Path, rank: int, n_ranks: int) -> SymmetricMemory:
    """SymmetricMemory whose tensors lie in files that all ranks have mapped."""
    kept: list[Tensor] = []
    held: list[Any] = []

    def file_of(owner: int, index: int, n: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(folder / f"{owner}.{index}"), shared=True, size=n, dtype=dtype)

    def empty(n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept.append(file_of(rank, len(kept), n, dtype))
        return kept[-1]

    def rendezvous(tensor: Tensor, group: Any) -> Any:
        dist.barrier()
        index = next(place for place, each in enumerate(kept) if each is tensor)
        maps = [file_of(owner, index, tensor.numel(), tensor.dtype) for owner in range(n_ranks)]
        maps[rank] = tensor
        # Mapped, too, since no address of a GPU has less than 32 bits, as those of some Pythons' small objects have.
        table = file_of(rank, index + 100, n_ranks, torch.int64)
        table.copy_(torch.tensor([each.data_ptr() for each in maps]))
        held.append((maps, table))
        return SimpleNamespace(buffer_ptrs_dev=table.data_ptr())

    memory_of = "torch.distributed._symmetric_memory"
    with mock.patch(f"{memory_of}.empty", empty), mock.patch(f"{memory_of}.rendezvous", rendezvous):
        memory = SymmetricMemory(dist.group.WORLD, torch.device("cpu"))
        memory.connect()
    memory.held_by_test = held  # type: ignore[attr-defined]
    # As after so many calls that the counts soon wrap around.
    memory._shared.counts.fill_(2**31 - 4)
    memory._signals.fill_(2**31 - 4)
    dist.barrier()
    return memory


def compare_rank(rank: int, folder: str, n_ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n_ranks)
    memory = open_shared(Path(folder), rank, n_ranks)
    compare_calls(memory, rank, n_ranks)
    compare_models(memory, rank, n_ranks)
    dist.destroy_process_group()


def compare_calls(memory: SymmetricMemory, rank: int, n_ranks: int) -> None:
    """Calls of several kinds and sizes take turns, over the wrap-around of the counts."""
    tp = ParallelGroup(rank, n_ranks, dist.group.WORLD, symmetric_memory=memory)
    generator = torch.Generator().manual_seed(rank)
    for n, size in [(1, 24), (3, 4096), (2, 8), (1, 8), (3, 4096), (2, 24)]:
        part = torch.randint(-9, 10, (n, size), generator=generator).bfloat16()
        part[0, 0] = -0.0  # what an empty place holds
        pieces = [torch.empty_like(part) for _ in range(n_ranks)]
        dist.all_gather(pieces, part)
        total = torch.stack(pieces).float().sum(0).bfloat16()
        assert memory.can_all_reduce(part)
        assert memory.can_gather(part)
        assert torch.equal(memory.all_reduce(part), total)
        wide = part.float()
        wide.view(torch.int32)[-1, -1] = EMPTY * (2**16 + 1) - 2**32  # again, and next to 0
        expected = torch.stack(pieces).float().sum(0)
        expected[-1, -1] = 0
        assert torch.equal(memory.all_reduce(wide), expected)
        assert torch.equal(tp.all_gather_stacked(part), torch.stack(pieces))
        stream, weight = torch.linspace(-2, 2, n * size).view(n, size), torch.full((size,), 0.5).bfloat16()
        summed, normed = memory.add_and_norm(stream, part, weight, 1e-6, True)
        assert torch.equal(summed, stream + total.float())
        expected = summed * (summed.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * 1.5
        torch.testing.assert_close(normed.float(), expected, atol=1e-6, rtol=2**-7)
    left = torch.full((3, 1, 19), float(rank))  # what a draw from columns tells of one row
    assert memory.can_gather(left)
    assert torch.equal(
        tp.all_gather_stacked(left), torch.arange(n_ranks).float().view(-1, 1, 1, 1).expand(-1, *left.shape)
    )
    assert -(2**31) <= int(memory._shared.counts[0]) < 0  # they have wrapped


def compare_models(memory: SymmetricMemory, rank: int, n_ranks: int) -> None:
    """Hidden states without gradients: with tokens that ranks share, too."""
    from tests.helpers.fused_layers import BARE, build

    changes: dict[str, Any] = {**BARE, "intermediate_size": 42, "num_layers": 1}
    plain, peers = (ParallelGroup(rank, n_ranks, dist.group.WORLD, symmetric_memory=each) for each in (None, memory))
    tokens, positions = torch.arange(6) * 7 % 50, torch.arange(6)
    attend = PackedAttend(torch.tensor([0, 6]).int(), 6, "sdpa")
    met = mock.Mock(wraps=memory.add_and_norm)
    with torch.no_grad(), mock.patch.object(memory, "add_and_norm", met):
        expected = build(torch.bfloat16, "cpu", plain, **changes)(tokens, positions, attend)
        model = build(torch.bfloat16, "cpu", peers, **changes)
        torch.testing.assert_close(model(tokens, positions, attend), expected, atol=0.05, rtol=0.05)
        assert met.call_count == 2
        torch.testing.assert_close(model(tokens, positions, attend, split=True), expected, atol=0.05, rtol=0.05)


def compare(n_ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(compare_rank, (folder, n_ranks), n_ranks)


@pytest.mark.slow
def test_ranks_that_read_each_others_memory_do_what_collectives_do() -> None:
    run_interpreted("from tests.kernels.test_symmetric_memory_interpreted import compare; compare(3)", timeout=100)
