"""More families against transformers: same logits and gradients, saved and loaded, on one rank and on two."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areno.errors import CheckpointError
from areno.models.families import FAMILIES
from areno.models.registry import load_config
from tests.helpers.family_cases import (
    CASES,
    EXPERTS,
    IMAGES,
    SHAPE,
    config_of,
    logits_of,
    random_model,
    read_and_saved_as_text,
)
from tests.helpers.in_float64 import InFloat64
from tests.helpers.saving import save_weights
from tests.helpers.two_ranks import (
    assert_saved_alike,
    compare_models,
    load,
    on_two_ranks,
    packed,
    random_rows,
    values_of,
)

NAMES = list(CASES)


@pytest.mark.parametrize("case", NAMES)
def test_logits_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path)
    model = load(tmp_path)
    rows = random_rows(101)
    logits, expected = model.logits(model(*packed(rows))), logits_of(reference, rows)
    assert expected.std() > 0.3  # a reference that says nothing would agree with anything
    if model.config.experts:  # grouped products have no float64
        reference.set_experts_implementation("eager")
    if model.config.delta:
        # Rounding is multiplied, also that of transformers: see test_delta_rounding.py.
        with InFloat64(), torch.no_grad():
            exact = logits_of(deepcopy(reference).double(), rows)
        bar = max(1e-4, 2 * (expected - exact).abs().max().item())
        torch.testing.assert_close(logits.double(), exact, atol=bar, rtol=0)
    else:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) / 10
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    # What was gathered under the names of the checkpoint, as saving does.
    save_weights(model, tmp_path / "gradients")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gradients", dtype=torch.float32)
    for name, parameter in found.named_parameters():
        # The norm behind a state that holds little yet multiplies rounding as it does gradients, up to hundreds.
        scale = max(1.0, theirs[name].abs().max().item() / 10) if model.config.delta else 1.0
        torch.testing.assert_close(parameter.data, theirs[name], atol=5e-4 * scale, rtol=1e-3, msg=f"{case} {name}")


@pytest.mark.parametrize("case", [*NAMES, *EXPERTS])
def test_transformers_loads_what_is_saved(case: str, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path)
    save_weights(load(tmp_path), tmp_path / "saved")
    saved, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in reference.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
    rows = random_rows(101, (60,))
    with torch.no_grad():
        assert torch.equal(logits_of(saved, rows), logits_of(reference, rows))


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients (after gathering), initialisation and saving.

    101 tokens leave the last rank a padded row. Each rank has half of the experts.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    cases = ["qwen3", "qwen3-tied", "llama-linear", "llama3-rope", "qwen2", "qwen2-tied", *NAMES, *EXPERTS]
    references = {case: random_model(case, tmp_path / case) for case in cases}
    on_two_ranks(compare_models, *(tmp_path / case for case in cases))
    for case, reference in references.items():
        assert_saved_alike(reference, Path(f"{tmp_path / case}-saved"))


# config.json as earlier versions of transformers wrote it, with the case whose weights it fits.
OLD: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3-tied",
        {
            "rope_theta": 1000.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
            "final_logit_softcapping": None,
            "cache_implementation": "hybrid",
        },
    ),
    "olmo3": (
        "olmo3-tied",
        {
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "glm4": ("glm4", {"rope_theta": 100.0, "partial_rotary_factor": 0.25}),
    "phi3": ("phi3", {"rope_theta": 100.0, "rope_scaling": None, "partial_rotary_factor": 0.5, "sliding_window": 7}),
    "phi3 longrope": (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [4.0, 5.0, 6.0]},
            "partial_rotary_factor": 0.75,
            "rope_theta": 50.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "smollm3": ("smollm3-tied", {"rope_theta": 100.0, "no_rope_layers": [1, 0], "no_rope_layer_interval": 4}),
    "qwen2": ("qwen2-window", {"rope_theta": 100.0, "max_window_layers": 2}),
}


@pytest.mark.parametrize("name", OLD)
def test_older_files_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    case, changes = OLD[name]
    random_model(case, tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    for gone in ("rope_parameters", "layer_types", "dtype"):
        values.pop(gone, None)
    file.write_text(json.dumps({**values, **changes, "torch_dtype": "float32"}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rows = random_rows(101)
    model = load(tmp_path)
    with torch.no_grad():
        logits, expected = model.logits(model(*packed(rows))), logits_of(reference, rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert model.config.max_position_embeddings == (64 if name == "phi3 longrope" else 256)
    file.write_text(json.dumps(values))
    with torch.no_grad():  # what was changed counts
        again = load(tmp_path)
        assert (again.logits(again(*packed(rows))) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "case",
    [
        "mistral",
        "phi3",
        "smollm3",
        "olmo2",
        "olmo3",
        "glm4",
        "gemma3",
        "qwen3.5",
        "qwen3-experts",
        "mixtral-experts",
        "gpt-oss-experts",
    ],
)
def test_scores_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = config_of(case, num_labels=1, pad_token_id=0)
    reference = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path / "in")
    save_weights(load(tmp_path / "in", head="value"), tmp_path / "out")
    rows = [row.clamp(min=1) for row in random_rows(101)]
    with torch.no_grad():
        expected = [reference(row[None]).logits[0, 0] for row in rows]
        assert torch.stack(expected).std() > 0.1
        for folder in ("in", "out"):
            for values, score in zip(values_of(load(tmp_path / folder, head="value"), rows), expected, strict=True):
                torch.testing.assert_close(values[-1], score, atol=1e-4, rtol=0)


def test_families_that_transformers_has_token_classifiers_for() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as THERE

    assert {name: family.classes.get("step") for name, family in FAMILIES.items()} == {
        name: THERE.get(name) for name in FAMILIES
    }


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_gemma_with_images(tied: bool, tmp_path: Path) -> None:
    """Which those of 4B and more are. It is read, and saved with its images; fields may be left out as published."""
    torch.manual_seed(0)
    text = {**SHAPE, **CASES["gemma3"][1], "num_attention_heads": 8, "tie_word_embeddings": tied}
    whole = transformers.Gemma3Config(text_config=text, vision_config=IMAGES, tie_word_embeddings=tied)
    reference = transformers.Gemma3ForConditionalGeneration(whole).eval()
    reference.save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    values = json.loads(file.read_text())
    del values["text_config"]["num_attention_heads"]
    file.write_text(json.dumps({**values, "eos_token_id": [1, 7]}))
    rows = random_rows(101, (20, 33, 7))
    model, expected, again = read_and_saved_as_text(reference, tmp_path / "in", rows, "Gemma3ForConditionalGeneration")
    assert model.config.within == "Gemma3ForConditionalGeneration"
    assert (model.head is None) == tied
    assert torch.equal(again, expected)
    assert expected.std() > 0.1
    file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="quantization_config is 'fp8'"):
        load_config(tmp_path / "in")


WRONG = [
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0.*capped logits are not implemented"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True.*expected false"),
    ("gemma3", {"hidden_activation": "silu"}, "hidden_activation is 'silu'.*'gelu_pytorch_tanh'"),
    ("gemma3", {"rope_parameters": {"chunked_attention": {"rope_theta": 1.0}}}, "chunked_attention is .* a field"),
    ("gemma3", {"sliding_window": None}, "sliding_window is missing, expected int"),
    ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types is .*'full_attention' or 'sliding_attention'"),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "has 1 numbers, expected 4",
    ),
    ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1]}}, "short_factor is missing"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod is 2.*expected 1"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1.*there is no dropout"),
    ("phi3", {"partial_rotary_factor": 0.4, "rope_parameters": None}, "partial_rotary_factor is .*an even number"),
    ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types is .*all layers go by sliding_window"),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers is .*a 0 or 1 for each of num_hidden_layers=4"),
    ("qwen2-window", {"use_sliding_window": False}, "layer_types is .*without use_sliding_window"),
    ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate is False.*expected true"),
    ("qwen3.5", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'.*expected 'swish'"),
    ("qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3.*a multiple of linear_num_key_heads=2"),
    ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, "layer_types is .*'full_attention' in one layer at least"),
    ("qwen3.5", {"layer_types": ["sliding_attention"] * 4}, "layer_types is .*'full_attention' or 'linear_attention'"),
    ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'.*'silu'"),
    ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, expected int, at least 2"),
    ("qwen3.5", {"linear_key_head_dim": 129}, "linear_key_head_dim is 129, expected int, at least 1, at most 128"),
    ("qwen3-experts", {"num_local_experts": None}, "num_experts is missing"),
    ("qwen3-experts", {"num_experts": 9}, "num_local_experts is 8, and num_experts is 9"),
    ("qwen3-experts", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, .* at most num_local_experts=8"),
    ("qwen3-experts", {"mlp_only_layers": [3]}, "mlp_only_layers is .*layers, 0 to 2"),
    ("qwen3-experts", {"mlp_only_layers": [0, 1, 2]}, "leave no layer with experts"),
    ("qwen3-experts", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected int, at least 1"),
    ("qwen3-experts", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ("qwen3-experts", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
    (
        "qwen3-experts",
        {"shared_expert_intermediate_size": 8},
        "shared_expert_intermediate_size is 8, a field that areno",
    ),
    ("glm4-experts", {"n_group": 5}, "n_group is 5.*a divisor of n_routed_experts=12 that leaves at least two"),
    ("glm4-experts", {"n_group": 12}, "n_group is 12.*that leaves at least two"),
    ("glm4-experts", {"topk_group": 2}, "topk_group is 2.*at most n_group=1"),
    (
        "glm4-tied-experts",
        {"num_experts_per_tok": 9},
        "topk_group is 2.*enough groups of 4 experts",
    ),
    ("glm4-experts", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3.*fewer than num_hidden_layers=3"),
    ("glm4-experts", {"n_shared_experts": -1}, "n_shared_experts is -1, expected int, at least 0"),
    ("glm4-experts", {"n_routed_experts": 0}, "n_routed_experts is 0, expected int, at least 1"),
    ("glm4-experts", {"n_group": 0}, "n_group is 0, expected int, at least 1"),
    ("glm4-experts", {"kv_lora_rank": 16}, "kv_lora_rank is 16, a field that areno"),
    ("gpt-oss-experts", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0, expected float, more than 0"),
    ("gpt-oss-experts", {"layer_types": ["chunked_attention"] * 3}, "'full_attention' or 'sliding_attention'"),
    ("gpt-oss-experts", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'.*mxfp4"),
    ("gpt-oss-experts", {"num_local_experts": 0}, "num_local_experts is 0, expected int, at least 1"),
    ("gpt-oss-experts", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, .* at most num_local_experts=6"),
    ("qwen3-experts", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config is 'mxfp4'"),
    ("mixtral-experts", {"sliding_window": 64}, "sliding_window is 64, which is not supported"),
    ("mixtral-experts", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, which is not supported"),
    ("mixtral-experts", {"rope_parameters": None}, "rope_theta is missing"),
]


@pytest.mark.parametrize(("case", "changes", "message"), WRONG)
def test_what_is_missing_is_told_by_its_field(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(tmp_path)
    assert len(caught.value.problems) == 1
