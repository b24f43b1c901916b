"""GLM-4.5 to 4.7: experts with sigmoid scores, chosen with a bias that is never trained or rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from areno.engine.engine import Engine
from areno.errors import CheckpointError
from areno.layers.parallel import ParallelGroup
from areno.layers.routing import probabilities, ranking
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.known_shapes import published_config
from areno.models.parameters import n_active_body_parameters, n_parameters
from areno.models.registry import build_model, load_config, parse_config
from areno.models.weights import check_weights, load_weights
from tests.helpers.family_cases import random_model
from tests.helpers.lora_models import REQUESTS, ROWS, apart, engine_of
from tests.helpers.processes import worker_of
from tests.helpers.published import assert_same_files, in_mixed_dtypes, rewrite
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import rollout, saved_tensors, scored, train_rows
from tests.helpers.two_ranks import load

BIAS = "mlp.gate.e_score_correction_bias"


def rows_with_routes(engine: Engine) -> list[Any]:
    outputs = rollout(engine, REQUESTS)
    rows = train_rows(outputs, REQUESTS)
    samples = [sample for item in REQUESTS for sample in outputs[item.request_id]]
    return [replace(row, routes=sample.routes) for row, sample in zip(rows, samples, strict=True)]


def test_a_published_folder_is_read_and_written_bit_for_bit(tmp_path: Path) -> None:
    """Also the layer that predicts further tokens, which is not used."""
    random_model("glm4-experts", tmp_path / "in")
    stored = in_mixed_dtypes(tmp_path / "in", (BIAS,))
    assert stored[f"model.layers.1.{BIAS}"].dtype == torch.float32
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in stored
    unread = {"model.layers.3.eh_proj.weight": torch.ones(2, 2), "model.layers.3.mlp.gate.weight": torch.ones(3)}
    rewrite(tmp_path / "in", {**stored, **unread}, num_nextn_predict_layers=1)
    config = load_config(tmp_path / "in")
    model = build_model(config, dtype=torch.bfloat16, device="cpu")
    assert "tensors in 1 file" in check_weights(model, tmp_path / "in")
    load_weights(model, tmp_path / "in")
    assert torch.equal(model.layers[1].mlp.router.e_score_correction_bias, stored[f"model.layers.1.{BIAS}"])
    save_weights(model, tmp_path / "out")
    assert_same_files(tmp_path / "out", {**stored, **unread})
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held == n_parameters(config)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_plain_layer_is_not_taken_for_one_that_predicts_further_tokens(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), num_hidden_layers=2, num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match="says num_hidden_layers=2, the weight files have 3 layers"):
        load(tmp_path)


def test_rollout_training_and_states_leave_the_bias_as_it_is(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    with engine_of(tmp_path, None, routing_replay=True) as engine:
        for _ in range(2):
            stats = engine.train(rows_with_routes(engine), grpo_loss_fn)
            assert stats["logp_abs_diff_max"] < 1e-4
            assert stats["router_changed"] == 0.0
            assert 0.5 < stats["router_entropy"] < 1.0
        assert engine.train(train_rows(rollout(engine, REQUESTS), REQUESTS), grpo_loss_fn)["logp_abs_diff_max"] < 1e-4
        expected = scored(engine, "actor", ROWS)
        engine.save(str(tmp_path / "saved"))
        engine.save_state(tmp_path / "state")
        assert engine.is_state_written(wait=True)
    after = saved_tensors(tmp_path / "saved")
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.endswith(BIAS), name
    with engine_of(tmp_path, None) as other:
        other.load_state(tmp_path / "state")
        assert scored(other, "actor", ROWS) == expected


def test_exact(tmp_path: Path) -> None:
    random_model("glm4-tied-experts", tmp_path)
    with engine_of(tmp_path, None, exact=True) as engine:
        for _ in range(2):
            rows = train_rows(rollout(engine, REQUESTS), REQUESTS)
            assert engine.train(rows, grpo_loss_fn)["logp_abs_diff_max"] == 0.0


@pytest.mark.slow
def test_a_state_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    found = []
    with engine_of(tmp_path, None) as one:
        rows = train_rows(rollout(one, REQUESTS), REQUESTS)
    for settings in ({"devices": 2, "tp_size": 2}, {}):
        with engine_of(tmp_path, None, **settings) as engine:
            engine.train(rows, grpo_loss_fn)
            if settings:
                engine.save_state(tmp_path / "state")
                assert engine.is_state_written(wait=True)
            found.append(scored(engine, "actor", ROWS))
    assert apart(*found) < 1e-3
    with engine_of(tmp_path, None) as again:
        again.load_state(tmp_path / "state")
        assert apart(scored(again, "actor", ROWS), found[0]) < 1e-4


def test_weights_from_scratch_have_a_bias_of_zero(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    with engine_of(tmp_path, None, random_init=True) as engine:
        assert not worker_of(engine).actor.layers[1].mlp.router.e_score_correction_bias.any()


def test_the_choice_is_by_groups_and_statistics_are_shares(tmp_path: Path) -> None:
    random_model("glm4-tied-experts", tmp_path)
    experts = load_config(tmp_path).experts
    assert experts is not None
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(50, 12, generator=generator), torch.randn(12, generator=generator)
    scores = 1 / (1 + (-logits).exp())
    for row, ranked, share in zip(scores, ranking(experts, logits, bias), probabilities(experts, logits), strict=True):
        of_groups = [sum(sorted((row + bias)[group : group + 4].tolist())[-2:]) for group in (0, 4, 8)]
        used = sorted(range(3), key=lambda group: of_groups[group])[-2:]
        allowed = [expert for expert in range(12) if expert // 4 in used]
        best = sorted(allowed, key=lambda expert: float(row[expert] + bias[expert]))[-3:]
        assert set(ranked.topk(3).indices.tolist()) == set(best)
        torch.testing.assert_close(share, row / row.sum())


# --- tensor parallelism ---


def test_a_rank_has_the_whole_bias(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    whole, half = load(tmp_path), load(tmp_path, ParallelGroup(1, 2))
    bias = half.layers[2].mlp.router.e_score_correction_bias
    assert torch.equal(bias, whole.layers[2].mlp.router.e_score_correction_bias)
    assert bias.abs().max() > 0.1


def test_glm_4_5_air_has_the_published_size() -> None:
    values = published_config("zai-org/GLM-4.5-Air")
    assert values is not None
    config = parse_config(values, "config.json")
    assert config.experts is not None
    assert n_parameters(config) == pytest.approx(106.9e9, rel=0.005)
    assert n_active_body_parameters(config) == pytest.approx(12e9, rel=0.06)
