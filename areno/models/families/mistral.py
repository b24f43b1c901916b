"""Mistral (7B, Nemo, Small 3 as text): Llama's layers, whose tokens may see a window of the last tokens only."""

from __future__ import annotations

from areno.models.config import Family, TransformerConfig, read_decoder, with_windows
from areno.models.folder.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
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


MISTRAL = Family("mistral", "MistralForCausalLM", "MistralForSequenceClassification", read)
