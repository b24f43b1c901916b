"""A small random model of the family of a run's model, with its vocabulary and context."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError
from areno.files.paths import existing_path
from areno.models.folder import HUB_ID, MODEL, TOKENIZER
from areno.models.known_shapes import published_config

_SMALL_BYTES = 100 * 2**20  # a model of less is its own small model
_COMPARED = 2**16  # numbers of a tensor
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "query_pre_attn_scalar": 16,
}
_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "chat_template.jinja", *TOKENIZER)


def folder_without_weights(path: str) -> Path:
    """Return the local folder of a model or tokenizer. Of a hub id, only the small files are downloaded."""
    if (local := existing_path(path)) is not None:
        return local
    if not HUB_ID.fullmatch(path):
        raise CheckpointError("{} does not exist; expected a local folder or a hub id `owner/name` ({})", path, MODEL)
    from huggingface_hub import snapshot_download

    patterns: list[str] = [*_BESIDE_WEIGHTS]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception:  # the client raises exceptions of its HTTP library, too
        try:
            return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=True))
        except Exception as error:
            text = "{} is not a local folder, is not in the local cache, and the hub cannot be reached ({})"
            raise CheckpointError(text, path, type(error).__name__) from error


def is_small(folder: Path) -> bool:
    """Whether a local folder holds a whole model that is small enough to be used as it is."""
    weights = list(folder.glob("*.safetensors"))
    return bool(weights) and sum(file.stat().st_size for file in weights) < _SMALL_BYTES


def have_same_weights(one: Path, other: Path) -> bool:
    """Whether two local folders have the same tensors. Of a large tensor, the first part is compared."""
    if one.resolve() == other.resolve():
        return True
    places = [
        {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}
        for folder in (one, other)
    ]
    if not places[0] or places[0].keys() != places[1].keys():
        return False
    return all(_first_part(places[0][name], name).equal(_first_part(places[1][name], name)) for name in places[0])


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _first_part(file: Path, name: str) -> Any:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        part = opened.get_slice(name)
        shape = part.get_shape()
        return part[: max(1, _COMPARED // max(1, math.prod(shape[1:])))] if shape else opened.get_tensor(name)


def model_values(path: str) -> dict[str, Any]:
    """Return the content of config.json, for a published model without a download."""
    if existing_path(path) is None and (known := published_config(path)) is not None:
        return known
    file = folder_without_weights(path) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    return values.get("text_config") or values


def write_small_model(path: str, folder: Path, seed: int) -> Path:
    """Write a random model in fp32 of the family of `path`: few layers and few channels, the same vocabulary."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from transformers.utils.logging import disable_progress_bar

    values = {key: value for key, value in model_values(path).items() if key not in ("quantization_config", "dtype")}
    whole = AutoConfig.for_model(**values)
    small = {**values, **{key: size for key, size in _SIZES.items() if values.get(key)}, **_layers(whole)}
    heads, kv_heads = values["num_attention_heads"], values.get("num_key_value_heads")
    if kv_heads:
        small["num_key_value_heads"] = 4 if kv_heads == heads else 2
    small.setdefault("head_dim", 16)
    rope = {key: values[key] for key in ("rope_scaling", "rope_parameters") if isinstance(values.get(key), dict)}
    for key, given in rope.items():
        if "short_factor" in given:  # one number for each channel of a head
            small[key] = {"rope_type": "default", "rope_theta": given.get("rope_theta", 10000.0)}
    disable_progress_bar()
    config = AutoConfig.for_model(**small)
    [architecture] = values.get("architectures") or [""]
    kind = AutoModelForCausalLM
    if architecture.endswith("ForSequenceClassification"):
        kind = AutoModelForSequenceClassification
    elif architecture.endswith("ForTokenClassification"):
        kind = AutoModelForTokenClassification
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    if (local := existing_path(path)) is not None:
        for name in _BESIDE_WEIGHTS[1:]:
            if (local / name).is_file():
                shutil.copy(local / name, folder)
    return folder


def _layers(config: Any) -> dict[str, Any]:
    """Return settings with two layers, or one layer of each kind if there are more kinds."""
    kinds = list(dict.fromkeys(vars(config).get("layer_types") or ()))
    n_layers = max(2, len(kinds))
    found: dict[str, Any] = {"num_hidden_layers": n_layers}
    if kinds:
        found["layer_types"] = (kinds * 2)[:n_layers]
    for name in ("mlp_only_layers", "no_rope_layers"):
        if isinstance(given := vars(config).get(name), list):
            found[name] = [] if name == "mlp_only_layers" else given[-n_layers:]
    if vars(config).get("max_window_layers") is not None:
        found["max_window_layers"] = 1
    return found
