"""Functions that find the family and the shape of a model folder, and build the model.

MISSING lists known architectures that are not supported, each with the features that areno lacks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.config.experiments import HeadName
from areno.config.layout import Layout
from areno.errors import CheckpointError, ConfigError, Key, Problem
from areno.models.config import N_LABELS, UNUSED, Family, TransformerConfig
from areno.models.families import FAMILIES
from areno.models.folder import MODEL, RawConfig, read_json, resolve_model_folder
from areno.models.parameters import n_kv_heads, n_parameters
from areno.models.stored import with_stored

if TYPE_CHECKING:
    import torch

    from areno.layers.parallel import ParallelGroup
    from areno.models.transformer import Transformer

_TEXT_ONLY = "images beside text; only text models run"
_LATENT = "multi-head latent attention"
_SPARSE = "multi-head latent attention, and sparse attention to tokens that an indexer chooses"

MISSING: dict[str, str] = {
    "CohereForCausalLM": "LayerNorm, and attention and MLP side by side",
    "Cohere2ForCausalLM": "LayerNorm, and attention and MLP side by side",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _SPARSE,
    "FalconH1ForCausalLM": "Mamba layers beside attention",
    "Gemma2ForCausalLM": "soft caps on attention scores and logits",
    "Gemma3nForConditionalGeneration": _TEXT_ONLY,
    "Gemma4ForCausalLM": "heads of two sizes, and keys that are the values",
    "Gemma4ForConditionalGeneration": _TEXT_ONLY,
    "GemmaForCausalLM": "norms that multiply by 1 + weight in Llama's places; Gemma 3 runs",
    "Glm4MoeLiteForCausalLM": _LATENT,
    "Glm4vMoeForConditionalGeneration": _TEXT_ONLY,
    "GlmForCausalLM": "GLM-4 of 2024 without norms behind attention and MLP; glm4 (0414) runs",
    "GlmMoeDsaForCausalLM": _SPARSE,
    "GPT2LMHeadModel": "LayerNorm, and positions that are learned",
    "GPTNeoXForCausalLM": "LayerNorm, and attention and MLP side by side",
    "GraniteForCausalLM": "multipliers of embeddings, attention, residuals and logits",
    "GraniteMoeHybridForCausalLM": "Mamba layers",
    "KimiLinearForCausalLM": "multi-head latent attention, and a delta rule with a decay for each channel",
    "Lfm2ForCausalLM": "short convolutions in the place of attention",
    "Lfm2MoeForCausalLM": "short convolutions in the place of attention",
    "Llama4ForCausalLM": "attention in chunks, and queries that are scaled by position",
    "Llama4ForConditionalGeneration": _TEXT_ONLY,
    "MambaForCausalLM": "Mamba layers in the place of attention",
    "MiniMaxM2ForCausalLM": "one norm over all queries and one over all keys, beside experts",
    "MinistralForCausalLM": "layers with and without a window beside Mistral's names",
    "Mistral3ForConditionalGeneration": _TEXT_ONLY,
    "NemotronHForCausalLM": "Mamba layers",
    "OlmoForCausalLM": "LayerNorm without weights",
    "OlmoeForCausalLM": "one norm over all queries and one over all keys, beside experts",
    "Phi4MultimodalForCausalLM": _TEXT_ONLY,
    "PhiForCausalLM": "LayerNorm, and attention and MLP side by side",
    "PhimoeForCausalLM": "LayerNorm, and a router that masks with noise",
    "Qwen2MoeForCausalLM": "biases on q, k and v, beside a shared expert with a gate",
    "Qwen2VLForConditionalGeneration": _TEXT_ONLY,
    "Qwen2_5_VLForConditionalGeneration": _TEXT_ONLY,
    "Qwen3NextForCausalLM": "projections of the gated delta rule that are interleaved by key head; Qwen3.5 runs",
    "Qwen3OmniMoeForConditionalGeneration": "images and audio beside text; only text models run",
    "Qwen3VLForConditionalGeneration": _TEXT_ONLY,
    "Qwen3VLMoeForConditionalGeneration": _TEXT_ONLY,
    "Starcoder2ForCausalLM": "LayerNorm, and an MLP without a gate",
}


_MISSING_BY_FIELD = {
    "vision_config": _TEXT_ONLY,
    "audio_config": _TEXT_ONLY.replace("images", "audio"),
    "kv_lora_rank": _LATENT,
    "mamba_d_state": "Mamba layers",
    "state_size": "Mamba layers",
}
"""Field of config.json -> what areno lacks for architectures that MISSING does not list."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MAX_PARAMETERS = 10**14  # a hundred times the largest that exists
_HEAD_TEXTS: dict[HeadName, tuple[str, str, str, str]] = {
    "value": ("value head", "a reward model", "one label", "a critic or reward model gives one number"),
    "step": ("head for steps", "a process reward model", "two labels", "a step is wrong or right"),
}
"""Head -> for messages: name of the head, kind of model, its labels, and what they stand for."""


