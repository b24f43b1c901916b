"""Processes of tests that start at once: forked from a process that has imported torch, which takes seconds.

What is tested is the same: the worker gets its arguments pickled, and shares nothing with the test. Tests of the start
itself ask for the fixture `cold_workers`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import context as contexts
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

from areno.models import saving

PRELOADED = [
    "areno.engine.worker",
    "areno.engine.processes.worker_main",
    "areno.data.encoder_process",
    "torch.distributed.checkpoint",
    "transformers.models.auto.tokenization_auto",
]


class _Process(contexts.ForkServerProcess):
    """With the environment of the moment, as a spawned process has it; the server's is that of its own start.

    A test may have made the smallest file of a checkpoint smaller.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._environment, self._min_shard_bytes = dict(os.environ), saving.MIN_SHARD_BYTES

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        saving.MIN_SHARD_BYTES = self._min_shard_bytes
        super().run()


class _Context(contexts.ForkServerContext):
    Process = _Process


def workers() -> Any:
    """In place of `multiprocessing` in modules that spawn processes."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return SimpleNamespace(get_context=lambda method: _Context())


def server_pid() -> int | None:
    """The process that forks them, once there is one; it lives as long as this one."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def on_ranks(main: Callable[..., None], args: tuple[Any, ...], n: int) -> None:
    """Call main(rank, *args) in n processes; raises what one of them raises."""
    import torch.multiprocessing as mp

    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(_rank_main, (dict(os.environ), main, args), n, start_method="forkserver")


def _rank_main(rank: int, environment: dict[str, str], main: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    main(rank, *args)
