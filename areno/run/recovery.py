"""How a run goes on where an earlier session of it stopped: finds the state, loads it, writes the next ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Protocol

from areno import __version__
from areno.checkpoint.trigger import Trigger
from areno.config.experiments import ExperimentConfig
from areno.errors import CheckpointError, ConfigError, Key, Problem, WorkerLost
from areno.files.durable import locked
from areno.run.changes import changes
from areno.run.earlier_run import STATE, EarlierRun, refuse
from areno.run.recover import StatefulEngine, StateWriter
from areno.run.state import State, States
from areno.tracking.files.run_files import RunFiles
from areno.tracking.new_run import versions

logger = logging.getLogger("areno.recover")

_POLL_EVERY_S = 0.5  # workers that decode are asked no more often, since each answer costs them a moment


class RecoverableEngine(StatefulEngine, Protocol):
    """What is asked of the engine; see areno.engine.engine."""

    def load_state(self, folder: str | Path, with_moments: bool = True) -> None: ...

    def restart(self) -> None: ...


class Recovery(AbstractContextManager["Recovery"]):
    """Of one run. engine: None for a run without states.

    inputs: fingerprints of what the run depends on, by the setting that names it. As a context manager it holds the
    folder of the states, so that no other process goes on with the same run.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        folder: Path,
        engine: Callable[[], RecoverableEngine] | None,
        inputs: Mapping[str, str],
    ):
        self.config, self.folder = config, folder
        self._settings, self._versions = asdict(config), versions()
        self.is_on = engine is not None and config.recover.mode != "off"
        self._engine, self._inputs = engine, inputs
        self.files = RunFiles(folder, config.stats_logger.tensorboard.path)
        self.states = States(folder / STATE, config.recover.keep)
        self.trigger = Trigger(config.recover)
        self.goes_on = False  # whether an earlier session has begun this run
        self._resources = ExitStack()
        self._n_restarts = 0
        self._polled_at = 0.0
        self._waiting = False  # a state is due, but the one before was still under way
        self._begun_at: dict[str, int] = {}  # the sizes of the run's files when this session began
        if engine is not None:
            told_s = config.engine.stall_timeout_s
            self.writer = StateWriter(config.recover, self.states, engine, self.files.sync, told_s)

    def __enter__(self) -> Recovery:
        """Raises ConfigError where another process has this run, where its settings differ, or for a wrong mode."""
        mode = self.config.recover.mode
        if self._engine is None:
            return self
        if mode == "off":
            if self.states.steps():
                text = "is off, but {} holds the states of an earlier run; set it to auto to go on, or choose another"
                raise ConfigError(Problem("recover.mode", text + " folder", self.states.folder))
            return self
        self._begun_at = self.files.sizes()
        self.goes_on = self.states.has_begun
        self.states.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.states.folder))
            except BlockingIOError:
                text = "the run in {} still goes on, in another process"
                raise ConfigError(Problem("trial_name", text, self.folder)) from None
            self.states.tidy()
            state = self.states.newest() if self.goes_on else None
            if state is not None:
                self._check(state)
            elif mode == "resume":
                raise ConfigError(Problem("recover.mode", "is resume, but {} has no state", self.folder))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._resources.close()

    def _check(self, state: State) -> None:
        """Raise ConfigError unless the state is of this run, with its model and its data."""
        found = changes(type(self.config), state.record["config"], self._settings)
        earlier = EarlierRun.find(self.folder)
        if earlier is not None:  # it has what the user asked for by --resume
            earlier.refuse_other(self.config, None)
        refuse(found, self.folder, explicit=earlier is not None)
        given, now = state.record["inputs"], self._inputs
        changed = {change.key for change in found if change.kind == "later"}
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
            logger.info("changed: %s (%s)", change, change.effect)
        before = state.record["versions"]
        for name in (name for name in self._versions if before.get(name) != self._versions[name]):
            logger.info("changed: version of %s: %s -> %s", name, before.get(name), self._versions[name])

    def load(self) -> dict[str, Any] | None:
        """Load the newest state that is whole into the engine, and cut the run's files back to it; its record.

        None where there is none: then the run begins, again if a session of it ended before it had one.
        """
        begun_at, self._begun_at = self._begun_at or self.files.sizes(), {}
        while self.is_on and (state := self.states.newest() if self.goes_on else None) is not None:
            assert self._engine is not None
            try:
                self._engine().load_state(state.engine, not self.config.recover.no_load_optim)
            except CheckpointError as error:
                self.states.set_aside(state.step, str(error))
                continue
            self.files.cut_back(state.step, state.record["files"], begun_at)
            self.states.set_finished(None)
            self.writer.written_step = state.step
            return state.record["run"]
        if self.is_on and self.goes_on:
            logger.warning("the run in %s ended before it had a state; it begins again", self.folder)
            self.files.cut_back(0, {}, begun_at)
        return None

    @property
    def may_restart(self) -> bool:
        """Whether the workers may be started again in this process."""
        return self.is_on and self._n_restarts < self.config.recover.retries

    def give_up(self, lost: WorkerLost) -> NoReturn:
        """Raise the error of workers that are not started again, with the reason where it is recover.retries."""
        if not self._n_restarts:
            raise lost
        text = "{}; the workers were started again {} before, and {} is {}, so the run ends"
        times = "once" if self._n_restarts == 1 else f"{self._n_restarts} times"
        raise WorkerLost(text, lost, times, Key("recover.retries"), self.config.recover.retries) from lost

    def count(self, lost: WorkerLost) -> None:
        """Say that the workers are started again, and that this was one of the times."""
        self._n_restarts += 1
        logger.warning("%s", lost)
        logger.warning(
            "starting the workers again (%d of recover.retries=%d)", self._n_restarts, self.config.recover.retries
        )

    def restart(self, lost: WorkerLost) -> None:
        """Start the workers again, as they were loaded first. `load` is to follow."""
        assert self._engine is not None
        self._begun_at, self.goes_on = self.files.sizes(), True
        self.count(lost)
        self._engine().restart()
        self.writer.poll(wait=True)  # of a state under way it is now known whether all ranks had written it

    def record(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """What is kept beside the engine's state."""
        return {
            "areno": __version__,
            "versions": self._versions,
            "config": self._settings,
            "inputs": dict(self._inputs),
            "files": self.files.sizes(),
            "run": run,
        }

    def write(self, step: int, record: Mapping[str, Any], due: bool) -> None:
        """Begin to write a state where one is due, or was while the one before was still under way."""
        if self.is_on and (due or self._waiting):
            self._waiting = not self.writer.begin(step, record)

    def write_now(self, step: int, record: Mapping[str, Any]) -> bool:
        """Write a state and wait for it. Whether it is whole."""
        return self.is_on and self.writer.write(step, record)

    def wait(self) -> None:
        """Return when no state is under way."""
        if self.is_on:
            self.writer.poll(wait=True)

    def poll(self) -> None:
        """Bring a state that is under way closer to its end."""
        now = time.monotonic()
        if self.is_on and now - self._polled_at > _POLL_EVERY_S:
            self._polled_at = now
            self.writer.poll()

    def finished(self, step: int, result: float, ended_by: str) -> None:
        """Note the end of a run whose last state is whole. ended_by: the setting."""
        if self.written_step == step:
            self.states.set_finished(step, result, ended_by)

    @property
    def written_step(self) -> int | None:
        """The step of the newest whole state."""
        return self.writer.written_step if self.is_on else None
