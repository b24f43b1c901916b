"""How the weight files of a folder store a model, from the headers of the files. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError
from areno.models.config import SCALES, Family, KeptTensor, StoredWeights, TransformerConfig, fp8_block_size
from areno.models.families import FAMILIES, unread_prefixes
from areno.models.folder import weight_files

MAX_HEADER = 10**8  # bytes; the limit of safetensors


def with_stored(config: TransformerConfig, folder: Path, values: Mapping[str, Any]) -> TransformerConfig:
    """Return the shape of a model with what its weight files say. `values`: the content of config.json.

    It is unchanged if the folder has no weight files, or damaged ones, which loading reports.
    """
    family = FAMILIES[config.family]
    if not (family.float32 or family.fused_experts or family.unread):
        return config
    try:
        headers = read_headers(folder)
    except (CheckpointError, OSError, ValueError):
        return config
    float32 = tuple(
        each
        for each in config.float32
        if any(header["dtype"] == "F32" and name.endswith(f".{each}") for name, header in headers.items())
    )
    return replace(config, float32=float32, stored=_stored_weights(config, family, folder, values, headers))


def _stored_weights(
    config: TransformerConfig,
    family: Family,
    folder: Path,
    values: Mapping[str, Any],
    headers: Mapping[str, Mapping[str, Any]],
) -> StoredWeights:
    unread = unread_prefixes(config)
    used = [name for name in headers if not name.startswith(unread)]
    is_fused = any(name.endswith(f".{each}") for name in used for each in family.fused_experts)
    if config.head != "lm":  # saved as a text model
        return StoredWeights(folder=folder, fused_experts=is_fused)
    is_within = family.around != "" and family.around in (values.get("architectures") or [])
    blocks = fp8_block_size(config.hf)
    kept = {
        name: KeptTensor(tuple(header["shape"]), _n_bytes(header), blocks is not None and f"{name}{SCALES}" in headers)
        for name, header in headers.items()
        if name.startswith(unread) and not (blocks is not None and name.endswith(SCALES))
    }
    return StoredWeights(
        folder=folder.absolute(),
        fused_experts=is_fused,
        beginnings={
            own: within
            for within, own in family.beginnings.items()
            if is_within and any(name.startswith(within) for name in used)
        },
        around=dict(values) if is_within else {},
        kept=kept,
    )


def _n_bytes(header: Mapping[str, Any]) -> int:
    start, stop = header["data_offsets"]
    return stop - start


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the dtype, shape and place of each tensor in the weight files of a folder, as their headers name them."""
    found: dict[str, dict[str, Any]] = {}
    for path in weight_files(folder):
        with open(path, "rb") as file:
            n_bytes = int.from_bytes(file.read(8), "little")
            if n_bytes > MAX_HEADER:
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(file.read(n_bytes))
        found |= {name: about for name, about in header.items() if name != "__metadata__"}
    return found
