"""Writes training states in the background, and removes the oldest ones if the disk has no space for another."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.config.run import RecoverConfig
from areno.errors import ArenoError, CheckpointError
from areno.files.durable import remove
from areno.run.states import ENGINE, StateFolder

if TYPE_CHECKING:
    from areno.engine.engine import Engine

logger = logging.getLogger("areno.recover")


@dataclass
class _OpenState:
    step: int
    folder: Path
    record: Mapping[str, Any]  # for run.json
    alarm: threading.Timer  # logs a warning if writing takes too long
    thread: threading.Thread | None = None  # completes the folder; None until the engine has written its files
    error: Exception | None = None


class StateWriter:
    """Writes the training states of one run in the background, one at a time.

    If a state cannot be written, a warning is logged, the run continues, and earlier states are kept. `engine` is a
    function, because the engine does not exist yet when the run is opened. `before` syncs the other files of the run to
    disk. It is called in another thread, before a state becomes complete.
    """

    def __init__(
        self,
        config: RecoverConfig,
        states: StateFolder,
        engine: Callable[[], Engine],
        before: Callable[[], object],
        slow_s: float | None = None,
    ):
        self.config, self.states, self._slow_s = config, states, slow_s
        self._engine, self._before = engine, before
        self._write: _OpenState | None = None
        self.written_step: int | None = None
        self.failure = ""

    def begin_write(self, step: int, record: Mapping[str, Any]) -> bool:
        """Start to write the training state of a step. Return False if the previous state is still being written.

        If writing fails, a warning is logged and the result is True. `record` is the data for run.json, see
        Recovery.keep_run_state.
        """
        self.poll()
        if self._write is not None:
            return False
        record = {**record, "token_budgets": self._engine().token_budgets}
        try:
            folder = self.states.begin_again(step) if step == self.written_step else None
            if folder is not None:
                self._write = _OpenState(step, folder, record, self._start_slow_warning(step))
                self._complete_folder(self._write)
                return True
            self._free_disk_space()
            folder = self.states.begin(step)
            self._write = _OpenState(step, folder, record, self._start_slow_warning(step))
            self._engine().save_state(folder / ENGINE, not self.config.no_save_optim)
        except (CheckpointError, OSError) as error:
            self._note_failure(step, error)
        except ArenoError:  # the engine has failed, so no state can become complete
            self.abandon_write()
            raise
        return True

    def poll(self, wait: bool = False) -> None:
        """Complete the state that is being written, if its files are ready. With `wait`, block until they are."""
        write = self._write
        if write is None:
            return
        try:
            if write.thread is None:
                if not self._engine().is_state_written(wait):
                    return
                self._complete_folder(write)
            assert write.thread is not None
            if wait:
                write.thread.join()
            if write.thread.is_alive():
                return
            if write.error is not None:
                raise write.error
        except (CheckpointError, OSError) as error:
            self._note_failure(write.step, error)
        except ArenoError:
            self.abandon_write()
            raise
        else:
            write.alarm.cancel()
            self._write, self.written_step = None, write.step

    def _start_slow_warning(self, step: int) -> threading.Timer:
        def warn() -> None:
            logger.warning(
                "the state of step %d has been in progress for %.0f s: the disk of %s is slow, or does not answer. "
                "There is no newer state until it is written",
                step,
                self._slow_s,
                self.states.folder,
            )

        timer = threading.Timer(self._slow_s or 0.0, warn)
        timer.daemon = True
        if self._slow_s is not None:
            timer.start()
        return timer

    def _complete_folder(self, write: _OpenState) -> None:
        """Start a thread that completes the folder of a state. The engine has written its files before."""

        def finish() -> None:
            try:
                self._before()
                self.states.finish(write.folder, write.step, write.record)
            except Exception as error:
                write.error = error

        write.thread = threading.Thread(target=finish, daemon=True, name="areno-state")
        write.thread.start()

    def write(self, step: int, record: Mapping[str, Any]) -> bool:
        """Write the training state of a step, block until it is complete, and return whether that succeeded."""
        self.poll(wait=True)
        self.begin_write(step, record)
        self.poll(wait=True)
        return self.written_step == step

    def abandon_write(self) -> None:
        """Stop writing the current state and remove its files. A state that has just become complete is kept."""
        write, self._write = self._write, None
        if write is not None:
            write.alarm.cancel()
            if write.thread is not None:
                write.thread.join()
            remove(write.folder)

    def _free_disk_space(self) -> None:
        """Remove states, the oldest first, until the disk has room for another one. The newest is never removed.

        Raises CheckpointError if that does not suffice. A partly written state would fill the disk, so that the other
        files of the run could not be written.
        """
        needed, folder = self.states.newest_size_bytes(), self.states.folder
        for step in reversed(self.states.steps()[1:]):
            if shutil.disk_usage(folder).free >= needed:
                return
            logger.warning("%s has little space left: the state of step %d makes room for the next one", folder, step)
            self.states.remove(step)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise CheckpointError("{} has {:.3g} GiB free, and it needs {:.3g}", folder, free / 2**30, needed / 2**30)

    def _note_failure(self, step: int, error: Exception) -> None:
        with suppress(OSError):
            self.abandon_write()
        self.failure = str(error)
        last = "there is no other" if self.written_step is None else f"that of step {self.written_step} stays"
        logger.warning("the state of step %d could not be written: %s. The run continues; %s", step, error, last)
