"""Random models that tests make with transformers: their shape, as small as can be, with shared key-value heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def random_model(config: Any, folder: Path, kind: str = "CausalLM") -> Any:
    """A model of transformers, saved to `folder`. All weights are random, those of norms and biases, too."""
    import torch
    import transformers

    torch.manual_seed(0)
    reference = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
        for name, parameter in reference.named_parameters():
            if name.endswith("sinks") or (parameter.dim() == 2 and name.endswith("_bias")):  # of experts
                parameter.copy_(torch.randn_like(parameter) / 2)
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer) - 0.5)
    reference.save_pretrained(folder)
    return reference
