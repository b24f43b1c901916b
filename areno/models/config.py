"""The shape of a model and the record of a model family, both read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from areno.config.experiments import HeadName
from areno.config.rollout import SamplingConfig
from areno.layers.config import DeltaConfig, MoEConfig, RopeConfig
from areno.models.folder import RawConfig
from areno.models.rope_config import read_rope
from areno.schema.fields import settings

SCALES = "_scale_inv"  # ends the name of the scales of a weight in FP8
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"  # end the names of the two tensors of a weight in MXFP4
N_LABELS: dict[HeadName, int] = {"lm": 0, "value": 1, "step": 2}
"""Kind of head -> number of scores that it computes for each token."""
MAX_LAYERS = 10_000  # a larger number is an error in the file


_NAMES = "architectures model_type transformers_version name_or_path model_name torch_dtype dtype tokenizer_class"
_TOKENS = "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id bos_token eos_token pad_token unk_token"
_LABELS = (
    "id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout step_separator"
)
_HOW_IT_RUNS = (
    "use_cache cache_implementation return_dict output_attentions output_hidden_states torchscript is_decoder "
    "gradient_checkpointing attn_implementation use_flash_attention use_flash_attn use_flashattn"
)
_LENGTHS = "model_max_length tokenizer_model_max_length max_sequence_length max_seq_length seq_length"
# Older versions of transformers wrote sampling settings to config.json: those that areno has, too, and these.
_SAMPLING = " ".join(settings(SamplingConfig)) + (
    " max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences"
)
_TOOLS = "unsloth_fixed unsloth_version is_llama_config transformers.js_config tokenizer_padding_side padding_side"
UNUSED = frozenset(" ".join((_NAMES, _TOKENS, _LABELS, _HOW_IT_RUNS, _LENGTHS, _SAMPLING, _TOOLS)).split())
"""Fields of `config.json` that do not change what a model computes, whatever its family."""
UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})
"""Fields of `config.json` that have no effect unless `use_sliding_window` is true."""


@dataclass(frozen=True)
class LayerKind:
    """Properties that may differ between the attention layers of a model."""

    rope: RopeConfig
    window: int | None = None  # number of last tokens that a token attends to, itself included; None means all


class KeptTensor(NamedTuple):
    """A tensor that areno does not use, and writes again as it is. Weights in FP8 with scales are dequantized."""

    shape: tuple[int, ...]
    n_bytes: int
    has_scales: bool


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """What the weight files of a folder hold that saving writes again.

    Attributes:
        folder: The folder.
        fused_experts: Whether the matrices of a layer's experts are stored in one tensor, see `Family.fused_experts`.
        beginnings: Prefix of tensor names in a text model -> prefix in the files. Empty if they are equal.
        around: config.json of the image-text model. Empty if the folder holds a text model.
        kept: The tensors that areno does not use, by name.
    """

    folder: Path
    fused_experts: bool = False
    beginnings: Mapping[str, str] = field(default_factory=dict)
    around: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, KeptTensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder-only transformer (transformer.py). Fields that are not listed mean what they are called.

    Attributes:
        family: The name of the model's Family.
        rope: The rotary positions. `kinds` may set others for some layers.
        max_position_embeddings: The context length: the largest number of tokens in a sequence.
        qk_norm: Whether each query and key head has a norm.
        qk_norm_whole: Whether all query heads of a token share one norm, and all key heads share another one.
        attention_gate: Whether the output of attention is multiplied by the sigmoid of a gate. The qkv projection
            computes the gate.
        attention_sinks: Whether each query head has a sink, a learned score in its softmax (areno/kernels/sinks.py).
        norms: Where the norms are: before attention and MLP, after them, or both.
        norm_plus_one: Whether norms multiply by 1 + weight.
        kinds: The properties of each layer. Empty if all layers have `rope` and no window. Unused for recurrent layers.
        initializer_range: The standard deviation of random weights, with the exceptions of `Transformer.init_weights`.
        delta: The layers with a recurrent state in place of attention.
        within: The class of the image-text model, if transformers builds one from this folder. peft then uses its
            tensor names. Otherwise empty.
        float32: Tensors of a layer that are float32 whatever the dtype of the model, such as "linear_attn.A_log". Those
            of the family's `float32` that the weight files store so, or in float16 or float64, or all of these without
            weight files.
        stored: What the weight files of the folder hold. None without weight files, and for families of which it is
            never read.
        unread_layers: Number of layers in the weight files, after all others, that are not used: they predict further
            tokens.
        fp8_kv: Whether keys (after rotary embedding) and values are rounded to FP8, so that they can be cached in it.
        stored_vocab_size: Number of token ids in the checkpoint, if it differs from `vocab_size`, the actor's number.
            Rows of further ids are not loaded, and missing ids have no logits.
        has_head: Whether the checkpoint has the weights of the head. False for a critic or a reward model made from a
            causal language model, whose head starts at 0.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    attention_gate: bool = False
    attention_sinks: bool = False
    norms: Literal["before", "after", "both"] = "before"
    norm_plus_one: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    kinds: tuple[LayerKind, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float
    hf: dict[str, Any]  # config.json as read, which is written again when the model is saved
    experts: MoEConfig | None = None  # in the layers that have experts in place of the plain MLP
    delta: DeltaConfig | None = None
    within: str = ""
    unread_layers: int = 0
    head: HeadName = "lm"
    has_head: bool = True
    float32: tuple[str, ...] = ()
    stored: StoredWeights | None = None
    fp8_kv: bool = False
    stored_vocab_size: int | None = None

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows can share the computation of a common prefix. Recurrent layers cannot."""
        return self.delta is None

    @property
    def sizes_divided_by_tp(self) -> list[tuple[str, str, int]]:
        """The sizes that are divided over tensor-parallel ranks, as (name, field of config.json, size)."""
        sizes = [
            ("attention heads", "num_attention_heads", self.num_heads),
            ("key-value heads", "num_key_value_heads", self.num_kv_heads),
        ]
        if self.experts is None or self.experts.dense_layers:
            sizes.append(("intermediate size", "intermediate_size", self.intermediate_size))
        if self.experts is not None:
            sizes.append(("experts", self.experts.field, self.experts.n_experts))
            if self.experts.shared_size:
                name = self.experts.shared_field
                sizes.append(("inner size of the shared expert", name, self.experts.shared_size))
        if self.delta is not None:
            sizes.append(("linear key heads", "linear_num_key_heads", self.delta.n_key_heads))
        return sizes

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers with attention, whose keys and values are cached."""
        recurrent = () if self.delta is None else self.delta.layers
        return tuple(index for index in range(self.num_layers) if index not in recurrent)

    @property
    def n_labels(self) -> int:
        """The number of scores that the head computes for each token. 0 for a language model."""
        return N_LABELS[self.head]

    def layer_kind(self, index: int) -> LayerKind:
        return self.kinds[index] if self.kinds else LayerKind(self.rope)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family. Adding a family needs no more than this record, in a file of areno/models/families.

    The names of modules are those in checkpoints, such as "self_attn.q_proj".

    Attributes:
        name: The `model_type` in `config.json`.
        architecture: The causal language model class of transformers.
        value_architecture: The sequence classification class of transformers, whose head gives a value. "": the name of
            `architecture` with ForSequenceClassification.
        has_value_class: Whether transformers has a sequence classification class for the family.
        read: Function that reads the shape of a model from `config.json`. It calls `read_decoder` first.
        has_step_class: Whether transformers has a token classification class for the family. The head of such a class
            scores labels for each token.
        unused: Fields of `config.json` that do not change the computation of this family, in addition to UNUSED. A
            field that is neither read nor listed raises an error.
        names: Module of areno's `Layer` -> its modules in the checkpoint. Only those that differ from LAYER_NAMES.
        expert_names: As `names`, for the modules of a mixture of experts. `{}` stands for the index of an expert. If a
            checkpoint module holds several matrices of each expert, they are stacked, expert by expert.
        fused_experts: Tensor with three dimensions that holds all experts of a layer -> module of `Layer`. Its rows are
            those of `expert_names`, expert by expert. Files may have these or a tensor for each expert.
        transposed_experts: Whether files always have the tensors of `fused_experts`, as (experts, inputs, outputs).
            Biases have the same names and `_bias`. In MXFP4, the weights are (experts, outputs, inputs).
        stacked: Fused module in the weight files -> the separate modules that it holds, in the order of their rows.
        float32: Tensors of a layer that published checkpoints store in float32 among weights in another dtype.
        around: The image-text architecture whose `text_config` describes a model of this family; "" if there is none.
        assumed: Default values of fields that such a `text_config` may leave out.
        is_whole: Whether transformers builds the image-text model from an image-text folder even when asked for a
            causal language model.
        beginnings: Prefix of tensor names in an image-text model -> prefix in a text model.
        unread: Prefixes of the names of tensors that areno does not use, such as those of the image encoder. They are
            written again when the model is saved.
    """

    name: str
    architecture: str
    read: Callable[[RawConfig], TransformerConfig]
    value_architecture: str = ""
    has_value_class: bool = True
    has_step_class: bool = True
    unused: frozenset[str] = frozenset()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    expert_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_experts: Mapping[str, str] = field(default_factory=dict)
    transposed_experts: bool = False
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    around: str = ""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    beginnings: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def classes(self) -> dict[HeadName, str]:
        """Map each kind of head to the name of its transformers class."""
        value = self.value_architecture or self.architecture.replace("ForCausalLM", "ForSequenceClassification")
        found: dict[HeadName, str] = {"lm": self.architecture}
        if self.has_value_class:
            found["value"] = value
        if self.has_step_class:
            found["step"] = value.replace("ForSequence", "ForToken")
        return found


