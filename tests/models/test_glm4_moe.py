"""GLM-4.5 to 4.7: experts with sigmoid scores, chosen with a bias that is never trained or rounded."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from areno.engine.engine import Engine
from areno.errors import CheckpointError
from areno.layers.parallel import ParallelGroup
from areno.layers.routing import probabilities, ranking
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.known_shapes import published_config
from areno.models.parameters import n_active_body_parameters, n_parameters
from areno.models.registry import build_model, load_config, parse_config
from areno.models.weights import check_weights, load_weights
from tests.helpers import tiny_shape
from tests.helpers.family_cases import random_model
from tests.helpers.lora_models import REQUESTS, ROWS, apart, engine_of
from tests.helpers.processes import worker_of
from tests.helpers.published import assert_same_files, in_mixed_dtypes, rewrite
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import rollout, saved_tensors, scored, train_rows
from tests.helpers.two_ranks import gradients_apart, load, packed, random_rows

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


# --- random configurations ---


def random_config(seed: int) -> transformers.Glm4MoeConfig:
    rng = random.Random(seed)
    heads, n_groups = rng.choice([(2, 1), (4, 2), (3, 3), (6, 2)]), rng.choice([1, 1, 1, 2, 3])
    n_experts, top_groups = n_groups * rng.choice([3, 4, 5]), rng.randint(1, n_groups)
    n_layers = rng.randint(1, 3)
    shape = {
        "vocab_size": 101,
        "hidden_size": rng.choice([24, 32, 40]),
        "intermediate_size": rng.choice([28, 44]),
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": rng.choice([8, 12, 16]),
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rng.choice([100.0, 10000.0]),
            "partial_rotary_factor": rng.choice([0.5, 0.5, 1.0]),
        },
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.7,
        "use_qk_norm": rng.random() < 0.5,
    }
    routing = {
        "moe_intermediate_size": rng.choice([20, 36]),
        "n_routed_experts": n_experts,
        "n_shared_experts": rng.choice([1, 2]),
        "num_experts_per_tok": rng.randint(1, min(4, top_groups * n_experts // n_groups)),
        "n_group": n_groups,
        "topk_group": top_groups,
        "routed_scaling_factor": rng.choice([1.0, 1.5, 2.5]),
        "norm_topk_prob": rng.random() < 0.7,
        "first_k_dense_replace": rng.randint(0, n_layers - 1),
    }
    return transformers.Glm4MoeConfig(**shape, **routing)


def has_near_tie(reference: Any, row: Tensor) -> bool:
    """Whether the last chosen and the first other expert, or group, of any token and layer differ by less than 1e-5."""
    gaps = [1.0]

    def watch(router: Any, args: Any, output: Any) -> None:
        ranked = output[0].sigmoid() + router.e_score_correction_bias
        groups = ranked.unflatten(-1, (router.num_group, -1))
        of_groups = groups.topk(2).values.sum(-1).sort(-1, descending=True)
        used = of_groups.indices[:, : router.topk_group, None].expand(-1, -1, groups.shape[-1])
        for values, n in (
            (of_groups.values, router.topk_group),
            (groups.gather(1, used).flatten(1).sort(-1, descending=True).values, router.top_k),
        ):
            if n < values.shape[1]:
                gaps.append(float((values[:, n - 1] - values[:, n]).min()))

    routers = [module for module in reference.modules() if hasattr(module, "e_score_correction_bias")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    with torch.no_grad():
        reference(row[None])
    for hook in hooks:
        hook.remove()
    return min(gaps) < 1e-5


def compare(seed: int, folder: Path) -> tuple[float, float, int]:
    """Return the largest difference of logits, that of gradients in parts of the largest, and the rows left out."""
    reference = tiny_shape.random_model(random_config(seed), folder)
    rows = [row for row in random_rows(101, (7, 25, 1)) if not has_near_tie(reference, row)]
    model = load(folder)
    logits = model.logits(model(*packed(rows)))
    expected = torch.cat([reference(row[None]).logits[0] for row in rows])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    apart = gradients_apart(model, reference).values()
    of_gradients = max(one / max(0.1, largest) for one, largest in apart)
    return float((logits - expected).detach().abs().max()), of_gradients, 3 - len(rows)


@pytest.mark.slow
def test_random_configurations_are_those_of_transformers(tmp_path: Path) -> None:
    found = [compare(seed, tmp_path / str(seed)) for seed in range(12)]
    assert max(logits for logits, _, _ in found) < 1e-4
    assert max(gradients for _, gradients, _ in found) < 1e-4
    assert sum(n_left_out for _, _, n_left_out in found) <= 1


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
