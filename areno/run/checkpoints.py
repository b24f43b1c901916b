"""When a checkpoint or an evaluation is due: every so many steps, epochs or seconds.

Which checkpoints are the best and which of them stay: their values of saver.best_metric, by step.

The checkpoints of a run, each whole or absent: their names, their links, and the folder that they share.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from areno.config.run import FrequencyConfig, SaverConfig
from areno.errors import ConfigError, Problem, did_you_mean
from areno.files.durable import (
    REPLACED,
    UNFINISHED,
    as_checkpoint_error,
    atomic_folder,
    atomic_remove,
    atomic_write_text,
    locked,
    make_folders,
    remove,
    remove_empty,
    sync,
)
from areno.run.hub import HubUpload


class Trigger:
    """Says when something with a FrequencyConfig is due. Steps count from 1. clock: gives the time in seconds."""

    def __init__(self, config: FrequencyConfig, clock: Callable[[], float] = time.monotonic):
        self.config, self._clock = config, clock
        self.epochs_ended = 0
        self._last = clock()

    def due(self, step: int, epoch_ended: bool = False) -> bool:
        """Whether it is due after this step. Ask once per step. epoch_ended: the step was the last of an epoch."""
        now, config = self._clock(), self.config
        self.epochs_ended += epoch_ended
        is_due = (
            (config.freq_steps is not None and step % config.freq_steps == 0)
            or (config.freq_epochs is not None and epoch_ended and self.epochs_ended % config.freq_epochs == 0)
            or (config.freq_secs is not None and now - self._last >= config.freq_secs)
        )
        if is_due:
            self._last = now
        return is_due

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to keep the rhythm. The time between the two runs does not count."""
        return {"epochs_ended": self.epochs_ended, "seconds_since_last": self._clock() - self._last}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a `state_dict`."""
        self.epochs_ended = int(state["epochs_ended"])
        self._last = self._clock() - state["seconds_since_last"]


logger = logging.getLogger("areno.saver")


class Ranking:
    """The value of the metric at each step that was saved; None where there is none, or it was not finite."""

    def __init__(self, config: SaverConfig):
        self.config = config
        self.mode = config.best_mode or ("min" if (config.best_metric or "").endswith("loss") else "max")
        self.values: dict[int, float | None] = {}
        self._last: tuple[int, float | None] = (-1, None)  # the last step that had a value, saved or not
        self._names: set[str] = set()  # of all scalars so far
        self._told = False

    def note(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Take the metric from scalars of a step. Whether a checkpoint got a value."""
        self._names |= scalars.keys()
        metric = self.config.best_metric
        if metric is None or metric not in scalars:
            return False
        value = float(scalars[metric])
        self._last = (step, value if math.isfinite(value) else None)
        if step in self.values:
            self.values[step] = self._last[1]
        return step in self.values

    def add(self, step: int) -> None:
        """A checkpoint of this step is being saved. Its value may be there already, or come later in the step."""
        self.warn_of_wrong_name()
        self.values[step] = self._last[1] if self._last[0] == step else None

    def warn_of_wrong_name(self) -> None:
        """Say once that a checkpoint is there without the metric. To be called when its step is over."""
        metric = self.config.best_metric
        if metric is not None and self.values and metric not in self._names and not self._told:
            self._told = True
            hint = did_you_mean(metric, self._names, "; there are " + ", ".join(sorted(self._names)))
            logger.warning("saver.best_metric: no step has recorded %s, so no checkpoint is the best%s", metric, hint)

    def best(self, steps: Iterable[int]) -> list[int]:
        """Those of `steps` that have a value, the best first; of equal ones the earliest."""
        sign = -1 if self.mode == "max" else 1
        valued = [(sign * value, step) for step in steps if (value := self.values.get(step)) is not None]
        return [step for _, step in sorted(valued)]

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Those of the saved `steps` that stay. All of them as long as none has a value, though there is a metric."""
        known = sorted(step for step in steps if step in self.values)
        best = self.best(known)
        if self.config.keep is None or (self.config.best_metric is not None and not best):
            return set(known)
        return {*known[-self.config.keep :], *best[: self.config.keep_best]}

    def text(self, best: int | None) -> str:
        """The content of metrics.json."""
        record = {
            "best_metric": self.config.best_metric,
            "best_mode": self.mode,
            "best_step": best,
            "values": {str(step): value for step, value in sorted(self.values.items())},
        }
        return json.dumps(record, indent=2) + "\n"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to rank as this one would have."""
        return {"values": [[step, value] for step, value in self.values.items()], "last": list(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.values = dict(state["values"])
        self._last = (state["last"][0], state["last"][1])


_KEY = "saver.path"
_POLL_S = 0.05
OWNER = ".owner"  # a file beside the checkpoints: the folder of the run whose they are


class _Dropped(Exception):
    """Ends the work on a checkpoint that shall not stay."""


class Saver:
    """Writes the checkpoints of one run, and keeps those that the settings ask for.

    default_dir: their folder if saver.path is not set. is_written: whether what a `write` of `save` began is on the
    disk, where saver.mode is async; it raises CheckpointError if that cannot be.
    """

    def __init__(self, config: SaverConfig, default_dir: str | Path, is_written: Callable[[], bool] = lambda: True):
        self.config, self._is_written = config, is_written
        self.folder = Path(default_dir if config.path is None else config.path).expanduser()
        self._is_chosen = config.path is not None
        self.trigger = Trigger(config)
        self.due = self.trigger.due  # whether to save after a step
        self.saved_step: int | None = None  # of the newest checkpoint that is complete
        self._step_under_way: int | None = None
        self._under_way = ExitStack()  # leaving it names the folder of that step
        self._owed: int | None = None  # a step whose checkpoint was under way when the state was taken
        self.ranking = Ranking(config)
        self._hub = HubUpload(config.push_to_hub, config.hub_private) if config.push_to_hub is not None else None
        self._claim = ExitStack()

    def claim(self, run_dir: Path) -> None:
        """Make the folder, and make it that of one run until `release`. What a crash of the run left is put in order.

        Raises CheckpointError if it cannot be written, and ConfigError if it belongs to another run: to one that still
        goes on, or to one that has left checkpoints.
        """
        with as_checkpoint_error(self.folder, "be written", _KEY), ExitStack() as claim:
            claim.callback(remove_empty, make_folders(self.folder))
            # A folder inside that of the run is its own, also where both were copied from another place.
            is_inside = self.folder.absolute().is_relative_to(run_dir.absolute())
            if not is_inside and self._owner() != str(run_dir.absolute()):
                self.refuse_checkpoints()
            try:
                claim.enter_context(locked(self.folder / OWNER))
            except BlockingIOError:
                if self._owner() == str(run_dir.absolute()):
                    text = "the run in {} still goes on, in another process"
                    raise ConfigError(Problem("trial_name", text, run_dir.absolute())) from None
                raise self._belongs("belongs to {}, which still goes on; choose another folder") from None
            claim.callback(self._disown)
            (self.folder / OWNER).write_text(f"{run_dir.absolute()}\n", encoding="utf-8")
            for replaced in self.folder.glob(f"{REPLACED}step-*"):
                final = self.folder / replaced.name.removeprefix(REPLACED)
                if final.exists():
                    remove(replaced)
                else:  # the crash came before the new one had its place
                    replaced.rename(final)
            for unfinished in self.folder.glob(f"{UNFINISHED}step-*"):
                remove(unfinished)
            self._claim = claim.pop_all()

    def refuse_checkpoints(self) -> None:
        """Raise ConfigError if the folder has checkpoints. A run that starts at its beginning cannot have any."""
        if self._has_checkpoints():
            raise self._belongs("holds the checkpoints of {}; choose another folder, or move that one away")

    def release(self) -> None:
        """Leave the folder to other runs, unless there are checkpoints; without them nothing of the run stays in it.

        A checkpoint under way is dropped.
        """
        self._drop()
        self._claim.close()

    def save(self, write: Callable[[Path], object], step: int) -> Path:
        """Let `write` fill a folder, and give it the name step-<n>. If it raises CheckpointError, nothing stays.

        With saver.mode async or auto, `write` may return before the files are complete. The folder then gets its name
        in a later `poll` or `finish`. One that is under way is waited for. Ctrl-C and SIGTERM come before the folder
        has its name, or after `latest` and `saved_step` speak of it.
        """
        self.finish()
        final = self._path(step)
        with as_checkpoint_error(self.folder, "hold the checkpoint", _KEY), ExitStack() as stack:
            write(stack.enter_context(atomic_folder(final, partial(self._saved, step))))
            self._step_under_way, self._under_way = step, stack.pop_all()
        self.ranking.add(step)
        if self.config.mode == "sync":
            self.finish()
        elif self.config.mode == "auto":  # which may have written all of it
            self.poll()
        return final

    def poll(self) -> bool:
        """Name the checkpoint under way if all of it is written; whether there is none any more.

        CheckpointError where it could not be written; nothing of it stays.
        """
        step, self._step_under_way = self._step_under_way, None
        if step is None:
            return True
        with as_checkpoint_error(self.folder, "hold the checkpoint", _KEY), self._under_way as stack:
            if not self._is_written():
                self._step_under_way, self._under_way = step, stack.pop_all()
                return False
        logger.info("checkpoint saved: %s", self._path(step))
        if self._hub is not None:
            self._hub.push(self._path(step))
        self._tidy()
        return True

    def finish(self) -> None:
        """Return when no checkpoint is under way."""
        while not self.poll():
            time.sleep(_POLL_S)

    def end(self) -> None:
        """The end of the run: finish what is under way, uploads included."""
        self.finish()
        self.ranking.warn_of_wrong_name()
        if self._hub is not None:
            self._hub.wait()
            self._tidy()

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is there or under way."""
        return step in (self.saved_step, self._step_under_way)

    def owes(self, step: int) -> bool:
        """Whether a run that goes on behind `step` must save it again: it was lost while it was under way."""
        return step == self._owed and not self.has(step)

    @property
    def needs_evaluation(self) -> bool:
        """Whether every checkpoint has to be evaluated."""
        return self.config.best_metric is not None and self.config.best_metric.startswith("eval/")

    def note(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the metric that checkpoints are ranked by from the scalars of a step."""
        if self.ranking.note(step, scalars):
            self._tidy()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to save and to remove when and what this one would have."""
        return {
            "saved_step": self.saved_step,
            "under_way": self._step_under_way,
            "trigger": self.trigger.state_dict(),
            "ranking": self.ranking.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. A checkpoint under way is dropped."""
        self._drop()
        self.saved_step, self._owed = state["saved_step"], state["under_way"]
        if self._owed is not None and self._path(self._owed).exists():  # it was finished after the state was taken
            self.saved_step = self._owed
        self.trigger.load_state_dict(state["trigger"])
        self.ranking.load_state_dict(state["ranking"])

    def _drop(self) -> None:
        self._step_under_way = None
        with suppress(_Dropped), self._under_way:
            raise _Dropped

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _saved(self, step: int) -> None:
        self.saved_step = step
        self._link("latest", step)

    def _tidy(self) -> None:
        """Let `best` and metrics.json speak of the checkpoints that are there, and remove those that do not stay.

        A checkpoint that the ranking does not know was saved behind the state from which the run goes on. It stays
        until the run has passed its step.
        """
        newest = self.saved_step
        if newest is None or (self.config.keep is None and self.config.best_metric is None):
            return
        steps = {step for step in self._steps() if self._path(step).exists()}
        best = next(iter(self.ranking.best(steps)), None)
        kept = {self._path(step) for step in self.ranking.kept(steps)} | {self._path(newest)}
        kept |= set() if self._hub is None else self._hub.needed
        try:
            if self.config.best_metric is not None:
                atomic_write_text(self.folder / "metrics.json", self.ranking.text(best))
            if best is not None:
                self._link("best", best)
            for step in sorted(steps) if self.config.keep is not None else ():
                if step <= newest and self._path(step) not in kept:
                    atomic_remove(self._path(step))
                    logger.info("checkpoint removed: %s", self._path(step))
        except OSError as error:  # the checkpoints themselves are there
            logger.warning("%s could not be put in order: %s", self.folder, error.strerror)

    def _steps(self) -> list[int]:
        return [int(path.name[5:]) for path in self.folder.glob("step-*") if path.name[5:].isdecimal()]

    def _has_checkpoints(self) -> bool:
        replaced = (path.name.removeprefix(f"{REPLACED}step-") for path in self.folder.glob(f"{REPLACED}step-*"))
        return bool(self._steps()) or any(step.isdecimal() for step in replaced)

    def _owner(self) -> str | None:
        owner = self.folder / OWNER
        return owner.read_text(encoding="utf-8").strip() if owner.exists() else None

    def _belongs(self, how: str) -> ConfigError:
        owner = self._owner()
        run = f"the run in {owner}" if owner else "an earlier run"
        return ConfigError(Problem(_KEY if self._is_chosen else "", f"{{}} {how}", self.folder, run))

    def _disown(self) -> None:
        if not self._has_checkpoints():
            (self.folder / OWNER).unlink(missing_ok=True)

    def _link(self, name: str, step: int) -> None:
        link, target = self.folder / f"{UNFINISHED}{name}", self._path(step).name
        try:
            remove(link)
            link.symlink_to(target, target_is_directory=True)
            if not (self.folder / name).is_symlink():
                remove(self.folder / name)  # a folder in its place: the run was copied by what follows links
            link.replace(self.folder / name)
        except OSError as error:  # some file systems have no links; the checkpoint itself is there
            logger.warning("%s could not be linked to %s: %s", self.folder / name, target, error.strerror)
        sync(self.folder)
