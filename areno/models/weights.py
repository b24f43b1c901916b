"""Weights from and to Hugging Face safetensors folders. One table of names serves both directions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from areno.layers.linear import Linear
from areno.layers.parallel import ParallelGroup
from areno.layers.rotary import head_order, in_order
from areno.layers.shard import Part
from areno.models.config import Family, TransformerConfig
from areno.models.families import FAMILIES, module_names, stored_names
from areno.models.folder import INDEX, copy_tokenizer_files, opened, resolve, tensor_files
from areno.models.transformer import Transformer

FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of what we can read
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SHOWN = 5  # names listed in an error
MAPPED_BYTES = 2**26  # of a file, before it is closed and opened again, where no tensor is larger
FILES_OF_A_RANK = 2  # at least, where several write: a rank that writes one at a time has half of its share in memory
MAX_SHARD_BYTES = 2**32  # of a file, unless a single tensor is larger; a power of two fills pinned memory


class Entry(NamedTuple):
    """A checkpoint tensor, the parameter that holds it and where. Names are Llama's, or the family's own `names`."""

    name: str
    parameter: Tensor
    part: Part


def checkpoint_table(model: Transformer) -> list[Entry]:
    """Every tensor of the model's checkpoint in a fixed order; a tied head and adapters have none of their own."""
    return [
        Entry(name, parameter, part)
        for own_name, parameter in model.named_parameters()
        if ".adapter." not in own_name
        for name, part in zip(_checkpoint_names(own_name, model), model.layout(own_name), strict=True)
    ]


class Stored(NamedTuple):
    """A tensor of the weight files: entries one below the other, nearly always a single one.

    orders: of each entry: for our numbers of a head, which of the file's each is; None where they are the same.
    """

    entries: list[Entry]
    orders: list[Tensor | None]

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [entry.part.full_shape for entry in self.entries]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def stored_tensors(model: Transformer) -> dict[str, Stored]:
    """The tensors of the weight files by name, in the order of `checkpoint_table`."""
    config = model.config
    order = head_order(config.rope, config.head_dim)
    stacked = stored_names(config)
    found: dict[str, Stored] = {}
    for entry in checkpoint_table(model):
        name, inner = entry.name, ".".join(entry.name.split(".")[3:-1])  # in a layer: model.layers.3.<inner>.weight
        if inner in stacked:
            name = name.replace(inner, stacked[inner])
        stored = found.setdefault(name, Stored([], []))
        stored.entries.append(entry)
        stored.orders.append(order_in(inner, order, config))
    return found


def order_in(inner: str, order: Tensor | None, config: TransformerConfig) -> Tensor | None:
    """The order of a tensor's heads, where that of queries and keys is another one than the file's."""
    if order is None or inner not in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm"):
        return None
    if inner.endswith("_norm"):
        return None if config.qk_norm_whole else order
    if inner == "self_attn.q_proj" and config.attention_gate:  # the numbers that gate a head are behind it
        return torch.cat((order, torch.arange(len(order), 2 * len(order))))
    return order


def _checkpoint_names(parameter: str, model: Transformer) -> tuple[str, ...]:
    """ "layers.3.attention.qkv.weight" -> the checkpoint tensors it holds, in order."""
    module, kind = parameter.rsplit(".", 1)
    return tuple(f"{name}.{kind}" for name in module_names(module, model.config))


class _Matched(NamedTuple):
    """The tensors of weight files and of a model. stored_as: our name of a tensor -> its name in the file."""

    table: dict[str, Stored]
    stored_as: dict[str, str]
    file_of: dict[str, Path]


def _matched(model: Transformer, folder: Path) -> _Matched:
    """Match the tensors of a folder with those of the model. Raises CheckpointError with all names that differ."""
    found, family = tensor_files(folder), FAMILIES[model.config.family]
    stored_as = {_own_name(name, family): name for name in found}
    file_of = {name: found[stored] for name, stored in stored_as.items()}
    if problem := _layers_problem(file_of, model.config.num_layers):
        raise CheckpointError(f"{folder}: {problem}")
    table = stored_tensors(model)
    if not model.config.has_head:
        del table["score.weight"]
    problems = []
    if missing := [name for name in table if name not in file_of]:
        problems.append(f"the weights lack {listing(missing)}, which its config.json asks for")
    if extra := [name for name in file_of if name not in table and not _is_harmless(name, model)]:
        problems.append(f"the weights hold {listing(extra)}, which its config.json has no place for")
    if problems:
        raise CheckpointError([Problem("", f"{folder}: {text}") for text in problems])
    return _Matched(table, stored_as, file_of)