def read_decoder(
    raw: RawConfig,
    family: str,
    default_head_dim: int | None = None,
    *,
    partial_rotary: float | None = None,
    interleaved: bool = False,
    may_slide: bool = False,
    may_recur: bool = False,
    may_bias: bool = False,
    may_mxfp4: bool = False,
    rope: RopeConfig | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> TransformerConfig:
    """Read the fields of `config.json` that all families share. The family then replaces other fields of the result.

    Args:
        raw: The fields of `config.json`. The result is usable only if its `problems` are empty.
        family: The name of the family.
        default_head_dim: The head dimension if `head_dim` is absent. None: hidden size divided by the number of heads.
        partial_rotary: The share of a head that is rotated if `config.json` does not set it. None: the whole head must
            be rotated, and any other share in `config.json` is a problem.
        interleaved: Whether element pairs (0, 1), (2, 3), ... of a head are rotated, rather than elements half a head
            apart.
        may_slide: Whether the family supports layers with a sliding window, see `with_sliding_windows`.
        may_recur: Whether the family supports layers with a recurrent state.
        may_bias: Whether `attention_bias` sets the biases of q, k, v and o.
        may_mxfp4: Whether the experts may be in MXFP4.
        rope: The rotary positions. None: they are read here.
        activation: The field that names the activation function, and its only supported value.
    """
    num_layers = raw.get("num_hidden_layers", int, ge=1, le=MAX_LAYERS)
    field, only = activation
    if raw.get(field, str, only) != only:
        raw.add_unsupported(field, repr(only))
    _refuse_unsupported(raw, num_layers, may_slide, may_recur, may_mxfp4)
    hidden_size, num_heads = raw.get("hidden_size", int, ge=1), raw.get("num_attention_heads", int, ge=1)
    num_kv_heads = raw.get("num_key_value_heads", int, num_heads, ge=1)
    max_positions = raw.get("max_position_embeddings", int, ge=1)
    rope = rope or read_rope(raw, max_positions, partial=partial_rotary, interleaved=interleaved)
    biased = may_bias and raw.get("attention_bias", bool, False)
    if rope.kind == "longrope":  # longer texts would rotate all keys in another way
        max_positions = min(max_positions, rope.original_max_positions)
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
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=raw.get("tie_word_embeddings", bool, False),
        qkv_bias=biased,
        o_bias=biased,
        initializer_range=raw.get("initializer_range", float, 0.02, ge=0, le=1e3),
        hf=raw.values,
    )
    if not raw.problems:
        _refuse_misfits(raw, config, is_derived=default_head_dim is None and raw.values.get("head_dim") is None)
    return config


