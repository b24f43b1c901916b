"""Qwen3, dense: Llama's layers with a norm on each query and key head before rope."""

from __future__ import annotations

from areno.models.config import RawConfig, TransformerConfig, read_decoder
from areno.models.family import LAYER_NAMES, Family


def read(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> TransformerConfig:
    """The head dimension is 128 where not given, whatever the hidden size."""
    attention_bias = raw.get("attention_bias", bool, False)
    return read_decoder(
        raw,
        eos_token_ids,
        family="qwen3",
        default_head_dim=128,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    value_architecture="Qwen3ForSequenceClassification",
    read=read,
    layer_names={
        **LAYER_NAMES,
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
    },
)