def load_config(path: str | Path, head: HeadName = "lm", *, needs_head: bool = False) -> TransformerConfig:
    """Read `config.json` of a model, the end-of-sequence ids of `generation_config.json`, and headers of weight files.

    `head` is the kind of head that the model must have. "lm": a ...ForCausalLM. "value": a critic or reward model, a
    ...ForSequenceClassification with one label. "step": a process reward model, a ...ForTokenClassification with two
    labels. Unless `needs_head`, a ...ForCausalLM is also accepted for "value" and "step"; its LM head is not used.

    Raises CheckpointError if the file is missing or has another head, or if fields are wrong, unknown or ask for a
    computation that is not implemented. The error lists all such fields.
    """
    folder = resolve_model_folder(path)
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError("{} has no config.json; expected a Hugging Face model folder ({})", folder, MODEL)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    values = read_json(file)
    config = parse_config(values, str(file), head, needs_head=needs_head, generation=generation)
    return with_stored(config, folder, values)


def parse_config(
    values: Mapping[str, Any],
    origin: str,
    head: HeadName = "lm",
    *,
    needs_head: bool = False,
    generation: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Read the shape of a model from the content of its files, as `load_config` does."""
    outer = RawConfig(dict(values), origin)
    raw = _text_config(outer)
    family, own_head = _find_family(raw)
    if head != "lm" and (own_head != "lm" or needs_head or head not in family.classes):
        _check_scores(raw, family, own_head, head)
    elif head == "lm" and own_head != "lm":
        wrong = "{}: architectures is {!r}, a model that gives scores and no next token; "
        expected = "expected a causal language model (...ForCausalLM) in {}"
        raise CheckpointError(wrong + expected, raw.origin, raw.values["architectures"], MODEL)
    config = family.read(raw)
    if not raw.problems:
        _check_size(raw, config)
    generated = RawConfig(dict(generation or {}), origin.replace("config.json", "generation_config.json"), raw.problems)
    eos_ids = _eos_ids(raw, config) | _eos_ids(generated, config)
    raw.add_unknown_fields(UNUSED | family.unused)
    if raw.problems:
        raise raw.error()
    has_head = head == own_head
    within = family.around if family.is_whole and raw is not outer else ""
    eos = tuple(sorted(eos_ids))
    own = {"eos_token_ids": eos, "within": within, "head": head, "has_head": has_head}
    return dataclasses.replace(config, **own, float32=family.float32)


def head_of(folder: Path) -> HeadName:
    """Return the kind of head of the model in a folder, "lm" if it has no `config.json`."""
    if not (folder / "config.json").is_file():
        return "lm"
    return _find_family(_text_config(RawConfig(read_json(folder / "config.json"), str(folder / "config.json"))))[1]


def layout_problems(config: TransformerConfig, layout: Layout, whose: str = "the model") -> list[Problem]:
    """Return a problem about engine.tp_size or engine.cp_size if the ranks cannot divide the sizes of a model.

    The tensor-parallel size must divide the numbers of heads and the other sizes. It may also be a multiple of the
    number of key-value heads, so that several ranks hold the same head. This is excluded if one norm covers the keys of
    all heads. The context-parallel size must divide the heads of each tensor-parallel rank. It must be 1 for a model
    with recurrent layers.
    """
    tp_size, cp_size, sizes = layout.tp_size, layout.cp_size, config.sizes_divided_by_tp
    wrong = [(what, name, size) for what, name, size in sizes if size % tp_size]
    if tp_size % config.num_kv_heads == 0 and not config.qk_norm_whole:  # the norm of all keys needs distinct heads
        wrong = [each for each in wrong if each[1] != "num_key_value_heads"]
    shown = ", ".join(f"{size} ({what})" for what, _, size in wrong)
    fields = ", ".join(f"{name}={size}" for _, name, size in wrong)
    message = f"is {tp_size}, which does not divide {whose}'s {shown}; use a divisor of these (config.json: {fields})"
    if wrong:
        return [Problem("engine.tp_size", message)]
    if config.delta is not None and cp_size > 1:
        text = (
            "is {}, but {} has layers with a recurrent state, whose ranks of a context cannot share a row; set it to 1"
        )
        return [Problem("engine.cp_size", text, cp_size, whose)]
    each = (config.num_heads // tp_size, n_kv_heads(config, layout))
    heads = [(n, *names) for n, names in zip(each, sizes[:2], strict=True) if n % cp_size]
    shown = " and ".join(f"{n} {what}" for n, what, _, _ in heads)
    fields = ", ".join(f"{name}={size}" for _, _, name, size in heads)
    text = "is {}, which does not divide the {} of {} on each device (config.json: {}; {}={})"
    problem = Problem("engine.cp_size", text, cp_size, shown, whose, fields, Key("engine.tp_size"), tp_size)
    return [problem] if heads else []


def build_model(
    config: TransformerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tp: ParallelGroup | None = None,
    placed: bool = True,
) -> Transformer:
    """Build this rank's shards of a model, with uninitialised weights. `placed`: see `WeightSpec.placed`."""
    # Here, because plans read shapes of models without torch.
    from areno.layers.parallel import ParallelGroup
    from areno.layers.shard import WeightSpec
    from areno.models.transformer import Transformer

    tp = tp or ParallelGroup()
    if problems := layout_problems(config, Layout.single_replica(tp.size)):
        raise ConfigError(problems)
    return Transformer(config, WeightSpec(dtype, device, tp, placed))


def _text_config(raw: RawConfig) -> RawConfig:
    """Return the fields in `text_config` if the model is an image-text model of a supported family, else `raw`."""
    for family in FAMILIES.values():
        if family.around and family.around in raw.get("architectures", list, []):
            text = raw.get("text_config", dict)
            if raw.problems:
                raise raw.error()
            values = {"architectures": [family.architecture], "model_type": family.name, **family.assumed, **text}
            values.setdefault("eos_token_id", raw.values.get("eos_token_id"))
            # transformers prefers the outer value of these fields.
            outer = ("tie_word_embeddings", "quantization_config")
            values |= {name: raw.values[name] for name in outer if name in raw.values}
            return RawConfig(values, f"{raw.origin}: text_config", raw.problems)
    return raw


def _find_family(raw: RawConfig) -> tuple[Family, HeadName]:
    """Return the family that `architectures` (if absent, `model_type`) names, and the kind of the model's head."""
    architectures = raw.get("architectures", list, [])
    model_type = raw.get("model_type", str, "")
    for family in FAMILIES.values():
        heads: list[HeadName] = [head for head, name in family.classes.items() if name in architectures]
        if not architectures and family.name == model_type:
            heads = ["lm"]
        if heads:
            if model_type not in ("", family.name):  # transformers uses this field
                raw.add_unsupported("model_type", f"{family.name!r}, as architectures is {architectures}")
            return family, heads[0]
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    expected = f"one of {supported}, or for critics and reward models the same with ...ForSequenceClassification "
    expected += "or ...ForTokenClassification"
    by_field = (lacks for field, lacks in _MISSING_BY_FIELD.items() if raw.values.get(field) is not None)
    lacked = next(by_field, None)
    for name in architectures:
        if isinstance(name, str) and (needs := MISSING.get(name, lacked)):
            raw.add_problem(f"architectures is {name}, which is not supported: it needs {needs}; expected {expected}")
            raise raw.error()
    raw.add_unsupported("architectures" if architectures else "model_type", expected)
    raise raw.error()


def _check_scores(raw: RawConfig, family: Family, own: HeadName, head: HeadName) -> None:
    """Raise CheckpointError unless a head of the kind `own`, which the model has, can serve as a `head`."""
    found = raw.values.get("architectures") or raw.values.get("model_type")
    if head not in family.classes:
        text = "{}: transformers has no {} for the model type {!r}, so it could not load {} of this type; choose "
        text += "another model in {}"
        name = "...ForTokenClassification" if head == "step" else "...ForSequenceClassification"
        raise CheckpointError(text, raw.origin, name, family.name, _HEAD_TEXTS[head][1], MODEL)
    lacks, wants, labels, gives = _HEAD_TEXTS[head]
    if own != head:
        names = ", ".join(each.classes[head] for each in FAMILIES.values() if head in each.classes)
        text = "{}: architectures is {!r}, which has no trained {}; expected {} in {}: {}, with {}"
        raise CheckpointError(text, raw.origin, found, lacks, wants, MODEL, names, labels)
    # transformers writes the labels as id2label, and omits the field for its default of two labels.
    n_labels, wanted = raw.get("num_labels", int, len(raw.get("id2label", dict, {})) or 2, ge=1), N_LABELS[head]
    if n_labels != wanted:
        text = "{}: the model has {} labels (id2label), expected {}; {}, choose another model in {}"
        raise CheckpointError(text, raw.origin, n_labels, wanted, gives, MODEL)


def _check_size(raw: RawConfig, config: TransformerConfig) -> None:
    """Add a problem if the sizes give an impossible number of parameters, which would exhaust the memory."""
    if (size := n_parameters(config)) > MAX_PARAMETERS:
        sizes = ", ".join(f"{name}={raw.values[name]}" for name in SIZES)
        limit = f"expected at most {MAX_PARAMETERS:.0e}"
        raw.add_problem(f"the sizes make a model of {size:.1e} parameters, {limit}; check {sizes}")


def _eos_ids(raw: RawConfig, config: TransformerConfig) -> set[int]:
    """Return the token ids in the field `eos_token_id`, which is an int, a list of ints, or null.

    If it has another type, or an id outside of the vocabulary, add a problem and return an empty set.
    """
    value = raw.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raw.add_unsupported("eos_token_id", "a token id or a list of them")
    elif not raw.problems and not all(0 <= token < config.vocab_size for token in ids):
        raw.add_unsupported("eos_token_id", f"ids from 0 to {config.vocab_size - 1}, as vocab_size={config.vocab_size}")
    else:
        return set(ids)
    return set()
