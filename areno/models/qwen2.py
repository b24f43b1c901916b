"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on q, k, v."""

from __future__ import annotations

from areno.models.config import RawConfig, TransformerConfig, read_decoder
from areno.models.family import Family


def read(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> TransformerConfig:
    """The biases on q, k, v are always there; `config.json` has no field for them."""
    return read_decoder(raw, eos_token_ids, family="qwen2", qkv_bias=True)


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    value_architecture="Qwen2ForSequenceClassification",
    read=read,
)
