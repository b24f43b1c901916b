"""Kernels of a mixture of experts against their torch references, and fused layers with experts against plain ones."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areno.kernels import experts as ops
from areno.kernels.experts import reference, triton, triton_routing
from areno.layers.config import ClampedGLU, DeltaConfig, MoEConfig
from areno.layers.parallel import ParallelGroup
from tests.helpers.fused_layers import BARE, SOME, build, compare, run
from tests.helpers.interpreted import on_ranks, run_interpreted
from tests.helpers.tiny_decoder import make_decoder, request
from tests.helpers.tiny_decoder import run as run_decoder

SIZES = [(40, 3, 7), (1, 2, 5), (90, 1, 4)]  # tokens, experts of a token, experts
EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "experts": MoEConfig(n_experts=6, top_k=2, inner_size=20, normalised=True, dense_layers=frozenset({0})),
    "mlp_bias": False,
}
SHARED = [  # an expert that every token uses, with a gate and without
    MoEConfig(n_experts=4, top_k=2, inner_size=20, normalised=True, shared_size=12, shared_gated=True),
    MoEConfig(n_experts=4, top_k=2, inner_size=20, normalised=True, shared_size=12, sigmoid=True, scale=1.5),
]
CLAMPED = MoEConfig(  # with biases, and limits that many numbers are beyond
    n_experts=4, top_k=2, inner_size=20, normalised=True, biased=True, clamped=ClampedGLU(1.7, 0.4)
)
OSS: dict[str, Any] = {**EXPERTS, "experts": CLAMPED, "attention_sinks": True}  # as gpt-oss


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def plain() -> Any:
    return mock.patch("areno.kernels.backend.is_triton_interpreted", return_value=False)


def compare_routing(device: str = "cpu") -> None:
    """Choices, weights and sorted copies: those of torch, also where a rank has only some of the experts."""
    for n, top_k, n_experts in [*SIZES, (400, 3, 40)]:
        logits = random(n, n_experts, device=device)
        for normalised in (True, False):
            chosen, weights = ops.choose_experts(logits, top_k, normalised)
            expected = reference.choose_experts(logits, top_k, normalised)
            assert torch.equal(chosen, expected[0])
            torch.testing.assert_close(weights, expected[1], atol=1e-6, rtol=1e-5)
            assert not normalised or top_k > 1 or bool((weights == 1).all())
            by_sigmoid = top_k, normalised, random(n_experts, device=device) / 4, 2.5
            others, weights = ops.choose_experts(logits, *by_sigmoid)
            expected = reference.choose_experts(logits, *by_sigmoid)
            assert torch.equal(others, expected[0])
            torch.testing.assert_close(weights, expected[1], atol=1e-6, rtol=1e-5)
        compare_weights_and_load(logits, chosen)
        for first, n_local in ((0, n_experts), (n_experts // 2, n_experts - n_experts // 2)):
            with mock.patch("areno.kernels.experts.can_use_triton", return_value=False):
                expected_groups = ops.group_by_expert(chosen, first, n_local)
            for most in (triton_routing.MAX_COPIES, 0):  # 0: sorted by counting
                with mock.patch.object(triton_routing, "MAX_COPIES", most):
                    groups = ops.group_by_expert(chosen, first, n_local)
                for one, other in zip(groups, expected_groups, strict=True):
                    assert torch.equal(one, other), (n, top_k, n_experts, first, most)
            counts = torch.bincount(chosen.flatten(), minlength=n_experts)[first : first + n_local]
            assert torch.equal(expected_groups.ends_E.cpu(), counts.cpu().cumsum(0).int())


def compare_weights_and_load(logits: Tensor, own: Tensor) -> None:
    """Weights of given experts, their gradient, and statistics, also of tokens that count several times or not."""
    (n, n_experts), top_k, device = logits.shape, own.shape[1], str(logits.device)
    chosen = (own + (random(n, top_k, device=device) > 1)) % n_experts
    for normalised, sigmoid in itertools.product((True, False), (True, False)):
        found = []
        for of in (ops, reference):
            given = logits.clone().requires_grad_()
            weights = of.expert_weights(given, own, normalised, sigmoid, 1.5)
            found.append((weights, *torch.autograd.grad(weights, given, random(n, top_k, device=device))))
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    counts = random(n, device=device).abs().mul(3).round()
    for others, times, sigmoid in ((None, None, False), (own, counts[: n - n // 3], True)):
        how = chosen, others, sigmoid, n if times is None else len(times), times
        sums = [of.expert_load(logits, *how).sum(0, dtype=torch.float64) for of in (ops, reference)]
        torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-5)
        assert (sums[0][-1] > 0) == (others is not None and n > 1)


def compare_products(device: str = "cpu", dtype: torch.dtype = torch.float32, tolerance: float = 1e-5) -> None:
    """Products, their gradients, sums over a token's experts, and the backward pass of the activation."""
    inputs, outputs = 40, 24
    for n, top_k, n_experts in SIZES:
        chosen, weights = ops.choose_experts(random(n, n_experts, device=device), top_k, True)
        for first, n_local in ((0, n_experts), (1, n_experts - 2)):
            groups = ops.group_by_expert(chosen, first, n_local)
            end, rows = int(groups.ends_E[-1]), n * top_k
            x = random(rows, inputs, device=device, dtype=dtype)
            weight = random(n_local, outputs, inputs, device=device, dtype=dtype)
            sides = (
                (x, weight, False),
                (random(rows, outputs, device=device, dtype=dtype), weight, True),
            )
            for side, matrices, transposed in sides:
                got = ops.grouped_matmul(side, matrices, groups.ends_E, transposed=transposed)[:end]
                expected = reference.grouped_matmul(side.float(), matrices.float(), groups.ends_E, transposed, 1)[:end]
                torch.testing.assert_close(got.float(), expected, atol=tolerance * 20, rtol=tolerance * 10)

            for size, transposed in ((outputs, False), (inputs, True)):
                y, h = (random(rows, each, device=device, dtype=dtype) for each in (size, 3))
                b = random(*((n_local, 3, size) if transposed else (n_local, size, 3)), device=device, dtype=dtype)
                expected = reference.add_expert_lora(y.float(), h.float(), b.float(), groups.ends_E, 0.7, transposed)
                got = ops.add_expert_lora(y, h, b, groups.ends_E, 0.7, transposed)
                torch.testing.assert_close(got.float()[:end], expected[:end], atol=tolerance * 20, rtol=tolerance * 10)

            a = random(rows, outputs, device=device, dtype=dtype)
            added, expected = (random(n_local, outputs, inputs, device=device) for _ in range(2))
            ops.add_grouped_matmul(added, a, x, groups.ends_E, 0.7)
            reference.add_grouped_matmul(expected, a.float(), x.float(), groups.ends_E, 0.7)
            torch.testing.assert_close(added, expected, atol=tolerance * 20, rtol=tolerance * 10)

            x[end:] = torch.nan  # nothing may read what is not computed
            for given in (weights, None):
                for bias in ((), (random(n_local, inputs, device=device, dtype=dtype), chosen - first)):
                    got = ops.combine(x, groups.copies_Nk, given, groups.ends_E, *bias)
                    expected = reference.combine(x.nan_to_num(), groups.copies_Nk, given, groups.ends_E, *bias)
                    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)

            gate_up, pairs = random(rows, 2 * outputs, device=device, dtype=dtype), (weights, groups.choices_M)
            gate_up[end:] = torch.nan
            got = ops.weighted_glu_backward(a, gate_up, *pairs, groups.ends_E)
            expected = reference.weighted_glu_backward(a, gate_up, *pairs, groups.ends_E)
            assert not got[2].flatten()[groups.choices_M[end:]].any()
            torch.testing.assert_close(got[2], expected[2], atol=tolerance, rtol=tolerance)
            for one, other in zip(got[:2], expected[:2], strict=True):
                torch.testing.assert_close(one[:end], other[:end], atol=tolerance, rtol=tolerance)

            biases = random(n_local, 2 * outputs, device=device, dtype=dtype)
            how = groups.ends_E, ops.BiasedClamp(biases, 1.7, 0.8)
            *got, grad = (ops.expert_glu(gate_up, *how), *ops.weighted_glu_backward(a, gate_up, *pairs, *how))
            *expected, other = reference.weighted_glu_backward(a, gate_up, *pairs, *how)
            assert not grad.flatten()[groups.choices_M[end:]].any()
            torch.testing.assert_close(grad, other, atol=tolerance, rtol=tolerance)
            for one, other in zip(got, (reference.expert_glu(gate_up, *how), *expected), strict=True):
                torch.testing.assert_close(one[:end], other[:end], atol=tolerance, rtol=tolerance)


