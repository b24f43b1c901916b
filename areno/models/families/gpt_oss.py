"""gpt-oss: experts with biases and a clamped activation, and attention with sinks.

Every other layer has a sliding window. The rows of gate and up alternate in an expert's matrix. A token's weights are a
softmax over its chosen experts, and its experts' activation is (up + 1) * gate * sigmoid(alpha * gate) within limits.
"""

from __future__ import annotations

from dataclasses import replace

from areno.layers.config import ClampedGLU
from areno.models.config import Family, TransformerConfig, read_decoder, with_sliding_windows
from areno.models.families.moe import ROUTER_LOSS, read_experts
from areno.models.folder import RawConfig

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a gpt-oss model. `intermediate_size` is the inner size of an expert."""
    raw.set_defaults(
        num_local_experts=128,
        num_experts_per_tok=4,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        max_position_embeddings=131072,
        attention_bias=True,
        sliding_window=128,
    )
    if not raw.values.get("rope_scaling"):
        raw.set_defaults(rope_parameters=_YARN)
    config = read_decoder(raw, "gpt_oss", may_slide=True, may_bias=True, may_mxfp4=True)
    experts = read_experts(
        raw,
        ("num_local_experts", "num_experts"),
        inner_size=config.intermediate_size,
        normalised=True,
        biased=True,
        clamped=ClampedGLU(
            alpha=raw.get("swiglu_alpha", float, 1.702, ge=0), limit=raw.get("swiglu_limit", float, 7.0, gt=0)
        ),
    )
    if raw.get("experts_per_token", int, experts.top_k) != experts.top_k:
        raw.add_unsupported("experts_per_token", f"num_experts_per_tok={experts.top_k}")
    return with_sliding_windows(
        raw, replace(config, attention_sinks=True, experts=experts), lambda layer: layer % 2 == 0
    )


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    read=read_gpt_oss,
    # The context before yarn: rope_scaling has it, too, and transformers reads it there.
    unused=frozenset({*ROUTER_LOSS, "initial_context_length"}),
    expert_names={
        "mlp.router": ("mlp.router",),
        "mlp.experts_gate_up": ("mlp.experts.{}.gate_up_proj",),
        "mlp.experts_down": ("mlp.experts.{}.down_proj",),
    },
    fused_experts={
        "mlp.experts.gate_up_proj": "mlp.experts_gate_up",
        "mlp.experts.down_proj": "mlp.experts_down",
    },
    transposed_experts=True,
)
