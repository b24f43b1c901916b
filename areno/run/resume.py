"""What differs between the settings that a run began with and those that it goes on with, and whether it may.

What an earlier session left in the folder of a run, and whether a run with these settings may go on there.

How a run goes on where an earlier session of it stopped: finds the state, loads it, writes the next ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from areno import __version__
from areno.config.experiments import ExperimentConfig
from areno.errors import CheckpointError, ConfigError, Key, Problem, WorkerLost
from areno.files.durable import locked
from areno.run.checkpoints import Trigger
from areno.run.states import State, StatefulEngine, States, StateWriter
from areno.schema.build import with_current_names, with_defaults
from areno.schema.fields import Section
from areno.schema.values import show
from areno.tracking import run_folder
from areno.tracking.run_folder import RunFiles, recipe_of, settings_of, versions

Kind = Literal["harmless", "later", "never"]

_END = "where the run ends, and with lr_decay_steps=null the learning rate from here on"
_SPEED = "speed and memory change; results up to the order of floating-point sums"
_FROM_HERE = "from here on"
_SAME = "nothing, if it is the same model or data in another place"

# Of the longest of these that is the key or a section of it. harmless: the samples and updates stay what they would
# have been, but for a learning rate that follows the length of the run. never: what the state holds does not fit. Other
# settings change the run from here on.
_KINDS: dict[str, tuple[Kind, str]] = {
    **dict.fromkeys(("total_train_steps", "total_train_epochs", "total_train_n_seqs"), ("harmless", _END)),
    "evaluator.patience": ("harmless", _END),
    **dict.fromkeys(("saver", "evaluator", "recover", "stats_logger"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("valid_dataset", "eval_gconfig"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("rollout.dump_to_file", "rollout.dump_n_samples"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("actor.max_skipped_steps", "reward.timeout_s"), ("harmless", _FROM_HERE)),
    **dict.fromkeys(("experiment_name", "trial_name", "cluster"), ("harmless", "nothing: the run keeps its folder")),
    **dict.fromkeys(
        (
            "engine", "scheduler", "cluster.n_nodes", "cluster.n_gpus_per_node",
            "rollout.max_prefill_tokens", "rollout.mem_fraction", "rollout.max_kv_tokens",
            "rollout.eager_decode", "rollout.max_concurrent_rollouts", "rollout.drop_rollout_state", "reward.workers",
            "reward.offload", "ref.offload", "critic.offload", "actor.mb_spec", "critic.mb_spec",
            "actor.gradient_checkpointing", "critic.gradient_checkpointing",
        ),
        ("harmless", _SPEED),
    ),
    **dict.fromkeys(("actor.path", "actor.init_lora_from", "tokenizer_path"), ("harmless", _SAME)),
    **dict.fromkeys(("train_dataset.path", "train_dataset.loader"), ("harmless", _SAME)),
    **dict.fromkeys(
        ("critic.path", "critic.init_from_scratch"), ("harmless", "nothing: the critic comes from the state")
    ),
    **dict.fromkeys(
        (
            "seed", "train_dataset", "actor.init_from_scratch", "engine.dummy_load", "actor.optimizer.type",
            "critic.optimizer.type", "actor.use_lora", "actor.lora_rank", "actor.lora_alpha", "actor.target_modules",
            "actor.use_rslora",
        ),
        ("never", ""),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One setting that differs. kind: see above. effect: what the change means for the run."""

    key: str
    before: Any
    now: Any
    kind: Kind
    effect: str

    @property
    def is_end(self) -> bool:
        """Whether it is about how long the run goes on."""
        return self.effect == _END

    @property
    def override(self) -> str:
        """What a command line says to make the change."""
        return f"{self.key}={'...' if isinstance(self.now, Mapping) else show(self.now)}"

    def __str__(self) -> str:
        before, now = ("a section" if isinstance(value, Mapping) else show(value) for value in (self.before, self.now))
        return f"{self.key} {before} -> {now}"


