"""Llama (2, 3.x, and models of that shape): no q/k norm, optional biases, frequency-band rope scaling."""

from __future__ import annotations

from areno.models.config import RawConfig, TransformerConfig, read_decoder
from areno.models.family import Family

NAMES = {
    "embed": ("model.embed_tokens",),
    "final_norm": ("model.norm",),
    "head": ("lm_head",),
    "score": ("score",),
}
LAYER_NAMES = {
    "input_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def read(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> TransformerConfig:
    """`attention_bias` covers q, k, v and o; `mlp_bias` covers gate, up and down."""
    attention_bias = raw.get("attention_bias", bool, False)
    return read_decoder(
        raw,
        eos_token_ids,
        family="llama",
        default_head_dim=None,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=raw.get("mlp_bias", bool, False),
        qk_norm=False,
    )


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    value_architecture="LlamaForSequenceClassification",
    read=read,
    names=NAMES,
    layers_prefix="model.layers",
    layer_names=LAYER_NAMES,
)
