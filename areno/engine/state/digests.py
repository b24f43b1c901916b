"""Digests of weights and optimizer moments, by which a replay proves that they have the recorded bits."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.engine.roles import Role
from areno.engine.state.tensor_shards import buffers_of, flat_and_optimizer
from areno.kernels.digests import matrix_digests

PART = 2**19  # words of 64 bits that have a digest of their own
_WORD = torch.int64
_COLUMNS = 1024


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
    parts = [matrix_digests(whole.view(-1, PART // _COLUMNS, _COLUMNS))] if n_whole else []
    if len(rest):
        padded = torch.nn.functional.pad(rest, (0, -len(rest) % (_COLUMNS * per_word))).view(_WORD)
        parts.append(matrix_digests(padded.view(1, -1, _COLUMNS)))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
