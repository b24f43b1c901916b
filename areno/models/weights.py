"""Loading and saving the weights of Hugging Face folders, in safetensors files.

`stored_tensors` maps tensor names to parameters, for loading and for saving. Functions raise CheckpointError, which
lists all tensors and files that are missing, damaged or do not fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from areno import heartbeat
from areno.errors import CheckpointError, Key, Problem
from areno.files.durable import sync, sync_tree
from areno.layers.embedding import VocabParallelEmbedding
from areno.layers.experts import ExpertMatrices
from areno.layers.linear import Linear
from areno.layers.parallel import ParallelGroup
from areno.layers.rotary import head_order, permute_heads
from areno.layers.shard import TensorPart
from areno.models.block_scales import SCALES, BlockScaledSlice
from areno.models.config import Family, TransformerConfig, fp8_block_size
from areno.models.families import FAMILIES, module_names, stored_names
from areno.models.folder import (
    INDEX,
    SHOWN,
    add_eos_token_ids,
    copy_tokenizer_files,
    join_first_names,
    open_safetensors,
    resolve_model_folder,
    tensor_files,
    write_json,
)
from areno.models.transformer import Transformer, is_finite

logger = logging.getLogger("areno")

FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of the dtypes that can be loaded
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
MAPPED_BYTES = 2**26  # the bytes read from a file before it is closed and opened again
ALIGNMENT = 16  # bytes of each tensor in host memory
FILES_OF_A_RANK = 2  # at least, if several ranks write, so that a rank holds half of its share at a time
MIN_SHARD_BYTES = 2**24  # of a model that several ranks write. A smaller file is not worth the division
MAX_SHARD_BYTES = 2**32  # the most of a file with several tensors; pinned memory is allocated in powers of two


class CheckpointEntry(NamedTuple):
    """A tensor under its unfused name, such as that of q_proj, and where the model keeps it."""

    name: str
    parameter: Tensor
    part: TensorPart


def checkpoint_table(model: Transformer) -> list[CheckpointEntry]:
    """Return all tensors of the model's checkpoint in a fixed order, without adapters. A tied head is listed once."""
    return [
        CheckpointEntry(name, parameter, part)
        for own_name, parameter in model.named_parameters()
        if ".adapter." not in own_name
        for name, part in zip(_checkpoint_names(own_name, model), model.tensor_parts(own_name), strict=True)
    ]