def test_the_activation_s_backward_pass_is_that_of_autograd() -> None:
    gate_up, weight = random(9, 10).double().requires_grad_(), random(9).double().requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    grad = random(9, 5)
    act = torch.nn.functional.silu(gate) * up * weight[:, None]
    expected = torch.autograd.grad(act, (gate_up, weight), grad.double())
    ends = torch.tensor([4, 9], dtype=torch.int32)
    given = gate_up.detach().float(), weight.detach().float(), torch.arange(9)
    got = reference.weighted_glu_backward(grad, *given, ends)
    for one, other in zip((got[0], got[2], got[1]), (*expected, act.detach()), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_the_clamped_activation_s_backward_pass_is_that_of_autograd() -> None:
    gate_up, weight = random(9, 10).double().requires_grad_(), random(9).double().requires_grad_()
    bias, ends, grad = random(2, 10), torch.tensor([4, 9], dtype=torch.int32), random(9, 5)
    gate, up = (gate_up + bias.double().repeat_interleave(torch.tensor([4, 5]), 0)).unflatten(1, (5, 2)).unbind(-1)
    gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
    assert 10 < (gate == 0.7).sum() + (up.abs() == 0.7).sum() < 60
    act = (up + 1) * gate * torch.sigmoid(1.5 * gate)
    expected = torch.autograd.grad(act * weight[:, None], (gate_up, weight), grad.double())
    given = gate_up.detach().float(), weight.detach().float()
    clamp = ops.BiasedClamp(bias, 1.5, 0.7)
    got = reference.weighted_glu_backward(grad, *given, torch.arange(9), ends, clamp)
    for one, other in zip((got[0], got[2], got[1]), (*expected, act * weight[:, None]), strict=True):
        torch.testing.assert_close(one.double(), other.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reference.expert_glu(given[0], ends, clamp), act.detach().float())


@pytest.mark.slow
def test_interpreted_kernels_are_the_references() -> None:
    run_interpreted(
        "from tests.kernels.test_experts_kernels import compare_products, compare_routing; compare_routing(); "
        "compare_products()",
        timeout=200,
    )


def compare_layers() -> None:
    """Fused layers with experts: a plain layer and one with experts; then weights that do not add up to 1."""
    compare("cpu", torch.float32, 1e-5, "sdpa", (SOME, {"recompute": True}), **EXPERTS)
    loose = MoEConfig(n_experts=4, top_k=3, inner_size=8, normalised=False)
    grouped = MoEConfig(n_experts=6, top_k=2, inner_size=8, normalised=True, sigmoid=True, n_groups=3, top_groups=2)
    for experts in (loose, grouped):
        compare("cpu", torch.float32, 1e-5, "sdpa", ({},), **{**EXPERTS, "experts": experts})
    for shared in SHARED:
        compare("cpu", torch.float32, 1e-5, "sdpa", ({}, {"recompute": True}), **{**EXPERTS, "experts": shared})
    compare("cpu", torch.float32, 1e-5, "sdpa", ({}, {"recompute": True}), **OSS)
    check_router_of_single_experts(is_fused=True)


def check_router_of_single_experts(is_fused: bool) -> None:
    """With one normalised expert for each token, the weight is always 1, so nothing trains the router."""
    for sigmoid in (False, True):
        single = replace(EXPERTS["experts"], top_k=1, sigmoid=sigmoid)
        model = build(torch.float32, "cpu", **{**EXPERTS, "experts": single})
        run(model, "sdpa", is_fused)
        mlp = model.layers[1].mlp
        assert not mlp.router.weight.grad.any()
        assert mlp.experts_down.weight.grad.any()


def test_a_router_of_single_experts_gets_no_gradient() -> None:
    check_router_of_single_experts(is_fused=False)


def compare_told_layers() -> None:
    for sigmoid in (False, True):
        compare_told({**EXPERTS, "experts": replace(EXPERTS["experts"], sigmoid=sigmoid)})


def compare_told(changes: dict[str, Any]) -> None:
    """The same with experts that are given, an auxiliary loss, padding, and statistics."""
    given = torch.tensor([[5, 0], [255, 255], [2, 4], [1, 3]], dtype=torch.uint8)[:, None]
    balance, found = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5]), []
    for is_fused in (False, True):
        with contextlib.nullcontext() if is_fused else plain():
            model = build(torch.float32, "cpu", **changes)
            assert model.routing is not None
            model.routing.configure(given, balance, 5, observes=True, records=True)
            how = {"recompute": True} if is_fused else {}
            numbers = run(model, "sdpa", is_fused, **how)
            [load] = model.routing.loads.values()
            found.append((*numbers, model.routing.recorded_experts(), load.sum(0, dtype=torch.float64)))
            model.routing.configure(given, None, 5)
            without = run(model, "sdpa", is_fused, **how)[2]
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert (found[1][2] - without).abs().max() > 0.1  # the auxiliary loss counts
    assert torch.equal(found[1][3][[0, 2, 3]], given[[0, 2, 3]])


