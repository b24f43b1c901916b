"""The prefill of prompt chunks: its inputs, which go to the device in one copy, and CUDA graphs of prefills.

If the prefill or the model is small, the host takes longer to launch the kernels than the device to compute them. A
CUDA graph launches all kernels at once. Graphs have fixed sizes, so a prefill is padded: its chunks are followed by a
row of padding tokens, which write to the scratch block of the KV cache, and by rows without tokens.

Shape letters: N computed tokens, M attended tokens, T block tables of a group of layers, K completed prompts, R chunks.
Tokens in the KV cache have indices: block * block_size + offset. `last` has the index, among the N tokens, of the last
token of each completed prompt. `cu_q` and `cu_k`, (R + 1,), are cumulative numbers of computed and attended tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from areno.cost.kv_layout import KVGroup
from areno.engine.decoder.block_manager import BlockManager
from areno.engine.decoder.cuda_graphs import GraphCache, GraphCapturer
from areno.engine.decoder.scheduler import Chunk
from areno.kernels.padding import CuSeqlens

# The sizes of prefills with a CUDA graph. With few sizes, there are few graphs, and none has to be dropped.
_TOKENS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_FEW_TOKENS = 2048  # prefills of at most this size have graphs for every model
# Largest product of tokens and parameters for which larger prefills have graphs. On an H100, 8,192 tokens of Qwen3-0.6B
# (3.6e12) take the device 19 ms. Without a graph, the host takes over 30 ms to launch the kernels.
_MOST_WORK = 5e12
_KEYS = (1024, 4096, 16384)
_ROWS = 64


@dataclass(slots=True)
class PrefillIndices:
    """The cache indices of the tokens that a prefill writes and reads, for one group of layers."""

    stored_TN: np.ndarray
    keys_TM: np.ndarray | None  # None if the chunks attend only to the tokens that they compute
    cu_k: np.ndarray


def _indices_of_group(
    chunks: list[Chunk], blocks: BlockManager, index: int, group: KVGroup, from_the_first: bool
) -> PrefillIndices:
    """Return the cache indices of a group of layers.

    With `from_the_first`, layers with a sliding window also read all earlier tokens of a prompt. Tokens before the
    window no longer have a block, so their indices point to the scratch block.
    """
    size = blocks.block_size
    stored, keys = [], []
    for chunk in chunks:
        block_tables = chunk.prefill.leader.block_tables
        group_blocks, n_skipped = (
            block_tables.group_blocks[index][: blocks.n_blocks_for(chunk.end)],
            block_tables.n_skipped[index],
        )
        first = 0 if from_the_first else group.first_visible_block(chunk.start, size)
        blocks_TW = np.full((group.n_tables, len(group_blocks)), blocks.scratch, dtype=np.int64)
        own = group_blocks[n_skipped:]
        blocks_TW[:, n_skipped:] = (
            own if group.n_tables == 1 else np.array([blocks.physical_blocks(each) for each in own]).T
        )
        position = np.arange(first * size, chunk.end)
        indices_TM = blocks_TW[:, position // size] * size + position % size
        keys.append(indices_TM)
        stored.append(indices_TM[:, chunk.start - first * size :])
    lengths = [each.shape[1] for each in keys]
    sees_earlier = lengths != [chunk.end - chunk.start for chunk in chunks]
    return PrefillIndices(
        stored_TN=np.concatenate(stored, axis=1),
        keys_TM=np.concatenate(keys, axis=1) if sees_earlier else None,
        cu_k=np.cumsum([0, *lengths], dtype=np.int32),
    )


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The sizes of a prefill, which give the offset of each input in the packed array.

    Tuples have an entry for each group of layers. No chunk has more than `max_q` computed and `max_k` attended tokens.
    """

    n_tokens: int
    n_rows: int
    n_last: int
    n_tables: tuple[int, ...]
    n_keys: tuple[int | None, ...]
    max_q: int
    max_k: tuple[int, ...]

    def input_lengths(self) -> list[int]:
        found = [self.n_tokens, self.n_tokens, self.n_rows + 1, self.n_last]
        for n_tables, n_keys in zip(self.n_tables, self.n_keys, strict=True):
            found += [n_tables * self.n_tokens, n_tables * (n_keys or 0), self.n_rows + 1]
        return found


@dataclass(slots=True)
class PrefillTensors:
    """The inputs of a prefill on the device, int64. Lists have an entry for each block table."""

    tokens_N: Tensor
    positions_N: Tensor
    last_K: Tensor
    stored: list[Tensor]
    keys: list[Tensor | None]
    borders: list[CuSeqlens]

    @staticmethod
    def unpack(packed: Tensor, shape: PrefillShape) -> PrefillTensors:
        tokens_N, positions_N, cu_q, last_K, *groups = packed.split(shape.input_lengths())
        cu_q_R1 = cu_q.int()
        found = PrefillTensors(tokens_N, positions_N, last_K, [], [], [])
        for index, (n_tables, n_keys) in enumerate(zip(shape.n_tables, shape.n_keys, strict=True)):
            stored, keys, cu_k = groups[3 * index : 3 * index + 3]
            found.stored += stored.view(n_tables, -1)
            found.keys += [None] * n_tables if n_keys is None else keys.view(n_tables, -1)
            found.borders += [CuSeqlens(cu_q_R1, cu_k.int(), shape.max_q, shape.max_k[index])] * n_tables
        return found


