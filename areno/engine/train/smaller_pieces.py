"""The retry of a pass over rows with smaller micro-batches, after memory has run out."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from areno.engine.device_memory import free_unused_memory, is_out_of_memory

T = TypeVar("T")


def retry_with_smaller_pieces(attempt: Callable[[], T], divide: Callable[[], bool]) -> T:
    """Return the result of the first attempt for which the memory suffices.

    `divide` makes the next attempt need less, and returns False if that is impossible or forbidden. The error of the
    last attempt is raised then.
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