def compare_mixed_dtypes(device: str = "cpu", dtype: torch.dtype = torch.float16) -> None:
    """Float32 decay rates and norms of recurrent states among other weights, and experts behind them.

    In float16, as the interpreter has no bfloat16.
    """
    sizes = DeltaConfig(layers=(0,), n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=12, width=3)
    changes: dict[str, Any] = {"experts": SHARED[0], "delta": sizes, "attention_gate": True, "norm_plus_one": True}
    found = []
    for is_fused in (False, True):
        with contextlib.nullcontext() if is_fused else plain():
            model = build(dtype, device if is_fused else "cpu", **{**BARE, **EXPERTS, **changes})
            delta = model.layers[0].delta
            for parameter in (delta.A_log, delta.norm.weight):  # type: ignore[union-attr]
                parameter.data = parameter.data.float() + 1e-3  # type: ignore[union-attr, operator]
            found.append([each.cpu().float() for each in run(model, "sdpa", is_fused)])
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, atol=0.01 * expected.abs().max().item(), rtol=0)


def compare_rank(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for experts in (SHARED[0], CLAMPED):
        compare_divided(rank, experts)
    dist.destroy_process_group()


def compare_divided(rank: int, experts: MoEConfig) -> None:
    """One of two ranks, with shared tokens, too: hidden states and gradients are as of one alone.

    Compared are gradients of routers, gates and the rank's experts.
    """
    changes: dict[str, Any] = {**BARE, **EXPERTS, "experts": experts, "num_heads": 4, "num_kv_heads": 2}
    with plain():
        alone = build(torch.float32, "cpu", **changes)
        expected = run(alone, "sdpa", is_fused=False)
    tp, attention = ParallelGroup(rank, 2, dist.group.WORLD), "layers.0.attention.out.weight"
    for how in ({}, {"split": True}, {"split": True, "recompute": True}):
        divided = build(torch.float32, "cpu", tp, **changes)
        got = run(divided, "sdpa", is_fused=True, **how)
        torch.testing.assert_close(got[:2], expected[:2], atol=1e-4, rtol=1e-4)
        ours, whole = divided.layers[1].mlp, alone.layers[1].mlp
        for name, parameter in ours.named_parameters():
            gradient = whole.get_parameter(name).grad
            if name.startswith("experts_"):
                gradient = gradient.chunk(2)[rank]
            elif name == "shared.down.weight":
                gradient = gradient.chunk(2, dim=1)[rank]
            if name != "shared.gate_up.weight":
                torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-4, msg=name)
        below = alone.get_parameter(attention).grad.chunk(2, dim=1)[rank]  # type: ignore[union-attr]
        torch.testing.assert_close(divided.get_parameter(attention).grad, below, atol=1e-4, rtol=1e-4)


