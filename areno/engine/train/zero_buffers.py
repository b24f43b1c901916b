"""Flat buffers: one for the trained parameters of a model, one for their gradients, one for fp32 master weights.

Parameters that are float32 among parameters in another dtype have a buffer of their own, which comes first in the
common range of elements.

With one buffer, a single collective sums all gradients, and an update is a few large elementwise operations. The
optimizer may be divided over data-parallel ranks (ZeRO, arXiv 1910.02054). The buffer is then cut into buckets, and
each rank owns an equal part of every bucket. A rank has master weights and moments only for the parts that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from areno.cost.memory import BUCKET
from areno.engine.train.optimizer_offload import Buffer, HostBuffer, buffer_range_views, split_at_parts
from areno.layers.parallel import ParallelGroup, wait_for
from areno.layers.shard import TensorPart

ALIGN = 16  # elements; every parameter starts at a multiple, so that vector loads are aligned in every dtype
CHUNK = 2**24  # elements worked on at once, which bounds the temporaries of the optimizer to 64 MiB each

Named = Sequence[tuple[str, nn.Parameter]]
Stage = Callable[[str], int]
InParts = Callable[[str], list[tuple[slice, int]]]
MatrixParts = Callable[[str], tuple[TensorPart, ...]]


@dataclass(frozen=True)
class Segment:
    """A range [start, stop) of the flat buffers whose parameters are treated alike by the optimizer."""

    start: int
    stop: int
    decayed: bool  # whether weight decay applies: to matrices, not to norm weights and biases
    sharded: bool  # whether tensor-parallel ranks hold different shards rather than equal copies
    n_params: int  # without the padding for alignment
    in_matrices: bool = False  # whether the optimizer updates whole matrices, rather than each element by itself


@dataclass(frozen=True)
class Bucket:
    """A range of the flat buffers that data-parallel ranks reduce and gather in one collective.

    All slices are ranges of elements. `place` (the whole bucket) and `own` (this rank's part) index `params`. `local`
    indexes `masters` and the moments. `grads` holds only the owned elements if gradients are divided (ZeRO-2). `stage`
    is a layer index. The backward pass completes large stages first.
    """

    place: slice
    own: slice
    local: slice
    grads: slice
    stage: int
    segments: tuple[Segment, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether `grads` holds the gradients of the whole bucket, not only of the owned elements."""
        return slice_length(self.grads) == slice_length(self.place)

    @property
    def own_grads_range(self) -> slice:
        return self.grads if not self.is_whole else _shift_slice(self.own, self.grads.start - self.place.start)


@dataclass(frozen=True)
class OwnedChunk:
    """A range of one segment that this rank owns, for one elementwise operation. Slices are as in Bucket."""

    place: slice
    local: slice
    grads: slice
    segment: Segment


def flatten(named: Named) -> list[torch.Tensor]:
    """Move parameters into one buffer for each of their dtypes, so that they become views of it."""
    buffers = []
    for dtype in dict.fromkeys(parameter.dtype for _, parameter in named):
        alike = [(name, parameter) for name, parameter in named if parameter.dtype == dtype]
        _, places, end = _assign_ranges(alike, None, ALIGN, 0)
        buffers.append(_move_parameters(alike, places, slice(0, end)))
    return buffers


class FlatParameters:
    """Moves the trained parameters of a model into one buffer, and their gradients into another buffer.

    `in_parts` returns pairs (range of elements, n) for a parameter name. The gradient of such a range must be summed
    over n tensor-parallel ranks. With `stage` (see Transformer.stage), masters and moments are divided over `dp`
    (ZeRO-1). With `divide_grads`, the gradients of layers are divided, too (ZeRO-2). Until they are reduced, they lie
    in `workspace`, which all divided buckets share. `fill` sets the weights once the parameters are views of `params`.
    So a model that was built without memory never has its weights in memory twice.

    `matrix_parts` returns the matrices of a parameter that the optimizer updates as a whole. All elements of such
    parameters lie after all others, so a moment that only the others have needs `n_elementwise` elements.

    `wide` holds the parameters that are float32 among others, and `params` all others. They share one range of
    elements, which begins with `wide`. `weights` returns elements of both.

    `grads` is float32, and each `parameter.grad` is a view of it or of `workspace`. Clear it by `grads.zero_()`; never
    set a gradient to None. `masters` are the float32 values that the optimizer updates, for the owned elements. If
    `params` is float32 and not divided, `masters` is the same tensor.
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
        in_host: bool = False,
        matrix_parts: MatrixParts = lambda name: (),
    ):
        named = list(model.named_parameters())  # a tied parameter appears once
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.frozen = [parameter.detach() for _, parameter in named if not parameter.requires_grad]
        self.dp, self.in_host = dp if stage is not None else ParallelGroup(), in_host
        self.shapes = {name: parameter.shape for name, parameter in trained}
        self.buckets: list[Bucket] = []
        self.ranges: dict[str, slice] = {}
        ends = {name: stage(name) for name, _ in trained} if stage is not None else dict.fromkeys(self.shapes, 0)
        self.matrices = {name: parts for name, _ in trained if (parts := matrix_parts(name))}
        wide, others = _split_wide(trained)
        assert not any(name in self.matrices for name, _ in wide), "matrices are in the dtype of the model"
        end = n_grads = n_wide = 0
        for group in self._grouped(wide, others, ends):
            start = end
            segments, places, end = _assign_ranges(group, is_sharded, align, start, self.matrices)
            end += -(end - start) % (align * self.dp.size)
            self.ranges |= places
            size = (end - start) // self.dp.size
            own = slice(start + self.dp.rank * size, start + (self.dp.rank + 1) * size)
            least = min(ends[name] for name, _ in group)
            is_whole = not divide_grads or group is wide or self._is_reduced_once(group, least, max(ends.values()))
            n_wide = end if group is wide else n_wide
            grads = slice(n_grads, n_grads + (end - start if is_whole else size))
            n_grads = grads.stop
            local = slice(start // self.dp.size, end // self.dp.size)
            self.buckets.append(Bucket(slice(start, end), own, local, grads, least, tuple(segments)))
        self.buckets.sort(key=lambda bucket: bucket.stage)
        self.params = _move_parameters(others, self.ranges, slice(n_wide, end))
        self.wide = _move_parameters(wide, self.ranges, slice(0, n_wide)) if wide else None
        fill()
        self.segments = [segment for bucket in self.buckets for segment in bucket.segments]
        self.n_local = end // self.dp.size
        self._copied = [
            (_shift_slice(elements, self.ranges[name].start), n)
            for name, _ in trained
            for elements, n in in_parts(name)
        ]

        self.grads = torch.zeros(n_grads, dtype=torch.float32, device=self.params.device)
        divided = [bucket for bucket in self.buckets if not bucket.is_whole]
        most = max((slice_length(bucket.place) for bucket in divided), default=0)
        self.workspace = self.grads.new_zeros((2, most))
        for name, parameter in trained:
            parameter.grad_dtype = torch.float32  # a bfloat16 parameter may then have, and accumulates in, fp32
            parameter.grad = self._gradient_buffer(self.ranges[name]).view(parameter.shape)
        self._make_masters()

    def _grouped(self, wide: Named, others: Named, ends: dict[str, int]) -> Iterator[Named]:
        """Yield the parameters of each bucket in the order of their elements."""
        if wide:
            yield wide
        if self.is_divided:
            yield from _parameters_by_bucket(others, ends, self.matrices)
        else:
            yield others

    def _is_reduced_once(self, group: Named, stage: int, last: int) -> bool:
        """Return whether the gradients of a bucket stay undivided until the last backward pass of a step.

        Those of the embedding and the head come at the ends of the backward pass, or at both if tied. With matrices,
        the other parameters of many layers share a bucket, which the last of them completes.
        """
        return (
            not self.is_divided or not 0 <= stage < last or (bool(self.matrices) and group[0][0] not in self.matrices)
        )

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of all parameters, also of frozen ones."""
        return [self.params, *([] if self.wide is None else [self.wide]), *self.frozen]

    def weights(self, place: slice) -> torch.Tensor:
        """Return the elements of parameters in a range, which must not extend beyond a bucket."""
        n_wide = 0 if self.wide is None else self.wide.numel()
        if self.wide is not None and place.start < n_wide:
            return self.wide[place]
        return self.params[_shift_slice(place, -n_wide)]

    def _make_masters(self) -> None:
        self.masters: Buffer = self.params
        if self.is_divided or self.params.dtype != torch.float32:
            self.masters = self.new_state(torch.float32)
            for bucket in self.buckets:
                for master, param in self._owned_pairs(bucket):
                    master.copy_(param)

    def new_state(self, dtype: torch.dtype, n: int | None = None, *, per_block: bool = False) -> Buffer:
        """Return zeros for masters or moments. With `per_block`, an element belongs to BLOCK parameters."""
        n = self.n_local if n is None else n
        if self.in_host:
            return HostBuffer(n, dtype, pinned=self.params.is_cuda, per_block=per_block)
        return self.params.new_zeros(n, dtype=dtype)

    def _owned_pairs(self, bucket: Bucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (masters, parameters) of the owned elements of a bucket, in pieces."""
        masters = buffer_range_views(self.masters, bucket.local)
        params = self.weights(bucket.own).split([master.numel() for master in masters])
        yield from zip(masters, params, strict=True)

    @property
    def n_elementwise(self) -> int:
        """Return the number of masters before those of `matrices`."""
        # A bucket of a divided buffer has only the one kind. An undivided buffer is one bucket.
        stops = [
            bucket.local.stop if self.is_divided else segment.stop
            for bucket in self.buckets
            for segment in bucket.segments
            if not segment.in_matrices
        ]
        return max(stops, default=0)

    @property
    def is_divided(self) -> bool:
        return self.dp.size > 1

    def gradient_slot(self, bucket: Bucket) -> torch.Tensor:
        """Return the buffer in which the gradients of all elements of a bucket accumulate."""
        if bucket.is_whole:
            return self.grads[bucket.grads]
        divided = [each for each in self.buckets if not each.is_whole]
        return self.workspace[divided.index(bucket) % 2, : slice_length(bucket.place)]

    def _gradient_buffer(self, place: slice) -> torch.Tensor:
        """Return the 1-D gradient buffer of the parameter whose range in `self.params` is `place`."""
        bucket = next(each for each in self.buckets if each.place.start <= place.start < each.place.stop)
        return self.gradient_slot(bucket)[_shift_slice(place, -bucket.place.start)]

    def chunks(self, bucket: Bucket | None = None, local: slice | None = None) -> Iterator[OwnedChunk]:
        """Yield the owned elements in chunks of at most CHUNK, within a range of the masters."""
        for each in self.buckets if bucket is None else [bucket]:
            for segment in each.segments:
                yield from _chunks(each, segment, segment.start, segment.stop, local)

    def replicated_chunks(
        self, bucket: Bucket | None = None, local: slice | None = None
    ) -> Iterator[tuple[OwnedChunk, int]]:
        """Yield (chunk of owned elements, n) where the gradient must be summed over n tensor-parallel ranks."""
        for each in self.buckets if bucket is None else [bucket]:
            for segment in each.segments:
                for place, n in self._copied:
                    low, high = max(segment.start, place.start), min(segment.stop, place.stop)
                    yield from ((chunk, n) for chunk in _chunks(each, segment, low, high, local))

    def owned_ranges(self, place: slice) -> Iterator[tuple[slice, slice]]:
        """Yield (range in `params`, range in `masters`) of the parts of `place` that this rank owns.

        If masters and moments are in host memory, each range lies within one part of their buffers.
        """
        for bucket in self.buckets:
            part = slice(max(place.start, bucket.own.start), min(place.stop, bucket.own.stop))
            shift = bucket.local.start - bucket.own.start
            if part.start < part.stop:
                locals_ = split_at_parts(_shift_slice(part, shift)) if self.in_host else [_shift_slice(part, shift)]
                yield from ((_shift_slice(local, -shift), local) for local in locals_)

    def gather(self, bucket: Bucket) -> Any:
        """Start an all-gather that fills a bucket of `params`. `wait_for` takes the handle."""
        return self.dp.all_gather(self.weights(bucket.place))

    @torch.no_grad()
    def update_from_masters(self) -> None:
        """Set `params` to the rounded masters. If the masters are divided, all ranks of `dp` must call this."""
        if self.params is not self.masters:
            for bucket in self.buckets:
                for master, param in self._owned_pairs(bucket):
                    param.copy_(master)
        for bucket in self.buckets:
            wait_for(self.gather(bucket))  # one at a time, because on a CPU each needs temporary memory


def _chunks(bucket: Bucket, segment: Segment, low: int, high: int, within: slice | None) -> Iterator[OwnedChunk]:
    """Yield the owned elements between `low` and `high`, which lie in one segment, in chunks."""
    shift = bucket.local.start - bucket.own.start
    own = bucket.own if within is None else _shift_slice(within, -shift)
    low, high = max(low, bucket.own.start, own.start), min(high, bucket.own.stop, own.stop)
    for start in range(low, high, CHUNK):
        place = slice(start, min(start + CHUNK, high))
        local = _shift_slice(place, shift)
        yield OwnedChunk(place, local, _shift_slice(place, bucket.own_grads_range.start - bucket.own.start), segment)


def _parameters_by_bucket(
    named: Named, stages: dict[str, int], matrices: Container[str]
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield the parameters of each bucket, first those of elements that are updated by themselves, then `matrices`.

    Both by ascending stage. All such parameters of a stage are in the same bucket. The embedding, and the parameters
    after the layers, have buckets of their own.
    """
    for kind in (False, True):
        alike = [(name, parameter) for name, parameter in named if (name in matrices) == kind]
        yield from filter(None, _parameters_by_stage(alike, stages))


def _parameters_by_stage(named: Named, stages: dict[str, int]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    last = max(stages.values())
    group: list[tuple[str, nn.Parameter]] = []
    for stage in sorted(set(stages.values())):
        group += [(name, parameter) for name, parameter in named if stages[name] == stage]
        following = min((other for other in stages.values() if other > stage), default=None)
        if stage < 0 or following in (None, last) or sum(parameter.numel() for _, parameter in group) >= BUCKET:
            yield group
            group = []


def _assign_ranges(
    named: Named, is_sharded: Callable[[str], bool] | None, align: int, start: int, matrices: Container[str] = ()
) -> tuple[list[Segment], dict[str, slice], int]:
    """Assign consecutive ranges, from `start`, to parameters grouped into segments. Also returns the end."""
    dtypes = {parameter.dtype for _, parameter in named}
    assert len(dtypes) == 1, f"parameters of several dtypes: {dtypes}"
    kinds: dict[tuple[bool, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kind = (name not in matrices, parameter.dim() >= 2, is_sharded is not None and is_sharded(name))
        kinds.setdefault(kind, []).append((name, parameter))

    segments: list[Segment] = []
    places: dict[str, slice] = {}
    end = start
    for (elementwise, decayed, sharded), members in sorted(kinds.items(), key=lambda item: item[0], reverse=True):
        start = end
        for name, parameter in members:
            places[name] = slice(end, end + parameter.numel())
            end += -(-parameter.numel() // align) * align
        segments.append(Segment(start, end, decayed, sharded, sum(p.numel() for _, p in members), not elementwise))
    return segments, places, end


def _split_wide(named: Named) -> tuple[Named, Named]:
    """Return the parameters that are float32 among parameters in another dtype, and all others."""
    if all(parameter.dtype == torch.float32 for _, parameter in named):
        return [], named
    wide = [(name, parameter) for name, parameter in named if parameter.dtype == torch.float32]
    return wide, [(name, parameter) for name, parameter in named if parameter.dtype != torch.float32]


def _move_parameters(named: Named, places: dict[str, slice], whole: slice) -> torch.Tensor:
    """Move parameters into a new buffer for the elements of `whole`, at their ranges in `places`."""
    first = named[0][1]
    buffer = torch.zeros(slice_length(whole), dtype=first.dtype, device=first.device)
    for name, parameter in named:
        view = buffer[_shift_slice(places[name], -whole.start)].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return buffer


def slice_length(place: slice) -> int:
    return place.stop - place.start


def _shift_slice(place: slice, by: int) -> slice:
    return slice(place.start + by, place.stop + by)
