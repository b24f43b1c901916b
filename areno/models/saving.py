"""Saving the weights of a model to a Hugging Face folder, in safetensors files.

Functions raise CheckpointError if a folder cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from areno import heartbeat
from areno.errors import CheckpointError, Key
from areno.files.durable import sync, sync_tree
from areno.layers.linear import Linear
from areno.layers.mlp import ExpertMatrices
from areno.layers.parallel import ParallelGroup
from areno.layers.rotary import permute_heads
from areno.models.block_scales import BlockScaledSlice
from areno.models.config import SCALES, fp8_block_size
from areno.models.families import FAMILIES
from areno.models.folder import (
    GENERATION,
    INDEX,
    PROCESSOR,
    TOKENIZER,
    add_eos_token_ids,
    copy_tokenizer_files,
    join_first_names,
    open_safetensors,
    resolve_model_folder,
    tensor_files,
    write_json,
)
from areno.models.transformer import Transformer
from areno.models.weights import DTYPE_NAMES, StoredTensor, stored_tensors

ALIGNMENT = 16  # bytes of each tensor in host memory
FILES_OF_A_RANK = 2  # at least, if several ranks write, so that a rank holds half of its share at a time
MIN_SHARD_BYTES = 2**24  # of a model that several ranks write. A smaller file is not worth the division
MAX_SHARD_BYTES = 2**32  # the most of a file with several tensors; pinned memory is allocated in powers of two


def file_writers(
    model: Transformer,
    folder: str | Path,
    *,
    source: Sequence[str | Path] = (),
    dp: ParallelGroup | None = None,
    pin_memory: bool = False,
    ends: Collection[int] = (),
) -> Iterator[Callable[[], None]]:
    """Yield functions for `write_all`. They write this rank's files of a folder that `transformers` can load.

    Tensors have the names, the dtypes and the layout of the folder that was read, whose tensors that areno does not use
    are copied (`TransformerConfig.stored`). Adapters are merged into the weights. The ranks of `dp` have replicas of
    the model and share the work. The folder is incomplete until all ranks have written, so a caller that needs atomic
    replacement must write to a temporary folder and rename it. Tokenizer, chat template and generation settings come
    from the first folder or hub id in `source` that has any.

    Taking a function from the iterator is a collective call, and copies the weights of one file to host memory. Calling
    the function writes the file and syncs it to disk. If all functions are taken before the next update of the weights,
    they may be called later, in any thread. `ends`: token ids to add to eos_token_id in generation_config.json.
    """
    folder, dp = Path(folder), dp or ParallelGroup()
    table = {_saved_name(name, model): stored for name, stored in stored_tensors(model).items()}
    sizes = {name: math.prod(stored.shape) * stored.dtype.itemsize for name, stored in table.items()}
    sizes |= kept_sizes(model)
    n_ranks, total = dp.size * model.tp.size, sum(sizes.values())
    n_files = max(1, min(FILES_OF_A_RANK * n_ranks, total // MIN_SHARD_BYTES)) if n_ranks > 1 else 1
    plan = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=min(MAX_SHARD_BYTES, -(-total // n_files)),
    )
    if dp.rank == model.tp.rank == 0:
        yield partial(_write_other_files, model, folder, source, plan, ends)
    shares = _divide_files(
        {file: sum(sizes[n] for n in names) for file, names in plan.filename_to_tensors.items()}, n_ranks
    )
    # Each copy of the model gathers its own files, one for each of its ranks at a time, and the ranks write together.
    for files in zip_longest(*shares[dp.rank * model.tp.size :][: model.tp.size]):
        write = None
        for owner, file in enumerate(files):
            if file is not None:
                names = plan.filename_to_tensors[file]
                named = {name: table[name] for name in names if name in table}
                kept = [name for name in names if name not in table]
                tensors = gather_tensors(named, model, owner, pin_memory)
                if owner == model.tp.rank:
                    copied = record_copies_event(model.device)
                    more = partial(read_kept, model, kept) if kept else None
                    write = partial(write_tensors, tensors, named, folder / file, copied, more)
                del tensors  # only `write` holds them, as long as the caller holds `write`
        if write is not None:
            yield write
        del write


def write_all(folder: str | Path, writes: Iterable[Callable[[], None]]) -> None:
    """Take and call all functions that `file_writers` or `adapter_writers` yields.

    After a failure the remaining functions are taken but not called, because taking a function is a collective call.
    """
    failure: Exception | None = None
    for write in writes:  # take all, even after a failure: taking a function is a collective call
        try:
            if failure is None:
                write()
        except (OSError, SafetensorError, CheckpointError) as error:
            failure = error
        del write  # free its weights before the next file is gathered
    if isinstance(failure, CheckpointError):
        raise CheckpointError("cannot write the model to {}: {}", folder, failure) from failure
    if failure is not None:
        text = "cannot write the model to {}: {}; free some space or choose another folder with {}"
        raise CheckpointError(text, folder, failure, Key("saver.path")) from failure


def _divide_files(sizes: dict[str, int], n: int) -> list[list[str]]:
    """Divide files (name -> bytes) over n ranks: the largest first, each to the rank with the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(n)]
    loads = [0] * n
    for file in sorted(sizes, key=lambda file: -sizes[file]):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += sizes[file]
    return shares


