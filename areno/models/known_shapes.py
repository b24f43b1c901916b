"""The shapes of published models, so that a benchmark or a plan needs no download.

A shape is the content of `config.json`. The sizes are those of the published files.
"""

from __future__ import annotations

from typing import Any

from areno.config.experiments import HeadName
from areno.files.paths import existing_path, name_model_setting_in_errors
from areno.models.config import TransformerConfig
from areno.models.folder import resolve_model_folder
from areno.models.registry import load_config, parse_config

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
# The values of each model's config.json, in the order of _SIZES.
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, False),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, False),
    "qwen3-30b-a3b": (48, 2048, 6144, 32, 4, 128, False),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, False),
    "qwen3.5-4b": (32, 2560, 9216, 16, 4, 256, True),
    "qwen3.5-27b": (64, 5120, 17408, 24, 4, 256, False),
    "qwen3.5-35b-a3b": (40, 2048, 512, 16, 2, 256, False),
    "qwen3.6-27b": (64, 5120, 17408, 24, 4, 256, False),
    "qwen3.6-35b-a3b": (40, 2048, 512, 16, 2, 256, False),
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, True),
    "qwen2.5-3b": (36, 2048, 11008, 16, 2, 128, True),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 128, False),
    "qwen2.5-14b": (48, 5120, 13824, 40, 8, 128, False),
    "qwen2.5-32b": (64, 5120, 27648, 40, 8, 128, False),
    "qwen2.5-72b": (80, 8192, 29568, 64, 8, 128, False),
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, True),
    "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128, True),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, False),
    "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128, False),
    "glm-4.5-air": (46, 4096, 10944, 96, 8, 128, False),
    "gpt-oss-20b": (24, 2880, 2880, 64, 8, 64, False),
    "gpt-oss-120b": (36, 2880, 2880, 64, 8, 64, False),
    "25m": (8, 384, 1536, 6, 2, 64, True),
    "tiny": (2, 64, 192, 4, 2, 16, True),
    "tiny-moe": (2, 64, 192, 4, 2, 16, True),
    "tiny-qwen3.5": (4, 64, 192, 4, 2, 16, True),
    "tiny-qwen3.5-moe": (4, 64, 48, 4, 2, 16, True),
    "tiny-gpt-oss": (4, 64, 48, 4, 2, 32, True),
}
# Last parts of the names of models that have the shape of the model without them.
_VARIANTS = {"base", "instruct", "chat", "thinking", "2507"}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151645,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_QWEN3_5: dict[str, Any] = {  # the text part of the published models, which also read images
    **_QWEN3,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "eos_token_id": 248044,
}
_QWEN3_5_MOE: dict[str, Any] = {
    **_QWEN3_5,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_TINY: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 2048, "eos_token_id": 0}
_QWEN2 = {**_QWEN3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "eos_token_id": 128009,
}
_GLM4_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [151329, 151336, 151338],
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "eos_token_id": 200002,
}
# Prefix of a shape's name -> the rest of its configuration. The longest prefix that matches counts.
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "25m": _QWEN3,
    "qwen2.5": _QWEN2,
    **{f"qwen2.5-{size}": {**_QWEN2, "vocab_size": 152064} for size in ("7b", "14b", "32b", "72b")},
    "llama": _LLAMA,
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3.5": _QWEN3_5,
    "glm": _GLM4_MOE,
    "gpt-oss": _GPT_OSS,
    "gpt-oss-120b": {**_GPT_OSS, "num_local_experts": 128},
    "tiny": {**_QWEN3, **_TINY},
    "tiny-qwen3.5": {
        **_QWEN3_5,
        **_TINY,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    **{f"qwen3.{version}-27b": {**_QWEN3_5, "linear_num_value_heads": 48} for version in (5, 6)},
    **{f"qwen3.{version}-35b-a3b": _QWEN3_5_MOE for version in (5, 6)},
    "tiny-qwen3.5-moe": {
        **_QWEN3_5_MOE,
        **_TINY,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "tiny-moe": {**_QWEN3_MOE, **_TINY, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "tiny-gpt-oss": {
        **_GPT_OSS,
        **_TINY,
        "rope_scaling": {**_GPT_OSS["rope_scaling"], "original_max_position_embeddings": 64},
        "sliding_window": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


def published_config(name: str) -> dict[str, Any] | None:
    """Return the content of `config.json` of a published model, or None if it is unknown.

    `name` is a key of the table such as "qwen3-4b", only a size such as "4b" for Qwen3, or a hub id such as
    "Qwen/Qwen3-4B-Instruct-2507".
    """
    name = name.rpartition("/")[2].lower().replace("meta-llama", "llama")
    if f"qwen3-{name}" in SHAPES:
        name = f"qwen3-{name}"
    parts = name.split("-")
    n = len(parts)
    while n > 1 and parts[n - 1] in _VARIANTS:
        n -= 1
    found = "-".join(parts[:n])
    if found not in SHAPES:
        return None
    family = max((prefix for prefix in _FAMILIES if found.startswith(prefix)), key=len)
    return {**_FAMILIES[family], **dict(zip(_SIZES, SHAPES[found], strict=True)), "hidden_act": "silu"}


def resolve_model_config(path: str, key: str, head: HeadName = "lm", needs_head: bool = False) -> TransformerConfig:
    """Return the shape of a model from its folder or the table of published models. Errors name the setting `key`."""
    local = existing_path(path)
    if local is None and (values := published_config(path)) is not None:
        return parse_config(values, path, head)  # of a published model, whose head may be of another kind
    with name_model_setting_in_errors(key):
        return load_config(resolve_model_folder(local or path), head, needs_head=needs_head)