@dataclass(slots=True)
class PrefillBatch:
    """The inputs of a prefill on the host."""

    tokens: np.ndarray
    positions: np.ndarray
    cu_q: np.ndarray
    last: np.ndarray
    indices: list[PrefillIndices]

    @staticmethod
    def from_chunks(chunks: list[Chunk], blocks: BlockManager, *, from_the_first: bool) -> PrefillBatch:
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
            indices=[
                _indices_of_group(chunks, blocks, index, group, from_the_first)
                for index, group in enumerate(blocks.groups)
            ],
        )

    @property
    def shape(self) -> PrefillShape:
        return PrefillShape(
            n_tokens=len(self.tokens),
            n_rows=len(self.cu_q) - 1,
            n_last=len(self.last),
            n_tables=tuple(len(each.stored_TN) for each in self.indices),
            n_keys=tuple(None if each.keys_TM is None else each.keys_TM.shape[1] for each in self.indices),
            max_q=int(np.diff(self.cu_q).max()),
            max_k=tuple(int(np.diff(each.cu_k).max()) for each in self.indices),
        )

    def pack(self) -> np.ndarray:
        parts = [self.tokens, self.positions, self.cu_q, self.last]
        for each in self.indices:
            keys = np.empty(0, np.int64) if each.keys_TM is None else each.keys_TM.ravel()
            parts += [each.stored_TN.ravel(), keys, each.cu_k]
        return np.concatenate(parts).astype(np.int64, copy=False)

    def pad(self, scratch: int, most_tokens: int) -> tuple[PrefillBatch, PrefillShape] | None:
        """Return the prefill padded to a size that can have a CUDA graph, and its shape, or None if it is too large.

        After the chunks come a row of padding tokens, a row that has the padding keys and no queries, and empty rows.
        `last` is padded with the first token, whose logits are not read. `scratch` is the cache index for padding.
        Layers with sliding windows are not supported.
        """
        n_tokens, n_rows = len(self.tokens), len(self.cu_q) - 1
        if n_tokens > most_tokens or n_rows > _ROWS:
            return None
        size, [place] = next(each for each in _TOKENS if each >= n_tokens), self.indices
        more, n_keys, keys = size - n_tokens, size, place.keys_TM
        if keys is not None:
            wanted = keys.shape[1] + more  # a row has at least as many keys as queries
            if wanted > _KEYS[-1]:
                return None
            n_keys = next(each for each in _KEYS if each >= wanted)
            keys = np.pad(keys, ((0, 0), (0, n_keys - keys.shape[1])), constant_values=scratch)
        batch = PrefillBatch(
            tokens=np.pad(self.tokens, (0, more)),
            positions=np.pad(self.positions, (0, more)),
            cu_q=np.pad(self.cu_q, (0, 2 + _ROWS - n_rows), constant_values=size),
            last=np.pad(self.last, (0, _ROWS - len(self.last))),
            indices=[
                replace(
                    place,
                    stored_TN=np.pad(place.stored_TN, ((0, 0), (0, more)), constant_values=scratch),
                    keys_TM=keys,
                    cu_k=np.concatenate(
                        [place.cu_k, [place.cu_k[-1] + more], np.full(1 + _ROWS - n_rows, n_keys)], dtype=np.int32
                    ),
                )
            ],
        )
        shape = batch.shape
        # Attention launches programs for `max_q` queries of every row. Programs beyond the end of a row stop at once,
        # but with many tokens they are many. A power of two as bound adds few shapes.
        max_q = size if size <= _FEW_TOKENS else min(size, 1 << (shape.max_q - 1).bit_length())
        return batch, replace(shape, max_q=max_q, max_k=(n_keys,))


class PrefillGraphs:
    """Computes prefills padded to one of few sizes, with a CUDA graph for each size that occurs again.

    Even the first prefill of a size, which runs without a graph, is padded. So the exact result of a prefill does not
    depend on earlier prefills. `body`, which computes logits, may read only its argument and tensors that never move.
    """

    def __init__(self, body: Callable[[PrefillTensors], Tensor], scratch: int, captures: GraphCapturer, n_params: int):
        self._body, self._scratch = body, scratch
        most = max(_FEW_TOKENS, min(_TOKENS[-1], int(_MOST_WORK / n_params)))
        self._most_tokens = max(size for size in _TOKENS if size <= most)
        self.graphs = GraphCache[PrefillShape](captures, at_once=False)
        self._logits_KV: Tensor | None = None  # of all graphs

    def run(self, batch: PrefillBatch) -> Tensor | None:
        """Return logits (K, V), valid until the next call. None if no prompt is complete or the batch is too large."""
        padded = batch.pad(self._scratch, self._most_tokens) if len(batch.last) else None
        if padded is None:
            return None
        whole, shape = padded
        packed = whole.pack()
        host = self.graphs.pinned_memory(len(packed))
        host.numpy()[:] = packed
        return self.graphs.run(shape, host, lambda inputs: self._logits(inputs, shape))[: len(batch.last)]

    def _logits(self, inputs: Tensor, shape: PrefillShape) -> Tensor:
        """Compute a padded prefill. All graphs return their logits in the same memory."""
        logits_KV = self._body(PrefillTensors.unpack(inputs, shape))
        if self._logits_KV is None:  # in the first prefill, which runs without a graph
            self._logits_KV = torch.empty_like(logits_KV)
        return self._logits_KV.copy_(logits_KV)