def changes(cls: type[Section], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that differ, in the order of the fields. A setting that `before` has not had its default then."""
    before = with_current_names(cls, before)
    pairs = _differences(with_defaults(cls, before), with_defaults(cls, now))
    return [Change(key, old, new, *_kind(key)) for key, old, new in pairs]


def _kind(key: str) -> tuple[Kind, str]:
    section = key
    while section not in _KINDS and section:
        section = section.rpartition(".")[0]
    return _KINDS.get(section, ("later", _FROM_HERE))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value); of a section that is null on one side, only its own key."""
    for name in {**new, **old}:
        one, other = old.get(name), new.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{prefix}{name}.")
        elif one != other:
            yield f"{prefix}{name}", one, other


STATE = "state"


class EarlierRun:
    """The run in a folder that holds a config.yaml."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.states = States(folder / STATE, keep=1)

    @classmethod
    def find(cls, folder: Path) -> EarlierRun | None:
        """The run of this folder; None where there is none, or one that ended while its folder was made."""
        return cls(folder) if run_folder.is_described(folder) else None

    @property
    def config(self) -> dict[str, Any]:
        """Its settings. Raises ArenoError if they cannot be read."""
        return settings_of(self.folder)

    @property
    def goes_on(self) -> bool:
        """Whether a state or the lack of results lets a run go on here."""
        return self.states.has_begun or not run_folder.has_results(self.folder)

    @property
    def is_running(self) -> bool:
        """Whether a process is at work on it."""
        if not self.states.has_begun:
            return False
        try:
            with locked(self.states.folder):
                return False
        except BlockingIOError:
            return True

    def refuse_running(self) -> None:
        """Raise ConfigError if a process is at work on it."""
        if self.is_running:
            raise ConfigError(Problem("trial_name", "the run in {} still goes on, in another process", self.folder))

    def refuse_recipe(self, recipe: str, key: str = "trial_name") -> None:
        """Raise ConfigError if it is a run of another recipe."""
        meant = recipe_of(self.folder)
        if meant not in ("", recipe):
            raise ConfigError(Problem(key, "{} is a run of {}, not of {}", self.folder, meant, recipe))

    def refuse_other(self, config: Section, recipe: str | None, explicit: bool = False) -> list[Change]:
        """The settings that differ from those of the run. ConfigError if one of them may not.

        explicit: the user has named the run and what to change, so a change may concern all that is to come.
        """
        if recipe is not None:
            self.refuse_recipe(recipe)
        found = changes(type(config), self.config, asdict(config))
        refuse(found, self.folder, explicit)
        return found


def refuse(found: Sequence[Change], folder: Path, explicit: bool) -> None:
    """Raise ConfigError for the changes that a run cannot go on with."""
    problems = []
    for change in found:
        if change.kind == "never":
            text = "the run in {} cannot go on with another one ({}); start a new run under another trial_name"
            problems.append(Problem(change.key, text, folder, change))
        elif change.kind == "later" and not explicit:
            text = "differs from the run in {} ({}); choose another trial_name, or go on with it: --resume {} {}"
            problems.append(Problem(change.key, text, folder, change, folder, change.override))
    if problems:
        raise ConfigError(problems)


def folder_for(config: ExperimentConfig, run_dir: str | Path | None) -> Path:
    """The folder of a script's run: `run_dir`, or a new one under cluster.fileroot, or that of the trial to go on with.

    Raises ConfigError where the trial is another run, or has ended without a state.
    """
    if run_dir is not None:
        return Path(run_dir)
    if config.trial_name is not None and config.recover.mode != "off":
        folder = run_folder.folder_of(config, config.trial_name)
        earlier = EarlierRun.find(folder)
        if earlier is not None and earlier.goes_on:
            earlier.refuse_running()
            if earlier.refuse_other(config, None):
                run_folder.describe_again(folder, config)
            return folder
    return run_folder.for_script(config)


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
