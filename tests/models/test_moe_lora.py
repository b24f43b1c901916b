"""Adapters on a model with experts: on all its linear layers, trained, sampled with and saved. peft is the oracle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areno.checks.steps.transformers_model import TransformersModel
from areno.config.layout import Layout
from areno.config.models import ModelConfig
from areno.cost.flops import TokenCost
from areno.errors import CheckpointError, ConfigError, EngineError
from areno.layers.config import AdapterSpec
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.adapter_shapes import linear_shapes, n_adapter_parameters
from areno.models.adapters import add_adapters, load_adapters, read_adapter_config, stored_adapters
from areno.models.registry import build_model, load_config
from areno.plan.lora import lora_spec
from areno.specs.role import RoleSpec
from tests.helpers.family_cases import random_model
from tests.helpers.in_float64 import InFloat64
from tests.helpers.lora_models import REQUESTS, ROWS, apart, engine_of, lora, of_peft, train
from tests.helpers.processes import worker_of
from tests.helpers.tiny_engine import rollout, scored, train_rows
from tests.helpers.two_ranks import load, packed, random_rows

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
PLAIN = ("gate_proj", "up_proj", "down_proj")  # of layers without experts
UNEQUAL = {"qwen3": {"moe_intermediate_size": 20}}  # so that no matrix is square


@pytest.fixture(scope="module", params=["qwen3", "mixtral", pytest.param("glm4", marks=pytest.mark.slow), "gpt-oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    random_model(f"{request.param}-experts", path, **UNEQUAL.get(request.param, {}))
    return path


def all_linear(folder: Path, **more: Any) -> Any:
    return lora(folder, tuple(linear_shapes(load_config(folder))), alpha=4.0, **more)


def test_the_layers_are_those_of_attention_experts_and_plain_mlps(folder: Path) -> None:
    model = load_config(folder)
    plain = PLAIN if model.experts is not None and model.experts.dense_layers else ()
    assert tuple(linear_shapes(model)) == (*ATTENTION, *EXPERTS, *plain)
    actor = ModelConfig(path=str(folder), use_lora=True)
    asked = lora_spec(actor, model)
    assert asked is not None
    assert asked.adapters.targets == (*ATTENTION, *EXPERTS, *plain)
    asked = lora_spec(replace(actor, target_modules=["q_proj", "experts.down_proj"]), model)
    assert asked is not None
    assert asked.adapters.targets == ("q_proj", "experts.down_proj")
    for name in ("w1", "gate_up_proj"):
        with pytest.raises(ConfigError, match=rf"has {name}, .* experts have experts\.gate_up_proj and experts\.down"):
            lora_spec(replace(actor, target_modules=["q_proj", name]), model)
    with pytest.raises(ConfigError, match="has gate, which is no linear layer"):
        lora_spec(replace(actor, target_modules=["gate"]), model)


def test_peft_loads_what_was_trained(folder: Path, tmp_path: Path) -> None:
    adapters = all_linear(folder)
    with engine_of(folder, None) as plain:
        base = scored(plain, "actor", ROWS)
    with engine_of(folder, adapters, routing_replay=True) as engine:
        assert scored(engine, "actor", ROWS) == base
        train(engine)
        assert train(engine, 1)["logp_abs_diff_max"] < 1e-4
        assert engine.info.n_adapter_params == n_adapter_parameters(load_config(folder), adapters.adapters)
        assert engine.info.routes is not None
        engine.save(str(tmp_path / "alone"))
        engine.save(str(tmp_path / "merged"), merge=True)
        found = scored(engine, "actor", ROWS)
        trained = {name: p for name, p in worker_of(engine).actor.named_parameters() if p.requires_grad}
        engine.ensure_roles({"ref": RoleSpec(path=str(folder), head="lm", key="ref.path")})
        assert scored(engine, "ref", ROWS) == base
        assert scored(engine, "actor", ROWS) == found
    assert all(".adapter." in name for name in trained)
    assert all(p.any() for p in trained.values())
    assert apart(found, base) > 0.01
    assert apart(found, of_peft(folder, tmp_path / "alone")) < 1e-5
    checked = TransformersModel(folder, adapters=tmp_path / "alone")
    weights = {name: tensor.double() for name, tensor in checked.read(tmp_path / "alone").items()}
    with InFloat64():
        assert apart(found, [checked.logprobs(weights, row) for row in ROWS]) < 1e-5
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(".experts." in name and not torch.equal(tensor, before[name]) for name, tensor in after.items())
    for name, tensor in after.items():
        is_frozen = any(part in name for part in ("norm", "embed", "lm_head", "gate.", "bias", "router", "sinks"))
        is_unused = ".experts." in name and torch.equal(tensor, before[name])  # no token may have used an expert
        assert torch.equal(tensor, before[name]) == (is_frozen or is_unused), name
    with engine_of(tmp_path / "merged", None) as merged:
        assert apart(scored(merged, "actor", ROWS), found) < 1e-5
    with engine_of(folder, replace(adapters, init_from=str(tmp_path / "alone"))) as again:
        assert scored(again, "actor", ROWS) == found


def test_exact(folder: Path) -> None:
    with engine_of(folder, all_linear(folder), exact=True) as engine:
        train(engine)
        assert train(engine, 1)["logp_abs_diff_max"] == 0.0


@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)])
def test_gradients_are_those_of_peft(folder: Path, tmp_path: Path, parameters: tuple[str, ...]) -> None:
    """Of a folder that peft made, in float64."""
    import peft
    import transformers

    torch.manual_seed(3)
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ),
        peft.LoraConfig(
            r=3,
            lora_alpha=10,
            target_modules=["v_proj"],
            target_parameters=[f"mlp.experts.{name}" for name in parameters],
            init_lora_weights=False,
        ),
    ).eval()
    theirs.save_pretrained(str(tmp_path))
    ours = load(folder)
    read = read_adapter_config(tmp_path, ours.config).adapters
    assert read == AdapterSpec(3, 10.0, ("v_proj", *(f"experts.{name}" for name in parameters)))
    add_adapters(ours, read)
    load_adapters(ours, tmp_path)
    ours.double()
    theirs.double()
    rows = random_rows(101, (7, 33, 1))
    with InFloat64():
        logits = ours.logits(ours(*packed(rows)))
        expected_logits = torch.cat([theirs(row[None]).logits[0] for row in rows])
        torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=0)
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) / 10
        (logits * weights).sum().backward()
        (expected_logits * weights).sum().backward()
    grads = {name.replace(".default", ""): each.grad for name, each in theirs.named_parameters()}
    expected = {name: grad for name, grad in grads.items() if grad is not None}
    found = stored_adapters(ours)
    assert found.keys() == expected.keys()
    for name, stored in found.items():
        gradients = [entry.part.region(entry.parameter.grad) for entry in stored.entries]  # type: ignore[arg-type]
        whole = torch.cat(gradients)
        ordered = stored.in_file_order(whole)
        scale = max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(ordered.double(), expected[name], atol=1e-6 * scale, rtol=0, msg=name)


def test_what_a_rank_holds_is_told_beforehand(folder: Path) -> None:
    config, adapters = load_config(folder), all_linear(folder).adapters
    for rank in range(2):
        divided = build_model(config, dtype=torch.float32, device="meta", tp=ParallelGroup(rank, 2))
        add_adapters(divided, adapters)
        held = sum(parameter.numel() for parameter in divided.parameters() if parameter.requires_grad)
        assert held == n_adapter_parameters(config, adapters, Layout.single_replica(2))


def test_a_token_computes_with_the_adapters_of_its_own_experts(folder: Path) -> None:
    config = load_config(folder)
    assert config.experts is not None
    n_all = {
        n: n_adapter_parameters(replace(config, experts=replace(config.experts, n_experts=n)), SPEC) for n in (2, 8)
    }
    eight = replace(config, experts=replace(config.experts, n_experts=8, top_k=2))
    cost = TokenCost.from_config(eight, 2, SPEC)
    assert cost.adapter_params == n_all[8]
    assert cost.active_adapter_params == n_all[2]
    plain = TokenCost.from_config(eight, 2)
    assert cost.params_read(1e9) - plain.params_read(1e9) == pytest.approx(cost.adapter_params)
    assert cost.params_read(1) - plain.params_read(1) == pytest.approx(cost.active_adapter_params)


SPEC = AdapterSpec(rank=3, alpha=6.0, targets=EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"cp_size": 2}], ids=["tp", "cp"])
def test_two_ranks_are_as_one(folder: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    """Also what is saved, and states that are read on the other layout."""
    adapters, found = all_linear(folder), []
    for name, settings in (("one", {}), ("two", {"devices": 2, **layout})):
        with engine_of(folder, adapters, **settings) as engine:
            if name == "one":
                rows = train_rows(rollout(engine, REQUESTS), REQUESTS)
            stats = [engine.train(rows, grpo_loss_fn) for _ in range(2)]
            numbers = [step[key] for step in stats for key in ("loss", "grad_norm")]
            engine.save(str(tmp_path / name))
            engine.save_state(tmp_path / f"{name}-state")
            assert engine.is_state_written(wait=True)
            found.append((numbers, scored(engine, "actor", ROWS)))
            if name == "two":
                engine.load_state(tmp_path / "one-state")
                assert apart(scored(engine, "actor", ROWS), found[0][1]) < 1e-4
    (numbers, logprobs), (numbers_2, logprobs_2) = found
    assert numbers_2 == pytest.approx(numbers, rel=1e-3, abs=1e-6)
    assert apart(logprobs_2, logprobs) < 1e-3
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, atol=1e-3, rtol=0, msg=name)
    with engine_of(folder, adapters) as engine:
        engine.load_state(tmp_path / "two-state")
        assert apart(scored(engine, "actor", ROWS), logprobs_2) < 1e-4


def test_a_state_with_adapters_on_fewer_layers_is_named(folder: Path, tmp_path: Path) -> None:
    """A run that began before all-linear included experts. Its checkpoint keeps the layers."""
    with engine_of(folder, lora(folder, ATTENTION)) as engine:
        train(engine, 1)
        engine.save(str(tmp_path / "checkpoint"))
        engine.save_state(tmp_path / "state")
        assert engine.is_state_written(wait=True)
    expected = r"actor\.target_modules names other layers .* is absent in the state and .*actor\.init_lora_from"
    with engine_of(folder, all_linear(folder)) as engine, pytest.raises(EngineError, match=expected):
        engine.load_state(tmp_path / "state")
    assert read_adapter_config(tmp_path / "checkpoint", load_config(folder)).adapters.targets == ATTENTION


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1, .*; expected 0, since adapters of target_parameters have no"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, r"base_layer\.lora_A\.weight, .*which target_parameters of"),
        ({"target_parameters": []}, r"mlp\.experts\..*which target_parameters of"),
        ({"rank_pattern": {"gate_up_proj": 6}}, "rank_pattern"),
    ],
)
def test_what_is_not_supported_is_named(folder: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with engine_of(folder, lora(folder, ("q_proj", *EXPERTS))) as engine:
        engine.save(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=named):
        read_adapter_config(tmp_path, load_config(folder))


def test_adapters_of_a_router_are_refused(folder: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.1.mlp.gate.lora_A.weight"
    save_file({name: torch.zeros(3, 32)}, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_parameters": ["gate.weight"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.lora_A\.weight; expected adapters of q_proj, .* only"):
        read_adapter_config(tmp_path, load_config(folder))