def gather_tensors(
    named: Mapping[str, StoredTensor], model: Transformer, owner: int, pin_memory: bool
) -> dict[str, Tensor]:
    """Gather tensors into host memory of the tensor-parallel rank `owner`. A collective call.

    Other ranks return an empty dict. Adapters are merged. The rows of heads are in the model's order; `write_tensors`
    changes them to the file's order. Copies to pinned memory may still be in progress on return.
    """
    entries = [entry for stored in named.values() for entry in stored.entries]
    outs: Sequence[Tensor | None] = [None] * len(entries)
    tensors = {}
    if owner == model.tp.rank:
        tensors = _empty_tensors(named, pin_memory)
        outs = [part for name, stored in named.items() for part in stored.split(tensors[name])]
    adapted = {id(module.weight): module for module in model.modules() if isinstance(module, (Linear, ExpertMatrices))}
    before = whole = entries[0].parameter if entries else model.embed.weight
    for index, (entry, out) in enumerate(zip(entries, outs, strict=True)):
        if index == 0 or entry.parameter is not before:  # a parameter with several tensors is merged once
            before, linear = entry.parameter, adapted.get(id(entry.parameter))
            whole = entry.parameter if linear is None else linear.merged_weight()
        entry.part.gather(whole, model.tp, owner, out)
        heartbeat.beat()
    return tensors


def _empty_tensors(named: Mapping[str, StoredTensor], pin_memory: bool) -> dict[str, Tensor]:
    """Allocate host memory for the tensors of a file: one buffer, as pinned memory is allocated in powers of two."""
    sizes = [math.prod(stored.shape) * stored.dtype.itemsize for stored in named.values()]
    padded = [size + -size % ALIGNMENT for size in sizes]
    buffers = torch.empty(sum(padded), dtype=torch.uint8, pin_memory=pin_memory).split(padded)
    return {
        name: buffer[:size].view(stored.dtype).view(stored.shape)
        for (name, stored), buffer, size in zip(named.items(), buffers, sizes, strict=True)
    }


def record_copies_event(device: torch.device) -> Any:
    """Record a CUDA event after all work queued on a device, for `write_tensors`. Returns None for a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def write_tensors(
    tensors: dict[str, Tensor],
    named: Mapping[str, StoredTensor],
    file: Path,
    copied: Any,
    more: Callable[[], dict[str, Tensor]] | None = None,
) -> None:
    """Write the tensors that `gather_tensors` and `more` return to a safetensors file, and sync the file to disk.

    First wait for the event `copied`, and permute the rows of heads in place into the file's order.
    """
    if copied is not None:
        copied.synchronize()
    for name, stored in named.items():
        tensors[name] = stored.in_file_order(tensors[name])
        if stored.by_column:
            continue
        for part, order in zip(stored.split(tensors[name]), stored.orders, strict=True):
            if order is not None:
                part.copy_(permute_heads(part, order.argsort()))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors if more is None else {**tensors, **more()}, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read
    sync(file)
    sync(file.parent)


def _write_other_files(
    model: Transformer, folder: Path, source: Sequence[str | Path], plan: Any, ends: Collection[int]
) -> None:
    """Write config.json, tokenizer files and, for several weight files, the index. Sync them to disk.

    `plan`: the division of tensors into weight files, from huggingface_hub.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sets = (TOKENIZER, GENERATION, PROCESSOR) if _kept_around(model) else (TOKENIZER, GENERATION)
    written = copy_tokenizer_files([resolve_model_folder(path) for path in source], folder, sets)
    written.append(write_json(folder / "config.json", _saved_config(model)))
    if listing_ends := add_eos_token_ids(folder, model.config.eos_token_ids, ends):
        written.append(listing_ends)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        written.append(write_json(folder / INDEX, index))
    sync_written(folder, written)


