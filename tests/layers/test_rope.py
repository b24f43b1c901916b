"""Scaled rotary positions against transformers, beyond the context of the first training, in training and decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areno.engine.decoder.decoder import Decoder
from areno.errors import CheckpointError, EngineError
from areno.layers.attention import PackedAttend
from areno.layers.config import RopeConfig
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from areno.models.weights import load_weights
from areno.types import GenerationRequest, SamplingParams
from tests.helpers import tiny_shape
from tests.helpers.new_decoder import new_decoder

ORIGINAL, CONTEXT = 32, 256
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": YARN,
    "yarn-ratio": {**YARN, "factor": None},
    "yarn-betas": {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.4},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4, "truncate": False},
    "yarn-short": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4, "truncate": None},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
FAMILIES = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
SHAPE = {**tiny_shape.SHAPE, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}


def reference(
    folder: Path, rope: dict[str, Any], family: str = "llama", **changes: Any
) -> transformers.PreTrainedModel:
    """A random model of transformers, saved to `folder`."""
    torch.manual_seed(0)
    config = FAMILIES[family](**{**SHAPE, **changes}, rope_parameters={"rope_theta": 1000.0, **rope})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def edited(folder: Path, **changes: Any) -> transformers.PreTrainedModel:
    """The saved model with other fields in config.json (None removes one), as transformers loads it."""
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder: Path) -> Transformer:
    model = build_model(load_config(folder), dtype=torch.float32, device="cpu")
    load_weights(model, folder)
    return model


def assert_same_logits(folder: Path, theirs: transformers.PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """Of rows packed together, each beside the same row alone in transformers."""
    rows = [torch.randint(64, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    model, ends = load(folder), torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        ours = model.logits(model(torch.cat(rows), positions, PackedAttend(ends, max(lengths), "sdpa")))
        expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
    assert expected.std() > 0.3
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_up_to_the_whole_context(kind: str, kv_heads: int, tmp_path: Path) -> None:
    theirs = reference(tmp_path, KINDS[kind], num_key_value_heads=kv_heads)
    assert_same_logits(tmp_path, theirs, (CONTEXT, 7, ORIGINAL + 1))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_have_the_same_scaling(family: str, tmp_path: Path) -> None:
    head_dim = {"head_dim": 16} if family == "qwen3" else {}
    assert_same_logits(tmp_path, reference(tmp_path, YARN, family, **head_dim), (CONTEXT, 40))


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
def test_a_scaling_that_matters_is_not_plain_rope(kind: str, tmp_path: Path) -> None:
    """What the comparisons above would miss if scaling did nothing; dynamic scaling does nothing within the context."""
    theirs = reference(tmp_path, KINDS[kind])
    plain = edited(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, plain(tokens).logits) == (kind == "dynamic")


# --- spellings ---


def test_older_fields_are_read_like_the_new_ones(tmp_path: Path) -> None:
    reference(tmp_path, YARN)
    new = load_config(tmp_path).rope
    edited(tmp_path, rope_parameters=None, rope_theta=1000.0, rope_scaling=YARN)
    assert load_config(tmp_path).rope == new
    edited(tmp_path, rope_scaling={"type": "linear", "factor": 2}, rope_theta=3.0)
    assert load_config(tmp_path).rope == RopeConfig(3.0, "linear", 2.0)
    edited(tmp_path, rope_scaling=None, rope_theta=7)
    assert load_config(tmp_path).rope == RopeConfig(7.0)


def test_rope_scaling_beside_rope_parameters_counts_as_in_transformers(tmp_path: Path) -> None:
    reference(tmp_path, {"rope_type": "default"})
    default = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = edited(tmp_path, rope_parameters=default, rope_scaling={"rope_type": "yarn", "factor": 4})
    assert (load_config(tmp_path).rope.kind, load_config(tmp_path).rope.theta) == ("yarn", 10000.0)
    assert_same_logits(tmp_path, theirs, (CONTEXT, 40))
    theirs = edited(tmp_path, rope_scaling={**YARN, "rope_theta": 10000.0}, rope_theta=77.0)
    assert_same_logits(tmp_path, theirs, (CONTEXT, 40))


def test_the_original_length_outside_of_the_section_counts_more(tmp_path: Path) -> None:
    reference(tmp_path, YARN)
    theirs = edited(tmp_path, original_max_position_embeddings=64)
    assert load_config(tmp_path).rope.original_max_positions == 64
    assert_same_logits(tmp_path, theirs, (CONTEXT, 40))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "rope_theta=10000.0.* and rope_parameters.*rope_theta=1000.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 1e3, "rope_parameters": YARN},
            "=linear.*=yarn",
        ),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type is 'proportional'.*'linear', 'dynamic', .* or"),
        ({"rope_parameters": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_parameters: type is 'mrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing, expected float, at least 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "factor is 0.5, expected float, at least 1"),
        ({"rope_parameters": {**YARN, "beta_slow": 40}}, "beta_slow is 40.*at most 32.0"),
        ({"rope_parameters": {**YARN, "attention_factor": -1.0}}, "attention_factor is -1.0.*more than 0"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"rope_parameters": {**KINDS["llama3"], "high_freq_factor": 1.0}}, "high_freq_factor is 1.0.*more than 1.0"),
        ({"rope_parameters": {**YARN, "short_factor": [1.0]}}, r"short_factor is \[1.0\], a field.* rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "factor is 4.0, a field.*'default'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention is .*a field"),
        ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', expected dict"),
    ],
)
def test_what_cannot_be_the_same_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = {"architectures": ["LlamaForCausalLM"], **SHAPE, "rope_parameters": {"rope_theta": 1000.0}, **fields}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(tmp_path)
    assert len(caught.value.problems) == 1


# --- decoding ---


def decoder(of: Transformer) -> Decoder:
    return new_decoder(of, n_blocks=128, max_running=4, max_prefill_tokens=16)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "yarn-mscale", "dynamic"])
def test_decoding_agrees_with_training_and_with_transformers(kind: str, tmp_path: Path) -> None:
    """A prompt within the original context, in chunks, and a completion far beyond it."""
    theirs = reference(tmp_path, KINDS[kind])
    decoding, prompt = decoder(load(tmp_path)), list(range(3, 23))
    params = SamplingParams(max_new_tokens=80, ignore_eos=True)
    decoding.submit(GenerationRequest(request_id=0, prompt=prompt, n_samples=1, seed=1, params=params))
    outputs: list[Any] = []
    while decoding.has_work:
        outputs += decoding.step()
    row = torch.tensor(prompt + outputs[0].tokens)
    with torch.no_grad():
        logprobs = theirs(row[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    expected = logprobs.gather(1, row[len(prompt) :, None])[:, 0].tolist()
    assert outputs[0].logprobs == pytest.approx(expected, abs=1e-4)


def test_dynamic_scaling_ends_where_it_would_change_the_angles(tmp_path: Path) -> None:
    reference(tmp_path, KINDS["dynamic"])
    config = load_config(tmp_path)
    assert config.max_position_embeddings == CONTEXT
    assert config.rope.limit_note == " (max_position_embeddings; dynamic rope scaling beyond it is not supported)"
    request = GenerationRequest(request_id=0, prompt=[5] * CONTEXT, n_samples=1, seed=1, params=SamplingParams())
    with pytest.raises(EngineError, match=f"context.*{CONTEXT}"):
        decoder(load(tmp_path)).submit(request)
