"""Qwen3, dense: Llama's layers with a norm on each query and key head before rope."""

from __future__ import annotations

from dataclasses import replace

from areno.models.config import Family, TransformerConfig, read_decoder
from areno.models.config_json.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
    """The head dimension is 128 where not given, whatever the hidden size."""
    bias = raw.get("attention_bias", bool, False)
    return replace(read_decoder(raw, "qwen3", default_head_dim=128), qkv_bias=bias, o_bias=bias, qk_norm=True)


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification", read)
