"""Random models of Qwen3, Qwen2 and Llama by transformers, saved as folders."""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.helpers.tiny_shape import SHAPE, random_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


CASES = {
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


def random_reference(case: str, folder: Path) -> transformers.PreTrainedModel:
    """A transformers model with random weights, norms and biases included, saved to `folder`."""
    kind, extra = CASES[case]
    return random_model(kind(**{**SHAPE, **extra}), folder)
