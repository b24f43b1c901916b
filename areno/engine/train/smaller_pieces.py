"""Repeats a pass over rows with smaller micro-batches after memory has run out."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from areno.engine.device_memory import free_unused_memory, is_out_of_memory

T = TypeVar("T")


def retry_with_smaller_micro_batches(attempt: Callable[[], T], divide: Callable[[], bool]) -> T:
    """Call `attempt` until the memory suffices, and return its result.

    After each failure, `divide` makes the next attempt need less memory. If `divide` returns False, it could not do so,
    and the error of the last attempt is raised.
    """
    while True:
        try:
            return attempt()
        except RuntimeError as error:
            cause = error.__cause__ or error  # an error of out_of_memory_hint
            if not is_out_of_memory(cause):
                raise
            for each in (error, cause):
                traceback.clear_frames(each.__traceback__)  # they hold the tensors of the pass that failed
            if not divide():
                raise
        free_unused_memory()
