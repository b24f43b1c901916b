"""Llama (2, 3.x, and models of that shape): no q/k norm, optional biases, frequency-band rope scaling."""

from __future__ import annotations

from areno.models.config import RawConfig, TransformerConfig, read_decoder
from areno.models.family import Family


def read(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> TransformerConfig:
    """`attention_bias` covers q, k, v and o; `mlp_bias` covers gate, up and down."""
    attention_bias = raw.get("attention_bias", bool, False)
    return read_decoder(
        raw,
        eos_token_ids,
        family="llama",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=raw.get("mlp_bias", bool, False),
    )


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    value_architecture="LlamaForSequenceClassification",
    read=read,
)
