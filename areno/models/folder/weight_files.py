"""The weight files of a model folder: which there are and which tensors they hold, from their headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from areno.errors import CheckpointError, Key, Problem, printable
from areno.models.folder.raw_config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the name of each tensor with the file that holds it.

    Raises:
        CheckpointError: if there are no weights, or with all files that are missing, cut off or damaged.
    """
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        files = [folder / name for name in _indexed_files(folder / INDEX)]
    elif any(folder.glob("pytorch_model*.bin")):
        advice = "convert them to safetensors, for example by loading and saving the model once with transformers"
        raise CheckpointError(f"{folder} has its weights in pytorch_model.bin only; {advice}")
    else:
        wrong = f"has no weights: looked for {SINGLE} and {INDEX}; download the model again "
        advice = "(actor and critic can start from random weights in the shape of config.json: {}=true, {}=true)"
        keys = (Key("actor.init_from_scratch"), Key("critic.init_from_scratch"))
        raise CheckpointError("{} " + wrong + advice, folder, *keys)
    file_of: dict[str, Path] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, though {INDEX} lists it; download the model again")
            with opened(file) as tensors:
                file_of.update(dict.fromkeys(tensors.keys(), file))
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    return file_of


def _indexed_files(index: Path) -> list[str]:
    """Return the files that an index names. Raises CheckpointError unless all are plain names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} is not a safetensors index; expected weight_map, an object of file names")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if not _is_plain(name)]:
        wrong = f"{index}: weight_map names {', '.join(repr(name[:80]) for name in outside[:5])}; "
        raise CheckpointError(wrong + "expected plain names of .safetensors files in this folder")
    return names


def _is_plain(name: str) -> bool:
    """Return whether a name is one of a safetensors file in the same folder, which file systems can have."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0") and len(os.fsencode(name)) <= 255


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises CheckpointError, which names the file, for all that is wrong with it."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        said = printable(str(error))
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({said}); download it again") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
