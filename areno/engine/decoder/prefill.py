"""The prefill of prompt chunks: its inputs, which go to the device in one copy, and CUDA graphs of small prefills.

The host takes longer to launch the kernels of a small prefill than the device to compute them. A CUDA graph launches
them at once. Graphs have fixed sizes, so a prefill is padded: its last row consists of tokens that write to the scratch
block of the KV cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.block_manager import BlockManager, KVGroup
from areno.engine.decoder.graphs import captured
from areno.engine.decoder.scheduler import Chunk

_MOST_TOKENS = 2048  # larger prefills keep the device busy while the host launches them
_MOST_KEYS = 16384
_ROWS = (4, 16, 64)


@dataclass(slots=True)
class PrefillPlaces:
    """Where a prefill writes and reads keys and values in the KV cache, for one group of layers.

    Each token is given by its index in the cache, which is block * block_size + offset. N is the number of tokens that
    all chunks compute, M the number of tokens that the chunks attend to, and T the number of block tables of the group.

    Attributes:
        stored_TN: int64, cache index of each computed token in each block table.
        keys_TM: int64, cache index of each attended token in each block table. None if the chunks attend only to the
            tokens that they compute.
        cu_k: (chunks + 1,) int32, cumulative number of attended tokens of the chunks, from 0 to M.
        max_k: Largest number of tokens that a chunk attends to.
    """

    stored_TN: np.ndarray
    keys_TM: np.ndarray | None
    cu_k: np.ndarray
    max_k: int


def prefill_places(chunks: list[Chunk], blocks: BlockManager, *, from_the_first: bool) -> list[PrefillPlaces]:
    """Return the indices in the KV cache that a prefill writes and reads, for each group of layers.

    Args:
        chunks: The chunks of prompts that the prefill computes.
        blocks: The allocator of KV blocks, with the groups of layers.
        from_the_first: If True, layers with a sliding window also read all earlier tokens of a prompt. Tokens before
            the window no longer have a block, so their indices point to the scratch block.
    """
    return [_of_group(chunks, blocks, index, group, from_the_first) for index, group in enumerate(blocks.groups)]


def _of_group(
    chunks: list[Chunk], blocks: BlockManager, index: int, group: KVGroup, from_the_first: bool
) -> PrefillPlaces:
    """Return the cache indices that a prefill writes and reads, for one group of layers.

    `group` is the group, and `index` its index in `blocks.groups`. The other arguments are those of
    `prefill_places`.
    """
    size = blocks.block_size
    stored, keys = [], []
    for chunk in chunks:
        block_tables = chunk.prefill.leader.block_tables
        group_blocks, n_skipped = (
            block_tables.group_blocks[index][: blocks.blocks_for(chunk.end)],
            block_tables.n_skipped[index],
        )
        first = 0 if from_the_first else group.first_visible(chunk.start, size)
        blocks_TW = np.full((group.n_tables, len(group_blocks)), blocks.scratch, dtype=np.int64)
        own = group_blocks[n_skipped:]
        blocks_TW[:, n_skipped:] = (
            own if group.n_tables == 1 else np.array([blocks.physical_blocks(each) for each in own]).T
        )
        position = np.arange(first * size, chunk.end)
        places_TM = blocks_TW[:, position // size] * size + position % size
        keys.append(places_TM)
        stored.append(places_TM[:, chunk.start - first * size :])
    lengths = [each.shape[1] for each in keys]
    sees_earlier = lengths != [chunk.end - chunk.start for chunk in chunks]
    return PrefillPlaces(
        stored_TN=np.concatenate(stored, axis=1),
        keys_TM=np.concatenate(keys, axis=1) if sees_earlier else None,
        cu_k=np.cumsum([0, *lengths], dtype=np.int32),
        max_k=max(lengths),
    )


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The sizes of a prefill, by which its inputs lie in one array.

    Attributes:
        n_tokens: Number of computed tokens.
        n_rows: Number of chunks.
        n_last: Number of prompts that the prefill completes.
        n_tables: For each group of layers, the number of its block tables.
        n_keys: For each group of layers, the number of attended tokens. None if these are the computed tokens.
        max_q: Largest number of computed tokens of a chunk.
        max_k: For each group of layers, the largest number of attended tokens of a chunk.
    """

    n_tokens: int
    n_rows: int
    n_last: int
    n_tables: tuple[int, ...]
    n_keys: tuple[int | None, ...]
    max_q: int
    max_k: tuple[int, ...]

    def lengths(self) -> list[int]:
        """Return the lengths of all inputs in the array: tokens, positions, borders of queries, last tokens, groups."""
        found = [self.n_tokens, self.n_tokens, self.n_rows + 1, self.n_last]
        for n_tables, n_keys in zip(self.n_tables, self.n_keys, strict=True):
            found += [n_tables * self.n_tokens, n_tables * (n_keys or 0), self.n_rows + 1]
        return found


