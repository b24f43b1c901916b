"""Loading the weights of Hugging Face folders, in safetensors files.

`stored_tensors` maps tensor names to parameters, for loading and for saving. Functions raise CheckpointError, which
lists all tensors and files that are missing, damaged or do not fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areno import heartbeat
from areno.errors import CheckpointError, Problem
from areno.layers.embedding import VocabParallelEmbedding
from areno.layers.rotary import head_order, permute_heads
from areno.layers.shard import TensorPart
from areno.models.block_scales import BlockScaledSlice, MXFP4Slice
from areno.models.config import (
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    SCALES,
    Family,
    TransformerConfig,
    fp8_block_size,
    is_mxfp4,
)
from areno.models.families import FAMILIES, fused_expert_names, module_names, stored_names, unread_prefixes
from areno.models.folder import (
    SHOWN,
    join_first_names,
    open_safetensors,
    resolve_model_folder,
    tensor_files,
)
from areno.models.transformer import Transformer, is_finite

logger = logging.getLogger("areno")

FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of the dtypes that can be loaded
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
HEAD_ROWS = 4096  # of the head and the embedding that are compared at once
MAPPED_BYTES = 2**26  # the bytes read from a file before it is closed and opened again


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

    If `by_column`, it has the columns of n entries in turn: column i of entry e is column i n + e. If `transposed`, the
    rows of an expert's entries are the columns of its matrix.
    """

    entries: list[CheckpointEntry]
    orders: list[Tensor | None]  # for each entry, the result of `head_order`
    by_column: bool = False
    n_experts: int = 0  # if not 0, the size of the first dimension, which counts experts
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [entry.part.full_shape for entry in self.entries]
        if self.by_column:
            return (shapes[0][0], sum(shape[1] for shape in shapes))
        n_rows = sum(shape[0] for shape in shapes)
        if self.transposed:
            return (self.n_experts, *shapes[0][1:], n_rows // self.n_experts)
        if self.n_experts:
            return (self.n_experts, n_rows // self.n_experts, *shapes[0][1:])
        return (n_rows, *shapes[0][1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.entries[0].parameter.dtype

    def in_file_order(self, stacked: Tensor) -> Tensor:
        """Return the tensor of the file, given the entries one after another."""
        if self.transposed:
            return stacked.view(self.n_experts, self.shape[2], self.shape[1]).transpose(1, 2).contiguous()
        if not self.by_column:
            return stacked
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
    stacked, fused = stored_names(config), fused_expert_names(config)
    transposed = FAMILIES[config.family].transposed_experts
    found: dict[str, StoredTensor] = {}
    for entry in checkpoint_table(model):
        name, inner = entry.name, ".".join(entry.name.split(".")[3:-1])  # model.layers.3.<inner>.weight
        if inner in stacked:
            name = name.replace(inner, stacked[inner])
        n_experts = 0
        if inner in fused and config.experts is not None:
            kind, n_experts = entry.name.rpartition(".")[2], config.experts.n_experts
            name = name.removesuffix(f".{kind}").replace(inner, fused[inner]) + "_bias" * (kind == "bias")
        is_matrix = n_experts > 0 and len(entry.part.full_shape) == 2
        stored = found.setdefault(name, StoredTensor([], [], n_experts=n_experts, transposed=transposed and is_matrix))
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
        if self.stored_as[name] == f"{name}{MXFP4_BLOCKS}":
            scales = f"{name}{MXFP4_SCALES}"
            with open_safetensors(self.file_of[scales]) as others:
                return MXFP4Slice.checked(name, stored, others.get_tensor(scales))
        scales = f"{name}{SCALES}"
        if self.fp8_blocks is None or scales not in self.file_of:
            return stored
        with open_safetensors(self.file_of[scales]) as others:  # may be another file
            return BlockScaledSlice.checked(name, stored, others.get_tensor(self.stored_as[scales]), self.fp8_blocks)


def _match_tensors(model: Transformer, folder: Path) -> _MatchedTensors:
    found, family = tensor_files(folder), FAMILIES[model.config.family]
    names = {stored: _text_model_name(stored, family) for stored in found}
    if is_mxfp4(model.config.hf):
        names = {stored: name.removesuffix(MXFP4_BLOCKS) for stored, name in names.items()}
    stored_as = {name: stored for stored, name in names.items()}
    file_of = {name: found[stored] for name, stored in stored_as.items()}
    if problem := _layers_problem(file_of, model.config):
        raise CheckpointError(f"{folder}: {problem}")
    table = stored_tensors(model)
    if not model.config.has_head:
        table = {name: stored for name, stored in table.items() if not name.startswith("score.")}
    problems = []
    wanted = [*table, *(f"{name}{MXFP4_SCALES}" for name in table if stored_as.get(name) == f"{name}{MXFP4_BLOCKS}")]
    if missing := [name for name in wanted if name not in file_of]:
        problems.append(f"the weights lack {join_first_names(missing)}, which its config.json asks for")
    if extra := [name for name in file_of if name not in table and not _is_harmless(name, model)]:
        problems.append(f"the weights hold {join_first_names(extra)}, which its config.json has no place for")
    if twice := [(stored, stored_as[name]) for stored, name in names.items() if stored_as[name] != stored]:
        problems.append(f"the weights hold both {join_first_names([' and '.join(pair) for pair in twice])}")
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
    if is_mxfp4(model.config.hf):
        logger.info("%s: experts in MXFP4 are loaded as %s", folder, DTYPE_NAMES[model.embed.weight.dtype])
    if not model.config.has_head:  # a critic that starts from a language model
        assert model.score is not None
        for parameter in model.score.parameters():
            parameter.detach().zero_()
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.clear_padding()
    damaged, rounded = [], []
    for file in sorted(set(file_of.values())):
        names = iter([name for name in file_of if file_of[name] == file and name in table])
        name = next(names, None)
        while name is not None:
            # Pages read from a file stay mapped until it is closed, and count as memory of this process.
            with open_safetensors(file) as tensors:
                mapped = 0
                while name is not None and mapped < MAPPED_BYTES:
                    source = found.stored_slice(name, tensors)
                    if not load_shard(name, table[name], source, file):
                        damaged.append(name)
                    if name.endswith(".e_score_correction_bias") and source.get_dtype() in ("BF16", "F16"):
                        rounded.append(name)
                    mapped += math.prod(table[name].shape) * model.embed.weight.element_size()
                    name = next(names, None)
    if rounded:
        shown = "%s: %s: stored in 16 bits, so tokens choose other experts than with the published float32"
        logger.warning(shown, folder, join_first_names(rounded))
    if model.config.tie_word_embeddings and model.score is None and _has_another_head(found):
        text = "{}: tie_word_embeddings is true, but lm_head.weight differs from the embedding; set it to false in "
        text += "config.json, also in text_config if there is one, or remove lm_head.weight"
        raise CheckpointError(text, folder)
    if damaged:
        dtype = DTYPE_NAMES[model.embed.weight.dtype]
        wrong = f"{folder}: {join_first_names(damaged)}: numbers that are nan, infinite or beyond {dtype}; "
        raise CheckpointError(wrong + "expected finite weights: download or save the model again")


def _has_another_head(found: _MatchedTensors) -> bool:
    """Return whether the files of a model with a tied head hold a head that differs from the embedding."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    if head not in found.file_of:
        return False
    with open_safetensors(found.file_of[embed]) as tensors, open_safetensors(found.file_of[head]) as others:
        own, other = (each.get_slice(found.stored_as[name]) for each, name in ((tensors, embed), (others, head)))
        if own.get_shape() != other.get_shape():
            return True
        rows = (slice(first, first + HEAD_ROWS) for first in range(0, own.get_shape()[0], HEAD_ROWS))
        return not all(other[part].to(own[part].dtype).equal(own[part]) for part in rows)


def _layers_problem(names: Collection[str], config: TransformerConfig) -> str | None:
    """Return a message if the weight files and config.json have different numbers of layers, else None."""
    layers = [name.split(".", 3)[2] for name in names if name.startswith("model.layers.")]
    found = 1 + max((int(layer) for layer in layers if layer.isdecimal() and len(layer) < 10), default=-1)
    n_unread = sum(name.startswith("model.layers.") and name.endswith(".eh_proj.weight") for name in names)
    field, said, found, kind = "num_hidden_layers", config.num_layers, found - n_unread, "layers"
    if found == said:
        field, said, found, kind = "num_nextn_predict_layers", config.unread_layers, n_unread, "such layers"
    if found in (0, said):  # files may leave out the layers that predict further tokens
        return None
    wrong = f"config.json says {field}={said}, the weight files have {found} {kind}; "
    return wrong + f"set {field} to that, or download the model again"


def load_shard(name: str, target: StoredTensor, source: Any, file: Path, shaped_by: str = "config.json") -> bool:
    """Copy this rank's shard of a tensor from a safetensors slice, and return whether all values are finite.

    `source`: the slice. `shaped_by`: the file that error messages name as the source of the expected shape.
    """
    if wrong := _header_problem(name, target, source, shaped_by):
        raise CheckpointError(f"{file}: {wrong}")
    all_finite, row, n, n_total = True, 0, len(target.entries), target.shape[0]
    if target.n_experts:
        source, n_total = ExpertRows(source, target.transposed), -1
    whole = source[:] if target.by_column else None
    for index, (entry, order) in enumerate(zip(target.entries, target.orders, strict=True)):
        n_rows = entry.part.full_shape[0]
        if target.n_experts and not entry.part.size:  # an expert of another rank
            row += n_rows
            continue
        if whole is not None:
            piece = entry.part.shard_of(whole[:, index::n])
        else:
            piece = entry.part.shard_of(source if n_rows == n_total else source[row : row + n_rows])
        row += n_rows
        region = entry.part.region(entry.parameter)
        region.copy_(piece if order is None else permute_heads(piece, order))
        heartbeat.beat()
        all_finite &= is_finite(region)
    return all_finite


class ExpertRows:
    """A safetensors slice whose first dimension counts experts, as a tensor of its rows, expert by expert.

    If `transposed`, the rows of an expert are the columns of its matrix.
    """

    def __init__(self, source: Any, transposed: bool = False):
        self._source, self._transposed = source, transposed
        self._n_rows = source.get_shape()[2 if transposed else 1]

    def __getitem__(self, rows: slice) -> Tensor:
        expert, first = divmod(rows.start, self._n_rows)
        own, of_expert = slice(expert, expert + 1), slice(first, first + rows.stop - rows.start)
        if self._transposed:
            return self._source[own, :, of_expert].squeeze(0).t()
        return self._source[own, of_expert].squeeze(0)


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
    that becomes a critic, and tensors that areno does not use, or that hold no number.
    """
    is_unread = name.startswith(unread_prefixes(model.config))
    is_unread |= model.config.stored is not None and name in model.config.stored.kept
    is_scale = name.endswith(f".weight{SCALES}") and fp8_block_size(model.config.hf) is not None
    is_scale |= name.endswith(MXFP4_SCALES) and is_mxfp4(model.config.hf)
    is_copy = model.head is None and name == "lm_head.weight"
    return is_unread or is_scale or is_copy or name.endswith("rotary_emb.inv_freq")
