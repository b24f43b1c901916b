"""Products of few rows, and layers of a decoding step made of them, against float64 and the layers without Triton."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from areno.kernels.matmul import FixedOrderMatmul
from areno.layers.attention import Attend, AttentionLayer, CachedAttend, PackedAttend
from areno.models.layer import Layer
from areno.models.transformer import Transformer
from tests.helpers.fused_layers import BARE, build
from tests.helpers.interpreted import run_interpreted


def compare_products(device: str, dtype: torch.dtype, n_rows: int, n_inputs: int, n_outputs: int) -> None:
    from areno.kernels.matmul.triton_few_rows import few_rows_matmul, gated_product, partial_products

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=generator).to(device, dtype)
        for size in ((n_rows, n_inputs), (2 * n_outputs, n_inputs), (2 * n_outputs,))
    )
    expected = x.double() @ weight.double().T
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]

    def check(got: torch.Tensor, wanted: torch.Tensor, most: float) -> None:
        assert ((got.double() - wanted).norm() / wanted.norm()).item() < most

    got = few_rows_matmul(x, weight, bias)
    assert got.dtype == dtype
    check(got, expected + bias.double(), tolerance)
    check(few_rows_matmul(x, weight), expected, tolerance)
    parts = partial_products(x, weight)
    assert parts.dtype == torch.float32
    check(parts.double().sum(0), expected, 1e-5)
    gate, up = expected.to(dtype).double().chunk(2, -1)
    check(gated_product(x, weight), F.silu(gate) * up, 2 * tolerance)
    check(gated_product(x, weight, gelu=True), F.gelu(gate, approximate="tanh") * up, 2 * tolerance)


def layers_of(model: Transformer) -> list[Layer]:
    return cast("list[Layer]", list(model.layers))


def attend_to_all(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence."""
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1).contiguous()  # type: ignore[arg-type]


def compare_layers(device: str, dtype: torch.dtype, **changes: Any) -> None:
    from areno.models.few_rows import few_rows_layers

    model = build(dtype, device, **{**BARE, **changes})
    tokens, positions = torch.arange(7, device=device) * 5 % 50, torch.arange(7, device=device)
    with torch.no_grad():
        angles = [model.rotaries[rotary](positions) for rotary in model.rotary_of]
        got = few_rows_layers(layers_of(model), model.final_norm, model.embed(tokens), angles, attend_to_all)
        plain = model.double()
        expected = plain.embed(tokens)
        for layer, of_layer in zip(layers_of(plain), angles, strict=True):
            expected = layer(expected, *of_layer, attend_to_all)
        expected = plain.final_norm(expected)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    assert ((got.double() - expected).norm() / expected.norm()).item() < tolerance


def test_products_of_few_rows() -> None:
    run_interpreted(
        "import torch; from tests.kernels.test_few_rows import compare_products as compare; "
        "compare('cpu', torch.float32, 3, 40, 50); compare('cpu', torch.float32, 17, 520, 40)"
    )


@pytest.mark.slow
def test_layers_of_few_rows() -> None:
    run_interpreted(
        "import torch; from tests.kernels.test_few_rows import compare_layers as compare; "
        "compare('cpu', torch.float32, qkv_bias=True); compare('cpu', torch.float32, qk_norm=False)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_rows", [1, 5, 16, 33, 64])
def test_on_the_gpu(dtype: torch.dtype, n_rows: int) -> None:
    from areno.kernels import jit

    for sizes in ((1024, 3072), (1024, 2048), (3072, 512), (1536, 512), (384, 192), (100, 50)):
        compare_products("cuda", dtype, n_rows, *sizes)
    if n_rows == 5 and dtype == torch.bfloat16:
        compare_layers("cuda", dtype, qkv_bias=True)
    assert not jit._uncompiled  # else products in Triton were compared


