"""Build models of published sizes with random weights, and random texts for prompts.

A benchmark needs only the sizes of a model, so `model_folder` writes a configuration for the name of a shape. `Texts`
draws words that a tokenizer knows, so that they are encoded as fast as natural language.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from areno.bench.arguments import Work
from areno.errors import ConfigError, Problem

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
_SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, False),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, False),
    "qwen3-30b-a3b": (48, 2048, 6144, 32, 4, 128, False),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, False),
    "qwen3.5-4b": (32, 2560, 9216, 16, 4, 256, True),
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, True),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 128, False),
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, True),
    "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128, True),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, False),
    "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128, False),
    "25m": (8, 384, 1536, 6, 2, 64, True),
    "tiny": (2, 64, 192, 4, 2, 16, True),
    "tiny-moe": (2, 64, 192, 4, 2, 16, True),
    "tiny-qwen3.5": (4, 64, 192, 4, 2, 16, True),
}
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
# Prefix of a shape's name -> the rest of its configuration. The longest prefix that matches counts.
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "25m": _QWEN3,
    "qwen2.5": _QWEN2,
    "qwen2.5-7b": {**_QWEN2, "vocab_size": 152064},
    "llama": _LLAMA,
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3.5": _QWEN3_5,
    "tiny": {**_QWEN3, **_TINY},
    "tiny-qwen3.5": {
        **_QWEN3_5,
        **_TINY,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "tiny-moe": {**_QWEN3_MOE, **_TINY, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def model_folder(shape: str, folder: Path, **changes: Any) -> tuple[str, bool]:
    """Return a model folder for the name of a shape or a path.

    Args:
        shape: Path of a model folder, or a name such as "qwen3-4b". A size alone, such as "4b", means Qwen3.
        folder: Folder to which the configuration of a named shape is written.
        **changes: Values of config.json that replace those of a named shape, such as vocab_size.

    Returns:
        (path of the model folder, whether the weights have to be drawn at random because the folder has none).

    Raises:
        ConfigError: The shape is unknown.
    """
    if Path(shape).is_dir():
        return shape, not any(Path(shape).glob("*.safetensors"))
    name = shape.lower()
    name = f"qwen3-{name}" if f"qwen3-{name}" in _SHAPES else name
    if name not in _SHAPES:
        expected = ", ".join(_SHAPES)
        raise ConfigError([Problem("--shape", f"is {shape!r}; expected a model folder or one of {expected}")])
    family = max((prefix for prefix in _FAMILIES if name.startswith(prefix)), key=len)
    config = {**_FAMILIES[family], **dict(zip(_SIZES, _SHAPES[name], strict=True)), "hidden_act": "silu", **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), True


class Texts:
    """A source of random texts, whose words are mostly one token each.

    A text has about as many tokens as words.

    Args:
        tokenizer: Tokenizer from transformers.
    """

    def __init__(self, tokenizer: Any):
        texts = (tokenizer.decode([token]) for token in range(len(tokenizer)))
        words = (text[1:] for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha())
        self._words = sorted(set(words)) or ["a"]

    def of(self, work: Work, name: str, seed: int) -> list[str]:
        """Return a random text for each prompt of a batch. The same arguments always give the same texts.

        Args:
            work: The batch, whose `prompt_lens` are the numbers of words.
            name: Text that is hashed into the seed, such as the name of a way of sampling.
            seed: Number that is hashed into the seed, such as the number of a repeat.
        """
        draw = random.Random(f"{name} {seed}")
        return [" ".join(draw.choices(self._words, k=length)) for length in work.prompt_lens]
