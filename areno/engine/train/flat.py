"""Flat buffers: all trained parameters of a model in one, their gradients in another, fp32 masters in a third.

One buffer allows one collective for all gradients, and an update of a few large elementwise operations. The optimizer
may be divided over data-parallel ranks (ZeRO, arXiv 1910.02054). Then the buffer is cut into buckets, and each rank
owns an equal part of every bucket. It has masters and moments of these parts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from areno.layers.parallel import ParallelGroup, wait_for
from areno.models.cost import BUCKET

ALIGN = 16  # elements; every parameter starts at a multiple, so vectorised loads stay aligned in every dtype
CHUNK = 2**24  # elements worked on at once, which bounds the temporaries of the optimizer to 64 MiB each

Named = Sequence[tuple[str, nn.Parameter]]
Stage = Callable[[str], int]
InParts = Callable[[str], list[tuple[slice, int]]]


@dataclass(frozen=True)
class Segment:
    """A stretch of the buffers whose parameters are treated alike."""

    start: int
    stop: int
    decayed: bool  # weight decay applies: matrices, but not norm weights and biases
    sharded: bool  # tensor-parallel ranks hold different pieces, not equal copies
    n_params: int  # elements without alignment padding


@dataclass(frozen=True)
class Bucket:
    """A stretch of the buffers that data-parallel ranks reduce and gather at once.

    Attributes:
        place: Its elements in params.
        own: The elements in params that this rank owns.
        local: The elements of `own` in masters and moments.
        grads: Its elements in grads. Only those of `own` if the gradients are divided.
        stage: The least stage of its parameters. The backward pass completes stages in descending order.
        segments: Its segments.
    """

    place: slice
    own: slice
    local: slice
    grads: slice
    stage: int
    segments: tuple[Segment, ...]

    @property
    def is_whole(self) -> bool:
        """Whether grads holds the gradients of the whole bucket."""
        return length(self.grads) == length(self.place)

    @property
    def own_grads(self) -> slice:
        """The elements of `own` in grads."""
        return self.grads if not self.is_whole else _shifted(self.own, self.grads.start - self.place.start)


@dataclass(frozen=True)
class Chunk:
    """A part of the elements that this rank owns, inside one segment.

    Attributes:
        place: Its elements in params.
        local: Its elements in masters and moments.
        grads: Its elements in grads.
        segment: The segment.
    """

    place: slice
    local: slice
    grads: slice
    segment: Segment


def flatten(
    named: Named, is_sharded: Callable[[str], bool] | None = None, align: int = ALIGN
) -> tuple[torch.Tensor, list[Segment], dict[str, slice]]:
    """Make named parameters views of one buffer of their dtype.

    Args:
        named: Parameters with their names.
        is_sharded: Whether tensor-parallel ranks hold different pieces of a parameter.
        align: Every parameter starts at a multiple of this number of elements.

    Returns:
        The buffer, its segments, and the place of each parameter by name.
    """
    segments, places, end = _arranged(named, is_sharded, align, 0)
    return _moved(named, places, end), segments, places


class FlatParameters:
    """Moves the trained parameters of a model into one buffer, and gives each of them a gradient in another.

    Args:
        model: The model. Parameters with requires_grad=False stay where they are.
        is_sharded: Whether tensor-parallel ranks hold different pieces of a parameter.
        align: Every parameter, and every part that a rank owns, starts at a multiple of this number of elements.
        in_parts: See Transformer.in_parts.
        stage: See Transformer.stage. With it and several ranks in `dp`, masters are divided over these ranks.
        dp: The ranks that hold copies of the model.
        divide_grads: Divide the gradients of layers, too. Until they are reduced, they lie in `workspace`, which two
            buckets share (see ReducedGradients).
        fill: Sets the parameters once they lie in `params`. A model that has no memory before (see WeightSpec.placed)
            is never in memory twice.

    Attributes:
        params: All trained parameters, in the dtype of the model.
        grads: float32. Each `parameter.grad` is a view of it. Clear it by `grads.zero_()`; never set a gradient to
            None.
        masters: float32 values that the optimizer updates. `params` itself if that is float32 and not divided.
        places: Elements of each parameter in params, by name.
        shapes: Shape of each parameter by name.
        frozen: The parameters that are not trained.
    """

    def __init__(
        self,
        model: nn.Module,
        is_sharded: Callable[[str], bool] | None = None,
        align: int = ALIGN,
        *,
        in_parts: InParts = lambda name: [],
        stage: Stage | None = None,
        dp: ParallelGroup = ParallelGroup(),  # noqa: B008  (frozen)
        divide_grads: bool = False,
        fill: Callable[[], object] = lambda: None,
    ):
        named = list(model.named_parameters())  # a tied parameter appears once
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.frozen = [parameter.detach() for _, parameter in named if not parameter.requires_grad]
        self.dp = dp if stage is not None else ParallelGroup()
        self.shapes = {name: parameter.shape for name, parameter in trained}
        self.buckets: list[Bucket] = []
        self.places: dict[str, slice] = {}
        ends = {name: stage(name) for name, _ in trained} if stage is not None else dict.fromkeys(self.shapes, 0)
        end = n_grads = 0
        for group in _groups(trained, ends) if self.is_divided else [trained]:
            start = end
            segments, places, end = _arranged(group, is_sharded, align, start)
            end += -(end - start) % (align * self.dp.size)
            self.places |= places
            size = (end - start) // self.dp.size
            own = slice(start + self.dp.rank * size, start + (self.dp.rank + 1) * size)
            least = min(ends[name] for name, _ in group)
            # Embedding and head are the first in the backward pass, or among the last, or both at once.
            is_whole = not (divide_grads and self.is_divided and 0 <= least < max(ends.values()))
            grads = slice(n_grads, n_grads + (end - start if is_whole else size))
            n_grads = grads.stop
            local = slice(start // self.dp.size, end // self.dp.size)
            self.buckets.append(Bucket(slice(start, end), own, local, grads, least, tuple(segments)))
        self.params = _moved(trained, self.places, end)
        fill()
        self.segments = [segment for bucket in self.buckets for segment in bucket.segments]
        self.n_local = end // self.dp.size
        self._copied = [
            (_shifted(elements, self.places[name].start), n) for name, _ in trained for elements, n in in_parts(name)
        ]

        self.grads = torch.zeros(n_grads, dtype=torch.float32, device=self.params.device)
        divided = [bucket for bucket in self.buckets if not bucket.is_whole]
        most = max((length(bucket.place) for bucket in divided), default=0)
        self.workspace = self.grads.new_zeros((2, most))
        for name, parameter in trained:
            parameter.grad_dtype = torch.float32  # a bfloat16 parameter may then have, and accumulates in, fp32
            parameter.grad = self._gradient(self.places[name]).view(parameter.shape)
        if self.is_divided:
            self.masters = self.grads.new_empty(self.n_local)
            for bucket in self.buckets:
                self.masters[bucket.local].copy_(self.params[bucket.own])
        else:
            self.masters = self.params if self.params.dtype == torch.float32 else self.params.float()

    @property
    def is_divided(self) -> bool:
        """Whether this rank has masters and moments of a part only."""
        return self.dp.size > 1

    def slot(self, bucket: Bucket) -> torch.Tensor:
        """Return the buffer in which the gradients of a bucket accumulate: a part of grads or of the workspace."""
        if bucket.is_whole:
            return self.grads[bucket.grads]
        divided = [each for each in self.buckets if not each.is_whole]
        return self.workspace[divided.index(bucket) % 2, : length(bucket.place)]

    def _gradient(self, place: slice) -> torch.Tensor:
        """Return the gradient buffer of one parameter."""
        bucket = next(bucket for bucket in self.buckets if place.stop <= bucket.place.stop)
        return self.slot(bucket)[_shifted(place, -bucket.place.start)]

    def chunks(self, bucket: Bucket | None = None) -> Iterator[Chunk]:
        """Yield the elements that this rank owns, of a bucket or of all, in parts of at most CHUNK elements."""
        for each in self.buckets if bucket is None else [bucket]:
            for segment in each.segments:
                yield from _chunks(each, segment, segment.start, segment.stop)

    def copies(self, bucket: Bucket | None = None) -> Iterator[tuple[Chunk, int]]:
        """Yield the owned elements whose gradient is split over tensor-parallel ranks.

        Each chunk comes with the number of ranks that share it.
        """
        for each in self.buckets if bucket is None else [bucket]:
            for segment in each.segments:
                for place, n in self._copied:
                    low, high = max(segment.start, place.start), min(segment.stop, place.stop)
                    yield from ((chunk, n) for chunk in _chunks(each, segment, low, high))

    def owned(self, place: slice) -> Iterator[tuple[slice, slice]]:
        """Yield the owned parts of a stretch of params: elements in params, and in masters and moments."""
        for bucket in self.buckets:
            part = slice(max(place.start, bucket.own.start), min(place.stop, bucket.own.stop))
            if part.start < part.stop:
                yield part, _shifted(part, bucket.local.start - bucket.own.start)

    def gather(self, bucket: Bucket) -> Any:
        """Start filling a bucket of params with the parts of all ranks, see ParallelGroup.all_gather."""
        return self.dp.all_gather(self.params[bucket.place])

    @torch.no_grad()
    def from_masters(self) -> None:
        """Set params to the rounded masters. All data-parallel ranks must call this if masters are divided."""
        if self.params is not self.masters:
            for bucket in self.buckets:
                self.params[bucket.own].copy_(self.masters[bucket.local])
        for bucket in self.buckets:
            wait_for(self.gather(bucket))  # one at a time: on a CPU each takes memory of its own meanwhile


def _chunks(bucket: Bucket, segment: Segment, low: int, high: int) -> Iterator[Chunk]:
    """Yield the owned elements of a stretch of a segment."""
    high = min(high, bucket.own.stop)
    for start in range(max(low, bucket.own.start), high, CHUNK):
        place = slice(start, min(start + CHUNK, high))
        local = _shifted(place, bucket.local.start - bucket.own.start)
        yield Chunk(place, local, _shifted(place, bucket.own_grads.start - bucket.own.start), segment)


def _groups(named: Named, stages: dict[str, int]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield the parameters of each bucket by ascending stage.

    A bucket holds whole stages. Parameters before and after the layers have buckets of their own.
    """
    last = max(stages.values())
    group: list[tuple[str, nn.Parameter]] = []
    for stage in sorted(set(stages.values())):
        group += [(name, parameter) for name, parameter in named if stages[name] == stage]
        following = min((other for other in stages.values() if other > stage), default=None)
        if stage < 0 or following in (None, last) or sum(parameter.numel() for _, parameter in group) >= BUCKET:
            yield group
            group = []


