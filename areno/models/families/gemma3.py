"""Gemma 3 (arXiv 2503.19786), the text model.

Five of six layers have a window and their own rotary positions. Norms are before and after attention and MLP and
multiply by 1 + weight. Embeddings are scaled, and the MLP uses GELU. Gemma 2 is not supported, because its caps on
logits and attention scores are not implemented; Gemma 3 has none. The models of 4B and more also read images. areno
reads their text model, and saves it without the image encoder.
"""

from __future__ import annotations

from dataclasses import replace

from areno.models.config import Family, LayerKind, TransformerConfig, read_decoder, with_sliding_windows
from areno.models.folder import RawConfig
from areno.models.rope_config import read_two_ropes


def read_gemma3(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Gemma 3 model.

    Attention scores are divided by the square root of `query_pre_attn_scalar`, which may differ from the head size.
    """
    raw.set_defaults(sliding_window=4096, rope_theta=1e6, tie_word_embeddings=True, num_key_value_heads=4)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(name, float, 0.0):
            raw.add_unsupported(name, "null, since capped logits are not implemented")
    if raw.get("use_bidirectional_attention", bool, False):
        raw.add_unsupported("use_bidirectional_attention", "false")
    ropes = read_two_ropes(raw, raw.get("max_position_embeddings", int, ge=1), "rope_local_base_freq")
    head_dim = raw.get("head_dim", int, 256, ge=2)
    # Attention divides scores by the root of head_dim. Queries and keys carry the root of the remaining factor each.
    more = (head_dim / raw.get("query_pre_attn_scalar", float, 256.0, gt=0)) ** 0.25
    rope, local = (replace(rope, attention_factor=rope.attention_factor * more) for rope in ropes)
    config = read_decoder(
        raw,
        "gemma3_text",
        default_head_dim=256,
        may_slide=True,
        may_bias=True,
        rope=rope,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    config = replace(config, kinds=(LayerKind(rope),) * config.num_layers)
    pattern = raw.get("sliding_window_pattern", int, 6, ge=1)
    config = with_sliding_windows(raw, config, lambda layer: (layer + 1) % pattern != 0, local)
    return replace(
        config,
        qk_norm=True,
        norms="both",
        norm_plus_one=True,
        activation="gelu_tanh",
        embed_scale=config.hidden_size**0.5,
    )


GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    value_architecture="Gemma3TextForSequenceClassification",
    has_step_class=False,
    read=read_gemma3,
    names={
        "post_attention_norm": ("post_attention_layernorm",),
        "pre_mlp_norm": ("pre_feedforward_layernorm",),
        "post_mlp_norm": ("post_feedforward_layernorm",),
    },
    around="Gemma3ForConditionalGeneration",
    assumed={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
    },
    is_whole=True,
    beginnings={
        "model.language_model.": "model.",
        "language_model.model.": "model.",  # as published
        "language_model.lm_head.": "lm_head.",
    },
    unread=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