@dataclass(slots=True)
class PrefillTensors:
    """The inputs of a prefill on the device.

    N is the number of computed tokens, R of chunks, M of attended tokens, K of completed prompts. Lists have an entry
    for each block table.

    Attributes:
        tokens_N: int64, token ids.
        positions_N: int64, position of each token in its sequence.
        last_K: int64, index among the N tokens of the last token of each prompt that the prefill completes.
        stored: (N,) int64, index of each computed token in the KV cache.
        keys: (M,) int64, index of each attended token in the KV cache. None if these are the computed tokens.
        borders: (cumulative numbers of queries, cumulative numbers of keys: (R + 1,) int32; largest numbers of both).
    """

    tokens_N: Tensor
    positions_N: Tensor
    last_K: Tensor
    stored: list[Tensor]
    keys: list[Tensor | None]
    borders: list[tuple[Tensor, Tensor, int, int]]

    @staticmethod
    def of(packed: Tensor, shape: PrefillShape) -> PrefillTensors:
        """Divide the array of all inputs.

        Args:
            packed: int64, as `PrefillBatch.packed` makes it, on the device.
            shape: Sizes of the prefill.
        """
        tokens_N, positions_N, cu_q, last_K, *groups = packed.split(shape.lengths())
        cu_q_R1 = cu_q.int()
        found = PrefillTensors(tokens_N, positions_N, last_K, [], [], [])
        for index, (n_tables, n_keys) in enumerate(zip(shape.n_tables, shape.n_keys, strict=True)):
            stored, keys, cu_k = groups[3 * index : 3 * index + 3]
            found.stored += stored.view(n_tables, -1)
            found.keys += [None] * n_tables if n_keys is None else keys.view(n_tables, -1)
            found.borders += [(cu_q_R1, cu_k.int(), shape.max_q, shape.max_k[index])] * n_tables
        return found


