"""How the weight files of a folder store a model, from the headers of the files. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError
from areno.models.config import TransformerConfig
from areno.models.families import FAMILIES
from areno.models.folder import weight_files

MAX_HEADER = 10**8  # bytes; the limit of safetensors


def with_stored(config: TransformerConfig, folder: Path) -> TransformerConfig:
    """Return the shape of a model with what its weight files say about dtypes.

    It is unchanged if the folder has no weight files, or damaged ones, which loading reports.
    """
    if not FAMILIES[config.family].float32:
        return config
    try:
        tensors = read_headers(folder)
    except (CheckpointError, OSError, ValueError):
        return config
    wide = {name for name, header in tensors.items() if header["dtype"] == "F32"}
    return replace(
        config, float32=tuple(each for each in config.float32 if any(name.endswith(f".{each}") for name in wide))
    )


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the dtype and shape of each tensor in the weight files of a folder, as their headers name them."""
    found: dict[str, dict[str, Any]] = {}
    for path in weight_files(folder):
        with open(path, "rb") as file:
            n_bytes = int.from_bytes(file.read(8), "little")
            if n_bytes > MAX_HEADER:
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(file.read(n_bytes))
        found |= {name: about for name, about in header.items() if name != "__metadata__"}
    return found
