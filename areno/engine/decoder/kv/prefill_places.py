"""Where the tokens of a prefill have their keys and values in the cache. No tensors.

The place of a token in a block table is block * block_size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.engine.decoder.block_manager import BlockManager
from areno.engine.decoder.kv.layout import KVGroup
from areno.engine.decoder.scheduler import Chunk


@dataclass(slots=True)
class PrefillPlaces:
    """In the block tables of one group of layers, of the N tokens of all chunks, and of the M that these see.

    stored_TN: int64, for each table of the group. keys_TM: the same of earlier tokens, too; None where the chunks see
    themselves alone. cu_k: (chunks + 1,) int32, where those that a chunk sees begin; max_k: the most of them.
    """

    stored_TN: np.ndarray
    keys_TM: np.ndarray | None
    cu_k: np.ndarray
    max_k: int


def prefill_places(chunks: list[Chunk], blocks: BlockManager, *, from_the_first: bool) -> list[PrefillPlaces]:
    """For each group of layers.

    from_the_first: all earlier tokens of a sequence count as seen, those behind the window in the scratch block.
    """
    return [_of_group(chunks, blocks, index, group, from_the_first) for index, group in enumerate(blocks.groups)]


def _of_group(
    chunks: list[Chunk], blocks: BlockManager, index: int, group: KVGroup, from_the_first: bool
) -> PrefillPlaces:
    size = blocks.block_size
    stored, keys = [], []
    for chunk in chunks:
        held = chunk.prefill.leader.held
        stacks, n_behind = held.stacks[index][: blocks.blocks_for(chunk.end)], held.n_behind[index]
        first = 0 if from_the_first else group.first_seen(chunk.start, size)
        blocks_TW = np.full((group.n_tables, len(stacks)), blocks.scratch, dtype=np.int64)
        own = stacks[n_behind:]
        blocks_TW[:, n_behind:] = own if group.n_tables == 1 else np.array([blocks.stack(each) for each in own]).T
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
