"""SmolLM3: Llama's layers, some of which know no position (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from areno.layers.rope_config import Rope
from areno.models.config import Family, LayerKind, TransformerConfig, read_decoder, with_windows
from areno.models.folder.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
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


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification", read)
