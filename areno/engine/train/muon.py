"""Muon's directions: the momentum of each matrix, orthogonalised, in place of the gradients in the flat buffers.

Data-parallel ranks that share the optimizer hold parts of the momentum. A bucket is gathered, and a rank orthogonalises
only the matrices that overlap its own part. Tensor-parallel ranks gather the shards of a matrix and orthogonalise the
whole matrix, so its update is that of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from areno.config.optimizers import MuonConfig
from areno.engine.train.zero_buffers import CHUNK, Bucket, FlatParameters
from areno.layers.parallel import ParallelGroup, wait_for
from areno.layers.shard import TensorPart

A, B, C = 3.4445, -4.775, 2.0315  # of the quintic polynomial in kellerjordan.github.io/posts/muon
EPS = 1e-7  # the norm of a smaller matrix counts as this


def orthogonalise(x_BRC: Tensor, steps: int) -> Tensor:
    """Return matrices with the singular vectors of `x_BRC` and singular values near 1, in the dtype of `x_BRC`."""
    is_tall = x_BRC.shape[1] > x_BRC.shape[2]
    x = x_BRC.mT if is_tall else x_BRC
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if is_tall else x


def matrix_scale(shape: tuple[int, ...], settings: MuonConfig) -> float:
    rows, columns = shape
    if settings.scale_mode == "spectral":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalise_gradients(flat: FlatParameters, tp: ParallelGroup, settings: MuonConfig) -> None:
    """Replace, in `flat.grads`, the elements that this rank owns of all matrices. All ranks of the model call this."""
    for bucket in flat.buckets:
        if not any(segment.in_matrices for segment in bucket.segments):
            continue
        slot, start = flat.gradient_slot(bucket), bucket.place.start
        own = slot[bucket.own.start - start : bucket.own.stop - start]
        if not bucket.is_whole:
            own.copy_(flat.grads[bucket.grads])
        wait_for(flat.dp.all_gather(slot))
        _replace_matrices(list(_overlapping(flat, bucket, slot)), tp, settings)
        if not bucket.is_whole:
            flat.grads[bucket.grads].copy_(own)


def _overlapping(flat: FlatParameters, bucket: Bucket, slot: Tensor) -> Iterator[tuple[Tensor, TensorPart]]:
    """Yield (view of `slot`, part) for each matrix of a bucket of which this rank owns elements."""
    for name, parts in flat.matrices.items():
        place, columns = flat.ranges[name], flat.shapes[name][1]
        if not bucket.place.start <= place.start < bucket.place.stop:
            continue
        whole = slot[place.start - bucket.place.start : place.stop - bucket.place.start].view(-1, columns)
        for part in parts:
            view = part.region(whole)
            first = place.start + part.offset * columns
            if view.numel() and first < bucket.own.stop and first + view.numel() > bucket.own.start:
                yield from ((view[i :: part.alternating], part) for i in range(part.alternating))


def _replace_matrices(found: list[tuple[Tensor, TensorPart]], tp: ParallelGroup, settings: MuonConfig) -> None:
    alike: dict[tuple[int, ...], list[Tensor]] = {}
    for view, part in found:
        if part.dim is None or part.holder is not None or tp.size == 1:
            alike.setdefault(tuple(view.shape), []).append(view)
            continue
        shards = tp.all_gather_stacked(view).unbind()[:: part.copies]
        [full] = _directions([torch.cat(shards, dim=part.dim)], settings)
        view.copy_(part.shard_of(full))
    for shape, views in alike.items():  # small matrices together, such as those of experts
        n = max(1, CHUNK // math.prod(shape))
        for at in range(0, len(views), n):
            for view, direction in zip(views[at : at + n], _directions(views[at : at + n], settings), strict=True):
                view.copy_(direction)


def _directions(matrices: list[Tensor], settings: MuonConfig) -> Tensor:
    """Return the updates of matrices of one shape, for a learning rate of 1: (B, R, C)."""
    in_bf16 = settings.ns_dtype == "bfloat16" and matrices[0].is_cuda
    x_BRC = torch.stack(matrices)
    x_BRC /= x_BRC.flatten(1).norm(dim=1).clamp_min_(EPS).view(-1, 1, 1)
    found = orthogonalise(x_BRC.bfloat16() if in_bf16 else x_BRC, settings.ns_steps)
    return found.float().mul_(matrix_scale(tuple(matrices[0].shape), settings))
