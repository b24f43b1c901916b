"""The shape of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

from areno.errors import CheckpointError
from areno.layers.rope_config import Rope

FamilyName = Literal["qwen3", "llama", "qwen2"]
HeadName = Literal["lm", "value"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything the decoder-only transformer of `models/transformer.py` needs to know.

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
    head: HeadName = "lm"
    has_head: bool = True


class RawConfig:
    """`config.json` with typed look-ups; every complaint names the file and the field."""

    def __init__(self, values: dict[str, Any], origin: str):
        self.values = values
        self.origin = origin

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The field, or `default` where it is absent or null. Without a default the field is required."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.origin}: {name} is missing, expected {kind.__name__}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.origin}: {name} is {value!r}, expected {kind.__name__}")
        return cast(T, value)

    def refuse(self, name: str, found: object, supported: str) -> CheckpointError:
        """The error for a field whose value this code would compute wrongly."""
        return CheckpointError(f"{self.origin}: {name} is {found!r}, which is not supported; expected {supported}")


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
    _refuse_unsupported(raw)
    hidden_size, num_heads = raw.get("hidden_size", int), raw.get("num_attention_heads", int)
    num_kv_heads = raw.get("num_key_value_heads", int, num_heads)
    if num_heads % num_kv_heads:
        raise raw.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads={num_heads}")
    if default_head_dim is None:
        if "head_dim" not in raw.values and hidden_size % num_heads:
            raise raw.refuse("hidden_size", hidden_size, f"a multiple of num_attention_heads={num_heads}")
        default_head_dim = hidden_size // num_heads
    head_dim = raw.get("head_dim", int, default_head_dim)
    if head_dim % 2:
        raise raw.refuse("head_dim", head_dim, "an even number")
    max_positions = raw.get("max_position_embeddings", int)
    return TransformerConfig(
        family=family,
        vocab_size=raw.get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=raw.get("intermediate_size", int),
        num_layers=raw.get("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", float, 1e-6),
        rope=_read_rope(raw, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=raw.get("tie_word_embeddings", bool, False),
        initializer_range=raw.get("initializer_range", float, 0.02),
        hf=raw.values,
    )


def _refuse_unsupported(raw: RawConfig) -> None:
    """Fields that would change the numbers and that nothing here implements."""
    if raw.get("hidden_act", str, "silu") != "silu":
        raise raw.refuse("hidden_act", raw.values["hidden_act"], "'silu'")
    if raw.values.get("quantization_config"):
        method = raw.values["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise raw.refuse("quantization_config", method, "a checkpoint in bfloat16, float16 or float32")
    layer_types = raw.values.get("layer_types") or []
    other = next((kind for kind in layer_types if kind != "full_attention"), None)
    if other is not None:
        raise raw.refuse("layer_types", other, "'full_attention' in every layer")
    slides = raw.values.get("use_sliding_window") and raw.values.get("sliding_window") is not None
    if slides and not layer_types and raw.get("max_window_layers", int, 28) < raw.get("num_hidden_layers", int):
        raise raw.refuse("use_sliding_window", True, "false, since sliding-window attention is not implemented")


def _read_rope(raw: RawConfig, max_positions: int) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` beside `rope_scaling` (before)."""
    field = "rope_parameters" if raw.values.get("rope_parameters") else "rope_scaling"
    params = RawConfig(raw.get(field, dict, {}), f"{raw.origin}: {field}")
    partial = params.get("partial_rotary_factor", float, raw.get("partial_rotary_factor", float, 1.0))
    if partial != 1.0:
        raise raw.refuse("partial_rotary_factor", partial, "1.0")
    theta = params.get("rope_theta", float, raw.get("rope_theta", float, 10000.0))
    kind = params.get("rope_type", str, params.get("type", str, "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", params.get("factor", float))
    if kind == "llama3":
        factor, low, high = (params.get(name, float) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        return Rope(
            theta, "llama3", factor, low, high, params.get("original_max_position_embeddings", int, max_positions)
        )
    raise raw.refuse(f"{field}.rope_type", kind, "'default', 'linear' or 'llama3'")
