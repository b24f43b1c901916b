"""How the weight files of a folder store a model, from the headers of the files. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError
from areno.models.config import (
    SCALES,
    Family,
    KeptTensor,
    StoredWeights,
    TransformerConfig,
    fp8_block_size,
    shape_of_scales,
)
from areno.models.families import FAMILIES, unread_prefixes
from areno.models.folder import join_first_names, weight_files

MAX_HEADER = 10**8  # bytes; the limit of safetensors
_BEYOND_BF16 = {"F16", "F32", "F64"}  # safetensors' names of the dtypes with numbers that bfloat16 would round


def with_stored(config: TransformerConfig, folder: Path, values: Mapping[str, Any]) -> TransformerConfig:
    """Return the shape of a model with what its weight files say. `values`: the content of config.json.

    It is unchanged if the folder has no weight files, or damaged ones, which loading reports. Raises CheckpointError if
    it has tensors in FP8 that areno would copy, and whose values cannot be found.
    """
    family = FAMILIES[config.family]
    if not (family.float32 or family.fused_experts or family.unread):
        return config
    try:
        headers = read_headers(folder)
    except (CheckpointError, OSError, ValueError, RecursionError):
        return config
    float32 = tuple(
        each
        for each in config.float32
        if any(header["dtype"] in _BEYOND_BF16 and name.endswith(f".{each}") for name, header in headers.items())
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
    if blocks is not None:
        _refuse_unscaled(folder, {name: each for name, each in headers.items() if name.startswith(unread)}, blocks)
    kept = {
        name: KeptTensor(tuple(header["shape"]), _n_bytes(header), blocks is not None and f"{name}{SCALES}" in headers)
        for name, header in headers.items()
        # transformers writes matrices of a shared expert with no rows or columns.
        if 0 in header["shape"] or (name.startswith(unread) and not (blocks is not None and name.endswith(SCALES)))
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


def _refuse_unscaled(folder: Path, copied: Mapping[str, Mapping[str, Any]], blocks: tuple[int, int]) -> None:
    """Raise CheckpointError if tensors that are copied are in FP8, but are no matrices with a scale for each block."""
    wrong = []
    for name, header in copied.items():
        scales, shape = copied.get(f"{name}{SCALES}", {"shape": None})["shape"], header["shape"]
        expected = shape_of_scales(shape, blocks)
        if header["dtype"].startswith("F8") and not name.endswith(SCALES) and (len(shape) != 2 or scales != expected):
            wrong.append(name)
    if wrong:
        text = f"{folder}: {join_first_names(wrong)}: FP8 that areno would copy; expected matrices, each with a tensor "
        text += f"*{SCALES} of one number for each block of {blocks[0]} x {blocks[1]}; convert them to bfloat16"
        raise CheckpointError(text)


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
        tensors = {**header} if isinstance(header, dict) else {"": header}
        tensors.pop("__metadata__", None)
        if not all(map(_is_description, tensors.values())):
            raise ValueError(f"{path} is not a safetensors file")
        found |= tensors
    return found


def _is_description(about: Any) -> bool:
    """Return whether a header describes a tensor with this value."""
    if not isinstance(about, dict) or not isinstance(about.get("dtype"), str):
        return False
    sizes, place = about.get("shape"), about.get("data_offsets")
    if not isinstance(sizes, list) or not isinstance(place, list) or len(place) != 2:
        return False
    return all(type(number) is int for number in (*sizes, *place))
