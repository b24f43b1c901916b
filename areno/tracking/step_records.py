"""The files of the flight recorder: what each step received and computed, exact and binary.

<run>/recorder/000012.zip         the record of a step: record.json and its arrays, with checksums
               state/step-000010  a pinned training state, as areno.run.states stores it

A record is a tree of dictionaries, lists, numbers, texts, arrays and the records of areno.types. Nothing is pickled, so
a record from elsewhere cannot run code.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from areno.errors import ArenoError
from areno.files.durable import UNFINISHED, remove
from areno.types import RewardOutcome, RolloutSequence, TokenRow, Trajectory

FOLDER = "recorder"
"""Name of the folder in the folder of a run."""
FORMAT = 2
_TREE = "record.json"
_TYPES: dict[str, Any] = {cls.__name__: cls for cls in (RewardOutcome, RolloutSequence, TokenRow, Trajectory)}
_FIELDS = {name: [field.name for field in fields(cls)] for name, cls in _TYPES.items()}
_FEWEST_NUMBERS = 8  # shorter lists are written as text
_SUFFIX = ".zip"


class UnrecordableError(TypeError):
    """Raised for a value that has no place in a record, such as an object of a user's class."""


class RecordFolder:
    """The records of the steps of one run. The folder is made when the first record is written."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path_of(self, step: int) -> Path:
        return self.folder / f"{step:06d}{_SUFFIX}"

    def steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())

    def sizes(self) -> dict[int, int]:
        """Return step -> size of its record in bytes, in ascending order of steps."""
        return {step: self.path_of(step).stat().st_size for step in self.steps()}

    def write(self, step: int, tree: Mapping[str, Any]) -> None:
        """Write the record of a step. The file appears only when it is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f"{UNFINISHED}{self.path_of(step).name}"
        try:
            _write_tree(unfinished, tree)
            os.replace(unfinished, self.path_of(step))
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def read(self, step: int) -> dict[str, Any]:
        """Read the record of a step. Raises ArenoError if it is missing or damaged."""
        path = self.path_of(step)
        try:
            tree = _read_tree(path)
        except FileNotFoundError:
            raise ArenoError("there is no record of step {}: {} is missing", step, path) from None
        except Exception as error:  # a damaged file can make zipfile, zlib, json and numpy raise almost anything
            raise ArenoError("the record {} is damaged ({}: {})", path, type(error).__name__, error) from error
        if tree.get("step") != step:
            raise ArenoError("the record {} is damaged (it is that of step {})", path, tree.get("step"))
        return tree

    def remove(self, step: int) -> None:
        self.path_of(step).unlink(missing_ok=True)

    def remove_after(self, step: int) -> None:
        """Remove the records of later steps, which the run repeats, and unfinished files."""
        for later in (each for each in self.steps() if each > step):
            self.remove(later)
        for path in self.folder.glob(f"{UNFINISHED}*{_SUFFIX}"):
            remove(path)


def _write_tree(path: Path, tree: Mapping[str, Any]) -> None:
    arrays: list[np.ndarray] = []
    whole = {
        "format": FORMAT,
        "tree": _to_json(tree, arrays),
        "arrays": [[_name_of(a.dtype), *a.shape] for a in arrays],
    }
    by_dtype: dict[str, list[np.ndarray]] = {}
    for array in arrays:
        by_dtype.setdefault(_name_of(array.dtype), []).append(array.reshape(-1))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr(_TREE, json.dumps(whole, separators=(",", ":")))
        for name, found in by_dtype.items():
            file.writestr(name, np.concatenate(found).astype(np.dtype(name).newbyteorder("<"), copy=False).tobytes())


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which numpy makes anew each time


def _read_tree(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as file:  # each read checks a checksum
        whole = json.loads(file.read(_TREE))
        if whole["format"] != FORMAT:
            raise ValueError(f"its format is {whole['format']}, and this areno reads format {FORMAT}")
        flat = {
            name: np.frombuffer(file.read(name), np.dtype(name).newbyteorder("<"))
            for name in dict.fromkeys(name for name, *_ in whole["arrays"])
        }
    arrays, at = [], dict.fromkeys(flat, 0)
    for name, *shape in whole["arrays"]:
        size = int(np.prod(shape, dtype=np.int64))
        arrays.append(flat[name][at[name] : at[name] + size].reshape(shape))
        at[name] += size
    return _from_json(whole["tree"], arrays)


def _to_json(value: Any, arrays: list[np.ndarray]) -> Any:
    """Convert a value to JSON. Its arrays and longer lists of numbers are appended to `arrays`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if (name := type(value).__name__) in _TYPES and isinstance(value, _TYPES[name]):
        # `vars` has the stored arrays of Numbers, which reading the attribute would convert to lists.
        stored = vars(value) if hasattr(value, "__dict__") else {key: getattr(value, key) for key in _FIELDS[name]}
        return {"$type": name, "of": {key: _to_json(each, arrays) for key, each in stored.items()}}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise UnrecordableError(f"an array of {value.dtype}")
        arrays.append(value)
        return {"$array": len(arrays) - 1}
    if isinstance(value, list):
        if (array := _as_array(value)) is None:
            return [_to_json(each, arrays) for each in value]
        arrays.append(array)
        return {"$list": len(arrays) - 1}
    if isinstance(value, tuple):
        return {"$tuple": [_to_json(each, arrays) for each in value]}
    if isinstance(value, (dict, Mapping)):  # a dict first, because a Mapping is recognised slowly
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _to_json(each, arrays) for key, each in value.items()}
        return {"$pairs": [[_to_json(key, arrays), _to_json(each, arrays)] for key, each in value.items()]}
    raise UnrecordableError(f"a {type(value).__name__}")


def _as_array(numbers: list[Any]) -> np.ndarray | None:
    """Return a longer list of numbers of one type as an array, or None."""
    if len(numbers) < _FEWEST_NUMBERS or type(numbers[0]) not in (int, float):
        return None
    if any(type(number) is not type(numbers[0]) for number in numbers):
        return None
    array = np.asarray(numbers)
    return array if array.dtype in (np.int64, np.float64) else None  # integers of more than 64 bits stay text


def _from_json(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_from_json(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        return arrays[value["$array"]]
    if "$list" in value:
        return arrays[value["$list"]].tolist()
    if "$tuple" in value:
        return tuple(_from_json(each, arrays) for each in value["$tuple"])
    if "$pairs" in value:
        return {_from_json(key, arrays): _from_json(each, arrays) for key, each in value["$pairs"]}
    if "$type" in value:
        return _TYPES[value["$type"]](**{key: _from_json(each, arrays) for key, each in value["of"].items()})
    return {key: _from_json(each, arrays) for key, each in value.items()}