def compare_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(compare_rank, (f"{folder}/meet",), 2)


def decode_with_experts(device: str = "cpu", use_graphs: bool = False) -> None:
    for changes in (EXPERTS, OSS):
        decode_with(changes, device, use_graphs)


def decode_with(changes: dict[str, Any], device: str, use_graphs: bool) -> None:
    """Tokens, log-probabilities and experts of a decoder with kernels are those of the plain one on a CPU."""
    models = []
    for where in ("cpu", device):
        with plain():
            model = build(torch.float32, where, **{**changes, "num_kv_heads": 2, "num_heads": 4, "head_dim": 16})
        models.append(model)
    requests = [request(1, 9, n_samples=2, max_new_tokens=4), request(2, 14, n_samples=3, max_new_tokens=5)]
    found = []
    for model, graphs in zip(models, (False, use_graphs), strict=True):
        with plain() if model is models[0] else contextlib.nullcontext():
            decoder = make_decoder(
                model, n_blocks=24, attn_backend="sdpa", keeps_routes=True, use_graphs=graphs, max_prefill_tokens=11
            )
            for item in requests:
                decoder.submit(item)
            found.append(run_decoder(decoder))
    for key, expected in found[0].items():
        got = found[1][key]
        assert got.tokens == expected.tokens
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert got.routes is not None
        assert expected.routes is not None
        n_layers = len(changes["experts"].layers(2))
        assert got.routes.shape == (len(requests[key[0] - 1].prompt) + len(got.tokens) - 1, n_layers, 2)
        assert (got.routes == expected.routes).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    ["compare_layers", "compare_mixed_dtypes", "compare_told_layers", "compare_two_ranks", "decode_with_experts"],
)
def test_interpreted_layers_with_experts_are_the_plain_ones(what: str) -> None:
    run_interpreted(f"from tests.kernels.test_experts_kernels import {what}; {what}()", timeout=200)