def _refuse_misfits(raw: RawConfig, config: TransformerConfig, is_derived: bool) -> None:
    """Add problems for sizes that contradict each other.

    `is_derived`: the head dimension is computed as hidden_size divided by the number of heads.
    """
    heads = f"num_attention_heads={config.num_heads}"
    if config.num_heads % config.num_kv_heads:
        raw.add_unsupported("num_key_value_heads", f"a divisor of {heads}")
    if is_derived and config.hidden_size % (2 * config.num_heads):
        raw.add_unsupported("hidden_size", f"a multiple of {heads} that gives heads of an even size")
    elif config.head_dim % 2:
        raw.add_unsupported("head_dim", "an even number")
    elif config.rope.rotary_dim(config.head_dim) % 2 or not config.rope.rotary_dim(config.head_dim):
        shown = f"{config.rope.partial} of heads of {config.head_dim}"
        raw.add_unsupported("partial_rotary_factor", "a share that is an even number of each head's", shown)
    elif config.rope.kind == "longrope" and 2 * len(config.rope.short_factors) != config.rope.rotary_dim(
        config.head_dim
    ):
        n_factors, n_turned = len(config.rope.short_factors), config.rope.rotary_dim(config.head_dim) // 2
        raw.add_problem(
            f"short_factor of longrope has {n_factors} numbers, expected {n_turned}, one for each frequency"
        )


