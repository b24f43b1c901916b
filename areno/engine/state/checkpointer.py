"""Saves the state of a worker's trained roles in a background thread, and loads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areno import heartbeat
from areno.engine.device_memory import host_bytes_free
from areno.engine.roles import Role, Roles
from areno.engine.state.tensor_shards import (
    TensorShard,
    buffers_of,
    flat_and_optimizer,
    role_metadata,
    shards_of,
    shards_to_write,
)
from areno.engine.train.optimizer_offload import PINNED_BYTES, HostBuffer
from areno.errors import CheckpointError, EngineError
from areno.layers.parallel import ParallelGroup
from areno.models.quantization import quantize_again

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a second to import
    from areno.engine.state.storage import HostFile
    from areno.engine.state.transfer import ShardSavePlanner

_WAIT_S = 1.0  # between two looks at the progress of writing
COPY_BYTES = 2**26  # copied at once: copies from the decoder to the host may have to wait this long


@dataclass(frozen=True)
class _Share:
    """The consecutive shards of one buffer, such as "actor.master", that this rank writes."""

    role: str
    buffer: str
    shards: list[TensorShard]

    @property
    def start(self) -> int:
        return self.shards[0].start

    @property
    def stop(self) -> int:
        return self.shards[-1].stop


class StateCheckpointer:
    """Saves and loads the training state of one worker. All ranks must call each method, except `close`."""

    def __init__(self, roles: Roles):
        self._roles, self._context, device = roles, roles.context, roles.context.device
        self._plans: dict[bool, tuple[list[_Share], ShardSavePlanner]] = {}  # with moments or not; while the roles stay
        self._memory: dict[str, list[Tensor]] = {}  # buffer -> host memory for this rank's share of it
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._n_checks = 0  # grows while files are written
        self._closed = threading.Event()

    def save(self, folder: Path, with_moments: bool = True) -> None:
        """Start writing the training state to a new folder, in a background thread.

        Later optimizer updates do not change the state that is written. On CUDA, the state is copied to pinned host
        memory while the following work runs, and the next optimizer update waits for this copy. Masters and moments
        that are kept in host memory are not copied: the next optimizer update waits until they are written.
        `is_written` reports when the files are complete.
        """
        if self._thread is not None:
            self._thread.join()  # another rank may know earlier that all ranks have written
        self._failure = None
        if with_moments not in self._plans:
            self._plans[with_moments] = self._plan_shares(with_moments)
        shares, planner = self._plans[with_moments]
        files: list[HostFile] = []
        failure: Exception | None = None
        try:
            files = self._start_copies(shares)
        except (EngineError, RuntimeError) as error:  # no memory; `check` stops the other ranks, which already write
            failure = error

        def check() -> None:
            if failure is not None:
                raise failure
            self._n_checks += 1
            self._wait_for_copies()
            if self._closed.is_set():
                raise InterruptedError("the engine was closed")

        self._thread = threading.Thread(
            target=self._write, args=(folder, files, planner, check), daemon=True, name="areno-state-writer"
        )
        self._thread.start()
        for role in self._roles.trained_roles().values():
            flat, optimizer = flat_and_optimizer(role.backend)
            if flat.in_host:
                optimizer.before_step.append(self._wait_for_files)

    def is_written(self) -> bool:
        """Return whether all ranks have written the last `write_state`. Raises CheckpointError once if it failed."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure
        return True

    def load(self, folder: Path, with_moments: bool = True) -> None:
        """Load the training state from a folder. The ranks that wrote it may have had another layout.

        Each rank first checks the folder and its share of the files. If a check fails on any rank, no rank loads
        anything. The rank whose check failed raises the error, and all other ranks return. Without `with_moments`,
        moments start at zero.

        Raises CheckpointError for a damaged folder, and EngineError for the state of other roles, models or optimizers.
        """
        from areno.engine.state.storage import StateFileReader
        from areno.engine.state.transfer import check_compatible, load_role

        self._wait_for_copies()
        self._wait_for_files()
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()  # the last update has stored masters and moments in host memory
        roles, context = self._roles.trained_roles(), self._context
        readers: list[StateFileReader] = []

        def check() -> None:
            readers.append(StateFileReader(folder))
            check_compatible(readers[0], roles, folder)
            readers[0].verify(context.rank, context.world_size)

        def load() -> None:
            for name, role in roles.items():
                with role.on_device(training=True) as backend:
                    load_role(readers[0], name, backend, with_moments)

        self._plans.clear()  # they contain facts about the moments
        if self._run_on_all_ranks(check) and self._run_on_all_ranks(load):
            for role in roles.values():
                with role.on_device(training=True) as backend:
                    flat_and_optimizer(backend)[0].update_from_masters()  # a collective call
                    quantize_again(backend.model)

    def free_buffers(self) -> None:
        """Free save plans and host memory. Call this before roles are added or removed."""
        self._wait_for_copies()
        self._plans.clear()
        self._memory.clear()

    def close(self) -> None:
        """Stop the background thread of `write_state` and wait for it to end. A state may stay incomplete."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _plan_shares(self, with_moments: bool) -> tuple[list[_Share], ShardSavePlanner]:
        from areno.engine.state.transfer import ShardSavePlanner

        shares: list[_Share] = []
        dtypes: dict[str, torch.dtype] = {}
        roles = self._roles.trained_roles()
        for name, role in roles.items():
            dtypes |= {buffer: tensor.dtype for buffer, tensor in buffers_of(name, role.backend).items()}
            flat, _ = flat_and_optimizer(role.backend)
            alike = ParallelGroup() if flat.is_divided else self._context.dp
            mine = shards_to_write(shards_of(name, role.backend, with_moments), alike)
            shares += [_Share(name, buffer, shards) for buffer, shards in mine.items()]
        shards = [shard for share in shares for shard in share.shards]
        facts = {name: role_metadata(role.backend, with_moments) for name, role in roles.items()}
        return shares, ShardSavePlanner(shards, dtypes, facts)

    def _start_copies(self, shares: list[_Share]) -> list[HostFile]:
        """Start to copy this rank's shares into host memory. Buffers that are in host memory are not copied."""
        from areno.engine.state.storage import HostFile

        roles = self._roles.trained_roles()
        sources: dict[str, list[Tensor]] = {}
        in_host: dict[str, list[Tensor]] = {}
        for share in shares:
            role, place = roles[share.role], slice(share.start, share.stop)
            buffer = buffers_of(share.role, role.backend)[share.buffer]
            if isinstance(buffer, HostBuffer):
                in_host[share.buffer] = buffer.range_views(place)
            else:
                sources[share.buffer] = _buffer_views(buffer, role, share.start, share.stop)
        self._allocate_host_memory(sources)
        with self._on_copy_stream(list(roles.values())):
            for buffer, parts in sources.items():
                size = COPY_BYTES // parts[0].element_size()
                for copy, part in zip(self._memory[buffer], parts, strict=True):
                    for stretch, source in zip(copy.split(size), part.split(size), strict=True):
                        stretch.copy_(source, non_blocking=True)
        rank, contents = self._context.rank, self._memory | in_host
        return [
            HostFile(f"{share.buffer}.{rank}.bin", share.start, contents[share.buffer], share.shards)
            for share in shares
        ]

    def _allocate_host_memory(self, sources: dict[str, list[Tensor]]) -> None:
        """Allocate host memory for copies, once for each buffer. Raises EngineError if too little is free."""
        missing = {buffer: parts for buffer, parts in sources.items() if buffer not in self._memory}
        n_bytes = sum(part.nbytes for parts in missing.values() for part in parts)
        if n_bytes > host_bytes_free() // self._roles.spec.n_ranks_on_machine(self._context.rank):
            raise EngineError(f"a copy of the state takes {n_bytes / 2**30:.1f} GiB of host memory, which are not free")
        for buffer, parts in missing.items():
            pinned = self._stream is not None
            self._memory[buffer] = [torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned) for part in parts]

    @contextmanager
    def _on_copy_stream(self, roles: list[Role]) -> Iterator[None]:
        """Put the copies that are launched inside a `with` block on a separate CUDA stream.

        The copies start after the work launched so far, and run while later work runs. The next optimizer update of
        `roles` waits for them. On a CPU the copies run at once.
        """
        if self._stream is None:
            yield
            return
        if any(role.spec.offload for role in roles):
            torch.cuda.current_stream().synchronize()  # copies of offloaded buffers to host memory are complete
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._copied = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
        self._copied.record(self._stream)
        for role in roles:
            flat_and_optimizer(role.backend)[1].before_step.append(partial(_wait_on_stream, self._copied))

    def _wait_for_copies(self) -> None:
        if (copied := self._copied) is not None:
            copied.synchronize()
            self._copied = None

    def _wait_for_files(self) -> None:
        n_checks = self._n_checks
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_WAIT_S)
            if self._n_checks != n_checks:
                n_checks = self._n_checks
                heartbeat.beat()

    def _write(self, folder: Path, files: list[HostFile], planner: ShardSavePlanner, check: Callable[[], None]) -> None:
        """Write the files in the background thread. `check` stops this by raising an exception."""
        from areno.engine.state.transfer import write_state

        try:
            write_state(folder, files, planner, check, self._context.states)
        except CheckpointError as error:
            self._failure = error

    def _run_on_all_ranks(self, step: Callable[[], None]) -> bool:
        """Run `step` on all ranks. Raises its error if it failed here, and returns False if it failed elsewhere."""
        failure = None
        try:
            step()
        except Exception as error:
            failure = error
        failed = torch.tensor(float(failure is not None), device=self._context.device)
        any_failed = bool(self._context.dp.all_reduce(self._context.tp.all_reduce(failed)).item())
        if failure is not None:
            raise failure
        return not any_failed


def _wait_on_stream(event: torch.cuda.Event) -> None:
    torch.cuda.current_stream().wait_event(event)


def _buffer_views(buffer: Tensor, role: Role, start: int, stop: int) -> list[Tensor]:
    """Return elements [start, stop) as views of at most PINNED_BYTES, of host memory for an offloaded role."""
    size, parts, begin = PINNED_BYTES // buffer.element_size(), [], 0
    for whole in role.offload.host_copies(buffer) or [buffer]:
        low, high = max(start - begin, 0), min(stop - begin, whole.numel())
        parts += [whole[at : min(at + size, high)] for at in range(low, high, size)]
        begin += whole.numel()
    return parts
