"""The dense Qwen models: Qwen2 and 2.5, Qwen3, and the text model of Qwen3.5 and 3.6.

- Qwen2 and Qwen2.5: Llama's layers with biases on q, k and v.
- Qwen3: Llama's layers with a norm on each query and key head before the rotation.
- Qwen3.5: three of four layers have the gated delta rule in place of attention (arXiv 2412.06464). The others have the
  attention of Qwen3 with a gate at its output, and a quarter of each head is rotated. Norms multiply by 1 + weight.
  For text, multimodal rotary positions (mrope) equal ordinary ones. areno reads the text model of an image-text model,
  and copies the image encoder when it saves.
"""

from __future__ import annotations

from dataclasses import replace

from areno.layers.config import DeltaConfig
from areno.models.config import UNUSED_WINDOW, Family, TransformerConfig, read_decoder, with_sliding_windows
from areno.models.folder import RawConfig
from areno.models.rope_config import read_rope


def read_qwen2(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Qwen2 or Qwen2.5 model.

    q, k and v always have biases, for which `config.json` has no field.
    """
    return with_sliding_windows_from_layer(raw, replace(read_decoder(raw, "qwen2", may_slide=True), qkv_bias=True))


def with_sliding_windows_from_layer(raw: RawConfig, config: TransformerConfig) -> TransformerConfig:
    """Return the shape with the window `sliding_window` in the layers from the index `max_window_layers` on.

    If the file has `layer_types`, that field names the layers in place of `max_window_layers`. If `use_sliding_window`
    is not true, no layer has a window, and a sliding layer in `layer_types` is a problem.
    """
    raw.set_defaults(sliding_window=4096)
    first = raw.get("max_window_layers", int, 28, ge=0)
    if raw.get("use_sliding_window", bool, False) and raw.get("sliding_window", int, 0, ge=1):
        return with_sliding_windows(raw, config, lambda layer: layer >= first)
    if "sliding_attention" in raw.get("layer_types", list, []):
        raw.add_unsupported("layer_types", "'full_attention' in every layer without use_sliding_window")
    return config


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read_qwen2,
    unused=UNUSED_WINDOW | {"attention_bias"},  # q, k and v have biases whatever it says
)


def read_qwen3(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Qwen3 model. An absent `head_dim` is 128, whatever the hidden size."""
    config = read_decoder(raw, "qwen3", default_head_dim=128, may_slide=True, may_bias=True)
    return with_sliding_windows_from_layer(raw, replace(config, qk_norm=True))


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read_qwen3,
    unused=UNUSED_WINDOW,
)


_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_MAX_KEY_DIM = (
    128  # the kernels hold whole columns of a state, and columns of 256 exceed the memory of a multiprocessor
)


def read_qwen3_5(raw: RawConfig, family: str = "qwen3_5_text") -> TransformerConfig:
    """Read the shape of a Qwen3.5 model. `family`: the name of the family, which may have experts.

    Without `layer_types`, every `full_attention_interval`-th layer has attention.
    """
    if not raw.get("attn_output_gate", bool, True):
        raw.add_unsupported("attn_output_gate", "true")
    if raw.get("output_gate_type", str, "swish") not in ("swish", "silu"):  # Qwen3.6 says it of the delta rule
        raw.add_unsupported("output_gate_type", "'swish'")
    rope = read_rope(raw, raw.get("max_position_embeddings", int, ge=1), partial=0.25, unused=_OF_IMAGES)
    config = read_decoder(raw, family, default_head_dim=256, may_recur=True, may_bias=True, rope=rope)
    interval = raw.get("full_attention_interval", int, 4, ge=1)
    types = raw.get("layer_types", list, [])
    recurs = [kind == "linear_attention" for kind in types] or [
        (layer + 1) % interval != 0 for layer in range(config.num_layers)
    ]
    delta = DeltaConfig(
        layers=tuple(layer for layer, does in enumerate(recurs) if does),
        n_key_heads=raw.get("linear_num_key_heads", int, 16, ge=1),
        n_value_heads=raw.get("linear_num_value_heads", int, 32, ge=1),
        key_dim=raw.get("linear_key_head_dim", int, 128, ge=1, le=_MAX_KEY_DIM),
        value_dim=raw.get("linear_value_head_dim", int, 128, ge=1),
        width=raw.get("linear_conv_kernel_dim", int, 4, ge=2, le=64),
    )
    if delta.n_value_heads % delta.n_key_heads:
        raw.add_unsupported("linear_num_value_heads", f"a multiple of linear_num_key_heads={delta.n_key_heads}")
    if not config.num_layers - len(delta.layers):
        raw.add_unsupported("layer_types", "'full_attention' in one layer at least")
    return replace(
        config,
        qk_norm=True,
        norm_plus_one=True,
        attention_gate=True,
        delta=delta if delta.layers else None,
    )


# Nothing here reads the layers that predict several tokens, and states are always float32.
UNUSED_QWEN3_5 = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"})

QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    value_architecture="Qwen3_5TextForSequenceClassification",
    has_step_class=False,
    read=read_qwen3_5,
    unused=UNUSED_QWEN3_5,
    names={
        "delta": ("linear_attn",),
        "delta.in_proj": (
            "linear_attn.in_q",
            "linear_attn.in_k",
            "linear_attn.in_v",
            "linear_attn.in_proj_z",
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
        ),
        "delta.conv": ("linear_attn.conv_q", "linear_attn.conv_k", "linear_attn.conv_v"),
        "delta.norm": ("linear_attn.norm",),
        "delta.out": ("linear_attn.out_proj",),
    },
    stacked={
        "linear_attn.in_proj_qkv": ("linear_attn.in_q", "linear_attn.in_k", "linear_attn.in_v"),
        "linear_attn.conv1d": ("linear_attn.conv_q", "linear_attn.conv_k", "linear_attn.conv_v"),
    },
    float32=("linear_attn.A_log", "linear_attn.norm.weight"),  # in Qwen3.5; in bf16 in Qwen3.6
    around="Qwen3_5ForConditionalGeneration",
    beginnings={"model.language_model.": "model."},
    unread=("mtp.", "model.visual."),
)
