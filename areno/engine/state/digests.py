"""Digests of weights and optimizer moments: equal bits give equal digests, and other bits almost surely other ones.

A buffer is cut into parts of PART words of 64 bits, as few as can be, since additions take as long as reading. The
words of a part are a matrix, whose row and column sums are mixed with their place. So two changes cannot cancel out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.engine.roles import Role
from areno.engine.state.tensor_shards import buffers_of, flat_and_optimizer

PART = 2**19
_WORD = torch.int64
_COLUMNS = 1024
# The constants of splitmix64, as signed numbers.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)


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
    data = buffer.detach()
    per_word = _WORD.itemsize // data.itemsize
    if data.storage_offset() % per_word:
        data = data.clone()
    n_whole = len(data) // (PART * per_word) * PART * per_word
    whole, rest = data[:n_whole].view(_WORD), data[n_whole:]
    parts = [_digest_matrices(whole.view(-1, PART // _COLUMNS, _COLUMNS))] if n_whole else []
    if len(rest):
        padded = torch.nn.functional.pad(rest, (0, -len(rest) % (_COLUMNS * per_word))).view(_WORD)
        parts.append(_digest_matrices(padded.view(1, -1, _COLUMNS)))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _digest_matrices(words: Tensor) -> Tensor:
    columns, rows = words.sum(1), words.sum(2)
    return _mixed(columns, 1) + _mixed(rows, words.shape[2] + 1)


def _mixed(sums: Tensor, first: int) -> Tensor:
    """Spread each bit of each sum over 64 bits, as splitmix64 does, so that sums of changed words do not cancel out."""
    places = torch.arange(first, first + sums.shape[1], device=sums.device)
    mixed = sums + places * _ODD
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)).sum(1)
