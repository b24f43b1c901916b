"""Settings of torch, cuBLAS and NCCL with which a worker computes the same bits in every run.

A worker applies them if the setting `engine.deterministic` is true. areno's own kernels need no settings: they
always add in a fixed order, and their random numbers depend on counters, not on earlier draws. The libraries need
settings. Some CUDA operations of torch add in the order in which threads arrive. cuBLAS may split a product
according to the workspace of the stream. NCCL may reduce inside the network switch.

`CpuThreads` sets the number of threads on a CPU. For small passes of a tiny model, one thread is faster than several.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from areno.errors import EngineError, Key

_KEY = Key("engine.deterministic")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")  # a fixed size for all streams; torch accepts only these values
_memory: Any = torch.utils.deterministic  # Any, because type checkers do not know its settings
_ONE_BELOW = 5_000_000  # parameters
_ALL_FROM = 600_000_000  # parameters x tokens: where all threads began to pay in training of a tiny model
_SAYS = " does not have a deterministic implementation"


@dataclass
class _GlobalFlags:
    """Switches torch's process-wide deterministic mode on for the first worker, and restores it after the last one.

    `before` holds the original values: the deterministic debug mode, and fill_uninitialized_memory.
    """

    n_workers: int = 0
    before: tuple[int, bool] = (0, True)

    def apply(self) -> None:
        if not self.n_workers:
            self.before = torch.get_deterministic_debug_mode(), _memory.fill_uninitialized_memory
            torch.set_deterministic_debug_mode("error")  # torch.use_deterministic_algorithms would import its compiler
            # Memory is not read before it is written; to fill it all would only take time.
            _memory.fill_uninitialized_memory = False
        self.n_workers += 1

    def restore(self) -> None:
        self.n_workers -= 1
        if not self.n_workers:
            mode, _memory.fill_uninitialized_memory = self.before
            torch.set_deterministic_debug_mode(mode)


_flags = _GlobalFlags()


def begin_deterministic(device: str, world_size: int) -> None:
    """Make this process compute the same bits in every run, until `end_deterministic`.

    Call this before the process uses CUDA or NCCL. It switches torch's deterministic mode on. On a GPU it also sets the
    environment variables CUBLAS_WORKSPACE_CONFIG and, for several ranks, NCCL_ALGO=Ring. Variables that are already set
    keep their values. Raises EngineError if this cannot work.
    """
    if device.startswith("cuda"):
        given = os.environ.get(_WORKSPACE)
        if given is not None and given not in _WORKSPACES:
            raise EngineError(
                f"{{}} is true, but {_WORKSPACE} is {given!r} in the environment; expected one of "
                f"{', '.join(_WORKSPACES)}. Unset it, or set {{}} to false",
                _KEY,
                _KEY,
            )
        if find_spec("triton") is None:  # without triton, sampling uses sums of torch that have no fixed order
            raise EngineError("{} needs triton on CUDA; pip install triton, or set {} to false", _KEY, _KEY)
        if given is None and torch.cuda.is_initialized():
            raise EngineError(
                f"{{}} is true, but this process has used CUDA already, and {_WORKSPACE} counts at its start only; set "
                f"{{}}=spawn, or start the process with {_WORKSPACE}={_WORKSPACES[0]}",
                _KEY,
                Key("engine.workers"),
            )
        os.environ[_WORKSPACE] = given or _WORKSPACES[0]
        if world_size > 1:
            os.environ.setdefault("NCCL_ALGO", "Ring")  # each rank adds its own to what it has received
    _flags.apply()


def end_deterministic() -> None:
    """Undo one call of `begin_deterministic`. When all calls are undone, torch has its original settings again."""
    _flags.restore()


@contextmanager
def without_deterministic_mode() -> Iterator[None]:
    """Switch torch's deterministic mode off inside a `with` block. The decoder runs in such a block.

    The decoder is deterministic without this mode. Its indexed writes have distinct indices, add integers, or write
    values of padding tokens, which nobody reads. torch cannot know this and would sort all indices first. Sorting takes
    time, and in some releases of torch it waits for the device, which is forbidden while a CUDA graph is captured.
    """
    mode = torch.get_deterministic_debug_mode()
    if mode:
        torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        if mode:
            torch.set_deterministic_debug_mode(mode)


@contextmanager
def explain_nondeterminism_errors() -> Iterator[None]:
    """Turn torch's error about a nondeterministic operation into an EngineError that names it."""
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if isinstance(error, EngineError) or _SAYS not in message:
            raise
        name = message.partition(_SAYS)[0].split()[-1]
        raise EngineError(
            f"{{}} is true, but torch has no deterministic form of {name} here; use another operation where it is your "
            "own, such as in a loss function, or set {} to false",
            _KEY,
            _KEY,
        ) from error


class CpuThreads:
    """Sets how many CPU threads torch uses for the models of this rank. No effect on a CUDA device.

    The ranks of a machine share its threads. `size` returns the number of parameters of the largest model. With
    `one_number`, every pass uses the same number of threads, which exact arithmetic needs.
    """

    def __init__(self, device: torch.device, n_ranks: int, size: Callable[[], int], one_number: bool):
        self._on_cpu, self._size, self._one_number = device.type == "cpu", size, one_number
        self._most = max(1, torch.get_num_threads() // n_ranks)
        self.set_for_decoding()

    def set_for_decoding(self) -> None:
        """Set the number of threads for decoding, after the models have changed."""
        if self._on_cpu:
            torch.set_num_threads(1 if self._size() < _ONE_BELOW else self._most)

    @contextmanager
    def for_pass(self, n_tokens: int) -> Iterator[None]:
        if self._on_cpu and not self._one_number and self._size() * n_tokens >= _ALL_FROM:
            torch.set_num_threads(self._most)
        try:
            yield
        finally:
            self.set_for_decoding()
