"""config.json: what is read, what is let pass, and one line for each field that would be computed wrongly."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import transformers

from areno.errors import CheckpointError
from areno.files.paths import name_model_setting_in_errors
from areno.models.config import UNUSED
from areno.models.families import FAMILIES
from areno.models.registry import load_config
from tests.helpers.tiny_shape import SHAPE


def write_config(folder: Path, **changes: object) -> Path:
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, **changes}
    (folder / "config.json").write_text(json.dumps({key: v for key, v in values.items() if v != "absent"}))
    return folder


def test_head_dim_is_given_or_derived(tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path)).head_dim == 8
    assert load_config(write_config(tmp_path, head_dim=20)).head_dim == 20
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert load_config(write_config(tmp_path, **qwen3)).head_dim == 128
    assert load_config(write_config(tmp_path, head_dim=None, num_attention_heads=2)).head_dim == 16


def test_family_by_model_type_where_architectures_are_absent(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, architectures="absent", model_type="qwen2"))
    assert (config.family, config.qkv_bias, config.o_bias) == ("qwen2", True, False)


def test_eos_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=5)
    assert load_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 5]}')
    assert load_config(tmp_path).eos_token_ids == (5, 9)
    assert load_config(write_config(tmp_path, eos_token_id=None)).eos_token_ids == (5, 9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures.*Mamba.*Qwen3ForCausalLM"),
        ({"architectures": "absent", "model_type": "gemma"}, "model_type.*gemma"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu.*silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*fp8"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected int"),
        ({"num_attention_heads": 5}, "num_key_value_heads|hidden_size"),
        ({"num_attention_heads": 32, "num_key_value_heads": 32}, "hidden_size is 32.*even size"),
        ({"head_dim": 7}, "head_dim is 7.*even"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries.*num_hidden_layers=2"),
        ({"model_type": "mistral"}, r"model_type is 'mistral'.*'llama'.*LlamaForCausalLM"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1.*expected 0"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map.AutoModelForCausalLM.*expected none"),
        ({"auto_map": {"AutoModelForCausalLM": ["LlamaForCausalLM"]}}, "auto_map.AutoModelForCausalLM.*expected none"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        load_config(write_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("kind", "architecture", "needs"),
    [
        ("youtu", "YoutuForCausalLM", "multi-head latent attention"),
        ("longcat_flash", "LongcatFlashForCausalLM", "multi-head latent attention"),
        ("mamba2", "Mamba2ForCausalLM", "Mamba layers"),
        ("jamba", "JambaForCausalLM", "Mamba layers"),
        ("internvl", "InternVLForConditionalGeneration", "images beside text; only text models run"),
        ("glm4v", "Glm4vForConditionalGeneration", "images beside text; only text models run"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "audio beside text; only text models run"),
        ("arcee", "ArceeForCausalLM", None),
    ],
)
def test_an_architecture_that_is_not_listed_is_named_in_one_line(
    kind: str, architecture: str, needs: str | None, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(kind)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_config(tmp_path)
    told = f"architectures is {architecture}, which is not supported: it needs {needs}; expected one of "
    assert (told if needs else f"architectures is ['{architecture}'], which is not supported") in str(caught.value)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def test_sliding_window_fields_that_are_off_are_accepted(tmp_path: Path) -> None:
    load_config(write_config(tmp_path, use_sliding_window=False, sliding_window=64, max_window_layers=1))
    load_config(write_config(tmp_path, use_sliding_window=True, sliding_window=64, max_window_layers=2))
    load_config(write_config(tmp_path, layer_types=["full_attention", "full_attention"], rope_scaling=None))


def test_a_folder_without_config_or_with_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load_config(tmp_path)


@pytest.mark.parametrize("key", ["actor.path", "ref.path", "model_path"])
def test_errors_name_the_setting_that_the_model_comes_from(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "actor.path"  # a word of the message that is no setting
    with pytest.raises(CheckpointError) as caught, name_model_setting_in_errors(key):
        load_config(folder)
    expected = f"{folder} does not exist; expected a local model folder or a hub id `owner/name` ({key})"
    assert str(caught.value) == expected
    folder.mkdir()
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError) as caught, name_model_setting_in_errors(key):
        load_config(folder)
    assert str(caught.value) == f"{key}: {folder}/config.json holds a list, expected a JSON object"


# --- numbers ---


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_size", -4, "int, at least 1"),
        ("vocab_size", 0, "int, at least 1"),
        ("intermediate_size", 2.5, "int, at least 1"),
        ("num_attention_heads", True, "int, at least 1"),
        ("num_key_value_heads", 0, "int, at least 1"),
        ("num_hidden_layers", 10**9, "int, at least 1, at most 10000"),
        ("head_dim", -2, "int, at least 2"),
        ("max_position_embeddings", 10**400, "int, at least 1, at most 2147483647"),
        ("rms_norm_eps", math.nan, "float, at least 0"),
        ("rms_norm_eps", -1e-6, "float, at least 0"),
        ("initializer_range", 10**400, "float, at least 0"),
        ("rope_theta", math.inf, "float, more than 1"),
        ("rope_theta", 0, "float, more than 1"),
        ("attention_dropout", "0.1", "float"),
        ("tie_word_embeddings", 1, "bool"),
        ("layer_types", 2, "list"),
        ("auto_map", "own.py", "dict"),
    ],
)
def test_a_number_out_of_range_is_told_with_what_is_expected(
    field: str, value: object, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*, expected {expected}") as caught:
        load_config(write_config(tmp_path, **{field: value}))
    assert len(caught.value.problems) == 1
    assert len(str(caught.value)) < 300


def test_all_problems_of_the_file_come_together(tmp_path: Path) -> None:
    wrong = {"hidden_size": -4, "num_hidden_layers": "2", "rope_theta": 0.0, "rope_scaling": {"type": "yarn"}, "new": 1}
    with pytest.raises(CheckpointError) as caught:
        load_config(write_config(tmp_path, **wrong))
    named = ["num_hidden_layers is", "hidden_size is", "rope_theta is", "rope_scaling: factor is missing", "new is"]
    assert len(caught.value.problems) == len(named)
    for problem, name in zip(caught.value.problems, named, strict=True):
        assert f"config.json: {name}" in problem.message


def test_sizes_that_no_model_has(tmp_path: Path) -> None:
    write_config(tmp_path, hidden_size=2**20, intermediate_size=2**24, num_hidden_layers=9000)
    with pytest.raises(
        CheckpointError, match=r"parameters, expected at most 1e\+14; check .*intermediate_size=16777216"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "\x00", ""])
def test_files_that_are_not_json(name: str, text: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"/{name} cannot be read as JSON: [^\n]*$"):
        load_config(tmp_path)


@pytest.mark.parametrize("ids", [101, -1, [5, 101]])
def test_eos_ids_outside_of_the_vocabulary(ids: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id is .*ids from 0 to 100, as vocab_size=101"):
        load_config(write_config(tmp_path, eos_token_id=ids))
    write_config(tmp_path, eos_token_id=None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=r"/generation_config\.json: eos_token_id is "):
        load_config(tmp_path)


# --- fields that nothing reads ---


@pytest.mark.parametrize(
    ("field", "value"), [("logit_scale", 0.5), ("residual_multiplier", 0.22), ("norm_type", "layer"), ("mlp_only", [1])]
)
def test_an_unknown_field_that_says_something_is_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*areno does not know; remove it if"):
        load_config(write_config(tmp_path, **{field: value}))


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_an_unknown_field_that_says_nothing_is_let_pass(value: object, tmp_path: Path) -> None:
    load_config(write_config(tmp_path, some_field_of_the_future=value))


def test_what_other_tools_leave_behind_is_let_pass(tmp_path: Path) -> None:
    load_config(write_config(tmp_path, _name_or_path="x", unsloth_version="1", temperature=0.7, pretraining_tp=2))
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    load_config(write_config(tmp_path, **qwen2, sliding_window=4096, max_window_layers=1, use_mrope=False))
    with pytest.raises(CheckpointError, match="sliding_window is 4096, a field"):
        load_config(write_config(tmp_path, sliding_window=4096))


# What is special in config.json as published. Phi-3.5-mini and Phi-4-mini: code that transformers has by now, too.
PUBLISHED: dict[str, dict[str, object]] = {
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1, 1.118320672, 32.6]},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
    },
    "Qwen3.6": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": {"depth": 27},
        "image_token_id": 7,
        "text_config": {
            **SHAPE,
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "output_gate_type": "swish",
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "num_hidden_layers": 4,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_as_they_are_published(name: str, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, **PUBLISHED[name]))
    assert config.max_position_embeddings == (64 if name == "Phi-4-mini" else 256)
    assert not any(kind.window for kind in config.kinds)


@pytest.mark.parametrize("text", ["absent", [1]])
def test_a_missing_section_is_one_problem(text: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"text_config is (missing|\[1\]), expected dict") as caught:
        load_config(write_config(tmp_path, **{**PUBLISHED["Qwen3.6"], "text_config": text}))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_transformers_is_known(kind: str, tmp_path: Path) -> None:
    """Read, or listed as harmless: a field that a new version adds fails here, and somebody looks at what it does."""
    config = transformers.AutoConfig.for_model(kind)
    names = {field.name for field in dataclasses.fields(config)} | {"rope_theta", "rope_scaling", "model_type"}
    refused_unless_off = {"chunk_size_feed_forward", "is_encoder_decoder"}
    defaults = config.to_dict()
    values = {name: defaults.get(name) or "set" for name in names - UNUSED - FAMILIES[kind].unused - refused_unless_off}
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": kind}))
    with pytest.raises(CheckpointError) as caught:  # of the values that are only "set"
        load_config(tmp_path)
    assert [str(problem) for problem in caught.value.problems if "does not know" in str(problem)] == []
