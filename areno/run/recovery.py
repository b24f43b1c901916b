"""Writes the training states of a run, and continues the run from the newest one.

A training state consists of weights, optimizers and the run's state dict. After every step, `Recovery.keep_run_state`
records the state dict in memory. A state is written to disk when recover.freq_* says so, at the end of the run, and
when the run is interrupted. `StateWriter` writes it while the next step runs. resume.py decides which run is resumed
and which settings may change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from areno.config.experiments import ExperimentConfig
from areno.errors import ArenoError, CheckpointError, ConfigError, Key, Problem, WorkerLost
from areno.files.durable import locked
from areno.run.progress import Trigger
from areno.run.resume import STATE, EarlierRun, changed_settings, refuse_changes
from areno.run.state_writer import StateWriter
from areno.run.states import StateFolder, TrainingState
from areno.tracking.run_folder import RunFiles, versions
from areno.version import __version__

if TYPE_CHECKING:
    from areno.engine.engine import Engine

logger = logging.getLogger("areno.recover")

_POLL_EVERY_S = 0.5  # each poll interrupts decoding for a moment


class Recovery(AbstractContextManager["Recovery"]):
    """Writes and loads the training states of one run, and restarts lost workers.

    Inside the context, no other process can resume the same run. `inputs` are fingerprints of the model and data files,
    keyed by the setting that names the files, such as "actor.path". Entering the context raises ConfigError if

    - another process runs the same run,
    - settings, models or data differ from those in the newest state, and a resumed run does not accept the change,
    - recover.mode is "off" and the folder has states, or it is "resume" and the folder has none.
    """

    def __init__(self, config: ExperimentConfig, folder: Path, engine: Callable[[], Engine], inputs: Mapping[str, str]):
        self.config, self.folder = config, folder
        self._settings, self._versions = asdict(config), versions()
        self.facts = {
            "areno": __version__,
            "versions": self._versions,
            "config": self._settings,
            "inputs": dict(inputs),
        }
        self.is_on = config.recover.mode != "off"
        self._engine, self._inputs = engine, inputs
        self.files = RunFiles(folder, config.stats_logger.tensorboard.path)
        self.states = StateFolder(folder / STATE, config.recover.keep)
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
            self.states.clean_up()
            state = self.states.newest() if self.resumes else None
            if state is not None:
                self._check_compatible(state)
            elif self.config.recover.mode == "resume":
                raise ConfigError(Problem("recover.mode", "is resume, but {} has no state", self.folder))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def _check_compatible(self, state: TrainingState) -> None:
        """Raise ConfigError if the run cannot continue from a state with the current settings, models and data."""
        found = changed_settings(type(self.config), state.record["config"], self._settings)
        earlier = EarlierRun.find(self.folder)
        if earlier is not None:  # config.yaml has the changes that the user asked for by --resume
            earlier.check_resumable(self.config, None)
        refuse_changes(found, self.folder, explicit=earlier is not None)
        if self.config.actor.fp8 is not None and any(change.key == "engine.tp_size" for change in found):
            logger.warning(
                "engine.tp_size differs from that of the earlier part of the run. In FP8, each rank rounds its part of "
                "a row, so the model becomes a slightly different one"
            )
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
                self._engine().load_state(state.engine_folder, not self.config.recover.no_load_optim)
            except CheckpointError as error:
                self.states.set_aside(state.step, str(error))
                continue
            if (budgets := state.record.get("token_budgets")) is not None:  # an older areno recorded none
                self._engine().restore_token_budgets(budgets)
            self.files.truncate_to_step(state.step, state.record["files"], begun_at)
            self.states.set_finished(None)
            self.writer.written_step = state.step
            return state.record["run"]
        if self.is_on and self.resumes:
            logger.warning("the run in %s ended before it had a state; it begins again", self.folder)
            self.files.truncate_to_step(0, {}, begun_at)
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
            **self.facts,
            "files": self.files.sizes(),
            "run": run,
        }
        self.models_recorded = True

    def write(self, step: int, due: bool) -> None:
        """Start to write a training state if it is due.

        If the previous one is still being written, a later call starts to write.
        """
        if self.is_on and (due or self._waiting):
            self._waiting = not self.writer.begin_write(step, self._last)

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

    def check_last_state(self, step: int) -> None:
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
