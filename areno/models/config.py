"""The shape of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from areno.layers.experts_config import Experts
from areno.layers.rope_config import Rope
from areno.models.config_json.raw_config import RawConfig
from areno.models.config_json.rope import read_rope

FamilyName = Literal["qwen3", "llama", "qwen2", "qwen3_moe", "mixtral"]
HeadName = Literal["lm", "value"]
MOST_LAYERS = 10_000  # each is built before the weights are read


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything the decoder-only transformer of `models/transformer.py` needs to know.

    max_position_embeddings: the context, tokens of the longest row.
    head: "lm" predicts the next token, "value" gives one number for each token. has_head: the checkpoint holds that
    head; False for a value model made from a causal language model, whose head starts at 0.
    """

    family: FamilyName
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float
    hf: dict[str, Any]  # config.json as read, written back when the model is saved
    experts: Experts | None = None  # of the layers that have them in place of the plain MLP
    head: HeadName = "lm"
    has_head: bool = True

    @property
    def divided(self) -> list[tuple[str, str, int]]:
        """(what, field of config.json, number) of what tensor-parallel ranks divide into whole numbers."""
        sizes = [
            ("attention heads", "num_attention_heads", self.num_heads),
            ("key-value heads", "num_key_value_heads", self.num_kv_heads),
        ]
        if self.experts is None or self.experts.dense_layers:
            sizes.append(("intermediate size", "intermediate_size", self.intermediate_size))
        if self.experts is not None:
            sizes.append(("experts", self.experts.field, self.experts.n_experts))
        return sizes


class Family(NamedTuple):
    """One entry of the registry: what `config.json` calls the family, and how it is read."""

    name: FamilyName
    architecture: str  # with a head over the vocabulary
    value_architecture: str  # with a head of one label
    read: Callable[[RawConfig], TransformerConfig]


def read_decoder(raw: RawConfig, family: FamilyName, default_head_dim: int | None = None) -> TransformerConfig:
    """The fields that all families share; each family replaces the others in the result.

    default_head_dim: where `head_dim` is absent; None derives it from the hidden size.
    """
    num_layers = raw.get("num_hidden_layers", int, ge=1, le=MOST_LAYERS)
    _refuse_unsupported(raw, num_layers)
    hidden_size, num_heads = raw.get("hidden_size", int, ge=1), raw.get("num_attention_heads", int, ge=1)
    num_kv_heads = raw.get("num_key_value_heads", int, num_heads, ge=1)
    max_positions = raw.get("max_position_embeddings", int, ge=1)
    config = TransformerConfig(
        family=family,
        vocab_size=raw.get("vocab_size", int, ge=1),
        hidden_size=hidden_size,
        intermediate_size=raw.get("intermediate_size", int, ge=1),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=raw.get("head_dim", int, default_head_dim or max(2, hidden_size // num_heads), ge=2),
        rms_norm_eps=raw.get("rms_norm_eps", float, 1e-6, ge=0, le=1),
        rope=read_rope(raw, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=raw.get("tie_word_embeddings", bool, False),
        initializer_range=raw.get("initializer_range", float, 0.02, ge=0, le=1e3),
        hf=raw.values,
    )
    if not raw.problems:
        _refuse_misfits(raw, config, is_derived=default_head_dim is None and raw.values.get("head_dim") is None)
    return config


def _refuse_misfits(raw: RawConfig, config: TransformerConfig, is_derived: bool) -> None:
    """Sizes that do not fit each other. is_derived: the head dimension follows from the hidden size."""
    heads = f"num_attention_heads={config.num_heads}"
    if config.num_heads % config.num_kv_heads:
        raw.refuse("num_key_value_heads", f"a divisor of {heads}")
    if is_derived and config.hidden_size % (2 * config.num_heads):
        raw.refuse("hidden_size", f"a multiple of {heads} that gives heads of an even size")
    elif config.head_dim % 2:
        raw.refuse("head_dim", "an even number")


def _refuse_unsupported(raw: RawConfig, num_layers: int) -> None:
    """Fields that would change the numbers and that nothing here implements."""
    if raw.get("hidden_act", str, "silu") != "silu":
        raw.refuse("hidden_act", "'silu'")
    if raw.get("attention_dropout", float, 0.0):
        raw.refuse("attention_dropout", "0, since there is no dropout")
    own_code = [name for name in raw.get("auto_map", dict, {}) if name.startswith("AutoModel")]
    if own_code:
        raw.wrong(f"auto_map.{own_code[0]} names code that comes with the model, which is not run; expected none")
    quantization = raw.get("quantization_config", dict, {})
    if quantization:
        method = quantization.get("quant_method", quantization)
        raw.refuse("quantization_config", "a checkpoint in bfloat16, float16 or float32", method)
    layer_types = raw.get("layer_types", list, [])
    if any(kind != "full_attention" for kind in layer_types):
        raw.refuse("layer_types", "'full_attention' in every layer")
    elif layer_types and len(layer_types) != num_layers:
        expected = f"expected one for each of num_hidden_layers={num_layers}"
        raw.wrong(f"layer_types has {len(layer_types)} entries, {expected}")
    if "use_sliding_window" in raw.values:
        window, first = raw.get("sliding_window", int, -1, ge=0), raw.get("max_window_layers", int, 28, ge=0)
        slides = raw.get("use_sliding_window", bool, False) and window >= 0
        if slides and not layer_types and first < num_layers:
            raw.refuse("use_sliding_window", "false, since sliding-window attention is not implemented")