def sync_written(folder: Path, written: Iterable[Path]) -> None:
    """Sync written files and folders to disk, then the directory `folder`, which contains them."""
    for path in written:
        sync_tree(path) if path.is_dir() else sync(path)
    sync(folder)


def _saved_config(model: Transformer) -> dict[str, Any]:
    """Return config.json as it was read, but with the dtype of the weights and the architecture of the model's head."""
    family, values = FAMILIES[model.config.family], dict(model.config.hf)
    if around := _kept_around(model):
        return {**_with_dtype(around, model), "text_config": _with_dtype(around["text_config"], model)}
    values = _with_dtype(values, model)
    if model.score is None:
        values.setdefault("architectures", [family.architecture])
    elif not model.config.has_head:
        values["architectures"] = [family.classes[model.config.head]]
        labels = [f"LABEL_{number}" for number in range(model.config.n_labels)]
        values["id2label"] = {str(number): name for number, name in enumerate(labels)}
        values["label2id"] = {name: number for number, name in enumerate(labels)}
    values.setdefault("model_type", family.name)
    return values


def _with_dtype(values: Mapping[str, Any], model: Transformer) -> dict[str, Any]:
    """Return a section of config.json with the dtype of the run, to which weights in FP8 were dequantized."""
    kept = {name: value for name, value in values.items() if name != "quantization_config"}
    return {**kept, "dtype" if "dtype" in values else "torch_dtype": DTYPE_NAMES[model.embed.weight.dtype]}


def _kept_around(model: Transformer) -> Mapping[str, Any]:
    """Return config.json of the image-text model if the model is saved as such, else an empty mapping."""
    return {} if model.config.stored is None else model.config.stored.around


def _saved_name(name: str, model: Transformer) -> str:
    """Return the name of a tensor in the files, given its name in a text model."""
    for own, within in ({} if model.config.stored is None else model.config.stored.beginnings).items():
        if name.startswith(own):
            return within + name.removeprefix(own)
    return name


def kept_sizes(model: Transformer) -> dict[str, int]:
    """Return the bytes of each tensor that areno does not use."""
    kept = {} if model.config.stored is None else model.config.stored.kept
    itemsize = model.embed.weight.dtype.itemsize
    return {
        name: math.prod(tensor.shape) * itemsize if tensor.has_scales else tensor.n_bytes
        for name, tensor in kept.items()
    }


def read_kept(model: Transformer, names: Sequence[str]) -> dict[str, Tensor]:
    """Read tensors that areno does not use from the folder of the model. Weights in FP8 are dequantized."""
    stored, blocks = model.config.stored, fp8_block_size(model.config.hf)
    assert stored is not None
    try:
        file_of = tensor_files(stored.folder)
    except CheckpointError:
        file_of = {}
    if missing := [name for name in names if name not in file_of]:
        text = f"{stored.folder} no longer holds {join_first_names(missing)}, which are copied from there; "
        raise CheckpointError(text + "put the weight files of this model there again")
    found = {}
    for name in names:
        with open_safetensors(file_of[name]) as tensors:
            if stored.kept[name].has_scales and blocks is not None:
                scales = f"{name}{SCALES}"
                with open_safetensors(file_of[scales]) as others:
                    values = BlockScaledSlice(tensors.get_slice(name), others.get_tensor(scales), blocks)[:, :]
                found[name] = values.to(model.embed.weight.dtype)
            else:
                found[name] = tensors.get_tensor(name)
        heartbeat.beat()
    return found
