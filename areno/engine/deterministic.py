"""Makes a worker compute the same bits whenever the same run is made again: what `engine.deterministic` asks of torch.

Kernels of areno add in a fixed order anyway, and random numbers are counted, not drawn in turn. What is left are
libraries: some of torch's operations on CUDA add in the order in which threads come by, cuBLAS may divide a product by
the workspace that a stream happens to have, and NCCL may let the switch add.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from areno.errors import EngineError, Key

_KEY = Key("engine.deterministic")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")  # one size for all streams; these are what torch accepts
_memory: Any = torch.utils.deterministic  # whose settings type checkers do not see
_SAYS = " does not have a deterministic implementation"


@dataclass
class _Flags:
    """Those of torch, which are of the whole process, and how many workers in it want them set."""

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


_flags = _Flags()


def begin_deterministic(device: str, world_size: int) -> None:
    """For this process from now on, until `end_deterministic`. To be called before it uses CUDA or NCCL.

    EngineError where the environment, or what the process has done so far, does not allow it.
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
        if find_spec("triton") is None:  # torch's own forms of sampling have sums without a fixed order
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
    """Once for each `begin_deterministic`: torch is set as before the first of them."""
    _flags.restore()


@contextmanager
def places_of_their_own() -> Iterator[None]:
    """For the decoder, whose operations have a fixed order as they are: what they write by index are different places.

    torch does not know that. It would sort all indices first, which takes time, and in some releases waits for the
    device, as no CUDA graph may.
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
def operations_named() -> Iterator[None]:
    """Turn torch's refusal of a nondeterministic operation into an EngineError that names the operation."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if isinstance(error, EngineError) or _SAYS not in said:
            raise
        name = said.partition(_SAYS)[0].split()[-1]
        raise EngineError(
            f"{{}} is true, but torch has no deterministic form of {name} here; use another operation where it is your "
            "own, such as in a loss function, or set {} to false",
            _KEY,
            _KEY,
        ) from error
