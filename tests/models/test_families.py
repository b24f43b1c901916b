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
from tests.helpers.family_cases import CASES, SHAPE, logits_of, random_model, read_and_saved_as_text
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


@pytest.mark.parametrize("case", NAMES)
def test_transformers_loads_what_is_saved(case: str, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path)
    save_weights(load(tmp_path), tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
    rows = random_rows(101, (60,))
    with torch.no_grad():
        assert torch.equal(logits_of(saved, rows), logits_of(reference, rows))


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients (after gathering), initialisation and saving."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    references = {case: random_model(case, tmp_path / case) for case in NAMES}
    on_two_ranks(compare_models, *(tmp_path / case for case in NAMES))
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


@pytest.mark.parametrize("case", ["mistral", "phi3", "smollm3", "olmo2", "olmo3", "glm4", "gemma3", "qwen3.5"])
def test_scores_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, extra = CASES[case]
    torch.manual_seed(0)
    config = kind(**{**SHAPE, **extra, "num_labels": 1, "pad_token_id": 0})
    reference = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path / "in")
    save_weights(load(tmp_path / "in", head="value"), tmp_path / "out")
    for folder in ("in", "out"):
        row = random_rows(100, (30,))[0] + 1
        with torch.no_grad():
            [values] = values_of(load(tmp_path / folder, head="value"), [row])
            assert values[-1].item() == pytest.approx(reference(row[None]).logits.item(), abs=1e-4)


def test_families_that_transformers_has_token_classifiers_for() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as THERE

    assert {name: family.classes.get("step") for name, family in FAMILIES.items()} == {
        name: THERE.get(name) for name in FAMILIES
    }


IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_gemma_with_images(tied: bool, tmp_path: Path) -> None:
    """Which those of 4B and more are. It is read, and saved as a text model; fields may be left out as published."""
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
    model, expected, again = read_and_saved_as_text(reference, tmp_path / "in", rows, "Gemma3ForCausalLM")
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
]


@pytest.mark.parametrize(("case", "changes", "message"), WRONG)
def test_what_is_missing_is_told_by_its_field(case: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(tmp_path)
    assert len(caught.value.problems) == 1
