"""Tensors that layers save in host memory: the copies alone, and the bits of fused layers with and without them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from areno.kernels.attention import choose_backend
from areno.layers.attention import PackedAttend
from areno.layers.config import MoEConfig
from areno.models.activation_offload import ActivationOffload
from tests.helpers.fused_layers import BARE, LIKE_QWEN, build, run
from tests.helpers.interpreted import run_interpreted


class PoisoningOffload(ActivationOffload):
    """Fills what leaves the device with NaN, as if the memory were used for something else at once."""

    n_dropped = 0

    def _drop_from_device(self, layer: Any) -> None:
        self._wait_for_copies(layer)
        for index in layer.copies:
            tensor = layer.tensors[index]
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            self.n_dropped += 1
        super()._drop_from_device(layer)


@pytest.mark.parametrize("block", [256, 2**28], ids=["tensors in several blocks", "one block"])
def test_each_layer_gets_its_tensors_back(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.models.activation_offload.BLOCK", block)
    offload, n_layers = PoisoningOffload(torch.device("cpu")), 4
    n_bytes = []
    for n_offloaded, n_rows in ((3, 50), (0, 50), (4, 7), (1, 50)):
        offload.begin(n_offloaded)
        layers: list[list[Tensor | None]] = [
            [
                torch.randn(n_rows, 5),
                None,
                torch.randn(3, n_rows).t(),  # not contiguous
                torch.randint(100, (n_rows,)),
                torch.empty(0, dtype=torch.uint8),
                torch.tensor(1.5),
            ]
            for _ in range(n_layers)
        ]
        expected = [[each if each is None else each.clone() for each in tensors] for tensors in layers]
        offload.n_dropped = 0
        places = [offload.save(tensors) for tensors in layers]
        assert offload.n_dropped == 4 * max(0, n_offloaded - 1)  # the last one stays
        del layers
        for place, tensors in reversed(list(zip(places, expected, strict=True))):
            for got, each in zip(offload.load(place), tensors, strict=True):
                assert got is each is None or (got is not None and each is not None and torch.equal(got, each))
        n_bytes.append(offload.host_bytes)
    assert len(set(n_bytes)) == 1  # later passes use the memory of the first one


def run_offloading(model: Any, backend: str, n_offloaded: int, is_fused: bool) -> tuple[Tensor, ...]:
    offload, forward = PoisoningOffload(model.device), model.forward

    def with_offload(*args: Any, **how: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args)
        offload.begin(n_offloaded)
        return forward(*args, recompute=True, offload=offload)

    with mock.patch.object(model, "forward", with_offload):
        found = run(model, backend, is_fused=is_fused)
    assert (offload.n_dropped > 0) == (n_offloaded > 1)
    return found


EXPERTS = MoEConfig(n_experts=4, top_k=2, inner_size=20, normalised=True)


def compare_bits(
    device: str, dtype: torch.dtype, backend: str, ways: tuple[int, ...], is_fused: bool = True, **changes: Any
) -> None:
    changes = {"num_layers": 3, **changes}
    expected = run(build(dtype, device, **changes), backend, is_fused=is_fused, recompute=True)
    assert expected[2].isfinite().all()
    for n_offloaded in ways:
        found = run_offloading(build(dtype, device, **changes), backend, n_offloaded, is_fused)
        assert all(map(torch.equal, found, expected)), (n_offloaded, changes)


LIKE_GEMMA: dict[str, Any] = {"norms": "both", "norm_plus_one": True, "activation": "gelu_tanh"}
LIKE_OLMO: dict[str, Any] = {"norms": "after", "qk_norm": False, "qk_norm_whole": True}
LIKE_GPT_OSS: dict[str, Any] = {"qk_norm": False, "attention_sinks": True}


def check_frozen_layers() -> None:
    """Layers without a backward pass save nothing."""
    model, offload = build(torch.float32, "cpu", num_layers=2), ActivationOffload(torch.device("cpu"))
    for name, parameter in model.named_parameters():
        if name.startswith(("embed", "layers.0")):
            parameter.requires_grad_(False)
        else:
            parameter.grad = torch.zeros_like(parameter)
    attend = PackedAttend(torch.tensor([0, 3], dtype=torch.int32), 3, "sdpa")
    offload.begin(2)
    model(torch.arange(3), torch.arange(3), attend, recompute=True, offload=offload)
    assert len(offload._layers) == 1


def compare_interpreted() -> None:
    check_frozen_layers()
    how = "cpu", torch.float32, "sdpa"
    compare_bits(*how, (1, 2, 3))
    for like in (LIKE_GEMMA, LIKE_OLMO, LIKE_GPT_OSS, LIKE_QWEN, {**BARE, "experts": EXPERTS}):
        compare_bits(*how, (3,), **like)


@pytest.mark.slow  # checkpoint imports torch's compiler
@pytest.mark.parametrize("like", [{}, LIKE_GEMMA, {**BARE, "experts": EXPERTS}], ids=["llama", "gemma", "experts"])
def test_offloading_does_not_change_a_bit_without_triton(like: dict[str, Any]) -> None:
    compare_bits("cpu", torch.float32, "sdpa", (1, 2, 3), is_fused=False, **like)


@pytest.mark.slow
def test_offloading_does_not_change_a_bit() -> None:
    run_interpreted("from tests.models.test_activation_offload import compare_interpreted; compare_interpreted()")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "like",
    [{}, LIKE_GEMMA, LIKE_OLMO, LIKE_GPT_OSS, LIKE_QWEN],
    ids=["llama", "gemma", "olmo", "gpt-oss", "qwen 3.5"],
)
def test_offloading_does_not_change_a_bit_on_the_gpu(like: dict[str, Any]) -> None:
    half = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 320, "initializer_range": 0.1, **like}
    backend = choose_backend("native", "cuda", torch.bfloat16)
    compare_bits("cuda", torch.bfloat16, backend, (1, 2, 3), **half)