def _refuse_unsupported(raw: RawConfig, num_layers: int, may_slide: bool, may_recur: bool, may_mxfp4: bool) -> None:
    """Add problems for fields that ask for a computation that is not implemented."""
    if raw.get("attention_dropout", float, 0.0):
        raw.add_unsupported("attention_dropout", "0, since there is no dropout")
    for name, code in raw.get("auto_map", dict, {}).items():
        # Some checkpoints name code of their own for a class that transformers has. transformers uses its own class.
        known = str(code).rpartition(".")[2] in raw.get("architectures", list, [])
        if name.startswith("AutoModel") and not known:
            raw.add_problem(f"auto_map.{name} names code that comes with the model, which is not run; expected none")
    quantization = raw.get("quantization_config", dict, {})
    if quantization and fp8_block_size(raw.values) is None and not (may_mxfp4 and is_mxfp4(raw.values)):
        method = quantization.get("quant_method", quantization)
        expected = "a checkpoint in bfloat16, float16 or float32, or in fp8 with a weight_block_size"
        raw.add_unsupported("quantization_config", expected + ", or in mxfp4" * may_mxfp4, method)
    layer_types = raw.get("layer_types", list, [])
    known = ("full_attention",) + ("sliding_attention",) * may_slide + ("linear_attention",) * may_recur
    if any(kind not in known for kind in layer_types):
        raw.add_unsupported("layer_types", " or ".join(map(repr, known)) + " in every layer")
    elif layer_types and len(layer_types) != num_layers:
        expected = f"expected one for each of num_hidden_layers={num_layers}"
        raw.add_problem(f"layer_types has {len(layer_types)} entries, {expected}")
    if "use_sliding_window" in raw.values and not may_slide:
        window, first = raw.get("sliding_window", int, -1, ge=0), raw.get("max_window_layers", int, 28, ge=0)
        slides = raw.get("use_sliding_window", bool, False) and window >= 0
        if slides and not layer_types and first < num_layers:
            raw.add_unsupported("use_sliding_window", "false, since this family has no sliding windows")


def fp8_block_size(values: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of the blocks with one scale, for a config.json (`values`) of weights in FP8, else None."""
    quantization = values.get("quantization_config") or {}
    size = quantization.get("weight_block_size")
    is_fp8 = quantization.get("quant_method") == "fp8" and quantization.get("fmt", "e4m3") == "e4m3"
    if not is_fp8 or not isinstance(size, list) or len(size) != 2:
        return None
    return (size[0], size[1]) if all(isinstance(each, int) and each > 0 for each in size) else None


def shape_of_scales(shape: Sequence[int], blocks: tuple[int, int]) -> list[int]:
    return [-(-size // block) for size, block in zip(shape, blocks, strict=False)]


def is_mxfp4(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json (`values`) says that experts are in MXFP4."""
    return (values.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def with_sliding_windows(
    raw: RawConfig, config: TransformerConfig, slides: Callable[[int], bool], local_rope: RopeConfig | None = None
) -> TransformerConfig:
    """Return the shape with the window `sliding_window` in the layers that `layer_types` or else `slides` selects.

    A window at least as long as the context has no effect and is dropped. `local_rope`: the rotary positions of layers
    with a window, if they differ.
    """
    types = raw.get("layer_types", list, [])
    raw.get("sliding_window", int, 0, ge=1)  # counts as read, since the field may be unused
    sliding = [kind == "sliding_attention" for kind in types] or [slides(n) for n in range(config.num_layers)]
    if len(sliding) != config.num_layers or not any(sliding):
        return config
    window: int | None = raw.get("sliding_window", int, ge=1)
    if window >= config.max_position_embeddings:
        window = None
    kinds = [replace(config.layer_kind(n), window=window if slid else None) for n, slid in enumerate(sliding)]
    if local_rope is not None:
        kinds = [replace(kind, rope=local_rope) if slid else kind for kind, slid in zip(kinds, sliding, strict=True)]
    return replace(config, kinds=tuple(kinds))