@pytest.mark.gpu
def test_kernels_on_the_gpu_are_the_references() -> None:
    compare_routing("cuda")
    compare_products("cuda")
    compare_products("cuda", torch.bfloat16, 2e-2)


@pytest.mark.gpu
def test_layers_with_experts_on_the_gpu_are_the_plain_ones() -> None:
    for experts in (EXPERTS["experts"], CLAMPED, *SHARED):
        compare("cuda", torch.float32, 1e-4, "sdpa", **{**EXPERTS, "experts": experts})
    compare_mixed_dtypes("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
def test_a_decoder_with_experts_on_the_gpu_is_that_of_the_cpu(use_graphs: bool) -> None:
    decode_with_experts("cuda", use_graphs)


@pytest.mark.gpu
def test_torch_s_own_product_is_right_where_it_is_used() -> None:
    assert triton._is_grouped_mm_right(0), "see the log for what is wrong with it; areno's own kernel stands in"
    x, weight = random(1024, 128, device="cuda", dtype=torch.bfloat16), random(4, 64, 128, device="cuda")
    ends = torch.tensor([100, 100, 700, 900], dtype=torch.int32, device="cuda")
    matrices = weight.bfloat16()
    for transposed, side in ((False, x), (True, random(1024, 64, device="cuda", dtype=torch.bfloat16))):
        got = ops.grouped_matmul(side, matrices, ends, transposed=transposed)[:900]
        expected = reference.grouped_matmul(side.float(), matrices.float(), ends, transposed, 1)[:900]
        torch.testing.assert_close(got.float(), expected, atol=0.2, rtol=2e-2)