@pytest.mark.gpu
def test_hopper_computes_in_gluon() -> None:
    gluon_few_rows = pytest.importorskip("areno.kernels.matmul.gluon_few_rows")
    if not gluon_few_rows.jit.can_run_gluon(torch.device("cuda"), gluon_few_rows.FEW_ROWS_KERNEL):
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    x, weight = (torch.ones(n, 64, dtype=torch.bfloat16, device="cuda") for n in (5, 32))
    out = torch.empty(1, 5, 32, dtype=torch.bfloat16, device="cuda")
    assert gluon_few_rows.launch_few_rows(x, weight, None, out, is_gated=False, gelu=False)
    assert (out == 64).all()
    part = x.new_ones(1 + 5 * 64)[1:].view(5, 64)  # does not lie at a multiple of 16 bytes
    assert not gluon_few_rows.launch_few_rows(part, weight, None, out, is_gated=False, gelu=False)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1024, 4096, 1, 1), (256, 4, 4)),  # of Qwen3-0.6B
        ((2048, 1024, 4, 1), (256, 2, 2)),
        ((1024, 3072, 1, 2), (256, 4, 2)),
        ((3072, 1024, 4, 1), (256, 3, 3)),
        ((4864, 896, 4, 1), (64, 19, 18)),  # of Qwen2.5-0.5B
        ((896, 4864, 1, 2), None),  # 152 programs for 132 multiprocessors
        ((3072, 1024, 1, 1), (128, 24, 1)),  # no tile of 256 inputs of x fits
        ((8192, 1024, 1, 1), None),
        ((100, 64, 1, 1), None),
        ((128, 48, 1, 1), None),
    ],
)
def test_tiles_fit_into_shared_memory(sizes: tuple[int, ...], expected: tuple[int, int, int] | None) -> None:
    gluon_few_rows = pytest.importorskip("areno.kernels.matmul.gluon_few_rows")
    found = gluon_few_rows._choose_tiling(*sizes, 132)
    assert found == expected
    if found is not None:
        inputs, n_tiles, n_x_tiles = found
        assert inputs * n_tiles * sizes[2] == sizes[0]
        assert 2 * inputs * (32 * sizes[3] * n_tiles + 64 * n_x_tiles) + 8 * n_tiles <= 227 * 1024


def of_rollout(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise AssertionError("nothing is computed")


@pytest.mark.parametrize(
    ("changes", "n_tokens", "attend", "expected"),
    [
        ({}, 64, of_rollout, True),
        ({"qkv_bias": True}, 1, of_rollout, True),
        ({}, 65, of_rollout, False),
        ({}, 8, PackedAttend(torch.tensor([0, 8]), 8, "sdpa"), False),
        ({}, 8, CachedAttend(of_rollout, lambda *_: None), False),  # type: ignore[arg-type, return-value]
        ({"o_bias": True}, 8, of_rollout, False),
        ({"mlp_bias": True}, 8, of_rollout, False),
        ({"norms": "both"}, 8, of_rollout, False),
        ({"norms": "after"}, 8, of_rollout, False),
        ({"attention_gate": True}, 8, of_rollout, False),
        ({"qk_norm": False, "qk_norm_whole": True}, 8, of_rollout, False),
    ],
    ids=["64", "bias", "65", "scored", "recurrent", "o_bias", "mlp_bias", "norms", "after", "gate", "whole"],
)
def test_which_passes_have_few_rows(
    changes: dict[str, Any], n_tokens: int, attend: Attend, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from areno.models import few_rows

    layers = layers_of(build(torch.float32, "cpu", **{**BARE, **changes}))
    with torch.no_grad():
        assert not few_rows.can_run_few_rows(layers, n_tokens, attend)  # the CPU has no such kernels
        monkeypatch.setattr(few_rows, "supports_few_rows", lambda weight: True)
        assert few_rows.can_run_few_rows(layers, n_tokens, attend) is expected
        layers[1].mlp.down.fixed_order = FixedOrderMatmul()  # type: ignore[union-attr]
        assert not few_rows.can_run_few_rows(layers, n_tokens, attend)
        layers[1].mlp.down.fixed_order = None  # type: ignore[union-attr]
    assert not few_rows.can_run_few_rows(layers, n_tokens, attend)
