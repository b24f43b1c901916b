"""Weights from and to Hugging Face safetensors folders. One table of names, the family's, serves both directions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areno.errors import CheckpointError, Key
from areno.files.durable import sync_tree
from areno.layers.embedding import VocabParallelEmbedding
from areno.layers.shard import Part
from areno.models.companions import copy_companions
from areno.models.hub import resolve
from areno.models.transformer import Transformer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of what we can read
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SHOWN = 5  # names listed in an error


@dataclass(frozen=True)
class Entry:
    """A checkpoint tensor, the parameter that holds it and where."""

    name: str
    parameter: Tensor
    part: Part


def checkpoint_table(model: Transformer) -> list[Entry]:
    """Every tensor of the model's checkpoint in a fixed order; a tied head has none of its own."""
    return [
        Entry(name, parameter, part)
        for own_name, parameter in model.named_parameters()
        for name, part in zip(model.family.checkpoint_names(own_name), model.layout(own_name), strict=True)
    ]


def load_weights(model: Transformer, folder: str | Path) -> None:
    """Fill the model from a folder or hub id, one tensor at a time, reading only this rank's pieces.

    CheckpointError where weights are absent, corrupt, incomplete, left over, or not of the shape config.json says.
    """
    folder = resolve(folder)
    file_of = _tensor_files(folder)
    table = {entry.name: entry for entry in checkpoint_table(model)}
    if not model.config.has_head:  # a critic that starts from a language model
        assert model.score is not None
        model.score.weight.detach().zero_()
        table = {name: entry for name, entry in table.items() if entry.parameter is not model.score.weight}
    missing = [name for name in table if name not in file_of]
    if missing:
        raise CheckpointError(f"{folder}: the weights lack {_listing(missing)}, which its config.json asks for")
    extra = [name for name in file_of if name not in table and not _is_harmless(name, model)]
    if extra:
        raise CheckpointError(f"{folder}: the weights hold {_listing(extra)}, which its config.json has no place for")
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.clear_padding()
    for file in sorted(set(file_of.values())):
        with _opened(file) as tensors:
            for name in (name for name in tensors.keys() if file_of[name] == file and name in table):  # noqa: SIM118
                _fill(table[name], tensors.get_slice(name), file)


def save_weights(
    model: Transformer,
    folder: str | Path,
    *,
    source: str | Path | Sequence[str | Path] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that `transformers` loads: config.json, safetensors files, and the companions of `source`.

    Every tensor-parallel rank calls it; rank 0 writes, and all files are on the disk when it returns. `folder` is made
    if need be; to make it appear whole or not at all is the caller's task.
    source: folders or hub ids whose tokenizer, chat template and generation settings are carried along; the first that
    has them counts.
    dtype: of the written weights; None keeps the model's. max_shard_bytes: weights beyond it go into several files.
    CheckpointError, on every rank, where the folder cannot be written.
    """
    folder = Path(folder)
    dtype = dtype or model.embed.weight.dtype
    shards = _plan_shards(checkpoint_table(model), dtype.itemsize, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with _written_by_rank_0(model, folder) as writes:
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            sources = [source] if isinstance(source, str | Path) else source
            copy_companions([resolve(path) for path in sources], folder)
            _write_json(folder / "config.json", _saved_config(model, dtype))
            if len(shards) > 1:
                _write_json(folder / INDEX, _index(shards, names, dtype.itemsize))
    for name, shard in zip(names, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for entry in shard:
            full = entry.part.gather(entry.parameter, model.tp)
            if model.tp.rank == 0:
                tensors[entry.name] = full.to(device="cpu", dtype=dtype, copy=True).contiguous()
        with _written_by_rank_0(model, folder) as writes:
            if writes:
                save_file(tensors, folder / name, metadata={"format": "pt"})
                # safetensors makes its files readable by their owner only; give them what config.json got
                (folder / name).chmod((folder / "config.json").stat().st_mode & 0o777)
    with _written_by_rank_0(model, folder) as writes:
        if writes:
            sync_tree(folder)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        files = [folder / name for name in _indexed_files(folder / INDEX)]
    elif any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} has its weights in pytorch_model.bin only; convert them to safetensors, for example by loading "
            "and saving the model once with transformers"
        )
    else:
        raise CheckpointError(
            "{} has no weights: looked for {} and {}; download the model again (only the actor can start from random "
            "weights in the shape of its config.json: {}=true)",
            folder,
            SINGLE,
            INDEX,
            Key("actor.init_from_scratch"),
        )
    file_of: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, though {INDEX} lists it; download the model again")
        with _opened(file) as tensors:
            file_of.update(dict.fromkeys(tensors.keys(), file))
    return file_of


def _indexed_files(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {type(error).__name__}: {error}") from error
    return sorted(names)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The safetensors file; what is wrong with it names it."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({error}); download it again") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _fill(entry: Entry, stored: Any, file: Path) -> None:
    shape = tuple(stored.get_shape())
    if shape != entry.part.full_shape:
        expected = entry.part.full_shape
        raise CheckpointError(f"{file}: {entry.name} has shape {shape}, expected {expected} from config.json")
    if stored.get_dtype() not in FLOATS:
        raise CheckpointError(f"{file}: {entry.name} is {stored.get_dtype()}, expected one of {sorted(FLOATS)}")
    entry.part.region(entry.parameter).copy_(entry.part.cut(stored))


def _is_harmless(name: str, model: Transformer) -> bool:
    """Tensors that carry no information: computed tables, the second copy of a tied head, the vocabulary head of what
    becomes a value model."""
    not_needed = model.head is None and name in model.family.checkpoint_names("head.weight")
    return not_needed or name.endswith("rotary_emb.inv_freq")


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _plan_shards(table: list[Entry], itemsize: int, max_bytes: int) -> list[list[Entry]]:
    """Consecutive tensors of at most `max_bytes` together; a larger tensor has a file of its own."""
    shards: list[list[Entry]] = [[]]
    room = max_bytes
    for entry in table:
        size = _n_bytes(entry, itemsize)
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= size
    return shards


def _n_bytes(entry: Entry, itemsize: int) -> int:
    return torch.Size(entry.part.full_shape).numel() * itemsize


def _index(shards: list[list[Entry]], names: list[str], itemsize: int) -> dict[str, Any]:
    total = sum(_n_bytes(entry, itemsize) for shard in shards for entry in shard)
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _saved_config(model: Transformer, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as it was read, with the dtype of the written weights under the key it used, and the model's head."""
    values = dict(model.config.hf)
    values["dtype" if "dtype" in values else "torch_dtype"] = DTYPE_NAMES[dtype]
    if model.score is None:
        values.setdefault("architectures", [model.family.architecture])
    elif not model.config.has_head:
        values["architectures"] = [model.family.value_architecture]
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    values.setdefault("model_type", model.family.name)
    return values


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _written_by_rank_0(model: Transformer, folder: Path) -> Iterator[bool]:
    """Yields whether this rank writes. If that fails, every rank raises: none waits in the next collective call."""
    failure: Exception | None = None
    try:
        yield model.tp.rank == 0
    except (OSError, SafetensorError) as error:
        failure = error
    failed = torch.tensor(float(failure is not None), device=model.device)
    if model.tp.all_reduce(failed).item():
        reason = f": {failure}" if failure else ""
        raise CheckpointError(
            "cannot write the model to {}{}; free some space or choose another folder with {}",
            folder, reason, Key("saver.path"),
        ) from failure  # fmt: skip
