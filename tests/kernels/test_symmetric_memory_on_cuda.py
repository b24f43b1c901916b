"""Kernels in which two GPUs reach each other's memory, against NCCL. In CUDA graphs too, whose replays count on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from areno.kernels.symmetric_memory import SymmetricMemory, open_symmetric_memory
from areno.layers.parallel import ParallelGroup

SIZES = [(256, 4096), (64, 2560), (1, 5120), (3, 8), (512, 8192)]


def compare(rank: int, meeting: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=2, device_id=device)
    memory = open_symmetric_memory(dist.group.WORLD, device)
    assert memory is not None
    tp = ParallelGroup(rank, 2, dist.group.WORLD, symmetric_memory=memory)
    generator = torch.Generator(device).manual_seed(rank)
    for n, size in SIZES:
        part = torch.empty(n, size, device=device, dtype=torch.bfloat16)
        work(memory, tp, part)  # kernels are compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work(memory, tp, part)
        for _ in range(5):
            part.normal_(generator=generator)
            part[0, 0] = -0.0  # what an empty place holds
            graph.replay()
            for found, expected in zip((captured, work(memory, tp, part)), [by_nccl(tp, part)] * 2, strict=True):
                for name, one, other in zip(("sum", "all", "stream"), found, expected, strict=False):
                    assert torch.equal(one, other), (n, size, name)
                torch.testing.assert_close(found[3], expected[3], atol=0, rtol=2**-7)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def given(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual stream and the weight of a norm, the same on both GPUs."""
    n, size = part.shape
    return torch.linspace(-2, 2, n * size, device=part.device).view(n, size), torch.ones_like(part[0]) * 1.5


def work(memory: SymmetricMemory, tp: ParallelGroup, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
    stream, weight = given(part)
    return memory.all_reduce(part), tp.all_gather_stacked(part), *memory.add_and_norm(stream, part, weight, 1e-6, False)


def by_nccl(tp: ParallelGroup, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from areno.kernels.elementwise.triton_norm import add_rms_norm

    stream, weight = given(part)
    total = tp.all_reduce(part.clone())
    pieces = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(pieces, part)
    return total, torch.stack(pieces), *add_rms_norm(stream, total, weight, 1e-6)


@pytest.mark.gpu
def test_two_gpus_read_each_others_memory(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    mp.spawn(compare, (str(tmp_path / "meeting"),), nprocs=2)