@dataclass(slots=True)
class PrefillBatch:
    """The inputs of a prefill on the host.

    Attributes:
        tokens: (N,) int64, token ids of all chunks.
        positions: (N,) int64, position of each token in its sequence.
        cu_q: (chunks + 1,) int64, cumulative number of tokens of the chunks.
        last: (K,) int64, index among the N tokens of the last token of each prompt that the prefill completes.
        places: Cache indices, for each group of layers.
        max_q: Largest number of tokens of a chunk.
    """

    tokens: np.ndarray
    positions: np.ndarray
    cu_q: np.ndarray
    last: np.ndarray
    places: list[PrefillPlaces]
    max_q: int

    @staticmethod
    def of(chunks: list[Chunk], blocks: BlockManager, *, from_the_first: bool) -> PrefillBatch:
        """Return the inputs of a prefill.

        Args:
            chunks: The chunks of prompts that the prefill computes.
            blocks: The allocator of KV blocks.
            from_the_first: As in `prefill_places`.
        """
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.prefill.leader.tokens[chunk.start : chunk.end]
        lengths = [chunk.end - chunk.start for chunk in chunks]
        cu_q = np.cumsum([0, *lengths])
        return PrefillBatch(
            tokens=np.array(tokens, dtype=np.int64),
            positions=np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
            cu_q=cu_q,
            last=cu_q[1:][[chunk.is_last for chunk in chunks]] - 1,
            places=prefill_places(chunks, blocks, from_the_first=from_the_first),
            max_q=max(lengths),
        )

    @property
    def shape(self) -> PrefillShape:
        """The sizes of the prefill."""
        return PrefillShape(
            n_tokens=len(self.tokens),
            n_rows=len(self.cu_q) - 1,
            n_last=len(self.last),
            n_tables=tuple(len(each.stored_TN) for each in self.places),
            n_keys=tuple(None if each.keys_TM is None else each.keys_TM.shape[1] for each in self.places),
            max_q=self.max_q,
            max_k=tuple(each.max_k for each in self.places),
        )

    def packed(self) -> np.ndarray:
        """Return all inputs in one int64 array, for one copy to the device."""
        parts = [self.tokens, self.positions, self.cu_q, self.last]
        for each in self.places:
            keys = np.empty(0, np.int64) if each.keys_TM is None else each.keys_TM.ravel()
            parts += [each.stored_TN.ravel(), keys, each.cu_k]
        return np.concatenate(parts).astype(np.int64, copy=False)

    def padded(self, scratch: int) -> PrefillBatch | None:
        """Return an equal prefill of a size for which there can be a CUDA graph.

        A row of padding tokens follows, then empty rows. Padding prompts complete at the first token.

        Args:
            scratch: Index in the KV cache that padding tokens write to and read.

        Returns:
            The padded prefill. None if the prefill is too large, or if layers have sliding windows.
        """
        n_tokens, n_rows = len(self.tokens), len(self.cu_q) - 1
        if n_tokens > _MOST_TOKENS or n_rows > _ROWS[-1] or len(self.places) > 1:
            return None
        size, rows = _size_for(n_tokens), next(each for each in _ROWS if each >= n_rows)
        more, [place] = size - n_tokens, self.places
        n_keys, keys = size, place.keys_TM
        if keys is not None:
            n_keys = _size_for(keys.shape[1] + more)  # a row has at least as many keys as queries
            if n_keys > _MOST_KEYS:
                return None
            keys = np.pad(keys, ((0, 0), (0, n_keys - keys.shape[1])), constant_values=scratch)
        empty = rows - n_rows
        return PrefillBatch(
            tokens=np.pad(self.tokens, (0, more)),
            positions=np.pad(self.positions, (0, more)),
            cu_q=np.pad(self.cu_q, (0, 1 + empty), constant_values=size),
            last=np.pad(self.last, (0, rows - len(self.last))),
            places=[
                replace(
                    place,
                    stored_TN=np.pad(place.stored_TN, ((0, 0), (0, more)), constant_values=scratch),
                    keys_TM=keys,
                    cu_k=np.pad(place.cu_k, (0, 1 + empty), constant_values=n_keys),
                    max_k=n_keys,
                )
            ],
            max_q=size,
        )


def _size_for(n: int) -> int:
    """Return the smallest size of at least `n` in the series 16, 24, 32, 48, 64, 96 and so on."""
    power = max(16, 1 << (n - 1).bit_length())
    return power * 3 // 4 if n <= power * 3 // 4 and power > 16 else power


class PrefillGraphs:
    """Captures prefills of small sizes as CUDA graphs, one for each padded size, and replays them.

    A graph is captured when its size occurs for the second time. As for DecodeGraphs, the prefill may read only its
    argument, and tensors whose memory never moves.

    Args:
        body: Function that computes a prefill and returns the logits of the last tokens, (K, V).
        scratch: Index in the KV cache that padding tokens write to and read.
        device: The GPU.

    Attributes:
        n_replays: Number of replayed prefills.
    """

    def __init__(self, body: Callable[[PrefillTensors], Tensor], scratch: int, device: torch.device):
        self._body, self._scratch, self._device = body, scratch, device
        self._seen = Counter[PrefillShape]()
        self._graphs: dict[PrefillShape, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}  # graph, inputs, logits
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.n_replays = 0

    def run(self, batch: PrefillBatch) -> Tensor | None:
        """Run a prefill as a CUDA graph.

        Args:
            batch: The inputs.

        Returns:
            Logits of the last token of each completed prompt, (K, V). The next call overwrites this tensor. None if
            there is no graph for the prefill.
        """
        padded = batch.padded(self._scratch) if len(batch.last) else None
        if padded is None:
            return None
        shape = padded.shape
        self._seen[shape] += 1
        if self._seen[shape] == 1:
            return None
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(padded.packed(), shape)
        graph, inputs, logits_KV = self._graphs[shape]
        inputs.copy_(torch.from_numpy(padded.packed()).pin_memory(), non_blocking=True)
        graph.replay()
        self.n_replays += 1
        return logits_KV[: len(batch.last)]

    def _capture(self, packed: np.ndarray, shape: PrefillShape) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Capture a prefill as a CUDA graph, and return the graph, its input and its output."""
        inputs = torch.from_numpy(packed).to(self._device)
        graph, logits_KV = captured(lambda: self._body(PrefillTensors.of(inputs, shape)), self._pool, self._stream)
        return graph, inputs, logits_KV
