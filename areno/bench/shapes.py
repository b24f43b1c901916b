"""Models by the name of their shape, with random weights: what a benchmark needs of a model is its size."""

from __future__ import annotations

import json
from pathlib import Path

from areno.errors import ConfigError, Problem

# name -> layers, hidden, intermediate, heads, kv heads, tied embeddings: as in the config.json of the Qwen3 models
_QWEN3 = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, False),
    "tiny": (2, 64, 192, 4, 2, True),
}


def model_folder(shape: str, folder: Path) -> tuple[str, bool]:
    """A model folder for a shape's name or a path, and whether its weights are to be drawn at random."""
    if Path(shape).is_dir():
        return shape, False
    if shape not in _QWEN3:
        raise ConfigError([Problem("--shape", f"is {shape!r}; expected a model folder or one of {', '.join(_QWEN3)}")])
    layers, hidden, intermediate, heads, kv_heads, tied = _QWEN3[shape]
    tiny = shape == "tiny"
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512 if tiny else 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16 if tiny else 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "eos_token_id": 0 if tiny else 151645,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), True
