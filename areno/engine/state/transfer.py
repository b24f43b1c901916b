"""Writes the state of the trained roles to a folder, and loads it into roles with the same or another layout.

The planners of this file tell torch.distributed.checkpoint which shards this rank writes or reads. `storage.py` has the
file format.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, Metadata, ReadItem, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from areno import heartbeat
from areno.engine.roles import Role
from areno.engine.state.storage import HostFile, StateFileReader, StateFileWriter
from areno.engine.state.tensor_shards import (
    COUNTERS,
    MASTER,
    TP_SIZE,
    TensorShard,
    buffers_of,
    flat_and_optimizer,
    role_metadata,
    shards_by_name,
    shards_of,
    stored_shapes,
    vector_shards,
)
from areno.engine.train.backend import TrainBackend
from areno.engine.train.optimizer_offload import Buffer, block_range
from areno.errors import ArenoError, CheckpointError, EngineError, Key
from areno.kernels.adam.reference import BLOCK, dequantise, quantise
from areno.layers.parallel import ParallelGroup
from areno.models.adapters import add_adapters
from areno.models.registry import build_model
from areno.models.transformer import Transformer


class ShardSavePlanner(DefaultSavePlanner):
    """The planner for writing shards of a state.

    The plan is made once and reused for later states of the same layout, since planning delays the decoding thread.
    """

    def __init__(self, shards: Iterable[TensorShard], dtypes: Mapping[str, torch.dtype], about: Mapping[str, Any]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards, self._dtypes, self._about = shards, dtypes, about
        self._final: SavePlan | None = None  # of this rank
        self._global: Metadata | None = None  # on the coordinator

    def create_local_plan(self) -> SavePlan:
        """Return the plan for this rank's shards. It is empty once `finish_plan` has stored the final plan."""
        return SavePlan([] if self._final else [self._write_item(shard) for shard in self._shards])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join the plans of all ranks in the first call. Later calls return the first result.

        Raises ValueError if the shards of all ranks do not cover each tensor exactly once.
        """
        if self._global is None or self._final is None:
            all_plans, self._global = super().create_global_plan(all_plans)
            self._global.planner_data = self._about
        return all_plans, self._global

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._final = self._final or new_plan
        return self._final

    def _write_item(self, shard: TensorShard) -> WriteItem:
        data = TensorWriteData(
            _chunk_metadata(shard), TensorProperties(self._dtypes[shard.buffer]), torch.Size(shard.shape)
        )
        return WriteItem(MetadataIndex(shard.name, shard.offsets), WriteItemType.SHARD, tensor_data=data)


class ShardLoadPlanner(LoadPlanner):
    """The planner for reading shards into buffers. The file may divide a tensor into chunks in another way."""

    def __init__(self, shards: Iterable[TensorShard], buffers: Mapping[str, Buffer]):
        self._shards, self._buffers = shards_by_name(shards), buffers
        self._shard_at = {(shard.name, shard.offsets): shard for found in self._shards.values() for shard in found}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, shards in self._shards.items():
            tensor = self._metadata[name]
            assert isinstance(tensor, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, tensor, [_chunk_metadata(shard) for shard in shards])
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
        shard = self._shard_at[index.fqn, tuple(index.offset)]
        target = shard.view(self._buffers[shard.buffer])
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        heartbeat.beat()


def _chunk_metadata(shard: TensorShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))


# A single worker has no process group, which is not a mistake.
warnings.filterwarnings("ignore", message=r"torch\.distributed is .*uninitialized, assuming the intent")


def write_state(
    folder: Path, files: Sequence[HostFile], planner: ShardSavePlanner, check: Callable[[], None], group: Any
) -> None:
    """Write the files of all ranks, which must all call this. Raises CheckpointError on every rank if one fails."""
    try:
        dcp.save(
            {},
            storage_writer=StateFileWriter(folder, files, check),
            planner=planner,
            process_group=group,
            no_dist=not group,
        )
    except BaseException as error:  # CheckpointException does not derive from Exception
        raise _checkpoint_error(error, f"{folder}: the state of the run cannot be written") from error


def check_compatible(reader: StateFileReader, roles: Mapping[str, Role], folder: Path) -> None:
    """Raise EngineError if a stored state has other role names, optimizer types or model shapes than `roles`."""
    if reader.about.keys() != roles.keys():
        raise EngineError(
            f"{folder} is the state of {', '.join(reader.about)}, trained here are {', '.join(roles) or 'none'}; "
            "resume with the algorithm that wrote it"
        )
    for name, role in roles.items():
        theirs, ours = reader.about[name]["optimizer"], role_metadata(role.backend)["optimizer"]
        if theirs != ours:
            text = "{}: {} was {!r} when the state was written and is {!r} now; it cannot change within a run"
            raise EngineError(text, folder, Key(f"{role.spec.section}.optimizer.type"), theirs, ours)
        _check_shapes(reader, name, role, folder)


def _check_shapes(reader: StateFileReader, name: str, role: Role, folder: Path) -> None:
    prefix, ours = f"{name}.{MASTER}.", stored_shapes(role.backend)
    theirs = {
        tensor.removeprefix(prefix): tuple(metadata.size)
        for tensor, metadata in reader.metadata.state_dict_metadata.items()
        if tensor.startswith(prefix) and isinstance(metadata, TensorStorageMetadata)
    }
    if differing := [tensor for tensor in {**ours, **theirs} if ours.get(tensor) != theirs.get(tensor)]:
        first = differing[0]
        stored, own = theirs.get(first, "absent"), ours.get(first, "absent")
        if role.spec.lora is not None and all((name in ours) != (name in theirs) for name in differing):
            text = "{}: {} names other layers than those that have adapters in the state: {} is {} in the state and {} "
            text += "in the model ({} parameters differ). all-linear now includes experts, and plain MLPs beside them; "
            text += "start a new run (trial_name) with {} at the last checkpoint, which keeps the layers"
            keys = Key("actor.target_modules"), Key("actor.init_lora_from")
            raise EngineError(text, folder, keys[0], first, stored, own, len(differing), keys[1])
        text = "{}: the state is of another model than {} ({}): {} is {} in the state and {} in the model "
        text += "({} parameters differ)"
        raise EngineError(text, folder, Key(role.spec.key), role.spec.path, first, stored, own, len(differing))


@torch.no_grad()
def load_role(reader: StateFileReader, role: str, backend: TrainBackend, with_moments: bool = True) -> None:
    """Load master weights, moments and update counters of one role, whose buffers are on the device.

    Each rank reads only the elements that it holds. Without `with_moments`, moments start at zero.
    """
    _, optimizer = flat_and_optimizer(backend)
    facts = reader.about[role]
    stored_tp, with_moments = facts[TP_SIZE], with_moments and facts.get("moments", True)
    buffers, shards = buffers_of(role, backend), shards_of(role, backend, with_moments)
    if with_moments and optimizer.is_in_blocks and stored_tp != backend.model.tp.size:
        shards = [shard for shard in shards if shard.buffer in (f"{role}.{MASTER}", f"{role}.{COUNTERS}")]
        _requantise(reader, role, backend, stored_tp)
    counters = buffers[f"{role}.{COUNTERS}"]
    assert isinstance(counters, Tensor)
    counters.zero_()  # states of older versions lack the last one
    _read_shards(reader, shards, buffers)
    optimizer.steps, optimizer.skipped_steps, optimizer.empty_steps = counters.tolist()
    optimizer.moments_from = facts.get("moments_from", 0)
    if not with_moments:
        optimizer.clear_moments()


def _read_shards(reader: StateFileReader, shards: Iterable[TensorShard], buffers: Mapping[str, Buffer]) -> None:
    try:
        dcp.load({}, storage_reader=reader, planner=ShardLoadPlanner(shards, buffers), no_dist=True)
    except CheckpointException as error:
        raise _checkpoint_error(error, "the state of the run cannot be read") from error


def _requantise(reader: StateFileReader, role: str, backend: TrainBackend, stored_tp: int) -> None:
    """Fill 8-bit moments from a state that was written with another tensor-parallel size.

    The blocks that share a scale follow the layout of one rank, so the stored moments are dequantised, assembled to
    full tensors, cut for this rank and quantised again.
    """
    flat, optimizer = flat_and_optimizer(backend)
    model = backend.model
    dtype = model.embed.weight.dtype
    stored = [
        build_model(model.config, dtype=dtype, device="meta", tp=ParallelGroup(rank, stored_tp))
        for rank in range(stored_tp)
    ]
    if backend.role.lora is not None:
        for each in stored:
            add_adapters(each, backend.role.lora.adapters)
    buffers, device = buffers_of(role, backend), optimizer.moments["exp_avg"].device
    for kind, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        for name, place in flat.ranges.items():
            own = torch.zeros(flat.shapes[name])
            wholes = _full_moments(reader, role, kind, name, stored)
            for part, whole in zip(model.tensor_parts(name), wholes, strict=True):
                part.region(own).copy_(part.shard_of(whole))
            for part, local in flat.owned_ranges(place):
                values = own.flatten()[part.start - place.start : part.stop - place.start].to(device)
                scales = buffers[f"{role}.{kind}_scale"][block_range(local)]
                quantise(values, buffers[f"{role}.{kind}"][local], scales, signed=signed)


def _full_moments(reader: StateFileReader, role: str, kind: str, name: str, stored: list[Transformer]) -> list[Tensor]:
    """Return the full fp32 moment of each checkpoint tensor that a parameter combines.

    `stored` are models on the device `meta` with the shapes of each tensor-parallel rank that wrote the state.
    """
    wholes = [torch.zeros(part.full_shape) for part in stored[0].tensor_parts(name)]
    for model in stored if stored[0].is_sharded(name) else stored[:1]:
        shape = model.get_parameter(name).shape
        codes = torch.empty(shape.numel(), dtype=torch.uint8)
        scales = torch.empty(-(-shape.numel() // BLOCK))
        buffers = {f"{role}.{kind}": codes, f"{role}.{kind}_scale": scales}
        shards = [
            shard
            for suffix, buffer in (("", codes), ("_scale", scales))
            for shard in vector_shards(role, f"{kind}{suffix}", name, model.tp, slice(0, buffer.numel()))
        ]
        _read_shards(reader, shards, buffers)
        values = dequantise(codes, scales, signed=kind == "exp_avg").view(shape)
        for part, whole in zip(model.tensor_parts(name), wholes, strict=True):
            part.shard_of(whole).copy_(part.region(values))
    return wholes


def _checkpoint_error(error: BaseException, what: str) -> CheckpointError:
    """Return a CheckpointError with the text `what`, followed by the error of the lowest rank that failed."""
    ranks = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
    first: BaseException = ranks[min(ranks)][0]
    if isinstance(first, OSError) and first.strerror:
        return CheckpointError("{}: {}", what, first.strerror)
    text = str(first) if isinstance(first, ArenoError | OSError) else f"{type(first).__name__}: {first}"
    return CheckpointError("{}: {}", what, text)
