"""Writes the states of a run in the background: begun at the end of a step, made whole while the next one goes on."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from areno.config.recover import RecoverConfig
from areno.errors import ArenoError, CheckpointError
from areno.files.durable import remove
from areno.run.state import ENGINE, States

logger = logging.getLogger("areno.recover")


class StatefulEngine(Protocol):
    """What is asked of the engine; see areno.engine.engine."""

    def save_state(self, folder: str | Path, with_moments: bool = True) -> None: ...

    def state_written(self, wait: bool = False) -> bool: ...


@dataclass
class _Write:
    """A state that is being written. thread: finishes its folder when the engine has written its part."""

    step: int
    folder: Path
    record: Mapping[str, Any]
    alarm: threading.Timer
    thread: threading.Thread | None = None
    error: Exception | None = None


class StateWriter:
    """Of one run. before: called, in another thread, before a state becomes whole. slow_s: when writing takes longer,
    that is told; None: never.

    A state that cannot be written is told in a warning, and the run goes on: what was written before stays.
    """

    def __init__(
        self,
        config: RecoverConfig,
        states: States,
        engine: Callable[[], StatefulEngine],
        before: Callable[[], object],
        slow_s: float | None = None,
    ):
        self.config, self.states, self._slow_s = config, states, slow_s
        self._engine, self._before = engine, before
        self._write: _Write | None = None
        self.written_step: int | None = None  # of the newest whole state, where this run wrote or loaded it

    def begin(self, step: int, record: Mapping[str, Any]) -> bool:
        """Begin to write the state as it is now. False if the one before is still under way."""
        self.poll()
        if self._write is not None:
            return False
        try:
            folder = self.states.begin_again(step) if step == self.written_step else None
            if folder is not None:
                self._write = _Write(step, folder, record, self._alarm(step))
                self._finish(self._write)
                return True
            self._check_room()
            folder = self.states.begin(step)
            self._write = _Write(step, folder, record, self._alarm(step))
            self._engine().save_state(folder / ENGINE, not self.config.no_save_optim)
        except (CheckpointError, OSError) as error:
            self._failed(step, error)
        except ArenoError:  # the engine cannot go on, and nothing will ever be whole
            self.drop()
            raise
        return True

    def poll(self, wait: bool = False) -> None:
        """Bring what is under way to its end as far as that can be without waiting, or entirely."""
        write = self._write
        if write is None:
            return
        try:
            if write.thread is None:
                if not self._engine().state_written(wait):
                    return
                self._finish(write)
            assert write.thread is not None
            if wait:
                write.thread.join()
            if write.thread.is_alive():
                return
            if write.error is not None:
                raise write.error
        except (CheckpointError, OSError) as error:
            self._failed(write.step, error)
        except ArenoError:
            self.drop()
            raise
        else:
            write.alarm.cancel()
            self._write, self.written_step = None, write.step

    def _alarm(self, step: int) -> threading.Timer:
        """A disk that does not answer is no error, and only a thread waits for it: nobody else would notice."""

        def tell() -> None:
            logger.warning(
                "the state of step %d has been under way for %.0f s: the disk of %s is slow, or does not answer. There "
                "is no newer state until it is written", step, self._slow_s, self.states.folder,
            )  # fmt: skip

        timer = threading.Timer(self._slow_s or 0.0, tell)
        timer.daemon = True
        if self._slow_s is not None:
            timer.start()
        return timer

    def _finish(self, write: _Write) -> None:
        def finish() -> None:
            try:
                self._before()
                self.states.finish(write.folder, write.step, write.record)
            except Exception as error:
                write.error = error

        write.thread = threading.Thread(target=finish, daemon=True, name="areno-state")
        write.thread.start()

    def write(self, step: int, record: Mapping[str, Any]) -> bool:
        """Write the state as it is now, and wait until it is whole. Whether it is."""
        self.poll(wait=True)
        self.begin(step, record)
        self.poll(wait=True)
        return self.written_step == step

    def drop(self) -> None:
        """Forget what is under way, and remove it unless it has just become whole."""
        write, self._write = self._write, None
        if write is not None:
            write.alarm.cancel()
            if write.thread is not None:
                write.thread.join()
            remove(write.folder)

    def _check_room(self) -> None:
        """A full disk is seen before it is full, so that what else the run writes has its room."""
        needed, free = self.states.size(), shutil.disk_usage(self.states.folder).free
        if free < needed:
            text = "{} has {:.3g} GiB free, and it needs {:.3g}"
            raise CheckpointError(text, self.states.folder, free / 2**30, needed / 2**30)

    def _failed(self, step: int, error: Exception) -> None:
        with suppress(OSError):
            self.drop()
        last = "there is no other" if self.written_step is None else f"that of step {self.written_step} stays"
        logger.warning("the state of step %d could not be written: %s. The run goes on; %s", step, error, last)
