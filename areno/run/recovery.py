"""Writes the training states of a run, and continues the run from the newest one.

A training state consists of weights, optimizers and the run's state dict. After every step, `Recovery.keep_run_state`
records the state dict in memory. A state is written to disk when recover.freq_* says so, at the end of the run, and
when the run is interrupted. `StateWriter` starts to write at the end of a step, and finishes while the next step runs.
Before that, resume.py decides which run is resumed and which settings may change.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from areno.config.experiments import ExperimentConfig
from areno.config.run import RecoverConfig
from areno.errors import ArenoError, CheckpointError, ConfigError, Key, Problem, WorkerLost
from areno.files.durable import locked, remove
from areno.run.progress import Trigger
from areno.run.resume import STATE, EarlierRun, changed_settings, refuse_changes
from areno.run.states import ENGINE, State, States
from areno.tracking.run_folder import RunFiles, versions
from areno.version import __version__

logger = logging.getLogger("areno.recover")

_POLL_EVERY_S = 0.5  # each poll interrupts decoding for a moment


class RecoverableEngine(Protocol):
    """The methods of areno.engine.engine.Engine that write and load training states."""

    def save_state(self, folder: str | Path, with_moments: bool = True) -> None:
        """Start to write weights and optimizers into a folder. Does not wait for the files."""
        ...

    def state_written(self, wait: bool = False) -> bool:
        """Return whether all ranks have written their files. With `wait`, block until then."""
        ...

    def load_state(self, folder: str | Path, with_moments: bool = True) -> None:
        """Load a folder that `save_state` has filled. Without `with_moments`, optimizer moments start at zero."""
        ...

    def restart(self) -> None: ...

    def phase_memory_gib(self) -> float:
        """Return the highest peak memory of any worker, in GiB, since the last call."""
        ...

    def begin_kernels(self) -> None: ...

    def end_kernels(self, name: str) -> None: ...

    def write_memory_snapshots(self, name: str) -> None: ...

    @property
    def token_budgets(self) -> dict[str, Any]: ...

    def restore_token_budgets(self, record: Mapping[str, Any]) -> None: ...


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
        states: States,
        engine: Callable[[], RecoverableEngine],
        before: Callable[[], object],
        slow_s: float | None = None,
    ):
        self.config, self.states, self._slow_s = config, states, slow_s
        self._engine, self._before = engine, before
        self._write: _OpenState | None = None
        self.written_step: int | None = None
        self.failure = ""

    def begin(self, step: int, record: Mapping[str, Any]) -> bool:
        """Start to write the training state of a step. Return False if the previous state is still being written.

        If writing fails, a warning is logged and the result is True. `record` is the data for run.json, see
        Recovery.remember.
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
            self._make_room()
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
                if not self._engine().state_written(wait):
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
        self.begin(step, record)
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

    def _make_room(self) -> None:
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


