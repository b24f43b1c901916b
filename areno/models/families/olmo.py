"""OLMo 2 (arXiv 2501.00656) and OLMo 3.

Norms are after attention and MLP. All queries of a token share one norm, and all keys share another norm. Three of four
layers of OLMo 3 have a window. Only the layers without a window have rope scaling.
"""

from __future__ import annotations

from dataclasses import replace

from areno.models.config import Family, LayerKind, TransformerConfig, read_decoder, with_sliding_windows
from areno.models.folder import RawConfig
from areno.models.rope_config import read_two_ropes

_NORMS = {"post_attention_norm": ("post_attention_layernorm",), "post_mlp_norm": ("post_feedforward_layernorm",)}


def read_olmo2(raw: RawConfig) -> TransformerConfig:
    raw.set_defaults(rms_norm_eps=1e-5)
    return replace(read_decoder(raw, "olmo2", may_bias=True), qk_norm_whole=True, norms="after")


def read_olmo3(raw: RawConfig) -> TransformerConfig:
    """Read the shape of an OLMo 3 model. Without `layer_types`, three of four layers have a window."""
    raw.set_defaults(rms_norm_eps=1e-5, sliding_window=4096, rope_theta=5e5)
    rope, local = read_two_ropes(raw, raw.get("max_position_embeddings", int, ge=1), "rope_theta")
    config = read_decoder(raw, "olmo3", may_slide=True, may_bias=True, rope=rope)
    config = replace(config, kinds=(LayerKind(rope),) * config.num_layers)
    config = with_sliding_windows(raw, config, lambda layer: (layer + 1) % 4 != 0, local)
    return replace(config, qk_norm_whole=True, norms="after")


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    has_step_class=False,
    read=read_olmo2,
    names=_NORMS,
)
OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    has_step_class=False,
    read=read_olmo3,
    names=_NORMS,
)
