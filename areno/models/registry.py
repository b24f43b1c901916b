"""From a model folder to a model: which family it is, what shape it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from areno.errors import CheckpointError, ConfigError, Problem
from areno.layers.parallel import TensorParallel
from areno.models.config import RawConfig, TransformerConfig
from areno.models.family import Family
from areno.models.hub import resolve
from areno.models.llama import LLAMA
from areno.models.qwen2 import QWEN2
from areno.models.qwen3 import QWEN3
from areno.models.transformer import Transformer

FAMILIES: dict[str, Family] = {family.name: family for family in (QWEN3, LLAMA, QWEN2)}


def load_config(path: str | Path) -> TransformerConfig:
    """Read `config.json` of a model folder or hub id, with the end-of-sequence ids of `generation_config.json` added.

    CheckpointError where there is none, where the architecture is not one of ours, or where a field asks for something
    that is not implemented.
    """
    folder = resolve(path)
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json; expected a Hugging Face model folder (actor.path)")
    raw = RawConfig(_read_json(file), str(file))
    family = _find_family(raw)
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    eos_token_ids = _eos_ids(raw) | _eos_ids(RawConfig(generation, str(generation_file)))
    return family.read(raw, tuple(sorted(eos_token_ids)))


def tp_problems(config: TransformerConfig, tp_size: int) -> list[Problem]:
    """What `tp_size` ranks cannot divide among them."""
    sizes = [
        ("attention heads", "num_attention_heads", config.num_heads),
        ("key-value heads", "num_key_value_heads", config.num_kv_heads),
        ("intermediate size", "intermediate_size", config.intermediate_size),
    ]
    wrong = [(what, name, size) for what, name, size in sizes if size % tp_size]
    if not wrong:
        return []
    shown = ", ".join(f"{size} ({what})" for what, _, size in wrong)
    fields = ", ".join(f"{name}={size}" for _, name, size in wrong)
    message = f"is {tp_size}, which does not divide the model's {shown}; use a divisor of these (config.json: {fields})"
    return [Problem("engine.tp_size", message)]


def build_model(
    config: TransformerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tp: TensorParallel | None = None,
) -> Transformer:
    """The model with uninitialised weights, this rank's shards only. ConfigError where the ranks do not divide it."""
    tp = tp or TensorParallel()
    if problems := tp_problems(config, tp.size):
        raise ConfigError(problems)
    return Transformer(config, FAMILIES[config.family], dtype=dtype, device=device, tp=tp)


def _find_family(raw: RawConfig) -> Family:
    """By `architectures`, or by `model_type` where that is absent."""
    architectures = raw.get("architectures", list, [])
    model_type = raw.get("model_type", str, "")
    for family in FAMILIES.values():
        if family.architecture in architectures or (not architectures and family.name == model_type):
            return family
    name, value = ("architectures", architectures) if architectures else ("model_type", model_type)
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    raise raw.refuse(name, value, f"one of {supported}")


def _eos_ids(raw: RawConfig) -> set[int]:
    """`eos_token_id` is an int, a list of them, or null."""
    value = raw.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise raw.refuse("eos_token_id", value, "a token id or a list of them")
    return set(ids)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, expected a JSON object")
    return values
