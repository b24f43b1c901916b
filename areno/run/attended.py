"""What stands around every training loop: a lost worker does not end it, and whatever ends it leaves a state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol, TypeVar

from areno.errors import WorkerLost

Loop = TypeVar("Loop", bound="HasRun")


class AttendedRun(Protocol):
    """See Run."""

    def attended(self) -> AbstractContextManager[None]: ...

    @property
    def may_restart(self) -> bool: ...

    def give_up(self, lost: WorkerLost) -> NoReturn: ...

    def restart(self, lost: WorkerLost) -> None: ...

    def has_result(self, result: float) -> None: ...


class HasRun(Protocol):
    """A loop with its run."""

    @property
    def run(self) -> AttendedRun: ...


def attended(fit: Callable[[Loop], float]) -> Callable[[Loop], float]:
    """Marks the method that runs a loop to its end; its result is that of the run. See Run.attended."""

    @functools.wraps(fit)
    def attended_fit(loop: Loop) -> float:
        with loop.run.attended():
            lost: WorkerLost | None = None
            while True:
                try:
                    if lost is not None:
                        loop.run.restart(lost)  # in which the next one may be lost
                    result = fit(loop)
                    break
                except WorkerLost as error:
                    if not loop.run.may_restart:
                        loop.run.give_up(error)
                    lost = error
        loop.run.has_result(result)
        return result

    return attended_fit
