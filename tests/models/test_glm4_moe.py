"""GLM-4.5 to 4.7: experts with sigmoid scores, chosen with a bias that is never trained or rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from areno.errors import CheckpointError
from areno.kernels.experts.reference import probabilities
from areno.layers.parallel import ParallelGroup
from areno.layers.routing import ranking
from areno.models.known_shapes import published_config
from areno.models.parameters import n_active_body_parameters, n_parameters
from areno.models.registry import build_model, load_config, parse_config
from areno.models.weights import check_weights, load_weights
from tests.helpers.family_cases import logits_of, random_model
from tests.helpers.lora_models import ROWS, apart, engine_of, train
from tests.helpers.processes import worker_of
from tests.helpers.published import assert_same_files, in_mixed_dtypes, rewrite
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import scored
from tests.helpers.two_ranks import assert_gradients, load, packed, random_rows

BIAS = "mlp.gate.e_score_correction_bias"


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


@pytest.mark.parametrize("said", [0, 2])
def test_the_number_of_layers_that_predict_further_tokens_is_named(said: int, tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {**stored, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, num_nextn_predict_layers=said)
    with pytest.raises(CheckpointError, match=f"says num_nextn_predict_layers={said}, the weight files have 1 such"):
        load(tmp_path)


@pytest.mark.parametrize("wide", [(BIAS,), ()])
def test_a_bias_that_was_rounded_is_warned_of(
    wide: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model("glm4-experts", tmp_path)
    in_mixed_dtypes(tmp_path, wide)
    assert load(tmp_path).layers[1].mlp.router.e_score_correction_bias.dtype == torch.float32
    assert (f"model.layers.1.{BIAS}, model.layers.2.{BIAS}: stored in 16 bits" in caplog.text) == (not wide)


def test_fields_of_the_router_that_other_families_have(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, stored, scoring_func="sigmoid", topk_method="noaux_tc")
    load_config(tmp_path)
    rewrite(tmp_path, stored, scoring_func="softmax")
    with pytest.raises(CheckpointError, match="scoring_func is 'softmax', which is not supported; expected 'sigmoid'"):
        load_config(tmp_path)


def test_weights_from_scratch_have_a_bias_of_zero(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    with engine_of(tmp_path, None, random_init=True) as engine:
        assert not worker_of(engine).actor.layers[1].mlp.router.e_score_correction_bias.any()


@pytest.mark.parametrize("case", ["glm4-experts", "glm4-tied-experts"])
def test_layers_without_a_shared_expert(case: str, tmp_path: Path) -> None:
    """transformers stores one of no size, which is saved again."""
    reference = random_model(case, tmp_path / "in", n_shared_experts=0)
    reference.set_experts_implementation("eager")
    stored = load_file(tmp_path / "in/model.safetensors")
    assert stored["model.layers.2.mlp.shared_experts.down_proj.weight"].shape == (32, 0)
    model, rows = load(tmp_path / "in"), random_rows(101)
    assert "tensors in 1 file" in check_weights(model, tmp_path / "in")
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters(model.config)
    logits, expected = model.logits(model(*packed(rows))), logits_of(reference, rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    save_weights(model, tmp_path / "out")
    assert_same_files(tmp_path / "out", stored)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) / 10
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    assert "model.layers.2.mlp.experts.11.down_proj.weight" in assert_gradients(model, reference, 1e-4)


def test_layers_without_a_shared_expert_train(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path / "in", n_shared_experts=0)
    with engine_of(tmp_path / "in", None) as engine:
        before = scored(engine, "actor", ROWS)
        train(engine)
        found = scored(engine, "actor", ROWS)
        engine.save(str(tmp_path / "out"))
    assert apart(before, found) > 0.1
    with engine_of(tmp_path / "out", None) as again:
        assert apart(scored(again, "actor", ROWS), found) < 1e-5


def test_a_shared_expert_of_which_the_config_says_nothing_is_named(tmp_path: Path) -> None:
    random_model("glm4-experts", tmp_path)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), n_shared_experts=0)
    with pytest.raises(CheckpointError, match=r"hold .*shared_experts\.down_proj.*config.json has no place for"):
        load(tmp_path)


def test_the_choice_is_by_groups_and_statistics_are_shares(tmp_path: Path) -> None:
    random_model("glm4-tied-experts", tmp_path)
    experts = load_config(tmp_path).experts
    assert experts is not None
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(50, 12, generator=generator), torch.randn(12, generator=generator)
    scores = 1 / (1 + (-logits).exp())
    for row, ranked, share in zip(scores, ranking(experts, logits, bias), probabilities(logits, True), strict=True):
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