def _arranged(
    named: Named, is_sharded: Callable[[str], bool] | None, align: int, start: int
) -> tuple[list[Segment], dict[str, slice], int]:
    """Arrange parameters one after another, sorted by kind. Return segments, places by name, and the end."""
    dtypes = {parameter.dtype for _, parameter in named}
    assert len(dtypes) == 1, f"parameters of several dtypes: {dtypes}"
    kinds: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kind = (parameter.dim() >= 2, is_sharded is not None and is_sharded(name))
        kinds.setdefault(kind, []).append((name, parameter))

    segments: list[Segment] = []
    places: dict[str, slice] = {}
    end = start
    for (decayed, sharded), members in sorted(kinds.items(), key=lambda item: item[0], reverse=True):
        start = end
        for name, parameter in members:
            places[name] = slice(end, end + parameter.numel())
            end += -(-parameter.numel() // align) * align
        segments.append(Segment(start, end, decayed, sharded, sum(p.numel() for _, p in members)))
    return segments, places, end


def _moved(named: Named, places: dict[str, slice], end: int) -> torch.Tensor:
    """Move parameters into one buffer and return the buffer."""
    first = named[0][1]
    buffer = torch.zeros(end, dtype=first.dtype, device=first.device)
    for name, parameter in named:
        view = buffer[places[name]].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return buffer


def length(place: slice) -> int:
    """Return the number of elements of a slice."""
    return place.stop - place.start


def _shifted(place: slice, by: int) -> slice:
    """Return a slice moved by a number of elements."""
    return slice(place.start + by, place.stop + by)