class StoredTensor(NamedTuple):
    """A tensor in the weight files. If these fuse modules, it stacks the rows of several `CheckpointEntry` tensors.

    If `by_column`, it has the columns of n entries in turn: column i of entry e is column i n + e.
    """

    entries: list[CheckpointEntry]
    orders: list[Tensor | None]  # for each entry, the result of `head_order`
    by_column: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [entry.part.full_shape for entry in self.entries]
        if self.by_column:
            return (shapes[0][0], sum(shape[1] for shape in shapes))
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.entries[0].parameter.dtype

    def columns_in_turn(self, stacked: Tensor) -> Tensor:
        """Return the tensor of the file, given the entries one after another."""
        return stacked.view(len(self.entries), self.shape[0], -1).permute(1, 2, 0).reshape(self.shape)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the entries that lie one after another in the memory of `whole`."""
        shapes = [entry.part.full_shape for entry in self.entries]
        parts = whole.view(-1).split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def stored_tensors(model: Transformer) -> dict[str, StoredTensor]:
    """Return the tensors in the weight files by name, in the order of `checkpoint_table`."""
    config = model.config
    order = head_order(config.rope, config.head_dim)
    stacked = stored_names(config)
    found: dict[str, StoredTensor] = {}
    for entry in checkpoint_table(model):
        name, inner = entry.name, ".".join(entry.name.split(".")[3:-1])  # model.layers.3.<inner>.weight
        if inner in stacked:
            name = name.replace(inner, stacked[inner])
        stored = found.setdefault(name, StoredTensor([], []))
        stored.entries.append(entry)
        stored.orders.append(module_head_order(inner, order, config))
    return found


def module_head_order(inner: str, order: Tensor | None, config: TransformerConfig) -> Tensor | None:
    """Return `order` for the module `inner` if it is a projection or head norm of q or k, else None."""
    if order is None or inner not in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm"):
        return None
    if inner.endswith("_norm"):
        return None if config.qk_norm_whole else order
    if inner == "self_attn.q_proj" and config.attention_gate:  # the gate of a head follows its query
        return torch.cat((order, torch.arange(len(order), 2 * len(order))))
    return order


def _checkpoint_names(parameter: str, model: Transformer) -> tuple[str, ...]:
    """Return the names of the tensors stacked in a parameter such as "layers.3.attention.qkv.weight", in order."""
    module, kind = parameter.rsplit(".", 1)
    return tuple(f"{name}.{kind}" for name in module_names(module, model.config))


class _MatchedTensors(NamedTuple):
    """The tensors of a model and of its weight files. Keys are the names that `stored_tensors` returns."""

    table: dict[str, StoredTensor]
    stored_as: dict[str, str]  # other names in the files, whose prefixes differ in an image-text model
    file_of: dict[str, Path]
    fp8_blocks: tuple[int, int] | None  # sizes of the blocks with one scale, if weights are in FP8

    def stored_slice(self, name: str, tensors: Any) -> Any:
        """Return the slice of a tensor in its open file `tensors`. Of weights in FP8, a slice with their values."""
        stored = tensors.get_slice(self.stored_as[name])
        scales = f"{name}{SCALES}"
        if self.fp8_blocks is None or scales not in self.file_of:
            return stored
        with open_safetensors(self.file_of[scales]) as others:  # may be another file
            return BlockScaledSlice(stored, others.get_tensor(self.stored_as[scales]), self.fp8_blocks)


def _match_tensors(model: Transformer, folder: Path) -> _MatchedTensors:
    found, family = tensor_files(folder), FAMILIES[model.config.family]
    stored_as = {_text_model_name(name, family): name for name in found}
    file_of = {name: found[stored] for name, stored in stored_as.items()}
    if problem := _layers_problem(file_of, model.config.num_layers):
        raise CheckpointError(f"{folder}: {problem}")
    table = stored_tensors(model)
    if not model.config.has_head:
        table = {name: stored for name, stored in table.items() if not name.startswith("score.")}
    problems = []
    if missing := [name for name in table if name not in file_of]:
        problems.append(f"the weights lack {join_first_names(missing)}, which its config.json asks for")
    if extra := [name for name in file_of if name not in table and not _is_harmless(name, model)]:
        problems.append(f"the weights hold {join_first_names(extra)}, which its config.json has no place for")
    if problems:
        raise CheckpointError([Problem("", f"{folder}: {text}") for text in problems])
    return _MatchedTensors(table, stored_as, file_of, fp8_block_size(model.config.hf))


def check_weights(model: Transformer, folder: Path) -> str:
    """Check that the headers of the weight files fit a model. Reads no weights. The model may be on `meta`.

    Return a text such as "310 tensors in 1 file, 1,137.0 MiB".
    """
    found = _match_tensors(model, folder)
    table, _, file_of, _ = found
    problems, files = [], sorted(set(file_of.values()))
    for file in files:
        with open_safetensors(file) as tensors:
            for name in (name for name in table if file_of[name] == file):
                if wrong := _header_problem(name, table[name], found.stored_slice(name, tensors), "config.json"):
                    problems.append(Problem("", f"{file}: {wrong}"))
    if problems:
        more = [Problem("", f"{folder}: and {len(problems) - SHOWN} more tensors")] if len(problems) > SHOWN else []
        raise CheckpointError([*problems[:SHOWN], *more])
    size = sum(file.stat().st_size for file in files) / 2**20
    return f"{len(table)} tensors in {len(files)} file{'s' * (len(files) > 1)}, {size:,.1f} MiB"


def load_weights(model: Transformer, folder: str | Path) -> None:
    """Load weights from a folder or hub id, one tensor at a time. Each rank reads only its own shards."""
    folder = resolve_model_folder(folder)
    found = _match_tensors(model, folder)
    table, _, file_of, fp8_blocks = found
    if fp8_blocks is not None:
        dtype = DTYPE_NAMES[model.embed.weight.dtype]
        logger.info("%s: weights in FP8 with blocks of %d x %d are loaded as %s", folder, *fp8_blocks, dtype)
    if not model.config.has_head:  # a critic that starts from a language model
        assert model.score is not None
        for parameter in model.score.parameters():
            parameter.detach().zero_()
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.clear_padding()
    damaged = []
    for file in sorted(set(file_of.values())):
        names = iter([name for name in file_of if file_of[name] == file and name in table])
        name = next(names, None)
        while name is not None:
            # Pages read from a file stay mapped until it is closed, and count as memory of this process.
            with open_safetensors(file) as tensors:
                mapped = 0
                while name is not None and mapped < MAPPED_BYTES:
                    if not load_shard(name, table[name], found.stored_slice(name, tensors), file):
                        damaged.append(name)
                    mapped += math.prod(table[name].shape) * model.embed.weight.element_size()
                    name = next(names, None)
    if damaged:
        dtype = DTYPE_NAMES[model.embed.weight.dtype]
        wrong = f"{folder}: {join_first_names(damaged)}: numbers that are nan, infinite or beyond {dtype}; "
        raise CheckpointError(wrong + "expected finite weights: download or save the model again")


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

    Adapters are merged into the weights. The ranks of `dp` have replicas of the model and share the work. The folder is
    incomplete until all ranks have written, so a caller that needs atomic replacement must write to a temporary folder
    and rename it. Tokenizer, chat template and generation settings come from the first folder or hub id in `source`
    that has any.

    Taking a function from the iterator is a collective call, and copies the weights of one file to host memory. Calling
    the function writes the file and syncs it to disk. If all functions are taken before the next update of the weights,
    they may be called later, in any thread. `ends`: token ids to add to eos_token_id in generation_config.json.
    """
    folder, dp = Path(folder), dp or ParallelGroup()
    table = stored_tensors(model)
    sizes = {name: math.prod(stored.shape) * stored.dtype.itemsize for name, stored in table.items()}
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
                named = {name: table[name] for name in plan.filename_to_tensors[file]}
                tensors = gather_tensors(named, model, owner, pin_memory)
                if owner == model.tp.rank:
                    write = partial(write_tensors, tensors, named, folder / file, record_copies_event(model.device))
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
        except (OSError, SafetensorError) as error:
            failure = error
        del write  # free its weights before the next file is gathered
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


