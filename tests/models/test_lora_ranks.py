"""Adapters on two ranks against one, and as fused layers with Triton, interpreted."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from areno.config.layout import Layout
from areno.config.models import OptimizerConfig
from areno.engine.engine import Engine
from areno.kernels.adapters import AdapterSlice, add_lora, column_tiles, reference
from areno.kernels.attention import choose_backend
from areno.layers.adapter import Adapter, use_stacked_adapters
from areno.layers.attention import PackedAttend
from areno.layers.config import AdapterSpec
from areno.layers.experts import ExpertAdapter
from areno.layers.linear import Linear
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.adapter_shapes import linear_shapes, n_adapter_parameters
from areno.models.adapters import add_adapters, refresh_adapters, stack_adapters, without_adapters
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from areno.specs.role import RoleSpec
from areno.types import GenerationRequest
from tests.helpers.adapted_layers import ALONE, LIKE_EXPERTS, adapted, passed
from tests.helpers.family_cases import random_model
from tests.helpers.fused_layers import DELTA, LIKE_QWEN
from tests.helpers.interpreted import on_ranks, run_interpreted
from tests.helpers.lora_models import ALL, REQUESTS, ROWS, SOME, apart, engine_of, lora
from tests.helpers.processes import worker_of
from tests.helpers.tiny_engine import (
    ROLLOUT,
    Outputs,
    folder_with_weights,
    request,
    rollout,
    scored,
    spec,
    tokens_of,
    train_rows,
)

T = TypeVar("T")
GREEDY = [request(index, length=5 + index, greedy=True, ignore_eos=True) for index in range(3)]
LIKE_STATES: dict[str, Any] = {**LIKE_QWEN, "delta": replace(DELTA, n_value_heads=4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_weights(tmp_path_factory.mktemp("base"))


LAYOUTS = {  # the last has fewer key-value heads than ranks
    "tp": {"tp_size": 2},
    "zero": {"zero_stage": 2},
    "cp": {"cp_size": 2},
    "heads": {"devices": 4, "tp_size": 4},
}
SLOW = [("qwen3", "zero"), ("qwen3", "cp"), ("qwen3", "heads"), ("phi3", "tp"), ("phi3", "heads"), ("qwen3.5", "zero")]
SLOW += [("qwen3.5", "tp")]


@pytest.mark.parametrize(
    ("model", "layout"),
    [("qwen3", "tp"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_several_ranks_are_as_one(folder: Path, tmp_path: Path, model: str, layout: str) -> None:
    """Loss, gradient, what is sampled, scored and saved, the reference, and a state read on the other layout."""
    found, rows = [], None
    if model != "qwen3":
        random_model(model, folder := tmp_path / "model")
    adapters = lora(folder, tuple(linear_shapes(load_config(folder))), alpha=8.0)
    for name, settings in (("one", {}), ("two", {"devices": 2, **LAYOUTS[layout]})):
        with engine_of(folder, adapters, **settings) as engine:
            rows = rows or train_rows(rollout(engine, REQUESTS), REQUESTS)
            stats = [engine.train(rows, grpo_loss_fn) for _ in range(3)]
            numbers = [step[key] for step in stats for key in ("loss", "grad_norm", "grad_zero_frac")]
            engine.ensure_roles({"ref": RoleSpec(path=str(folder), head="lm", key="ref.path")})
            logprobs = scored(engine, "actor", ROWS)
            ref = scored(engine, "ref", ROWS)
            engine.save(str(tmp_path / name))
            engine.save(str(tmp_path / f"{name}-merged"), merge=True)
            engine.save_state(tmp_path / f"{name}-state")
            assert engine.is_state_written(wait=True)
            found.append((numbers, tokens_of(rollout(engine, GREEDY)), logprobs, ref))
            if name == "two":
                engine.load_state(tmp_path / "one-state")
                assert apart(scored(engine, "actor", ROWS), found[0][2]) < 1e-4
    (numbers, tokens, logprobs, ref), (numbers_2, tokens_2, logprobs_2, ref_2) = found
    more = 10 if model == "qwen3.5" else 1  # states carry what is rounded on from token to token
    assert numbers_2 == pytest.approx(numbers, rel=1e-4 * more, abs=1e-6)
    assert tokens_2 == tokens
    assert apart(logprobs_2, logprobs) < 3e-4 * more  # Adam makes much of the sign of a gradient that is nearly zero
    assert apart(ref_2, ref) < 1e-5 * more
    for kind, file in (("", "adapter_model"), ("-merged", "model")):
        files = [sorted((tmp_path / f"{name}{kind}").glob(f"{file}*.safetensors")) for name in ("one", "two")]
        one, two = ({k: v for each in of for k, v in load_file(each).items()} for of in files)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, atol=2e-4 * more, rtol=0, msg=name)


@pytest.mark.parametrize("model", ["glm4", "qwen3.5"])
def test_what_a_rank_holds_is_told_beforehand(tmp_path: Path, model: str) -> None:
    random_model(model, tmp_path)
    config = load_config(tmp_path)
    adapters = AdapterSpec(rank=3, alpha=6.0, targets=tuple(linear_shapes(config)))
    for rank in range(2):
        divided = build_model(config, dtype=torch.float32, device="meta", tp=ParallelGroup(rank, 2))
        add_adapters(divided, adapters)
        held = sum(parameter.numel() for parameter in divided.parameters() if parameter.requires_grad)
        assert held == n_adapter_parameters(config, adapters, Layout.single_replica(2))


@pytest.mark.slow
def test_a_state_with_8_bit_moments_is_read_on_another_layout(folder: Path, tmp_path: Path) -> None:
    """Its blocks follow the layout of a rank, so they are quantised anew."""
    optimizer = OptimizerConfig(lr=1e-3, lr_scheduler_type="constant", warmup_steps_proportion=0.0, type="adam_8bit")
    with engine_of(folder, lora(folder, SOME), optimizer=optimizer) as one:
        rows = train_rows(rollout(one, REQUESTS), REQUESTS)
        for _ in range(3):
            one.train(rows, grpo_loss_fn)
        one.save_state(tmp_path)
        assert one.is_state_written(wait=True)
        expected = scored(one, "actor", ROWS)
        one.train(rows, grpo_loss_fn)
        after = scored(one, "actor", ROWS)
    with engine_of(folder, lora(folder, SOME), optimizer=optimizer, devices=2, tp_size=2) as two:
        two.load_state(tmp_path)
        assert apart(scored(two, "actor", ROWS), expected) < 1e-4
        two.train(rows, grpo_loss_fn)
        assert apart(scored(two, "actor", ROWS), after) < 0.1 * apart(after, expected)


@pytest.mark.slow
def test_two_ranks_agree_exactly(folder: Path) -> None:
    with engine_of(folder, lora(folder), devices=2, tp_size=2, exact=True) as engine:
        for _ in range(2):
            stats = engine.train(train_rows(rollout(engine, REQUESTS), REQUESTS), grpo_loss_fn)
        assert stats["logp_abs_diff_max"] == 0.0


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "dtype", "exact"),
    [
        *(("qwen3", dtype, exact) for dtype in ("float32", "bfloat16") for exact in (False, True)),
        ("qwen3.5", "float32", False),
    ],
)
def test_on_a_gpu(folder: Path, tmp_path: Path, model: str, dtype: str, exact: bool) -> None:
    """Rollouts by CUDA graphs that were captured before the first update have the adapters as they are now."""
    if model != "qwen3":
        random_model(model, folder := tmp_path)
    adapters = lora(folder, tuple(linear_shapes(load_config(folder))))
    on_cuda = spec(folder, random_init=False, lora=adapters, exact=exact, dtype=dtype, attn_backend="auto")
    with Engine(replace(on_cuda, devices=["cuda:0"]), "inline") as engine, engine_of(folder, adapters) as on_cpu:
        first = rollout(on_cpu, REQUESTS)
        rows = train_rows(first, REQUESTS)
        for row in rows:
            row.staleness = 1  # sampled elsewhere
        for each in (engine, on_cpu):
            each.train(rows, grpo_loss_fn)
        within = 2e-3 if dtype == "float32" else 0.5
        assert apart(scored(engine, "actor", ROWS), scored(on_cpu, "actor", ROWS)) < within
        for _ in range(3):
            engine.begin_rollout(ROLLOUT)
            outputs = engine.generate(REQUESTS)
            assert sum(stats.graph_replays for stats in engine.rollout_stats()) > 0
            engine.end_rollout()
            stats = engine.train(train_rows(outputs, REQUESTS), grpo_loss_fn)
            if exact:
                assert stats["logp_abs_diff_max"] == 0.0
            else:
                assert stats["logp_abs_diff_mean"] < (1e-4 if dtype == "float32" else 0.05)
        before = scored(engine, "actor", ROWS)
        engine.ensure_roles({"ref": RoleSpec(path=str(folder), head="lm", key="ref.path")})
        assert apart(scored(engine, "ref", ROWS), before) > 0.01
        assert scored(engine, "actor", ROWS) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    slices = (AdapterSlice(0, 0, 1024), AdapterSlice(1024, 1024, 200), AdapterSlice(1300, 1224, 136))
    for rank, n_rows in ((8, 1), (32, 256), (128, 1500)):
        y, h, b = (torch.randn(s, device="cuda").to(dtype) for s in ((n_rows, 1436), (n_rows, 3 * rank), (1360, rank)))
        expected = reference.add_lora(y.double(), h.double(), b.double(), slices, 0.5)
        with torch.no_grad():
            tiles = column_tiles(slices, rank, y.device)
            found = add_lora(y.clone(), h, b, slices, tiles, 0.5)
            rows = [add_lora(y[:n].clone(), h[:n], b, slices, tiles, 0.5) for n in (1, n_rows)]
        close = {"atol": 1e-3, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
        torch.testing.assert_close(found.double(), expected, **close)
        assert all(torch.equal(each, found[: len(each)]) for each in rows)


# -- interpreted ---------------------------------------------------------------------------------------------------


def compare_kernel() -> None:
    """Places that are no multiples of a tile, between columns that stay; ranks beyond a tile of inputs."""
    from areno.kernels.adapters.triton import add_lora_stacked, swiglu_stacked
    from areno.kernels.elementwise.triton_swiglu import swiglu

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for rank, n_rows in ((1, 1), (8, 17), (70, 65)):
        slices = (AdapterSlice(3, 0, 130), AdapterSlice(140, 130, 7))
        y, h, b = draw(n_rows, 150), draw(n_rows, 2 * rank), draw(137, rank)
        expected = reference.add_lora(y, h, b, slices, 0.7)
        with torch.no_grad():
            found = add_lora(y, h, b, slices, column_tiles(slices, rank, y.device), 0.7)
        assert found is y
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(expected[:, :3], y[:, :3])
    apart = (AdapterSlice(3, 0, 60), AdapterSlice(70, 60, 70))  # with columns between and behind them that stay
    y, h, b = draw(5, 150), draw(5, 8), draw(130, 4)
    found = add_lora_stacked(torch.cat([y, h], dim=1), b, column_tiles(apart, 4, y.device, whole=150), 0.7, 150)
    torch.testing.assert_close(found, reference.add_lora(y, h, b, apart, 0.7), atol=1e-4, rtol=1e-4)
    for rank, n_rows, slices in (
        (3, 1, (AdapterSlice(0, 0, 150),)),  # gate and up share an A
        (8, 17, (AdapterSlice(0, 0, 75), AdapterSlice(75, 75, 75))),
        (70, 20, (AdapterSlice(75, 0, 75),)),  # up alone
        (4, 3, (AdapterSlice(0, 0, 75),)),  # gate alone
    ):
        y, h, b = draw(n_rows, 150), draw(n_rows, len(slices) * rank), draw(150, rank)
        whole = reference.add_lora(y, h, b, slices, 0.7)
        both = torch.cat([y, h], dim=1)
        found = add_lora_stacked(both, b, column_tiles(slices, rank, y.device, whole=150), 0.7, 150)
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
        for gelu in (False, True):
            gate, up = whole.chunk(2, dim=-1)
            expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
            found = swiglu_stacked(both, b, slices, 0.7, 150, gelu)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            two_steps = swiglu(
                add_lora_stacked(both.half(), b.half(), column_tiles(slices, rank, y.device, whole=150), 0.7, 150), gelu
            )
            assert torch.equal(swiglu_stacked(both.half(), b.half(), slices, 0.7, 150, gelu), two_steps)
        assert torch.equal(both[:, :150], y)
    with mock.patch("areno.kernels.adapters.triton.MANY_ROWS", 17):
        bits = [add_lora_alone(n) for n in (1, 16, 17, 64, 65)]
    assert all(torch.equal(one, bits[-1][: len(one)]) for one in bits)


def add_lora_alone(n_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    y, h, b = (torch.randn(shape, generator=generator) for shape in ((65, 40), (65, 8), (40, 8)))
    # The interpreter's products are numpy's, which on some processors round by the number of rows: these are exact.
    h, b = ((each * 8).round() / 8 for each in (h, b))
    slices = (AdapterSlice(0, 0, 40),)
    with torch.no_grad():
        return add_lora(y[:n_rows].clone(), h[:n_rows], b, slices, column_tiles(slices, 8, y.device), 0.7)


def compare_fused(tp: ParallelGroup = ALONE, targets: tuple[str, ...] = SOME, **changes: Any) -> None:
    """Fused layers against plain ones through autograd, on one rank or on two."""
    hidden, grads = passed(adapted(ALONE, targets, **changes), fused=False)
    largest: dict[str, float] = {}  # of a parameter, since there may be experts without tokens
    for name, grad in grads.items():
        parameter = name.rpartition(".")[0]
        largest[parameter] = max(largest.get(parameter, 0.0), float(grad.abs().max()))
    assert min(largest.values()) > 1e-3
    for split in (False, True)[: tp.size]:
        found, found_grads = passed(adapted(tp, targets, **changes), fused=True, split=split)
        torch.testing.assert_close(found, hidden, atol=1e-4, rtol=1e-4)
        assert found_grads.keys() == grads.keys()
        for name, grad in found_grads.items():
            torch.testing.assert_close(grad, grads[name], atol=2e-4, rtol=1e-3, msg=f"{name} {split}")


def compare_shared() -> None:
    """Where projections share an A, MLPs compute 4 of 6 tokens at once, and the gated delta rule has adapters."""
    for compare in (compare_fused, compare_sampled):
        with mock.patch("areno.layers.mlp.mlp_piece_tokens", return_value=4):
            compare(targets=(), family="phi3")
        compare(targets=(), family="qwen3_5_text", **LIKE_STATES)


def compare_sampled(tp: ParallelGroup = ALONE, targets: tuple[str, ...] = SOME, **changes: Any) -> None:
    """Hidden states while sampling against those of training, before and after the adapters change."""
    model = adapted(tp, targets, **{"qkv_bias": True, "o_bias": True, "mlp_bias": True, **changes})
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.detach().fill_(0.5)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    stack_adapters(model)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    seen: list[Tensor] = []
    for _ in range(2):
        expected = hidden_of(model)
        refresh_adapters(model)
        with use_stacked_adapters(), mock.patch.object(Adapter, "project_a", side_effect=AssertionError("twice")):
            found = hidden_of(model)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert all((expected - each).abs().max() > 1e-2 for each in seen)
        seen.append(expected)
        for module in model.modules():
            if isinstance(module, (Adapter, ExpertAdapter)):
                module.a.detach().mul_(-1.5)
    with use_stacked_adapters(), without_adapters(model):
        found = hidden_of(model)
    with without_adapters(model):
        assert torch.equal(found, hidden_of(model))


def compare_experts() -> None:
    for compare in (compare_fused, compare_sampled):
        compare(targets=(), **LIKE_EXPERTS)


def compare_sampled_gelu() -> None:
    compare_sampled(targets=ALL, activation="gelu_tanh")


def compare_engine() -> None:
    """Rollouts with new adapters, after an update, with those of a state, and with those of a folder, not trained."""
    few = [request(0, n_samples=2, max_new_tokens=3, ignore_eos=True)]
    with tempfile.TemporaryDirectory() as path:
        base_folder, state, saved = (Path(path) / name for name in ("base", "state", "saved"))
        adapters = lora(folder_with_weights(base_folder), rank=3)
        with engine_of(base_folder, adapters) as engine:
            engine.train(train_rows(sampled_as_scored(engine, few), few), grpo_loss_fn)
            engine.save_state(state)
            assert engine.is_state_written(wait=True)
            expected = sampled_as_scored(engine, few)
            engine.train(train_rows(expected, few), grpo_loss_fn)
            now = scored(engine, "actor", ROWS[:1])
            sampled_as_scored(engine, few)
            engine.save(str(saved))
            engine.load_state(state)
            assert apart(scored(engine, "actor", ROWS[:1]), now) > 1e-3
            assert tokens_of(sampled_as_scored(engine, few)) == tokens_of(expected)
        with engine_of(base_folder, replace(adapters, init_from=str(saved)), optimizer=None) as other:
            assert apart(scored(other, "actor", ROWS[:1]), now) < 1e-5
            sampled_as_scored(other, few)
        with engine_of(base_folder, adapters, exact=True) as exact:
            assert all(module.stacked is None for module in modules_of(exact, Adapter))


def sampled_as_scored(engine: Engine, requests: list[GenerationRequest]) -> Outputs:
    """A rollout by one product for each layer, whose log-probabilities are those of the model."""
    for module in modules_of(engine, Linear):
        assert module.adapter is not None
        assert module.adapter.stacked is not None
        assert module.weight.data_ptr() == module.adapter.stacked[0].data_ptr()  # it is in memory once
    with mock.patch.object(Adapter, "project_a", side_effect=AssertionError("two products")):
        outputs = rollout(engine, requests)
    rows = train_rows(outputs, requests)
    expected = scored(engine, "actor", [row.tokens for row in rows])
    for row, logprobs in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.logprobs[-3:], logprobs[-3:], atol=1e-5, rtol=0)
    return outputs


def modules_of(engine: Engine, kind: type[T]) -> list[T]:
    model = worker_of(engine).actor
    return [module for module in model.modules() if isinstance(module, kind)]


@torch.no_grad()
def hidden_of(model: Transformer) -> Tensor:
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    attend = PackedAttend(cu, 7, choose_backend("native", model.device, torch.float32))
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    with mock.patch.object(Transformer, "runs_fused", return_value=True):
        return model(torch.arange(12) * 7 % model.config.vocab_size, positions, attend)


TWO_RANKS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "qwen3": ((ALL,), {}),
    "phi3": (((),), {"family": "phi3"}),
    "qwen3_moe": (((),), LIKE_EXPERTS),
    "qwen3_5": (((),), {"family": "qwen3_5_text", **LIKE_STATES}),
}


def compare_two_ranks(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(_rank_main, (f"file://{folder}/rendezvous", name), 2)


def _rank_main(rank: int, meeting: str, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    tp = ParallelGroup(rank=rank, size=2, group=dist.group.WORLD)
    args, options = TWO_RANKS[name]
    for compare in (compare_fused, compare_sampled):
        compare(tp, *args, **options)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "compare_sampled",
        *(
            pytest.param(f"compare_{n}", marks=pytest.mark.slow)
            for n in ("kernel", "sampled_gelu", "engine", "fused", "shared", "experts")
        ),
    ],
)
def test_interpreted(name: str) -> None:
    run_interpreted(f"from tests.models.test_lora_ranks import {name}; {name}()")


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_interpreted(name: str) -> None:
    run_interpreted(f"from tests.models.test_lora_ranks import compare_two_ranks; compare_two_ranks({name!r})")
