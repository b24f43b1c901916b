"""Small models of transformers with random weights, at least one of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from areno.models.transformer import Transformer
from tests.helpers import tiny_shape
from tests.helpers.moe_models import GLM, OSS, QWEN
from tests.helpers.saving import save_weights
from tests.helpers.two_ranks import load, packed

SHAPE = {**tiny_shape.SHAPE, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 3}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral-tied": (transformers.MistralConfig, {"sliding_window": None, "tie_word_embeddings": True}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 9}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-window": (
        transformers.Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 0, "head_dim": 16},
    ),
    "phi3": (transformers.Phi3Config, {}),
    "phi3-partial-tied": (
        transformers.Phi3Config,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
        },
    ),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 4, "tie_word_embeddings": False, "mlp_bias": True}),
    "smollm3-tied": (transformers.SmolLM3Config, {"no_rope_layers": [0, 1], "attention_bias": True}),
    "smollm3-window": (
        transformers.SmolLM3Config,
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "olmo2": (transformers.Olmo2Config, {"attention_bias": True}),
    "olmo2-tied": (transformers.Olmo2Config, {"tie_word_embeddings": True}),
    "olmo3": (transformers.Olmo3Config, {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": TWO_ROPES}),
    "olmo3-tied": (transformers.Olmo3Config, {"tie_word_embeddings": True}),
    "glm4": (transformers.Glm4Config, {"head_dim": 16}),
    "glm4-tied": (
        transformers.Glm4Config,
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": TWO_ROPES,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-tied": (
        transformers.Gemma3TextConfig,
        {
            "num_hidden_layers": 6,
            "head_dim": 8,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "qwen3.5": (
        transformers.Qwen3_5TextConfig,
        {
            "num_hidden_layers": 4,
            "initializer_range": 0.1,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
    "qwen3.5-tied": (
        transformers.Qwen3_5TextConfig,
        {
            "layer_types": ["full_attention", "linear_attention"],
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-experts": (
        transformers.Qwen3_5MoeTextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "initializer_range": 0.1,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "tie_word_embeddings": False,
        },
    ),
}
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DENSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3-tied": (transformers.Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        transformers.Qwen3Config,
        {
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            "tie_word_embeddings": False,
        },
    ),
    "llama-linear": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 10,
        },
    ),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-experts": ("qwen3_moe", {**QWEN, "mlp_only_layers": [0], "tie_word_embeddings": False}),
    "qwen3-tied-experts": (
        "qwen3_moe",
        {
            **QWEN,
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "glm4-experts": ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4-tied-experts": (
        "glm4_moe",
        {
            **GLM,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss-experts": ("gpt_oss", OSS),
    "gpt-oss-tied-experts": (
        "gpt_oss",
        {
            **OSS,
            "num_experts_per_tok": 3,
            "head_dim": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "swiglu_alpha": 1.2,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-tied-experts": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
}


def config_of(case: str, **more: Any) -> Any:
    """The configuration of transformers of a case of DENSE, CASES or EXPERTS."""
    if case in EXPERTS:
        kind, extra = EXPERTS[case]
        return transformers.AutoConfig.for_model(kind, **{**tiny_shape.SHAPE, "num_hidden_layers": 3, **extra, **more})
    kind, extra = (DENSE | CASES)[case]
    return kind(**{**(SHAPE if case in CASES else tiny_shape.SHAPE), **extra, **more})


def random_model(case: str, folder: Path, head: str = "CausalLM", **more: Any) -> transformers.PreTrainedModel:
    """Saved to `folder`. All weights are random, those of norms and biases, too."""
    return tiny_shape.random_model(config_of(case, **more), folder, head)


def logits_of(reference: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([reference(row[None]).logits[0] for row in rows])


def read_and_saved_as_text(
    reference: Any, folder: Path, rows: list[torch.Tensor], saved_as: str
) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    """The text model of a folder with images, which has the logits of `reference` and is saved as the class `saved_as`.

    Returns it, these logits, and those of what was saved.
    """
    model = load(folder)
    save_weights(model, folder.with_name("out"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder.with_name("out"), dtype=torch.float32)
    assert type(saved).__name__ == saved_as
    with torch.no_grad():
        expected, again = logits_of(reference, rows), logits_of(saved, rows)
        torch.testing.assert_close(model.logits(model(*packed(rows))), expected, atol=1e-4, rtol=0)
    return model, expected, again
