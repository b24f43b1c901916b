"""Llama (2, 3.x, and models of that shape): no q/k norm, optional biases, frequency-band rope scaling.

Mistral (7B, Nemo, Small 3 as text): Llama's layers, whose tokens may see a window of the last tokens only.

Phi-3 and Phi-4 as text: Llama's layers with other names, of whose heads only a part may be rotated.

With `longrope`, which the versions for long contexts have, the context ends where the first training's did.

SmolLM3: Llama's layers, some of which know no position (NoPE, arXiv 2501.18795).
"""

from __future__ import annotations

from dataclasses import replace

from areno.layers.config import Rope
from areno.models.config import Family, LayerKind, TransformerConfig, read_decoder, with_windows
from areno.models.folder import RawConfig


def read_llama(raw: RawConfig) -> TransformerConfig:
    """`attention_bias` covers q, k, v and o; `mlp_bias` covers gate, up and down."""
    bias, mlp_bias = raw.get("attention_bias", bool, False), raw.get("mlp_bias", bool, False)
    return replace(read_decoder(raw, "llama"), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


LLAMA = Family("llama", "LlamaForCausalLM", "LlamaForSequenceClassification", read_llama)


def read_mistral(raw: RawConfig) -> TransformerConfig:
    """Without `sliding_window` it is 4096, and null is none."""
    raw.assume(sliding_window=4096, num_key_value_heads=8)
    return with_window(raw, read_decoder(raw, "mistral", may_slide=True))


def with_window(raw: RawConfig, config: TransformerConfig) -> TransformerConfig:
    """`sliding_window` alone says whether there is one, and then all layers have it."""
    types = raw.get("layer_types", list, [])
    has_window = raw.get("sliding_window", int, 0, ge=1) > 0
    if any(kind != ("sliding_attention" if has_window else "full_attention") for kind in types):
        raw.refuse("layer_types", f"no such field, as in {config.family} all layers go by sliding_window")
        return config
    return with_windows(raw, config, lambda layer: has_window)


MISTRAL = Family("mistral", "MistralForCausalLM", "MistralForSequenceClassification", read_mistral)


def read_phi3(raw: RawConfig) -> TransformerConfig:
    """`sliding_window` is that of all layers."""
    raw.assume(rms_norm_eps=1e-5)
    config = read_decoder(raw, "phi3", partial_rotary=1.0, may_slide=True)
    for name in ("resid_pdrop", "embd_pdrop"):
        if raw.get(name, float, 0.0):
            raw.refuse(name, "0, since there is no dropout")
    for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's own code; transformers knows neither
        if raw.get(name, int, 1, ge=0) != 1:
            raw.refuse(name, "1")
    return with_window(raw, config)


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    "Phi3ForSequenceClassification",
    read_phi3,
    stacked={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)


def read_smollm3(raw: RawConfig) -> TransformerConfig:
    """`no_rope_layers` has a 1 for each layer that is rotated, else it is every one but each fourth."""
    raw.assume(rope_theta=2e6, tie_word_embeddings=True, num_key_value_heads=4)
    config = read_decoder(raw, "smollm3", may_slide=True)
    bias, mlp_bias = raw.get("attention_bias", bool, False), raw.get("mlp_bias", bool, False)
    interval = raw.get("no_rope_layer_interval", int, 4, ge=1)
    rotated = raw.get("no_rope_layers", list, [int((n + 1) % interval != 0) for n in range(config.num_layers)])
    if len(rotated) < config.num_layers or not all(flag in (0, 1) for flag in rotated):
        raw.refuse("no_rope_layers", f"a 0 or 1 for each of num_hidden_layers={config.num_layers}")
        return config
    nope = Rope(config.rope.theta, "none")
    kinds = tuple(LayerKind(config.rope if flag else nope) for flag in rotated[: config.num_layers])
    config = replace(config, kinds=kinds, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    if raw.get("use_sliding_window", bool, False) and raw.get("sliding_window", int, 0, ge=1):
        config = with_windows(raw, config, lambda layer: not rotated[layer])
    return config


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification", read_smollm3)
