"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on q, k, v."""

from __future__ import annotations

from dataclasses import replace

from areno.models.config import Family, TransformerConfig, read_decoder, with_windows
from areno.models.folder.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
    """The biases on q, k, v are always there; `config.json` has no field for them."""
    return with_late_windows(raw, replace(read_decoder(raw, "qwen2", may_slide=True), qkv_bias=True))


def with_late_windows(raw: RawConfig, config: TransformerConfig) -> TransformerConfig:
    """With `use_sliding_window`, the layers from `max_window_layers` on have the window `sliding_window`."""
    raw.assume(sliding_window=4096)
    first = raw.get("max_window_layers", int, 28, ge=0)
    if raw.get("use_sliding_window", bool, False) and raw.get("sliding_window", int, 0, ge=1):
        return with_windows(raw, config, lambda layer: layer >= first)
    if "sliding_attention" in raw.get("layer_types", list, []):
        raw.refuse("layer_types", "'full_attention' in every layer without use_sliding_window")
    return config


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", read)
