"""Llama (2, 3.x, and models of that shape): no q/k norm, optional biases, frequency-band rope scaling."""

from __future__ import annotations

from dataclasses import replace

from areno.models.config import Family, TransformerConfig, read_decoder
from areno.models.config_json.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
    """`attention_bias` covers q, k, v and o; `mlp_bias` covers gate, up and down."""
    bias, mlp_bias = raw.get("attention_bias", bool, False), raw.get("mlp_bias", bool, False)
    return replace(read_decoder(raw, "llama"), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


LLAMA = Family("llama", "LlamaForCausalLM", "LlamaForSequenceClassification", read)
