"""The stored form of a model's training state: named tensors, cut into boxes, and where this rank keeps each box.

A box is a range of indices in each dimension of a tensor. Master weights and fp32 moments are stored under the names
and full shapes of the checkpoint's tensors, so a run may be resumed with another layout than that of the run that
wrote the state. 8-bit moments share one scale for a block of elements, and the blocks follow the layout of one rank.
So their codes and scales are stored as each tensor-parallel rank holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from areno.engine.train.backend import TrainBackend
from areno.engine.train.optimizer import Optimizer
from areno.engine.train.optimizer_offload import Buffer, block_range
from areno.engine.train.zero_buffers import FlatParameters
from areno.kernels.adam import BLOCK
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import TensorPart
from areno.models.adapters import adapter_table
from areno.models.weights import checkpoint_table

MAX_SHARD_ELEMENTS = 2**24  # most elements of a shard: what data-parallel ranks share out, and what is read at once
MASTER, COUNTERS = "master", "counters"
N_COUNTERS = 3
TP_SIZE = "tp_size"  # entry of a state: how many ranks share each copy


@dataclass(frozen=True)
class TensorShard:
    """A box of a stored tensor, whose elements are contiguous in one buffer of this rank, such as "actor.master".

    `start` is the index of the first element in the buffer. `shards_of` counts only the elements that this
    data-parallel rank owns. `_cut_box` counts all elements of the undivided buffer. `repeated` is True if a lower rank
    holds the same box and writes it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    buffer: str
    start: int
    repeated: bool = False

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)

    def view(self, buffer: Buffer) -> Tensor:
        return buffer[self.start : self.stop].view(self.sizes)


def flat_and_optimizer(backend: TrainBackend) -> tuple[FlatParameters, Optimizer]:
    assert backend.flat is not None
    assert backend.optimizer is not None
    return backend.flat, backend.optimizer


def role_metadata(backend: TrainBackend, with_moments: bool = True) -> dict[str, Any]:
    """Return the facts about a role on which the form of its stored state depends. The index records them.

    States of older areno versions lack the last two entries. Their moments count from the first update.
    """
    _, optimizer = flat_and_optimizer(backend)
    found = {"optimizer": optimizer.config.type, TP_SIZE: backend.model.tp.size}
    return {**found, "moments": with_moments, "moments_from": optimizer.moments_from}


def buffers_of(role: str, backend: TrainBackend) -> dict[str, Buffer]:
    """Return the buffers of a role by name, such as "actor.master", on their devices or in host memory.

    The counters are a new tensor of N_COUNTERS values: the numbers of applied, of skipped and of empty updates.
    """
    flat, optimizer = flat_and_optimizer(backend)
    counters = torch.tensor([optimizer.steps, optimizer.skipped_steps, optimizer.empty_steps])
    named: dict[str, Buffer] = {MASTER: flat.masters, **optimizer.moments, COUNTERS: counters}
    return {f"{role}.{kind}": buffer for kind, buffer in named.items()}


def stored_shapes(backend: TrainBackend) -> dict[str, tuple[int, ...]]:
    return {name: _stored_shape(part) for name, _, part in _trained_tensors(backend)}


def shards_of(role: str, backend: TrainBackend, with_moments: bool = True) -> list[TensorShard]:
    """Return the shards of a role that this rank holds, ordered by buffer and index. The counters come last."""
    flat, optimizer = flat_and_optimizer(backend)
    kinds = [MASTER, *optimizer.moments] if with_moments and not optimizer.is_in_blocks else [MASTER]
    found = [
        own for kind in kinds for shard in _matrix_shards(role, kind, backend) for own in _owned_boxes(shard, flat)
    ]
    if optimizer.is_in_blocks and with_moments:
        tp = backend.model.tp
        for name, place in flat.ranges.items():
            is_sharded = backend.model.is_sharded(name)
            for kind in optimizer.moments:
                unit = BLOCK if kind.endswith("scale") else 1
                stretch = block_range(place) if unit > 1 else place
                holder = tp if is_sharded else ParallelGroup(0, tp.size)
                vectors = vector_shards(role, kind, name, holder, stretch, repeated=tp.rank > 0 and not is_sharded)
                found += [own for shard in vectors for own in _owned_boxes(shard, flat, unit)]
    found.sort(key=lambda shard: (shard.buffer, shard.start))
    repeated = tp_rank(backend) > 0 or flat.dp.rank > 0
    return [
        *found,
        *_cut_box(f"{role}.{COUNTERS}", (N_COUNTERS,), (0,), (N_COUNTERS,), f"{role}.{COUNTERS}", 0, repeated),
    ]


def tp_rank(backend: TrainBackend) -> int:
    return backend.model.tp.rank


# Modules of a layer that have another name in the files of a state, so that older states stay readable.
_STORED_MODULES = {
    "post_attention_norm": "attention_norm",
    "pre_mlp_norm": "post_norm",
    "post_mlp_norm": "mlp_norm",
    "in_proj": "given",
}


