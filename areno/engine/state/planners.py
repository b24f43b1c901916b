"""What torch.distributed.checkpoint is told: the pieces of this rank, to write or to read."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, Metadata, ReadItem, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from areno import heartbeat
from areno.engine.state.pieces import Piece, by_name


class PieceWriting(DefaultSavePlanner):
    """Plans to write pieces, once for any number of states: planning takes time from the thread that decodes.

    dtypes: of the buffers, by name. about: goes into the index as it is.
    """

    def __init__(self, pieces: Iterable[Piece], dtypes: Mapping[str, torch.dtype], about: Mapping[str, Any]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._dtypes, self._about = pieces, dtypes, about
        self._final: SavePlan | None = None  # of this rank
        self._global: Metadata | None = None  # on the coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([] if self._final else [self._item(piece) for piece in self._pieces])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """ValueError unless the pieces of all ranks are the whole tensors, and none is there twice."""
        if self._global is None or self._final is None:
            all_plans, self._global = super().create_global_plan(all_plans)
            self._global.planner_data = self._about
        return all_plans, self._global

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._final = self._final or new_plan
        return self._final

    def _item(self, piece: Piece) -> WriteItem:
        data = TensorWriteData(_chunk(piece), TensorProperties(self._dtypes[piece.buffer]), torch.Size(piece.shape))
        return WriteItem(MetadataIndex(piece.name, piece.offsets), WriteItemType.SHARD, tensor_data=data)


class PieceReading(LoadPlanner):
    """Plans to read pieces, wherever and however cut they were written, into buffers."""

    def __init__(self, pieces: Iterable[Piece], buffers: Mapping[str, Tensor]):
        self._pieces, self._buffers = by_name(pieces), buffers
        self._piece_at = {(piece.name, piece.offsets): piece for found in self._pieces.values() for piece in found}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, pieces in self._pieces.items():
            tensor = self._metadata[name]
            assert isinstance(tensor, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, tensor, [_chunk(piece) for piece in pieces])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a run state holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        piece = self._piece_at[index.fqn, tuple(index.offset)]
        target = piece.view(self._buffers[piece.buffer])
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        heartbeat.beat()


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
