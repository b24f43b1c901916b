"""Llama, and the families that have Llama's layers: Mistral, Phi-3 and SmolLM3.

- Llama 2, 3.x and models of that shape: no norms of queries and keys, optional biases, rope scaling by frequency bands.
- Mistral 7B, Nemo, Small 3 (text): all layers may have a window.
- Phi-3 and Phi-4 (text): fused tensors in the weight files, and the share of a head that is rotated can be set. With
  `longrope`, the context ends at `original_max_position_embeddings`.
- SmolLM3: some layers have no rotary positions (NoPE, arXiv 2501.18795).
"""

from __future__ import annotations

from dataclasses import replace

from areno.layers.config import RopeConfig
from areno.models.config import UNUSED_WINDOW, Family, LayerKind, TransformerConfig, read_decoder, with_sliding_windows
from areno.models.folder import RawConfig


def read_llama(raw: RawConfig) -> TransformerConfig:
    mlp_bias = raw.get("mlp_bias", bool, False)
    return replace(read_decoder(raw, "llama", may_bias=True), mlp_bias=mlp_bias)


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read=read_llama,
    unused=frozenset({"pretraining_tp"}),
)


def read_mistral(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Mistral model. An absent `sliding_window` means 4096, and null means no window."""
    raw.set_defaults(sliding_window=4096, num_key_value_heads=8)
    return with_sliding_window(raw, read_decoder(raw, "mistral", may_slide=True))


def with_sliding_window(raw: RawConfig, config: TransformerConfig) -> TransformerConfig:
    """Return the shape with `sliding_window` in all layers, if it is set. `layer_types` may not contradict it."""
    types = raw.get("layer_types", list, [])
    has_window = raw.get("sliding_window", int, 0, ge=1) > 0
    if any(kind != ("sliding_attention" if has_window else "full_attention") for kind in types):
        raw.add_unsupported("layer_types", f"no such field, as in {config.family} all layers go by sliding_window")
        return config
    return with_sliding_windows(raw, config, lambda layer: has_window)


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    read=read_mistral,
)


def read_phi3(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Phi-3 or Phi-4 model. All layers have the window `sliding_window`, if the field is set."""
    raw.set_defaults(rms_norm_eps=1e-5)
    config = read_decoder(raw, "phi3", partial_rotary=1.0, may_slide=True)
    for name in ("resid_pdrop", "embd_pdrop"):
        if raw.get(name, float, 0.0):
            raw.add_unsupported(name, "0, since there is no dropout")
    for name in ("full_attn_mod", "interpolate_factor"):  # fields of Phi-4-mini's own code, unknown to transformers
        if raw.get(name, int, 1, ge=0) != 1:
            raw.add_unsupported(name, "1")
    return with_sliding_window(raw, config)


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    read=read_phi3,
    unused=frozenset({"attention_bias"}),  # the family has no biases
    stacked={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)


def read_smollm3(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a SmolLM3 model.

    `no_rope_layers` has a 1 for each layer with rotary positions, and a 0 for each layer without. If the field is
    absent, every `no_rope_layer_interval`-th layer (default: every fourth) has no rotary positions.
    """
    raw.set_defaults(rope_theta=2e6, tie_word_embeddings=True, num_key_value_heads=4)
    config = read_decoder(raw, "smollm3", may_slide=True, may_bias=True)
    mlp_bias = raw.get("mlp_bias", bool, False)
    interval = raw.get("no_rope_layer_interval", int, 4, ge=1)
    rotated = raw.get("no_rope_layers", list, [int((n + 1) % interval != 0) for n in range(config.num_layers)])
    if len(rotated) < config.num_layers or not all(flag in (0, 1) for flag in rotated):
        raw.add_unsupported("no_rope_layers", f"a 0 or 1 for each of num_hidden_layers={config.num_layers}")
        return config
    nope = RopeConfig(config.rope.theta, "none")
    kinds = tuple(LayerKind(config.rope if flag else nope) for flag in rotated[: config.num_layers])
    config = replace(config, kinds=kinds, mlp_bias=mlp_bias)
    if raw.get("use_sliding_window", bool, False) and raw.get("sliding_window", int, 0, ge=1):
        config = with_sliding_windows(raw, config, lambda layer: not rotated[layer])
    return config


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=read_smollm3,
    unused=UNUSED_WINDOW | {"pretraining_tp"},
)
