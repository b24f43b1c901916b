"""Resume a run from the command line: find the run, apply changed settings, and print how to go on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areno.config.experiments import ExperimentConfig
from areno.errors import ConfigError, Problem
from areno.run.resume import Change, EarlierRun
from areno.schema.build import current_key
from areno.schema.values import value_at
from areno.tracking import run_folder
from areno.tracking.reader import RunReader
from areno.tracking.run_folder import NewFolder, overrides_of, sweep_of


def named_run(text: str, recipe: str) -> Path:
    """Return the folder that --resume names. Raises ConfigError unless it holds a run of this recipe with a state."""
    folder = Path(os.path.abspath(os.path.expanduser(text)))
    problem = ""
    if not folder.is_dir():
        problem = "there is no folder {}"
    elif run_folder.is_sweep(folder):
        problem = "{} holds a sweep: start it again with the same command and its trial_name, or name one of its runs"
    elif not run_folder.is_described(folder):
        problem = "{} is not the folder of a run: it has no config.yaml"
        if run_folder.is_described(folder.parent.parent):
            problem += f"; {folder.parent.parent} is one"
    elif not EarlierRun(folder).goes_on:
        problem = "{} has no state to go on from: it was started with recover.mode=off, or {} was removed"
    if problem:
        raise ConfigError(Problem("--resume", problem, folder, EarlierRun(folder).states.folder))
    EarlierRun(folder).refuse_recipe(recipe, "--resume")
    return folder


def earlier_run(config: ExperimentConfig, folder: Path) -> EarlierRun | None:
    """Return the run in a folder that a run with these settings resumes. None without one, or if recover.mode=off."""
    earlier = EarlierRun.find(folder) if config.recover.mode != "off" else None
    return earlier if earlier is not None and earlier.goes_on else None


def can_go_on(config: ExperimentConfig, folder: Path, sweep: list[str] | None) -> bool:
    """Return whether the run in a folder is resumed.

    Args:
        config: The settings of the new start.
        folder: The folder of the run or the sweep.
        sweep: The overrides of a sweep. None: a single run.

    Raises:
        ConfigError: The folder holds another sweep.
    """
    if sweep is None:
        return earlier_run(config, folder) is not None
    if config.recover.mode == "off" or not run_folder.is_sweep(folder):
        return False
    before = sweep_of(folder)
    if _unnamed(type(config), before) != _unnamed(type(config), sweep):
        told = " ".join(line.lstrip("+") for line in before)
        raise ConfigError(Problem("trial_name", "{} holds another sweep ({}); choose another name", folder, told))
    return True


def _unnamed(cls: type[ExperimentConfig], sweep: list[str]) -> list[str]:
    """Return overrides with the names of today, and without trial_name, which may be the start time of a sweep."""
    pairs = [line.lstrip("+").partition("=") for line in sweep]
    return [current_key(cls, key) + equals + value for key, equals, value in pairs if key != "trial_name"]


def take_up(
    earlier: EarlierRun, config: ExperimentConfig, recipe: str, overrides: list[str], explicit: bool
) -> list[Change]:
    """Give a run its new settings, and write them to its folder.

    Args:
        earlier: The run.
        config: The new settings.
        recipe: The algorithm that was started.
        overrides: The settings of the command line.
        explicit: Whether the user has named the run, so that `overrides` are the changes.

    Returns:
        The settings that differ from those of the run.

    Raises:
        ConfigError: The run cannot be resumed with these settings, or is in progress.
    """
    earlier.refuse_running()
    changed = earlier.refuse_other(config, recipe, explicit)
    if changed:
        before = overrides_of(earlier.folder) if explicit else []
        run_folder.describe_again(earlier.folder, config, [*before, *overrides])
    return changed


def told_result(earlier: EarlierRun, config: ExperimentConfig, changed: Sequence[Change], command: str) -> float | None:
    """Print that a run is finished, and return its result. None for a run that has steps left.

    Args:
        earlier: The run.
        config: Its settings.
        changed: The settings that the command line changes.
        command: The command that starts the algorithm.
    """
    finished = earlier.states.finished
    if finished is None or any(change.is_end for change in changed):
        return None
    step, result = finished["step"], finished["result"]
    print(
        f"{shown(earlier.folder)} is finished: its {step} steps are done, with the result {result:.6g}.\n"
        f"To train on:    {how(command, earlier.folder)} {_longer(finished, asdict(config))}\n"
        "For a new run:  the same command with another trial_name"
    )
    return result


def _longer(finished: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the setting that has ended a finished run, with twice its value."""
    ended_by = finished["ended_by"]
    limit: Any = value_at(settings, ended_by) or finished["step"]
    return f"{ended_by}={2 * limit}"


def how(command: str, folder: Path) -> str:
    """Return the command that resumes a run."""
    return f"{command} --resume {shlex.quote(shown(folder))}"


def tell_how(command: str, folder: Path) -> None:
    """Print how to resume a run that has just ended early, if it has a state."""
    if EarlierRun(folder).states.steps():
        print(f"to go on with it: {how(command, folder)}", file=sys.stderr)


def tell_how_with_sweep(folder: Path) -> None:
    """Print how to resume a sweep that has just ended early or has failed runs, if one of its runs has a state."""
    if any(EarlierRun(path).states.are_unfinished for path in folder.iterdir()):
        print(f"to go on with it: {_how_with_sweep(folder)}", file=sys.stderr)


def tell_next(command: str, folder: Path) -> None:
    """Print on a terminal the commands that are of use after the end of a run."""
    finished = EarlierRun(folder).states.finished
    if not sys.stderr.isatty():
        return
    quoted = shlex.quote(shown(folder))
    needs = "" if find_spec("plotly") else "  (it needs pip install 'areno[report]')"
    print(f"look at it:   areno report {quoted}{needs}", file=sys.stderr)
    run = RunReader(folder)
    if checkpoint := run.latest_checkpoint():
        if "gconfig" in run.config:
            more = "--n-samples 8" if run.config.get("valid_dataset") else "--data held_out.jsonl"
            print(f"evaluate it:  areno evaluate {quoted} {more}", file=sys.stderr)
        print(f"use it:       areno serve {shlex.quote(shown(checkpoint))}", file=sys.stderr)
    if finished is not None:
        print(f"train on:     {how(command, folder)} {_longer(finished, run.config)}", file=sys.stderr)


def tell_unfinished(command: str, experiment: Path) -> None:
    """Print how to resume the last run or sweep of an experiment, if it is not finished."""
    if not os.path.isdir(experiment):  # False, and no error, also for a name that is too long
        return
    folders = [path for path in experiment.iterdir() if run_folder.is_described(path) or run_folder.is_sweep(path)]
    newest = max(folders, key=run_folder.begun_at, default=None)
    if newest is None:
        return
    is_sweep = run_folder.is_sweep(newest)
    runs = [EarlierRun(path) for path in (newest.iterdir() if is_sweep else [newest])]
    if not any(run.is_running for run in runs) and any(run.states.are_unfinished for run in runs):
        told = _how_with_sweep(newest) if is_sweep else how(command, newest)
        print(f"This is a new run. {shown(newest)} is not finished; to go on with it: {told}")


def _how_with_sweep(folder: Path) -> str:
    return f"the same command with trial_name={folder.name}"


def shown(folder: Path) -> str:
    """Return a folder relative to the working directory if it lies there, else as an absolute path."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def existing(folder: Path) -> NewFolder:
    """Return the existing folder of a run or a sweep. All files in it stay."""
    return NewFolder(folder, frozenset([folder, *folder.parents, *folder.glob("*")]))
