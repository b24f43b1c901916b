"""GLM-4 (0414): norms before and after attention and MLP. In half of each head, neighbouring elements are rotated."""

from __future__ import annotations

from dataclasses import replace

from areno.models.config import Family, TransformerConfig, read_decoder
from areno.models.folder import RawConfig


def read_glm4(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a GLM-4 model. `attention_bias` sets the biases of q, k and v."""
    raw.set_defaults(rms_norm_eps=1.5625e-7, num_key_value_heads=2, attention_bias=True)
    config = read_decoder(raw, "glm4", default_head_dim=128, partial_rotary=0.5, interleaved=True)
    return replace(config, qkv_bias=raw.get("attention_bias", bool, False), norms="both")


GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    read=read_glm4,
    names={
        "post_attention_norm": ("post_self_attn_layernorm",),
        "pre_mlp_norm": ("post_attention_layernorm",),
        "post_mlp_norm": ("post_mlp_layernorm",),
    },
    stacked={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
)