def vector_shards(
    role: str, kind: str, name: str, holder: ParallelGroup, stretch: slice, repeated: bool = False
) -> Iterator[TensorShard]:
    """Yield the shards of one parameter for an 8-bit moment or for its scales (`kind`).

    Each tensor-parallel rank stores a 1-D tensor, whose name contains the rank and the size of `holder`. The rank is 0
    if all ranks hold equal copies. `stretch` is the range of the tensor in the buffer of this rank.
    """
    size = (stretch.stop - stretch.start,)
    *before, module, leaf = name.split(".")
    name = ".".join((*before, _STORED_MODULES.get(module, module), leaf))
    stored = f"{role}.{kind}.{name}.{holder.rank}-of-{holder.size}"
    return _cut_box(stored, size, (0,), size, f"{role}.{kind}", stretch.start, repeated)


def shards_to_write(shards: Iterable[TensorShard], dp: ParallelGroup) -> dict[str, list[TensorShard]]:
    """Return the shards that this rank writes, by buffer. The ranks of `dp` hold equal shards and divide the work."""
    by_buffer: dict[str, list[TensorShard]] = {}
    for shard in shards:
        if not shard.repeated:
            by_buffer.setdefault(shard.buffer, []).append(shard)
    shares = {}
    for buffer, found in by_buffer.items():
        end = found[-1].stop
        share = [shard for shard in found if (shard.start + shard.stop) * dp.size // (2 * end) == dp.rank]
        if share:
            shares[buffer] = share
    return shares


def _trained_tensors(backend: TrainBackend) -> Iterator[tuple[str, str, TensorPart]]:
    """Yield (checkpoint name, parameter name, TensorPart) for each checkpoint tensor that is trained.

    A parameter may combine several checkpoint tensors. The TensorPart says which rows of the parameter the checkpoint
    tensor fills, and which shard of the tensor this rank holds.
    """
    flat, _ = flat_and_optimizer(backend)
    own_names = {id(parameter): name for name, parameter in backend.model.named_parameters()}
    for entry in [*checkpoint_table(backend.model), *adapter_table(backend.model)]:
        if (own := own_names[id(entry.parameter)]) in flat.ranges:
            yield entry.name, own, entry.part


def _stored_shape(part: TensorPart) -> tuple[int, ...]:
    """Return the shape in which a checkpoint tensor is stored. Dimensions after the first are joined."""
    first, *rest = part.full_shape
    return (first, math.prod(rest)) if len(rest) > 1 else part.full_shape


def _matrix_shards(role: str, kind: str, backend: TrainBackend) -> Iterator[TensorShard]:
    """Yield the shards of master weights or fp32 moments, before data parallelism divides them."""
    flat, optimizer = flat_and_optimizer(backend)
    for name, own, part in _trained_tensors(backend):
        if kind != MASTER and not optimizer.has_moment(kind, own):
            continue
        row = math.prod(flat.shapes[own][1:])
        shape = _stored_shape(part)
        offsets, sizes = [0] * len(shape), list(shape)
        if part.dim is not None:
            offsets[part.dim], sizes[part.dim] = part.start, part.size
        start = flat.ranges[own].start + part.offset * row
        repeated = tp_rank(backend) % (backend.model.tp.size if part.dim is None else part.copies) > 0
        buffer = f"{role}.{kind}"
        yield from _cut_box(f"{buffer}.{name}", shape, offsets, sizes, buffer, start, repeated)


def _cut_box(
    name: str,
    shape: tuple[int, ...],
    offsets: Iterable[int],
    sizes: Iterable[int],
    buffer: str,
    start: int,
    repeated: bool,
) -> Iterator[TensorShard]:
    """Cut a box of a stored tensor by rows into shards of at most MAX_SHARD_ELEMENTS, unless a row has more."""
    (first, *offsets), (n_rows, *sizes) = offsets, sizes
    row = math.prod(sizes)
    step = max(1, MAX_SHARD_ELEMENTS // max(1, row))
    for at in range(0, n_rows if row else 0, step):
        n = min(step, n_rows - at)
        yield TensorShard(name, shape, (first + at, *offsets), (n, *sizes), buffer, start + at * row, repeated)


def _owned_boxes(shard: TensorShard, flat: FlatParameters, unit: int = 1) -> Iterator[TensorShard]:
    """Yield the parts of a shard that this data-parallel rank owns, as boxes.

    A part may begin or end inside a row. It then becomes up to three boxes: the rest of a row, whole rows, and the
    beginning of a row. `unit` is the number of parameters per element of the buffer, BLOCK for scales.
    """
    row = math.prod(shard.sizes[1:])
    for place, local in flat.owned_ranges(slice(shard.start * unit, shard.stop * unit)):
        begin, end = place.start // unit, -(-place.stop // unit)
        shift = local.start // unit - begin
        while begin < end:  # as boxes: what is left of a row, whole rows, the beginning of a row
            first, column = divmod(begin - shard.start, row)
            n = min(end - begin, row - column) if column or end - begin < row else (end - begin) // row * row
            box = (n,) if len(shard.sizes) == 1 else (max(1, n // row), n if n < row else row)
            corner = (first, column)[: len(box)]
            offsets = tuple(offset + at for offset, at in zip(shard.offsets, corner, strict=True))
            yield replace(shard, offsets=offsets, sizes=box, start=begin + shift)
            begin += n


def shards_by_name(shards: Iterable[TensorShard]) -> Mapping[str, list[TensorShard]]:
    found: dict[str, list[TensorShard]] = {}
    for shard in shards:
        found.setdefault(shard.name, []).append(shard)
    return found
