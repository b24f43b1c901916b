"""Mistral (7B, Nemo, Small 3 as text): Llama's layers, whose tokens may see a window of the last tokens only."""

from __future__ import annotations

from areno.models.config import Family, TransformerConfig, read_decoder
from areno.models.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
    """Without `sliding_window` it is 4096, and null is none."""
    raw.assume(sliding_window=4096, num_key_value_heads=8)
    config = read_decoder(raw, "mistral")
    if raw.get("sliding_window", int, config.max_position_embeddings, ge=1) < config.max_position_embeddings:
        raw.refuse("sliding_window", "null, since sliding-window attention is not implemented")
    return config


MISTRAL = Family("mistral", "MistralForCausalLM", "MistralForSequenceClassification", read)
