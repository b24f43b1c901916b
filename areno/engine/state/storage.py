"""The files of a run state: raw bytes of the buffers, an index of their contents, and checksums.

torch.distributed.checkpoint plans which rank writes and reads which shard, and reports a failure of one rank to all
ranks. Its own file format is not used for three reasons: it has no checksums; it holds Python's interpreter lock while
it writes, which would stall decoding; and its metadata is a pickle, which executes code when a damaged or foreign file
is read.

A folder holds `index.json` and one file for each buffer and rank. The index has two lines of JSON. The first is
{"format", "crc32"}, with the checksum of the second line. The second has three entries:

    about     facts about each role, see `tensor_shards.metadata`
    tensors   name -> {"dtype", "shape", "chunks": [[offsets, sizes, file, first byte], ...]}
    files     name -> {"bytes", "crc32": [one for every BLOCK_BYTES]}
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from areno import heartbeat
from areno.engine.state.tensor_shards import TensorShard
from areno.errors import CheckpointError
from areno.files.durable import sync

INDEX, FORMAT = "index.json", 1
BLOCK_BYTES = 2**24  # of a file that share one checksum
_THREADS = 4  # that read or write files concurrently; they wait for the disk or compute checksums
T = TypeVar("T")


@dataclass
class HostFile:
    """A file to write: elements of one buffer from index `start` on, in host memory."""

    name: str
    start: int
    parts: list[Tensor]  # consecutive 1-D tensors, which together are the file's contents
    shards: list[TensorShard]

    def blocks(self) -> Iterator[memoryview]:
        begun = bytearray()  # the first bytes of a block that continues in the next part
        for part in self.parts:
            data, start = part.view(torch.uint8).numpy().data, 0
            if begun:
                start = BLOCK_BYTES - len(begun)
                begun += data[:start]
                if len(begun) < BLOCK_BYTES:
                    continue
                yield memoryview(begun)
                begun = bytearray()
            end = start + (len(data) - start) // BLOCK_BYTES * BLOCK_BYTES
            for at in range(start, end, BLOCK_BYTES):
                yield data[at : at + BLOCK_BYTES]
            begun += data[end:]
        if begun:
            yield memoryview(begun)


@dataclass
class _Checksums:
    """The CRC-32 of each block of one file."""

    crc32: list[int] = field(default_factory=list)


class _OneState:
    """What StorageWriter and StorageReader ask for, where an object serves a single state, and its plan is final."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class StateFileWriter(_OneState, StorageWriter):
    """Writes the files of this rank and, on the coordinator, the index. All files are synced to disk at the end.

    torch.distributed.checkpoint calls its methods. `check` is called before each block of a file is written. An
    exception that it raises stops the writing on all ranks.
    """

    def __init__(self, folder: Path, files: Sequence[HostFile], check: Callable[[], None]):
        self._folder, self._files, self._check = folder, files, check

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._check()
        self._folder.mkdir(parents=True, exist_ok=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files. Returns a result for each file (checksums) and for each shard (its file and first byte)."""
        results = run_in_threads(self._write, self._files)
        sync(self._folder)
        locations = {
            (shard.name, shard.offsets): (file, (shard.start - file.start) * file.parts[0].element_size())
            for file in self._files
            for shard in file.shards
        }
        for item in plan.items:
            assert item.index.offset is not None
            file, start = locations[item.index.fqn, tuple(item.index.offset)]
            results.append(WriteResult(item.index, 0, (file.name, start)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, file: HostFile) -> WriteResult:
        n_bytes, sums = 0, _Checksums()
        with open(self._folder / file.name, "wb", buffering=0) as out:
            for block in file.blocks():
                self._check()
                sums.crc32.append(zlib.crc32(block))
                n_bytes += len(block)
                while block:
                    block = block[out.write(block) :]
            os.fsync(out.fileno())
        return WriteResult(MetadataIndex(file.name), n_bytes, sums)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on the coordinator only. `results` are those of `write_data`, for each rank."""
        files, locations = {}, {}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, _Checksums):
                files[result.index.fqn] = {"bytes": result.size_in_bytes, "crc32": result.storage_data.crc32}
            else:
                locations[result.index] = result.storage_data
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = [
                [[*chunk.offsets], [*chunk.sizes], *locations[MetadataIndex(name, chunk.offsets)]]
                for chunk in tensor.chunks
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": [*tensor.size], "chunks": chunks}
        body = json.dumps({"about": metadata.planner_data, "tensors": tensors, "files": files}).encode()
        head = json.dumps({"format": FORMAT, "crc32": zlib.crc32(body)}).encode()
        with open(self._folder / INDEX, "wb") as out:
            out.write(head + b"\n" + body)
            out.flush()
            os.fsync(out.fileno())
        sync(self._folder)


class StateFileReader(_OneState, StorageReader):
    """Reads shards from a folder that a Writer wrote. torch.distributed.checkpoint calls most of its methods.

    `about` are facts about each role. Raises CheckpointError if the index is missing, damaged or of another format.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        body = _read_index(folder)
        self.about: dict[str, Any] = body["about"]
        self._files: dict[str, dict[str, Any]] = body["files"]
        self._locations = {
            MetadataIndex(name, offsets): (sizes, file, start)
            for name, tensor in body["tensors"].items()
            for offsets, sizes, file, start in tensor["chunks"]
        }
        self.metadata = Metadata({name: _tensor_metadata(tensor) for name, tensor in body["tensors"].items()})

    def verify(self, rank: int, size: int) -> None:
        """Compare files with their checksums: every `size`-th file from the `rank`-th on. Raises CheckpointError."""
        run_in_threads(self._verify, sorted(self._files)[rank::size])

    def _verify(self, name: str) -> None:
        path, expected = self._folder / name, self._files[name]
        advice = "use another state"
        try:
            n_bytes = path.stat().st_size
            if n_bytes != expected["bytes"]:
                raise CheckpointError(f"{path} has {n_bytes} bytes, expected {expected['bytes']}; {advice}")
            block = bytearray(min(BLOCK_BYTES, n_bytes))
            with open(path, "rb", buffering=0) as file:
                for number, crc32 in enumerate(expected["crc32"]):
                    view = memoryview(block)[: min(BLOCK_BYTES, n_bytes - number * BLOCK_BYTES)]
                    _read_into(view, file)
                    heartbeat.beat()
                    if zlib.crc32(view) != crc32:
                        raise CheckpointError(
                            f"{path} is damaged: its checksum differs in the {BLOCK_BYTES >> 20} MiB from byte "
                            f"{number * BLOCK_BYTES}; {advice}"
                        )
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); {advice}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the constructor has read the index."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        shares = [plan.items[number::_THREADS] for number in range(_THREADS)]
        run_in_threads(lambda items: self._read(items, planner), shares)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        memory = torch.empty(0, dtype=torch.uint8)
        for item in items:
            sizes, name, start = self._locations[item.storage_index]
            tensor = self.metadata.state_dict_metadata[item.storage_index.fqn]
            assert isinstance(tensor, TensorStorageMetadata)
            target, dtype = planner.resolve_tensor(item), tensor.properties.dtype
            n_bytes = math.prod(sizes) * dtype.itemsize
            if memory.numel() < n_bytes:
                memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=target.is_cuda)
            with open(self._folder / name, "rb", buffering=0) as file:
                file.seek(start)
                _read_into(memory[:n_bytes].numpy().data, file)
            chunk = memory[:n_bytes].view(dtype).view(sizes)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, offset, length)
            target.copy_(chunk)
            planner.commit_tensor(item, target)


def run_in_threads(work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "areno-state-files") as pool:
        return list(pool.map(work, items))


def _read_into(view: memoryview, file: Any) -> None:
    while view:
        n = file.readinto(view)
        if not n:
            raise OSError(f"{file.name} ends early")
        view = view[n:]


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        head_line, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{folder} is no run state: {INDEX} cannot be read ({error.strerror})") from error
    try:
        head = json.loads(head_line)
        is_whole = head["format"] != FORMAT or head["crc32"] == zlib.crc32(body)
        content = json.loads(body) if is_whole and head["format"] == FORMAT else {}
    except (ValueError, KeyError, TypeError):
        is_whole, head, content = False, {}, {}
    if not is_whole:
        raise CheckpointError(f"{path} is damaged; use another state")
    if head["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {head['format']}, expected {FORMAT}: another version of areno wrote it; "
            "resume with that version"
        )
    return content


def _tensor_metadata(tensor: dict[str, Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in tensor["chunks"]]
    properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
    return TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
