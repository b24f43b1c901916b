"""How memory that GPUs read from each other is opened and tried; what it does then is in test_peers*.py."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areno.kernels import symmetric_memory
from areno.kernels.symmetric_memory import SymmetricMemory, open_symmetric_memory

CPU = torch.device("cpu")
SYMMETRIC = "torch.distributed._symmetric_memory"


def opened(n_ranks: int, empty: Any = torch.empty) -> SymmetricMemory:
    """Of a group of so many, where nobody else is."""
    pytest.importorskip("triton")
    with (
        mock.patch(f"{SYMMETRIC}.empty", empty),
        mock.patch(f"{SYMMETRIC}.rendezvous", return_value=SimpleNamespace(buffer_ptrs_dev=0)),
        mock.patch.object(dist, "get_world_size", return_value=n_ranks),
        mock.patch.object(dist, "get_rank", return_value=0),
    ):
        return SymmetricMemory(SimpleNamespace(group_name="group"), CPU)


@pytest.mark.parametrize(("n_ranks", "large"), [(2, True), (3, False), (4, True), (6, False), (8, True), (16, False)])
def test_large_sums_are_for_groups_that_torch_can_add_in_two_steps(n_ranks: int, large: bool) -> None:
    memory = opened(n_ranks)
    assert memory.can_all_reduce(torch.empty(2**19, dtype=torch.bfloat16))
    assert memory.can_all_reduce(torch.empty(2**19 + 8, dtype=torch.bfloat16)) == large
    assert memory.can_gather(torch.empty(2**19 + 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("text", ["", "\nno such device", "no such device"])
def test_an_error_without_a_first_line_is_one_as_well(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(symmetric_memory, "SymmetricMemory", mock.Mock(side_effect=RuntimeError(text)))
    monkeypatch.setattr(symmetric_memory, "_is_true_on_any_rank", lambda here, *_: here)
    with caplog.at_level("INFO", "areno"):
        assert open_symmetric_memory(None, CPU) is None
    assert (text.strip() or "RuntimeError") in caplog.text


def test_torch_makes_no_multicast_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "TORCH_SYMM_MEM_DISABLE_MULTICAST", []
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)  # and again after the test

    def empty(*args: Any, **options: Any) -> Tensor:
        seen.append(os.environ.get(name))
        return torch.empty(*args, **options)

    opened(2, empty)
    assert set(seen) == {"1"}


def test_each_rank_tries_the_memory_with_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else sums would be right where a GPU reads its own memory in the place of another's, or what was there before."""
    tried: list[Tensor] = []

    def total(x: Tensor) -> Tensor:
        tried.append(x.clone())
        return x

    memory: Any = SimpleNamespace(device=CPU, max_bytes=2**20, can_all_reduce=lambda _: True, all_reduce=total)
    memory.all_gather = lambda x: x[None]
    memory.connect = lambda: None
    monkeypatch.setattr(symmetric_memory, "SymmetricMemory", lambda *_: memory)
    monkeypatch.setattr(symmetric_memory, "_is_true_on_any_rank", lambda here, *_: here)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    for rank in range(2):
        torch.manual_seed(1)  # processes begin with the same state
        before = torch.get_rng_state()
        monkeypatch.setattr(dist, "get_rank", lambda _, rank=rank: rank)
        assert open_symmetric_memory(None, CPU) is memory
        assert torch.equal(torch.get_rng_state(), before)
    large = [x for x in tried if len(x) > 8]
    assert not any(torch.equal(x, y) for i, x in enumerate(large) for y in large[:i] if len(x) == len(y))


def test_no_warp_takes_a_turn_from_one_that_has_not_read_it() -> None:
    """A late one would wait for the numbers of the next call. In rows of 32 numbers nothing else makes warps meet."""
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.backends.compiler")
    from areno.kernels.symmetric_memory.triton import _all_reduce_norm_kernel as kernel

    types = {
        "x_ptr": "*fp32",
        "part_ptr": "*bf16",
        "sum_ptr": "*fp32",
        "weight_ptr": "*bf16",
        "normed_ptr": "*bf16",
        "size": "i32",
        "eps": "fp32",
        "inboxes_ptr": "i64",
        "turns_ptr": "*i32",
        "rank": "i32",
    }
    constants = {"SIZE": 2, "PIECE": 8192, "N_PROGRAMS": 512, "BLOCK": 8, "PLUS_ONE": False}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(
        kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    )
    compiled = triton.compile(source, compiler.GPUTarget("cuda", 90, 32), {"num_warps": 8})
    assert "bar.sync" in compiled.asm["ptx"]
