"""Adapters on a model with experts: on its attention, trained with the experts as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areno.config.models import ModelConfig
from areno.errors import ConfigError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.adapter_shapes import linear_shapes, n_adapter_parameters
from areno.models.registry import load_config
from areno.plan.lora import lora_spec
from tests.helpers.family_cases import random_model
from tests.helpers.lora_models import REQUESTS, ROWS, apart, engine_of, lora, of_peft, train
from tests.helpers.processes import worker_of
from tests.helpers.tiny_engine import rollout, scored, train_rows

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    random_model(f"{request.param}-experts", path)
    return path


def test_peft_loads_what_was_trained_on_attention(folder: Path, tmp_path: Path) -> None:
    assert tuple(linear_shapes(load_config(folder))) == ATTENTION
    with engine_of(folder, lora(folder, ATTENTION), routing_replay=True) as engine:
        base = scored(engine, "actor", ROWS)
        train(engine)
        assert engine.info.n_adapter_params == n_adapter_parameters(load_config(folder), lora(folder).adapters)
        assert engine.info.routes is not None
        engine.save(str(tmp_path / "alone"))
        engine.save(str(tmp_path / "merged"), merge=True)
        found = scored(engine, "actor", ROWS)
        trained = [name for name, p in worker_of(engine).actor.named_parameters() if p.requires_grad]
    assert apart(found, base) > 0.01
    assert all(".attention." in name and ".adapter." in name for name in trained)
    assert apart(found, of_peft(folder, tmp_path / "alone")) < 1e-5
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("self_attn" in name for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"cp_size": 2}], ids=["tp", "cp"])
def test_two_ranks_are_as_one(folder: Path, layout: dict[str, int]) -> None:
    adapters, found = lora(folder, ATTENTION), []
    with engine_of(folder, adapters) as one:
        rows = train_rows(rollout(one, REQUESTS), REQUESTS)
        stats = [one.train(rows, grpo_loss_fn) for _ in range(2)]
        found.append(([step[key] for step in stats for key in ("loss", "grad_norm")], scored(one, "actor", ROWS)))
    with engine_of(folder, adapters, devices=2, **layout) as two:
        stats = [two.train(rows, grpo_loss_fn) for _ in range(2)]
        found.append(([step[key] for step in stats for key in ("loss", "grad_norm")], scored(two, "actor", ROWS)))
    (numbers, logprobs), (numbers_2, logprobs_2) = found
    assert numbers_2 == pytest.approx(numbers, rel=1e-3, abs=1e-6)
    assert apart(logprobs_2, logprobs) < 1e-3


def test_adapters_on_experts_are_refused(folder: Path) -> None:
    model = load_config(folder)
    actor = ModelConfig(path=str(folder), use_lora=True)
    asked = lora_spec(actor, model)
    assert asked is not None
    assert asked.adapters.targets == ATTENTION
    for name in ("gate_proj", "down_proj", "w1", "gate"):
        with pytest.raises(ConfigError, match=f"has {name}, which belongs to the experts, .* not supported; there are"):
            lora_spec(replace(actor, target_modules=["q_proj", name]), model)
