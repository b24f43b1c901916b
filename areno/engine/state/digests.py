"""Digests of weights and optimizer moments: equal bits give equal digests, and other bits almost surely other ones.

A buffer is cut into parts of PART elements. The bits of a part are read as integers in a matrix, whose row and column
sums are weighted by their place. So two small changes cannot cancel out unless they are changes of one element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.engine.roles import Role
from areno.engine.state.tensor_shards import buffers_of, flat_and_optimizer

PART = 2**20  # elements
_COLUMNS = 1024
_ODD = 0x9E3779B1  # its multiples are spread over all bits of a sum


def digests_of_role(name: str, role: Role) -> dict[str, list[int]]:
    """Return buffer -> digest of each part, for master weights, moments and counters of a trained role.

    If masters and moments are in host memory, which takes long to read, the weights on the device stand for them.
    """
    flat, _ = flat_and_optimizer(role.backend)
    buffers = buffers_of(name, role.backend)
    found = {key: _digest(buffer) for key, buffer in buffers.items() if isinstance(buffer, Tensor)}
    if flat.in_host:
        with role.on_device():
            found |= {f"{name}.weights": _digest(flat.params)}
            found |= {} if flat.wide is None else {f"{name}.wide": _digest(flat.wide)}
    return {key: digest.tolist() for key, digest in found.items()}  # after all launches


def _digest(buffer: Tensor) -> Tensor:
    """Return the digests of the parts of a flat buffer, int64."""
    words = buffer.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[buffer.itemsize])
    n_whole = len(words) // PART * PART
    parts = [_digest_matrices(words[:n_whole].view(-1, PART // _COLUMNS, _COLUMNS))] if n_whole else []
    if len(rest := words[n_whole:]):
        padded = torch.nn.functional.pad(rest, (0, -len(rest) % _COLUMNS))
        parts.append(_digest_matrices(padded.view(1, -1, _COLUMNS)))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _digest_matrices(words: Tensor) -> Tensor:
    columns, rows = words.sum(1, dtype=torch.int64), words.sum(2, dtype=torch.int64)
    return _weighted(columns, 1) * 31 + _weighted(rows, 7)


def _weighted(sums: Tensor, first: int) -> Tensor:
    places = torch.arange(first, first + sums.shape[1], device=sums.device)
    return (sums * (places * _ODD + 1)).sum(1)
