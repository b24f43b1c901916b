"""Models by the name of their shape, with random weights: what a benchmark needs of a model is its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areno.errors import ConfigError, Problem

# name -> layers, hidden, intermediate, heads, kv heads, head dimension, tied embeddings: as in the config.json of each
_SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, False),
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, True),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 128, False),
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, True),
    "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128, True),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, False),
    "tiny": (2, 64, 192, 4, 2, 16, True),
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
    },
    "qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
    },
    "llama": {
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
    },
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {"vocab_size": 152064},
    "tiny": {**_FAMILIES["qwen3"], "vocab_size": 512, "max_position_embeddings": 2048, "eos_token_id": 0},
}


def full_name(shape: str) -> str:
    """The shape's name; a size alone, such as 4b, is that of Qwen3."""
    name = shape.lower()
    return f"qwen3-{name}" if f"qwen3-{name}" in _SHAPES else name


def model_folder(shape: str, folder: Path) -> tuple[str, bool]:
    """A model folder for a shape's name or a path, and whether its weights are to be drawn at random."""
    if Path(shape).is_dir():
        has_weights = any(Path(shape).glob("*.safetensors"))
        return shape, not has_weights
    name = full_name(shape)
    if name not in _SHAPES:
        expected = ", ".join(_SHAPES)
        raise ConfigError([Problem("--shape", f"is {shape!r}; expected a model folder or one of {expected}")])
    layers, hidden, intermediate, heads, kv_heads, head_dim, tied = _SHAPES[name]
    family = next((values for prefix, values in _FAMILIES.items() if name.startswith(prefix)), {})
    config = {
        **family,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        **_OWN.get(name, {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), True