def check_weights(model: Transformer, folder: Path) -> str:
    """Compare the headers of weight files with a model, which may be on the device `meta`. Reads no weights.

    Returns:
        How much the files hold, in words.

    Raises:
        CheckpointError: with all problems: files that are absent or cut off, and names, shapes and types of tensors.
    """
    table, stored_as, file_of = _matched(model, folder)
    problems, files = [], sorted(set(file_of.values()))
    for file in files:
        with opened(file) as tensors:
            for name in (name for name in table if file_of[name] == file):
                if wrong := _header_problem(name, table[name], tensors.get_slice(stored_as[name]), "config.json"):
                    problems.append(Problem("", f"{file}: {wrong}"))
    if problems:
        more = [Problem("", f"{folder}: and {len(problems) - SHOWN} more tensors")] if len(problems) > SHOWN else []
        raise CheckpointError([*problems[:SHOWN], *more])
    size = sum(file.stat().st_size for file in files) / 2**20
    return f"{len(table)} tensors in {len(files)} file{'s' * (len(files) > 1)}, {size:,.1f} MiB"


def load_weights(model: Transformer, folder: str | Path) -> None:
    """Fill the model from a folder or hub id, one tensor at a time, reading only this rank's pieces.

    CheckpointError where weights are absent, corrupt, incomplete, left over, not finite, or not of the shape that
    config.json says.
    """
    folder = resolve(folder)
    table, stored_as, file_of = _matched(model, folder)
    if not model.config.has_head:  # a critic that starts from a language model
        assert model.score is not None
        model.score.weight.detach().zero_()
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.clear_padding()
    damaged = []
    for file in sorted(set(file_of.values())):
        names = iter([name for name in file_of if file_of[name] == file and name in table])
        name = next(names, None)
        while name is not None:
            # What has been read of a file stays mapped as long as it is open, and counts as memory of this process.
            with opened(file) as tensors:
                mapped = 0
                while name is not None and mapped < MAPPED_BYTES:
                    if not fill(name, table[name], tensors.get_slice(stored_as[name]), file):
                        damaged.append(name)
                    mapped += math.prod(table[name].shape) * model.embed.weight.element_size()
                    name = next(names, None)
    if damaged:
        dtype = DTYPE_NAMES[model.embed.weight.dtype]
        wrong = f"{folder}: {listing(damaged)}: numbers that are nan, infinite or beyond {dtype}; "
        raise CheckpointError(wrong + "expected finite weights: download or save the model again")


def save_weights(
    model: Transformer,
    folder: str | Path,
    *,
    source: str | Path | Sequence[str | Path] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dp: ParallelGroup | None = None,
) -> None:
    """Write a folder that `transformers` loads: config.json, safetensors files, and the companions of `source`.

    Adapters are merged into the weights.

    Every rank calls it and writes its share of the files, which are on the disk when it returns there. `folder` is made
    if need be; to make it appear whole or not at all is the caller's task.
    source: folders or hub ids whose tokenizer, chat template and generation settings are carried along; the first that
    has them counts.
    dtype: of the written weights; None keeps the model's. max_shard_bytes: weights beyond it go into several files.
    dp: the ranks with equal copies of the model, which share the work; None where only the model's `tp` calls.
    CheckpointError, on the rank that cannot write its files.
    """
    write_all(folder, file_writes(model, folder, source=source, dtype=dtype, max_shard_bytes=max_shard_bytes, dp=dp))


