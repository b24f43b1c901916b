"""What a run state holds of a model: boxes of named tensors, and where the buffers of this rank have them.

Masters and fp32 moments are stored under the names of the checkpoint's tensors in their full shapes, so the ranks that
read a state may be others than those that wrote it. A block of 8-bit moments shares one scale, and blocks follow a
rank's own layout. So codes and scales are stored as each tensor-parallel rank holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from areno.engine.train.backend import TrainBackend
from areno.engine.train.flat import FlatParameters
from areno.engine.train.optimizer import Optimizer, blocks
from areno.kernels.adam import BLOCK
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import Part
from areno.models.adapters import adapter_table
from areno.models.weights import checkpoint_table

PIECE_ELEMENTS = 2**24  # most elements of a piece: what data-parallel ranks share out, and what is read at once
MASTER, COUNTERS = "master", "counters"


@dataclass(frozen=True)
class Piece:
    """A box of a stored tensor that lies in one stretch of a buffer of this rank.

    name, shape: of the whole tensor. offsets, sizes: of the box. buffer: its name. start: first element in it, where
    pieces_of gives it; before that, in the buffer of parameters (or blocks of these), which may not be divided.
    repeated: a tensor-parallel rank before this one holds the same.
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

    def view(self, buffer: Tensor) -> Tensor:
        """The box, in its shape."""
        return buffer[self.start : self.stop].view(self.sizes)


def trained(backend: TrainBackend) -> tuple[FlatParameters, Optimizer]:
    """Buffers and optimizer of a model that has them."""
    assert backend.flat is not None
    assert backend.optimizer is not None
    return backend.flat, backend.optimizer


def about(backend: TrainBackend, with_moments: bool = True) -> dict[str, Any]:
    """Return the facts that the stored form of a role depends on, beside its model.

    moments, moments_from: whether the state holds moments, and Optimizer.moments_from of these. A state without these
    two entries holds moments that began with the first update.
    """
    _, optimizer = trained(backend)
    found = {"optimizer": optimizer.config.type, "tp_size": backend.model.tp.size}
    return {**found, "moments": with_moments, "moments_from": optimizer.moments_from}


def buffers_of(role: str, backend: TrainBackend, with_moments: bool = True) -> dict[str, Tensor]:
    """Return the buffers of a role by name, such as "actor.master", on their devices. The counters are a copy."""
    flat, optimizer = trained(backend)
    counters = torch.tensor([optimizer.steps, optimizer.skipped_steps])
    named = {MASTER: flat.masters, **(optimizer.moments if with_moments else {}), COUNTERS: counters}
    return {f"{role}.{kind}": buffer for kind, buffer in named.items()}