def write_tensors(tensors: dict[str, Tensor], named: Mapping[str, StoredTensor], file: Path, copied: Any) -> None:
    """Write the tensors that `gather_tensors` returned to a safetensors file, and sync the file to disk.

    First wait for the event `copied`, and permute the rows of heads in place into the file's order.
    """
    if copied is not None:
        copied.synchronize()
    for name, stored in named.items():
        if stored.by_column:
            tensors[name] = stored.columns_in_turn(tensors[name])
            continue
        rows = tensors[name].split([entry.part.full_shape[0] for entry in stored.entries])
        for part, order in zip(rows, stored.orders, strict=True):
            if order is not None:
                part.copy_(permute_heads(part, order.argsort()))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})
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
    written = copy_tokenizer_files([resolve_model_folder(path) for path in source], folder)
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


def _layers_problem(names: Iterable[str], num_layers: int) -> str | None:
    """Return a message if the weight files and config.json have different numbers of layers, else None."""
    layers = [name.split(".", 3)[2] for name in names if name.startswith("model.layers.")]
    found = 1 + max((int(layer) for layer in layers if layer.isdecimal() and len(layer) < 10), default=-1)
    if found in (0, num_layers):
        return None
    wrong = f"config.json says num_hidden_layers={num_layers}, the weight files have {found} layers; "
    return wrong + "set num_hidden_layers to that, or download the model again"


def load_shard(name: str, target: StoredTensor, source: Any, file: Path, shaped_by: str = "config.json") -> bool:
    """Copy this rank's shard of a tensor from a safetensors slice, and return whether all values are finite.

    `source`: the slice. `shaped_by`: the file that error messages name as the source of the expected shape.
    """
    if wrong := _header_problem(name, target, source, shaped_by):
        raise CheckpointError(f"{file}: {wrong}")
    shape, all_finite, row, n = target.shape, True, 0, len(target.entries)
    whole = source[:] if target.by_column else None
    for index, (entry, order) in enumerate(zip(target.entries, target.orders, strict=True)):
        n_rows = entry.part.full_shape[0]
        if whole is not None:
            piece = entry.part.shard_of(whole[:, index::n])
        else:
            piece = entry.part.shard_of(source if n_rows == shape[0] else source[row : row + n_rows])
        row += n_rows
        region = entry.part.region(entry.parameter)
        region.copy_(piece if order is None else permute_heads(piece, order))
        heartbeat.beat()
        all_finite &= is_finite(region)
    return all_finite


def _header_problem(name: str, target: StoredTensor, source: Any, shaped_by: str) -> str | None:
    """Return a message if a tensor's shape or dtype in the file does not fit the model, else None."""
    shape = tuple(source.get_shape())
    if shape != target.shape:
        return f"{name} has shape {shape}, expected {target.shape} from {shaped_by}"
    if source.get_dtype() not in FLOATS:
        return f"{name} is {source.get_dtype()}, expected one of {sorted(FLOATS)}"
    return None


def _text_model_name(name: str, family: Family) -> str:
    """Return a tensor's name as a text model has it. Names in an image-text model have other prefixes."""
    for within, own in family.beginnings.items():
        if name.startswith(within):
            return own + name.removeprefix(within)
    return name


def _is_harmless(name: str, model: Transformer) -> bool:
    """Return whether a tensor in the files may be ignored if the model has no parameter for it.

    This holds for scales of weights in FP8, tables of rotary positions, the copy of a tied head, the LM head of a model
    that becomes a critic, and the tensors that the family lists as `unread`.
    """
    is_unread = name.startswith(FAMILIES[model.config.family].unread)
    is_scale = name.endswith(f".weight{SCALES}") and fp8_block_size(model.config.hf) is not None
    is_copy = model.head is None and name == "lm_head.weight"
    return is_unread or is_scale or is_copy or name.endswith("rotary_emb.inv_freq")


def _saved_config(model: Transformer) -> dict[str, Any]:
    """Return config.json as it was read, but with the dtype of the weights and the architecture of the model's head."""
    family, values = FAMILIES[model.config.family], dict(model.config.hf)
    values.pop("quantization_config", None)  # of weights that were dequantized
    values["dtype" if "dtype" in values else "torch_dtype"] = DTYPE_NAMES[model.embed.weight.dtype]
    if model.score is None:
        values.setdefault("architectures", [family.architecture])
    elif not model.config.has_head:
        values["architectures"] = [family.classes[model.config.head]]
        labels = [f"LABEL_{number}" for number in range(model.config.n_labels)]
        values["id2label"] = {str(number): name for number, name in enumerate(labels)}
        values["label2id"] = {name: number for number, name in enumerate(labels)}
    values.setdefault("model_type", family.name)
    return values
