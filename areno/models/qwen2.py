"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on q, k, v."""

from __future__ import annotations

from dataclasses import replace

from areno.models.config import Family, TransformerConfig, read_decoder
from areno.models.config_json.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
    """The biases on q, k, v are always there; `config.json` has no field for them."""
    return replace(read_decoder(raw, "qwen2"), qkv_bias=True)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", read)