def shapes_of(backend: TrainBackend) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> full shape, as a state has it, of the parameters that are trained."""
    return {name: _stored_shape(part) for name, _, part in _table(backend)}


def pieces_of(role: str, backend: TrainBackend, with_moments: bool = True) -> list[Piece]:
    """Return the pieces of a role that this rank holds, each buffer from its beginning to its end."""
    flat, optimizer = trained(backend)
    kinds = [MASTER, *optimizer.moments] if with_moments and not optimizer.in_8_bits else [MASTER]
    found = [own for kind in kinds for piece in _matrices(role, kind, backend) for own in _owned(piece, flat)]
    if optimizer.in_8_bits and with_moments:
        tp = backend.model.tp
        for name, place in flat.places.items():
            is_sharded = backend.model.is_sharded(name)
            for kind in optimizer.moments:
                unit = BLOCK if kind.endswith("scale") else 1
                stretch = blocks(place) if unit > 1 else place
                holder = tp if is_sharded else ParallelGroup(0, tp.size)
                vectors = vector(role, kind, name, holder, stretch, repeated=tp.rank > 0 and not is_sharded)
                found += [own for piece in vectors for own in _owned(piece, flat, unit)]
    found.sort(key=lambda piece: (piece.buffer, piece.start))
    repeated = tp_rank(backend) > 0 or flat.dp.rank > 0
    return [*found, *_boxes(f"{role}.{COUNTERS}", (2,), (0,), (2,), f"{role}.{COUNTERS}", 0, repeated)]


def tp_rank(backend: TrainBackend) -> int:
    return backend.model.tp.rank


def vector(
    role: str, kind: str, name: str, holder: ParallelGroup, stretch: slice, repeated: bool = False
) -> Iterator[Piece]:
    """8-bit codes or scales of a parameter (our own name), as the rank `holder` has them."""
    size = (stretch.stop - stretch.start,)
    stored = f"{role}.{kind}.{name}.{holder.rank}-of-{holder.size}"
    return _boxes(stored, size, (0,), size, f"{role}.{kind}", stretch.start, repeated)


def written_by(pieces: Iterable[Piece], dp: ParallelGroup) -> dict[str, list[Piece]]:
    """The pieces that this rank writes, by buffer; each list without large gaps.

    dp: the ranks that hold the same pieces. Each writes an equal share of every buffer.
    """
    by_buffer: dict[str, list[Piece]] = {}
    for piece in pieces:
        if not piece.repeated:
            by_buffer.setdefault(piece.buffer, []).append(piece)
    shares = {}
    for buffer, found in by_buffer.items():
        end = found[-1].stop
        share = [piece for piece in found if (piece.start + piece.stop) * dp.size // (2 * end) == dp.rank]
        if share:
            shares[buffer] = share
    return shares


def _table(backend: TrainBackend) -> Iterator[tuple[str, str, Part]]:
    """(checkpoint name, our name, place) of what is trained."""
    flat, _ = trained(backend)
    own_names = {id(parameter): name for name, parameter in backend.model.named_parameters()}
    for entry in [*checkpoint_table(backend.model), *adapter_table(backend.model)]:
        if (own := own_names[id(entry.parameter)]) in flat.places:
            yield entry.name, own, entry.part


def _stored_shape(part: Part) -> tuple[int, ...]:
    """Of two dimensions at most: those behind the first, of a convolution's weight, are one."""
    first, *rest = part.full_shape
    return (first, math.prod(rest)) if len(rest) > 1 else part.full_shape


def _matrices(role: str, kind: str, backend: TrainBackend) -> Iterator[Piece]:
    flat, _ = trained(backend)
    for name, own, part in _table(backend):
        row = math.prod(flat.shapes[own][1:])
        shape = _stored_shape(part)
        offsets, sizes = [0] * len(shape), list(shape)
        if part.dim is not None:
            offsets[part.dim], sizes[part.dim] = part.start, part.size
        start = flat.places[own].start + part.offset * row
        repeated = tp_rank(backend) % (backend.model.tp.size if part.dim is None else part.copies) > 0
        buffer = f"{role}.{kind}"
        yield from _boxes(f"{buffer}.{name}", shape, offsets, sizes, buffer, start, repeated)


def _boxes(
    name: str,
    shape: tuple[int, ...],
    offsets: Iterable[int],
    sizes: Iterable[int],
    buffer: str,
    start: int,
    repeated: bool,
) -> Iterator[Piece]:
    """One box of a tensor, cut by rows into pieces of at most PIECE_ELEMENTS (or one row)."""
    (first, *offsets), (n_rows, *sizes) = offsets, sizes
    row = math.prod(sizes)
    step = max(1, PIECE_ELEMENTS // max(1, row))
    for at in range(0, n_rows if row else 0, step):
        n = min(step, n_rows - at)
        yield Piece(name, shape, (first + at, *offsets), (n, *sizes), buffer, start + at * row, repeated)


def _owned(piece: Piece, flat: FlatParameters, unit: int = 1) -> Iterator[Piece]:
    """What this data-parallel rank has of a piece, whose start is that in params, in elements of `unit` there."""
    row = math.prod(piece.sizes[1:])
    for place, local in flat.owned(slice(piece.start * unit, piece.stop * unit)):
        begin, end = place.start // unit, -(-place.stop // unit)
        shift = local.start // unit - begin
        while begin < end:  # as boxes: what is left of a row, whole rows, the beginning of a row
            first, column = divmod(begin - piece.start, row)
            n = min(end - begin, row - column) if column or end - begin < row else (end - begin) // row * row
            box = (n,) if len(piece.sizes) == 1 else (max(1, n // row), n if n < row else row)
            corner = (first, column)[: len(box)]
            offsets = tuple(offset + at for offset, at in zip(piece.offsets, corner, strict=True))
            yield replace(piece, offsets=offsets, sizes=box, start=begin + shift)
            begin += n


def by_name(pieces: Iterable[Piece]) -> Mapping[str, list[Piece]]:
    """Tensor name -> its pieces."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found
