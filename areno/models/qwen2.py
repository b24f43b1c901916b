"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on q, k, v."""

from __future__ import annotations

from areno.models.config import RawConfig, TransformerConfig, read_decoder
from areno.models.family import Family
from areno.models.llama import LAYER_NAMES, NAMES


def read(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> TransformerConfig:
    """The biases on q, k, v are always there; `config.json` has no field for them."""
    return read_decoder(
        raw,
        eos_token_ids,
        family="qwen2",
        default_head_dim=None,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    value_architecture="Qwen2ForSequenceClassification",
    read=read,
    names=NAMES,
    layers_prefix="model.layers",
    layer_names=LAYER_NAMES,
)
