"""Going on with a run that is there: which one it is, what may be changed, and what the user is told of it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from areno.api.changes import Change
from areno.api.earlier_run import EarlierRun
from areno.config.experiments import ExperimentConfig
from areno.errors import ConfigError, Problem
from areno.tracking import new_run
from areno.tracking.new_run import NewFolder


def named_run(text: str, recipe: str) -> Path:
    """The folder that --resume names. Raises ConfigError if it holds no run of this recipe that can go on."""
    folder = Path(os.path.abspath(os.path.expanduser(text)))
    problem = ""
    if not folder.is_dir():
        problem = "there is no folder {}"
    elif new_run.is_sweep(folder):
        problem = "{} holds a sweep: start it again with the same command and its trial_name, or name one of its runs"
    elif not new_run.is_described(folder):
        problem = "{} is not the folder of a run: it has no config.yaml"
        if new_run.is_described(folder.parent.parent):
            problem += f"; {folder.parent.parent} is one"
    elif not EarlierRun(folder).goes_on:
        problem = "{} has no state to go on from: the run was started with recover.mode=off"
    if problem:
        raise ConfigError(Problem("--resume", problem, folder))
    EarlierRun(folder).refuse_recipe(recipe, "--resume")
    return folder


def earlier_run(config: ExperimentConfig, folder: Path) -> EarlierRun | None:
    """The run in this folder that a run with these settings goes on with, unless they say that it must not."""
    earlier = EarlierRun.find(folder) if config.recover.mode != "off" else None
    return earlier if earlier is not None and earlier.goes_on else None


def can_go_on(config: ExperimentConfig, folder: Path, sweep: list[str] | None) -> bool:
    """Whether the run in this folder goes on, or the sweep if its overrides are given."""
    if sweep is None:
        return earlier_run(config, folder) is not None
    if config.recover.mode == "off" or not new_run.is_sweep(folder):
        return False
    if (before := new_run.sweep_of(folder)) != sweep:
        told = " ".join(line.lstrip("+") for line in before)
        raise ConfigError(Problem("trial_name", "{} holds another sweep ({}); choose another name", folder, told))
    return True


def take_up(
    earlier: EarlierRun, config: ExperimentConfig, recipe: str, overrides: list[str], explicit: bool
) -> list[Change]:
    """Give the run its new settings; what has changed. Raises ConfigError where it cannot go on with them.

    explicit: the user has named the run, so `overrides` are what to change in it.
    """
    earlier.refuse_running()
    changed = earlier.refuse_other(config, recipe, explicit)
    if changed:
        before = new_run.overrides_of(earlier.folder) if explicit else []
        new_run.describe_again(earlier.folder, config, [*before, *overrides])
    return changed


def told_result(earlier: EarlierRun, changed: Sequence[Change], command: str) -> float | None:
    """The result of a run that is finished, after telling so. None for one that has something left to do."""
    finished = earlier.states.finished
    if finished is None or any(change.is_end for change in changed):
        return None
    step, result = finished["step"], finished["result"]
    print(
        f"{shown(earlier.folder)} is finished: its {step} steps are done, with the result {result:.6g}.\n"
        f"To train on:    {how(command, earlier.folder)} total_train_steps={2 * step}\n"
        "For a new run:  the same command with another trial_name"
    )
    return result


def how(command: str, folder: Path) -> str:
    """The command that goes on with a run."""
    return f"{command} --resume {shlex.quote(shown(folder))}"


def tell_how(command: str, folder: Path, sweep: bool) -> None:
    """Say how to go on with a run that has just ended early, if it can."""
    if EarlierRun(folder).states.steps():
        told = f"the same command with trial_name={folder.parent.name}" if sweep else how(command, folder)
        print(f"to go on with it: {told}", file=sys.stderr)


def tell_unfinished(command: str, experiment: Path) -> None:
    """Say how to go on with the last run of an experiment, if that has not come to its end."""
    if not os.path.isdir(experiment):  # False, and no error, also for a name that is too long
        return
    folders = (path.parent for path in experiment.glob("*/config.yaml"))
    newest = max(folders, key=lambda folder: (folder / "config.yaml").stat().st_mtime, default=None)
    if newest is None:
        return
    earlier = EarlierRun(newest)
    if earlier.states.steps() and earlier.states.finished is None and not earlier.is_running:
        print(f"This is a new run. {shown(newest)} is not finished; to go on with it: {how(command, newest)}")


def shown(folder: Path) -> str:
    """A folder as short as can be."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def existing(folder: Path) -> NewFolder:
    """The folder of a run or a sweep that is there; all that is in it stays."""
    return NewFolder(folder, frozenset([folder, *folder.parents, *folder.glob("*")]))