class Recovery(AbstractContextManager["Recovery"]):
    """Writes and loads the training states of one run, and restarts lost workers.

    Inside the context, no other process can resume the same run. `inputs` are fingerprints of the model and data files,
    keyed by the setting that names the files, such as "actor.path". Entering the context raises ConfigError if

    - another process runs the same run,
    - settings, models or data differ from those in the newest state, and a resumed run does not accept the change,
    - recover.mode is "off" and the folder has states, or it is "resume" and the folder has none.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        folder: Path,
        engine: Callable[[], RecoverableEngine],
        inputs: Mapping[str, str],
    ):
        self.config, self.folder = config, folder
        self._settings, self._versions = asdict(config), versions()
        self.is_on = config.recover.mode != "off"
        self._engine, self._inputs = engine, inputs
        self.files = RunFiles(folder, config.stats_logger.tensorboard.path)
        self.states = States(folder / STATE, config.recover.keep)
        self.trigger = Trigger(config.recover)
        self.writer = StateWriter(
            config.recover, self.states, engine, self.files.sync, slow_s=config.engine.stall_timeout_s
        )
        self.resumes = False
        self.models_recorded = True
        self._last: dict[str, Any] = {}  # the record of the last point from which the run can resume
        self._resources = ExitStack()
        self._n_restarts = 0
        self._polled_at = 0.0
        self._waiting = False  # a state is due, but the previous one was still being written
        self._begun_at: dict[str, int] = {}  # file -> its size when this session began

    def __enter__(self) -> Recovery:
        if not self.is_on:
            if self.states.steps():
                text = "is off, but {} holds the states of an earlier run; set it to auto to resume, or choose another"
                raise ConfigError(Problem("recover.mode", text + " folder", self.states.folder))
            return self
        self._begun_at = self.files.sizes()
        self.resumes = self.states.has_begun
        self.states.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.states.folder))
            except BlockingIOError:
                text = "the run in {} is still running, in another process"
                raise ConfigError(Problem("trial_name", text, self.folder)) from None
            self.states.tidy()
            state = self.states.newest() if self.resumes else None
            if state is not None:
                self._check_compatible(state)
            elif self.config.recover.mode == "resume":
                raise ConfigError(Problem("recover.mode", "is resume, but {} has no state", self.folder))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def _check_compatible(self, state: State) -> None:
        """Raise ConfigError if the run cannot continue from a state with the current settings, models and data."""
        found = changed_settings(type(self.config), state.record["config"], self._settings)
        earlier = EarlierRun.find(self.folder)
        if earlier is not None:  # config.yaml has the changes that the user asked for by --resume
            earlier.refuse_other(self.config, None)
        refuse_changes(found, self.folder, explicit=earlier is not None)
        given, now = state.record["inputs"], self._inputs
        changed = {change.key for change in found if change.on_resume.kind == "explicit"}
        text = "is not what the run in {} began with ({} instead of {})"
        hints = {"train_dataset": "; its rows must be the same, in the same order, at every start"}
        problems = [
            Problem(key, text + hints.get(key, ""), self.folder, now[key], given[key])
            for key in now
            if key in given and now[key] != given[key] and key not in changed
        ]
        if problems:
            raise ConfigError(problems)
        for change in found:
            logger.info("changed: %s (%s)", change, change.on_resume.effect)
        before = state.record["versions"]
        for name in (name for name in self._versions if before.get(name) != self._versions[name]):
            logger.info("changed: version of %s: %s -> %s", name, before.get(name), self._versions[name])

    def load(self) -> dict[str, Any] | None:
        """Load the newest complete training state into the engine, and truncate the files of the run to its step.

        A state with damaged files is renamed, and the next older state is tried. Returns the state dict of the run.
        Returns None if no state was ever written, or if recover.mode is off. The run then starts from its first step.
        """
        begun_at, self._begun_at = self._begun_at or self.files.sizes(), {}
        while self.is_on and (state := self.states.newest() if self.resumes else None) is not None:
            try:
                self._engine().load_state(state.engine, not self.config.recover.no_load_optim)
            except CheckpointError as error:
                self.states.set_aside(state.step, str(error))
                continue
            if (budgets := state.record.get("token_budgets")) is not None:  # an older areno recorded none
                self._engine().restore_token_budgets(budgets)
            self.files.cut_back(state.step, state.record["files"], begun_at)
            self.states.set_finished(None)
            self.writer.written_step = state.step
            return state.record["run"]
        if self.is_on and self.resumes:
            logger.warning("the run in %s ended before it had a state; it begins again", self.folder)
            self.files.cut_back(0, {}, begun_at)
        return None

    @property
    def may_restart(self) -> bool:
        return self.is_on and self._n_restarts < self.config.recover.retries

    def give_up(self, lost: WorkerLost) -> NoReturn:
        """Raise the error `lost`. If workers were restarted before, its message also names recover.retries."""
        if not self._n_restarts:
            raise lost
        text = "{}; the workers were started again {} before, and {} is {}, so the run ends"
        times = "once" if self._n_restarts == 1 else f"{self._n_restarts} times"
        raise WorkerLost(text, lost, times, Key("recover.retries"), self.config.recover.retries) from lost

    def count_restart(self, lost: WorkerLost) -> None:
        self._n_restarts += 1
        logger.warning("%s", lost)
        logger.warning(
            "starting the workers again (%d of recover.retries=%d)", self._n_restarts, self.config.recover.retries
        )

    def restart(self, lost: WorkerLost) -> None:
        """Restart all workers. They load the models of the start of the run, so call `load` next."""
        self._begun_at, self.resumes = self.files.sizes(), True
        self.count_restart(lost)
        self._engine().restart()
        self.writer.poll(wait=True)  # by now it is known whether all ranks had written a state in progress

    def keep_run_state(self, run: Mapping[str, Any]) -> None:
        """Record the run's state dict in memory. The next training state that is written to disk contains it."""
        self._last = {
            "areno": __version__,
            "versions": self._versions,
            "config": self._settings,
            "inputs": dict(self._inputs),
            "files": self.files.sizes(),
            "run": run,
        }
        self.models_recorded = True

    def write(self, step: int, due: bool) -> None:
        """Start to write a training state if it is due.

        If the previous one is still being written, a later call starts to write.
        """
        if self.is_on and (due or self._waiting):
            self._waiting = not self.writer.begin(step, self._last)

    def write_now(self, step: int) -> None:
        """Write a training state with the last state dict of `keep_run_state`, and block until it is complete."""
        if self.is_on:
            self.writer.write(step, self._last)

    def write_at_interrupt(self, step: int) -> None:
        """Write a last training state when the run ends early.

        If a model has been trained since the last call of `keep_run_state`, its weights do not fit the recorded state
        dict. Then nothing is written, and the current step is lost.
        """
        last = self._last["run"]["step"] if self._last else 0
        if not self.is_on or not last:
            return
        try:
            if self.models_recorded:
                self.writer.write(last, self._last)
            else:
                logger.warning("the models were being trained in step %d, so it is lost", step)
                self.writer.poll(wait=True)
        except ArenoError as error:  # such as the error of a dead worker, which ended the run
            logger.warning("the state of step %d could not be written: %s", last, error)

    def poll(self) -> None:
        """Complete the state that is being written, if its files are ready. Call this often during a step."""
        now = time.monotonic()
        if self.is_on and now - self._polled_at > _POLL_EVERY_S:
            self._polled_at = now
            self.writer.poll()

    def check_last(self, step: int) -> None:
        """Raise CheckpointError if the state of the last step could not be written."""
        if self.is_on and self.writer.written_step != step:
            again = self.writer.written_step or 0
            raise CheckpointError(
                "the run has trained all {} steps and saved its last checkpoint, but its last state could not be "
                "written: {}. Free some space, and repeat the command: it {}",
                step,
                self.writer.failure,
                f"trains again from step {again + 1} on" if again else "begins again, since there is no state",
            )

    def record_finished(self, step: int, result: float, ended_by: str) -> None:
        """Record on disk that the run has finished, if the training state of its last step is complete."""
        if self.written_step == step:
            self.states.set_finished(step, result, ended_by)

    @property
    def written_step(self) -> int | None:
        """Step of the newest complete state that this process has written or loaded, or None."""
        return self.writer.written_step if self.is_on else None
