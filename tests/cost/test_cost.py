"""The cost of a model: computed numbers against tensors that are counted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from areno.config.layout import Layout
from areno.config.models import OptimizerConfig
from areno.cost import flops, memory
from areno.cost.kv_cache import WantedCache
from areno.cost.kv_layout import KVLayout
from areno.cost.time import n_saved_outputs
from areno.engine.decoder.caches import KVCache, StateCache
from areno.engine.train.optimizer import Optimizer
from areno.engine.train.zero_buffers import FlatParameters
from areno.kernels.adam import BLOCK
from areno.layers.attention import PackedAttend
from areno.layers.config import AdapterSpec, ClampedGLU, DeltaConfig, MoEConfig, RopeConfig
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import WeightSpec
from areno.models import parameters
from areno.models.activation_offload import ActivationOffload
from areno.models.adapter_shapes import linear_shapes
from areno.models.adapters import add_adapters, stack_adapters
from areno.models.config import LayerKind, TransformerConfig
from areno.models.transformer import Transformer
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from tests.helpers.interpreted import run_interpreted

BARE = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}
CONFIG = TransformerConfig(
    family="llama",
    vocab_size=51,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=12,
    rms_norm_eps=1e-6,
    rope=RopeConfig(100.0),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    eos_token_ids=(1,),
    initializer_range=0.1,
    hf={},
)
SPARSE: dict[str, Any] = {
    "experts": MoEConfig(n_experts=8, top_k=3, inner_size=20, normalised=True, dense_layers=frozenset({1})),
    "mlp_bias": False,
}
RECURRENT: dict[str, Any] = {
    "delta": DeltaConfig(layers=(0, 2), n_key_heads=4, n_value_heads=8, key_dim=12, value_dim=12, width=4),
    "attention_gate": True,
    "num_kv_heads": 1,
}


def build(config: TransformerConfig, tp_size: int = 1, dtype: torch.dtype = torch.float32) -> Transformer:
    tp = ParallelGroup(tp_size - 1, tp_size)
    return Transformer(config, WeightSpec(dtype, "cpu", tp))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        BARE,
        {"tie_word_embeddings": False},
        {"head": "value"},
        SPARSE,
        {"norms": "both"},
        {"norms": "after", "qk_norm": False, "qk_norm_whole": True},
        {"attention_sinks": True},
        {**SPARSE, "experts": replace(SPARSE["experts"], biased=True, clamped=ClampedGLU(1.7, 7.0))},
        RECURRENT,
    ],
)
def test_parameters_are_those_of_the_model(changes: dict[str, Any], tp_size: int) -> None:
    config = replace(CONFIG, **changes)
    model, layout = build(config, tp_size), Layout.single_replica(tp_size)
    assert parameters.n_parameters(config, layout) == sum(parameter.numel() for parameter in model.parameters())
    body = [*model.layers.parameters(), *model.final_norm.parameters()]
    assert parameters.n_body_parameters(config, layout) == sum(parameter.numel() for parameter in body)


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_kv_bytes_are_those_of_the_cache(tp_size: int, fp8_kv: bool) -> None:
    config = replace(CONFIG, fp8_kv=fp8_kv)
    cache = KVCache(build(config, tp_size, torch.bfloat16), 4, KVLayout.from_config(config, 8, 64), n_slots=3)
    n_bytes = sum(
        value.nbytes for value in vars(cache).values() if isinstance(value, torch.Tensor) and value.dim() >= 5
    )
    assert n_bytes == 5 * 8 * memory.kv_bytes_per_token(config, 2, Layout.single_replica(tp_size))


def test_fp8_holds_nearly_twice_as_many_tokens() -> None:
    config = replace(CONFIG, head_dim=128)
    engine = EngineSpec(actor=RoleSpec(path=""), devices=["cpu"])
    rollout = RolloutSpec(max_running=2**16, max_len=64)
    how: dict[str, Any] = {"engine": engine, "rollout": rollout, "block_size": 32, "route_bytes": 0}
    rooms = [
        WantedCache.for_rollout(replace(config, fp8_kv=fp8_kv), 2, **how).affordable_blocks(2**36)
        for fp8_kv in (False, True)
    ]
    assert rooms[1] >= 1.9 * rooms[0]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_state_bytes_are_those_of_the_cache(tp_size: int) -> None:
    config = replace(CONFIG, **RECURRENT)
    model, layout = build(config, tp_size, torch.bfloat16), Layout.single_replica(tp_size)
    states = StateCache(model, n_slots=5)
    n_bytes = sum(each.nbytes for layer in states.layers for each in layer)
    assert n_bytes == 5 * memory.state_bytes(config, 2, layout)
    assert KVCache(model, 4, KVLayout.from_config(config, 8, 64), n_slots=3).kv_blocks.shape[0] == 1
    assert memory.kv_bytes_per_token(config, 2, layout) * 3 == memory.kv_bytes_per_token(
        replace(config, delta=None), 2, layout
    )
    assert memory.state_bytes(CONFIG, 2) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "adam_8bit", "sgd"])
def test_bytes_of_the_optimizer_buffers(kind: Any, dtype: torch.dtype) -> None:
    flat = FlatParameters(torch.nn.Linear(16 * BLOCK, 4, bias=False, dtype=dtype))
    optimizer = Optimizer(flat, OptimizerConfig(type=kind), ParallelGroup())
    buffers = [flat.grads, *optimizer.moments.values()] + ([] if flat.masters is flat.params else [flat.masters])
    moments = {"adam": 8, "adam_bf16": 4, "adam_8bit": 2 * (1 + 4 / BLOCK), "sgd": 0}[kind]
    expected = 4 + (0 if dtype == torch.float32 else 4) + moments  # gradient; float32 parameters are their own masters
    assert sum(buffer.nbytes for buffer in buffers) / sum(segment.n_params for segment in flat.segments) == expected


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "adam_8bit", "sgd"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"head": "value"}, SPARSE])
def test_bytes_of_a_divided_optimizer(
    zero_stage: int, kind: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_divided_optimizer(zero_stage, kind, changes, monkeypatch)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("kind", ["adam", "muon"])
@pytest.mark.parametrize("changes", [{}, RECURRENT])
def test_frozen_attention_has_neither_gradients_nor_moments(
    zero_stage: int, kind: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_divided_optimizer(zero_stage, kind, {"head": "value", **changes}, monkeypatch, frozen=True)


def check_divided_optimizer(
    zero_stage: int, kind: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, frozen: bool = False
) -> None:
    """Of three data-parallel ranks, with a bucket for each layer. Padding is small beside parameters of this size."""
    monkeypatch.setattr(memory, "BUCKET", 1)
    monkeypatch.setattr("areno.engine.train.zero_buffers.BUCKET", 1)
    config = replace(CONFIG, hidden_size=256, intermediate_size=1024, vocab_size=1024, **changes)
    model = build(config, dtype=torch.bfloat16)
    if frozen:
        model.freeze_attention()
        n_frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
        assert parameters.n_attention_parameters(config) == n_frozen
    how: dict[str, Any] = {"stage": model.backward_stage if zero_stage else None, "divide_grads": zero_stage == 2}
    if kind == "muon":
        how["matrix_parts"] = model.matrix_parts
    flat = FlatParameters(model, None, BLOCK, dp=ParallelGroup(0, 3), **how)
    optimizer = Optimizer(flat, OptimizerConfig(type=kind), ParallelGroup())
    found = memory.model_bytes(config, 2, kind, layout=Layout(3), zero_stage=zero_stage, freeze_attention=frozen)
    assert found.weights == pytest.approx(sum(buffer.nbytes for buffer in flat.buffers), rel=0.01)
    assert found.gradients == pytest.approx(flat.grads.nbytes + flat.workspace.nbytes, rel=0.01)
    assert found.masters == pytest.approx(flat.masters.nbytes, rel=0.01)
    assert found.moments == pytest.approx(sum(buffer.nbytes for buffer in optimizer.moments.values()), rel=0.01)


def count_activations() -> None:
    """What a layer saves for its backward pass. Run in a process of its own, where Triton interprets."""
    n = 7
    attend = PackedAttend(torch.tensor([0, n], dtype=torch.int32), n, "sdpa")
    more = [(torch.float32, replace(CONFIG, **changes)) for changes in (SPARSE, RECURRENT)]
    for dtype, config in ((torch.float32, CONFIG), (torch.float16, CONFIG), *more):
        model = build(config, dtype=dtype)
        model.init_weights(1)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        found = []
        for recompute in (True, False):
            out = model(torch.arange(n), torch.arange(n), attend, recompute=recompute)
            node = out.grad_fn.next_functions[0][0]  # the last layer
            cos_and_sin = 2 * n * CONFIG.head_dim // 2 * 4
            found.append(sum(saved.nbytes for saved in node.saved_tensors if saved is not None) - cos_and_sin)
        expected = memory.activation_bytes(config, dtype.itemsize)
        offload = ActivationOffload(torch.device("cpu"))
        offload.begin(1)
        model(torch.arange(n), torch.arange(n), attend, recompute=True, offload=offload)
        copies = offload._layers[0].copies.values()
        assert sum(len(part) for copy in copies for part in copy.parts) == n * expected.inputs
        assert found == [n * expected.always, n * (expected.always + expected.kept)], (dtype, found, expected)


@pytest.mark.slow
def test_activation_bytes_are_what_a_layer_saves() -> None:
    run_interpreted("from tests.cost.test_cost import count_activations; count_activations()", timeout=200)


def test_logits_and_flops_worked_by_hand() -> None:
    token = flops.TokenCost.from_config(replace(CONFIG, tie_word_embeddings=False), 2)
    products = 2.0 * (token.body_params + 51 * 24) * 5
    assert flops.forward_flops(token, [2, 3]) == products + 3 * 8 * 12 * 4 * (3 + 6)
    assert flops.train_flops(token, [2, 3], head_tokens=0) == 3 * (
        flops.forward_flops(token, [2, 3]) - 2.0 * 51 * 24 * 5
    )


def test_what_adapters_cost_worked_by_hand() -> None:
    """A product of 5 tokens with a frozen matrix is computed forward, and backward for its input alone."""
    config = replace(CONFIG, tie_word_embeddings=False)
    adapters = AdapterSpec(rank=2, alpha=4.0, targets=("down_proj",))
    whole, token = flops.TokenCost.from_config(config, 2), flops.TokenCost.from_config(config, 2, adapters)
    of_adapters = config.num_layers * 2 * (config.intermediate_size + 24)
    assert token.adapter_params == of_adapters
    assert flops.forward_flops(token, [2, 3]) == flops.forward_flops(whole, [2, 3]) + 2.0 * of_adapters * 5
    of_frozen = 2.0 * (token.body_params * 5 + 51 * 24 * 2)
    full = flops.train_flops(whole, [2, 3], head_tokens=2)
    assert flops.train_flops(token, [2, 3], head_tokens=2) == full - of_frozen + 6.0 * of_adapters * 5


def test_what_experts_cost_worked_by_hand() -> None:
    config = replace(CONFIG, **SPARSE)
    model, token = build(config), flops.TokenCost.from_config(config, 2)
    expert, n_layers = 3 * 20 * 24, 2
    assert token.expert_params == n_layers * expert
    body = sum(parameter.numel() for parameter in [*model.layers.parameters(), *model.final_norm.parameters()])
    assert token.body_params == body - n_layers * 5 * expert  # a token goes through 3 of 8
    assert token.params_read(1) == pytest.approx(token.active_params)
    draws = torch.stack([torch.rand(5000, 8).argsort(-1)[:, :3] for _ in range(4)], 1)  # 4 tokens, each of its own
    met = torch.zeros(5000, 8).scatter_(1, draws.flatten(1), 1.0).sum(1).mean().item()
    assert token.params_read(4) == pytest.approx(token.active_params + token.expert_params * (met - 3), rel=5e-3)
    assert token.params_read(10_000) == pytest.approx(body + token.head_params)
    dense = flops.TokenCost.from_config(CONFIG, 2)
    assert dense.params_read(5) == dense.active_params == parameters.n_body_parameters(CONFIG) + 51 * 24


@pytest.mark.parametrize("changes", [{}, SPARSE, RECURRENT, {**SPARSE, **RECURRENT}])
def test_outputs_that_layers_compute_again_are_those_of_the_model(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    if (experts := config.experts) is not None:
        config = replace(config, experts=replace(experts, shared_size=28))
    found = 0
    for name, module in build(config).named_modules():
        last = name.rpartition(".")[2]
        if last in ("qkv", "in_proj", "gate_up"):
            found += len(module.weight)
        elif last == "experts_gate_up" and experts is not None:
            found += module.out_size * experts.top_k
    assert n_saved_outputs(config) == found / config.num_layers


def test_what_states_cost_worked_by_hand() -> None:
    token = flops.TokenCost.from_config(replace(CONFIG, **RECURRENT), 2)
    assert token.state_bytes == 2 * (8 * 12 * 12 * 4 + 3 * (2 * 4 * 12 + 8 * 12) * 2)
    assert token.rule_flops == 2 * 8 * 6 * 12 * 12
    products = 2.0 * (token.body_params + token.head_params) * 5
    assert flops.forward_flops(token, [2, 3]) == products + 5 * token.rule_flops + 1 * 8 * 12 * 4 * (3 + 6)


def test_cost_and_specs_load_without_torch_and_numpy() -> None:
    code = """if 1:
        import importlib, pkgutil, sys, areno.cost, areno.specs
        for room in (areno.cost, areno.specs):
            for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
                importlib.import_module(module.name)
        assert not {"torch", "numpy"} & sys.modules.keys()"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers_with_windows_keep_and_see_their_last_tokens() -> None:
    kinds = tuple(LayerKind(CONFIG.rope, 7 if layer else None) for layer in range(CONFIG.num_layers))
    config = replace(CONFIG, kinds=kinds)
    of_layer = memory.kv_bytes_per_token(CONFIG, 2) // CONFIG.num_layers
    for n in (3, 7, 40):
        kept = n + (CONFIG.num_layers - 1) * min(n, 7)
        assert memory.kv_bytes_of_row(config, n, 2) == kept * of_layer
        seen = [sum(min(t, kind.window or n) for t in range(1, n + 1)) for kind in kinds]
        found = flops.mean_attention_pairs(flops.TokenCost.from_config(config, 2), [n, n])
        assert found == pytest.approx(2 * sum(seen) / CONFIG.num_layers)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes", [{}, {"family": "phi3"}, {"family": "qwen3_5_text", **RECURRENT}], ids=["llama", "phi3", "qwen3.5"]
)
def test_copies_of_a_are_counted(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], tp_size: int) -> None:
    """As many bytes as the storages of a model take once A has room below its weights."""
    monkeypatch.setattr("areno.layers.adapter.can_use_triton", lambda _: True)
    config = replace(CONFIG, **{**BARE, **changes})
    adapters = AdapterSpec(rank=3, alpha=6.0, targets=tuple(linear_shapes(config))[::2])
    model, layout = build(config, tp_size), Layout.single_replica(tp_size)
    add_adapters(model, adapters)
    before = _held(model)
    assert before == memory.model_bytes(config, 4, None, layout=layout, adapters=adapters).weights
    stack_adapters(model)
    after = memory.model_bytes(config, 4, None, layout=layout, adapters=adapters, copies_a=True).weights
    assert before < _held(model) == after


def _held(model: Transformer) -> int:
    """Bytes of the storages of all parameters."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(storages.values())