def file_writes(
    model: Transformer,
    folder: str | Path,
    *,
    source: str | Path | Sequence[str | Path] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dp: ParallelGroup | None = None,
    pin_memory: bool = False,
) -> Iterator[Callable[[], None]]:
    """The work of save_weights on this rank, as functions for `write_all`.

    To take one is a collective call and copies the weights of one file to host memory. To call it writes them. So a
    caller that takes all at once, before the next update, may write them at any time and in any thread.
    """
    folder, dp = Path(folder), dp or ParallelGroup()
    dtype = dtype or model.embed.weight.dtype
    table = stored_tensors(model)
    sizes = {name: math.prod(stored.shape) * dtype.itemsize for name, stored in table.items()}
    n_ranks = dp.size * model.tp.size
    n_files = FILES_OF_A_RANK * n_ranks if n_ranks > 1 else 1
    plan = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=min(max_shard_bytes, -(-sum(sizes.values()) // n_files)),
    )
    if dp.rank == model.tp.rank == 0:
        yield partial(_write_other_files, model, folder, source, dtype, plan)
    shares = _shares({file: sum(sizes[n] for n in names) for file, names in plan.filename_to_tensors.items()}, n_ranks)
    # Each copy of the model gathers its own files, one for each of its ranks at a time, so that these write together.
    for files in zip_longest(*shares[dp.rank * model.tp.size :][: model.tp.size]):
        write = None
        for owner, file in enumerate(files):
            if file is not None:
                named = {name: table[name] for name in plan.filename_to_tensors[file]}
                tensors = gathered(named, model, owner, dtype, pin_memory)
                if owner == model.tp.rank:
                    write = partial(write_tensors, tensors, named, folder / file, reached(model.device))
                del tensors  # only `write` holds them, and only as long as the caller holds that
        if write is not None:
            yield write
        del write


def write_all(folder: str | Path, writes: Iterable[Callable[[], None]]) -> None:
    """Call the functions of `file_writes`. CheckpointError where one of them cannot write."""
    failure: Exception | None = None
    for write in writes:  # to the end also after a failure: other ranks count on this one to take them
        try:
            if failure is None:
                write()
        except (OSError, SafetensorError) as error:
            failure = error
        del write  # the weights that it holds, before the next are gathered
    if failure is not None:
        raise CheckpointError(
            "cannot write the model to {}: {}; free some space or choose another folder with {}",
            folder, failure, Key("saver.path"),
        ) from failure  # fmt: skip


def _shares(sizes: dict[str, int], n: int) -> list[list[str]]:
    """Files dealt out to `n` ranks, the largest first, each to the rank with the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(n)]
    loads = [0] * n
    for file in sorted(sizes, key=lambda file: -sizes[file]):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += sizes[file]
    return shares


def gathered(
    named: Mapping[str, Stored], model: Transformer, owner: int, dtype: torch.dtype, pin_memory: bool
) -> dict[str, Tensor]:
    """The tensors in host memory, on the rank `owner`, with our order of heads; nothing on the others.

    A weight has its adapter merged in.
    """
    entries = [entry for stored in named.values() for entry in stored.entries]
    shapes = [entry.part.full_shape for entry in entries]
    outs: Sequence[Tensor | None] = [None] * len(entries)
    buffer = torch.empty(0)
    if owner == model.tp.rank:
        counts = [math.prod(shape) for shape in shapes]
        # One buffer for the file: pinned memory is given out in powers of two.
        buffer = torch.empty(sum(counts), dtype=dtype, pin_memory=pin_memory)
        outs = [flat.view(shape) for flat, shape in zip(buffer.split(counts), shapes, strict=True)]
    adapted = {id(module.weight): module for module in model.modules() if isinstance(module, Linear)}
    before = whole = entries[0].parameter if entries else model.embed.weight
    for index, (entry, out) in enumerate(zip(entries, outs, strict=True)):
        if index == 0 or entry.parameter is not before:  # it may hold several tensors, and is merged once
            before, linear = entry.parameter, adapted.get(id(entry.parameter))
            whole = entry.parameter if linear is None else linear.merged_weight()
        entry.part.gather(whole, model.tp, owner, out)
        heartbeat.beat()
    if owner != model.tp.rank:
        return {}
    tensors = buffer.split([math.prod(stored.shape) for stored in named.values()])
    return {name: flat.view(stored.shape) for (name, stored), flat in zip(named.items(), tensors, strict=True)}


def reached(device: torch.device) -> Any:
    """A mark behind what the device has been given to do. None for a CPU, which has done it."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def write_tensors(tensors: dict[str, Tensor], named: Mapping[str, Stored], file: Path, copied: Any) -> None:
    if copied is not None:
        copied.synchronize()
    for name, stored in named.items():
        rows = tensors[name].split([entry.part.full_shape[0] for entry in stored.entries])
        for part, order in zip(rows, stored.orders, strict=True):
            if order is not None:
                part.copy_(in_order(part, order.argsort()))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
    sync(file)
    sync(file.parent)


def _write_other_files(
    model: Transformer, folder: Path, source: str | Path | Sequence[str | Path], dtype: torch.dtype, plan: Any
) -> None:
    """All but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [source] if isinstance(source, str | Path) else source
    written = copy_tokenizer_files([resolve(path) for path in sources], folder)
    written.append(write_json(folder / "config.json", _saved_config(model, dtype)))
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        written.append(write_json(folder / INDEX, index))
    for path in written:
        sync_tree(path) if path.is_dir() else sync(path)
    sync(folder)


def _layers_problem(names: Iterable[str], num_layers: int) -> str | None:
    """Return what is wrong with the number of layers in the weight files."""
    layers = [name.split(".", 3)[2] for name in names if name.startswith("model.layers.")]
    found = 1 + max((int(layer) for layer in layers if layer.isdecimal() and len(layer) < 10), default=-1)
    if found in (0, num_layers):
        return None
    wrong = f"config.json says num_hidden_layers={num_layers}, the weight files have {found} layers; "
    return wrong + "set num_hidden_layers to that, or download the model again"


def fill(name: str, target: Stored, source: Any, file: Path, shaped_by: str = "config.json") -> bool:
    """Copy this rank's piece. Whether all of it is finite. shaped_by: what tells the shape, for the message."""
    if wrong := _header_problem(name, target, source, shaped_by):
        raise CheckpointError(f"{file}: {wrong}")
    shape, is_finite, row = target.shape, True, 0
    for entry, order in zip(*target, strict=True):
        n_rows = entry.part.full_shape[0]
        piece = entry.part.cut(source if n_rows == shape[0] else source[row : row + n_rows])
        row += n_rows
        region = entry.part.region(entry.parameter)
        region.copy_(piece if order is None else in_order(piece, order))
        heartbeat.beat()
        # The smallest and the largest number are nan where any number is; unlike a mask, they take no memory.
        is_finite &= region.numel() == 0 or bool(torch.stack(region.aminmax()).isfinite().all())
    return is_finite


def _header_problem(name: str, target: Stored, source: Any, shaped_by: str) -> str | None:
    shape = tuple(source.get_shape())
    if shape != target.shape:
        return f"{name} has shape {shape}, expected {target.shape} from {shaped_by}"
    if source.get_dtype() not in FLOATS:
        return f"{name} is {source.get_dtype()}, expected one of {sorted(FLOATS)}"
    return None


def _own_name(name: str, family: Family) -> str:
    """Of a tensor in the text model, which may be within a model with images."""
    for within, own in family.beginnings.items():
        if name.startswith(within):
            return own + name.removeprefix(within)
    return name


def _is_harmless(name: str, model: Transformer) -> bool:
    """Tensors without a place here: computed tables, the second copy of a tied head, the vocabulary head of what
    becomes a value model, and what a family names."""
    is_unread = name.startswith(FAMILIES[model.config.family].unread)
    return is_unread or name.endswith("rotary_emb.inv_freq") or (model.head is None and name == "lm_head.weight")


def listing(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _saved_config(model: Transformer, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as it was read, with the dtype of the written weights under the key it used, and the model's head."""
    family, values = FAMILIES[model.config.family], dict(model.config.hf)
    values["dtype" if "dtype" in values else "torch_dtype"] = DTYPE_NAMES[dtype]
    if model.score is None:
        values.setdefault("architectures", [family.architecture])
    elif not model.config.has_head:
        values["architectures"] = [family.value_architecture]
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    values.setdefault("model_type", family.name)
    return values


def write_json(file: Path, values: dict[str, Any]) -> Path:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return file
