"""Decides which run a command resumes and which settings may change, and prints how to resume a run.

Three files implement resuming:

resume.py    finds the run to resume, and checks which changed settings are accepted
recovery.py  records and writes the training states of a run, and continues a run from a state
states.py    stores the training states on disk
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areno.config.experiments import ExperimentConfig
from areno.config.resuming import EXPLICIT, ORDER, RUN_LENGTH
from areno.errors import ConfigError, Problem
from areno.files.durable import locked
from areno.run.states import StateFolder
from areno.schema.build import current_key, with_current_names, with_defaults
from areno.schema.fields import OnResume, Section, settings
from areno.schema.values import format_value, value_at
from areno.tracking import run_folder
from areno.tracking.reader import RunReader
from areno.tracking.run_folder import NewRunFolder, overrides_of, recipe_of, settings_of, sweep_of

STATE = "state"
"""Name of the folder of the states in the folder of a run."""


@dataclass(frozen=True)
class SettingChange:
    """A setting with different values in an earlier process of a run and in this process."""

    key: str  # dotted name
    before: Any
    now: Any
    on_resume: OnResume

    @property
    def override(self) -> str:
        """The change as a command-line override, such as `seed=2`."""
        return f"{self.key}={'...' if isinstance(self.now, Mapping) else format_value(self.now)}"

    def __str__(self) -> str:
        before, now = (
            "a section" if isinstance(value, Mapping) else format_value(value) for value in (self.before, self.now)
        )
        return f"{self.key} {before} -> {now}"


def changed_settings(cls: type[Section], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings that differ between two processes of a run, in the order of the fields of `cls`.

    `before` may have old names of settings that areno has renamed. Missing settings have their defaults.
    """
    before = with_current_names(cls, before)
    pairs = _differences(with_defaults(cls, before), with_defaults(cls, now))
    rollout = now.get("rollout") or {}
    is_race = bool(rollout.get("max_head_offpolicyness") or rollout.get("prompts_ahead"))
    return [SettingChange(key, old, new, _resume_rule(cls, key, is_race)) for key, old, new in pairs]


def _resume_rule(cls: type[Section], key: str, is_race: bool) -> OnResume:
    """Return how a resumed run treats a change of a setting, as the setting or the nearest section declares.

    `is_race`: the time at which prompts finish decides on which of them a step trains.
    """
    found, section = EXPLICIT, cls
    for name in key.split("."):
        if section is None or name not in settings(section):
            break
        found, section = settings(section)[name].on_resume or found, settings(section)[name].section
    return ORDER if is_race and found.decides_order else found


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value). A section that is null on one side is yielded as one setting."""
    for name in {**new, **old}:
        one, other = old.get(name), new.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{prefix}{name}.")
        elif one != other:
            yield f"{prefix}{name}", one, other


class EarlierRun:
    """A run that an earlier process has left in a folder. It may be possible to resume it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.states = StateFolder(folder / STATE, keep=1)

    @classmethod
    def find(cls, folder: Path) -> EarlierRun | None:
        """Return the run in a folder. None if the folder has no config.yaml, so that no run was fully set up."""
        return cls(folder) if run_folder.has_description(folder) else None

    @property
    def config(self) -> dict[str, Any]:
        return settings_of(self.folder)

    @property
    def can_resume(self) -> bool:
        """Whether the run has a folder of training states, or has left no results and can start again."""
        return self.states.has_begun or not run_folder.has_results(self.folder)

    @property
    def is_running(self) -> bool:
        if not self.states.has_begun:
            return False
        try:
            with locked(self.states.folder):
                return False
        except BlockingIOError:
            return True

    def refuse_running(self) -> None:
        if self.is_running:
            raise ConfigError(Problem("trial_name", "the run in {} is still running, in another process", self.folder))

    def refuse_recipe(self, recipe: str, key: str = "trial_name") -> None:
        """Raise ConfigError if this run was started with another recipe. `key`: the setting that the error names."""
        meant = recipe_of(self.folder)
        if meant not in ("", recipe):
            raise ConfigError(Problem(key, "{} is a run of {}, not of {}", self.folder, meant, recipe))

    def check_resumable(self, config: Section, recipe: str | None, explicit: bool = False) -> list[SettingChange]:
        """Return the settings that differ. Raises ConfigError if the run cannot be resumed with this configuration.

        `explicit`: the user has named the run by --resume. If `recipe` is None, the algorithm is not checked.
        """
        if recipe is not None:
            self.refuse_recipe(recipe)
        found = changed_settings(type(config), self.config, asdict(config))
        if self.states.steps() or run_folder.has_metrics(self.folder):  # otherwise it begins again, with any settings
            refuse_changes(found, self.folder, explicit)
        return found


def refuse_changes(found: Sequence[SettingChange], folder: Path, explicit: bool) -> None:
    """Raise ConfigError if any of the changed settings does not allow a run to be resumed."""
    problems = []
    for change in found:
        if change.on_resume.kind == "never":
            text = "the run in {} cannot be resumed with another value ({}); start a new run under another trial_name"
            problems.append(Problem(change.key, text, folder, change))
        elif change.on_resume.kind == "explicit" and not explicit:
            text = "differs from the run in {} ({}); choose another trial_name, or resume it: --resume {} {}"
            problems.append(Problem(change.key, text, folder, change, folder, change.override))
    if problems:
        raise ConfigError(problems)


def run_folder_for(config: ExperimentConfig, run_dir: str | Path | None) -> Path:
    """Return `run_dir` if given, else the folder of the run `trial_name` if it can be resumed, else a new folder."""
    if run_dir is not None:
        return Path(run_dir)
    if config.trial_name is not None and (
        earlier := run_to_resume(config, run_folder.run_folder_path(config, config.trial_name))
    ):
        earlier.refuse_running()
        if earlier.check_resumable(config, None):
            run_folder.rewrite_description(earlier.folder, config)
        return earlier.folder
    return run_folder.make_folder_for_script(config)


def run_to_resume(config: ExperimentConfig, folder: Path) -> EarlierRun | None:
    """Return the earlier run in a folder if a new process resumes it. None if a new run begins."""
    earlier = EarlierRun.find(folder) if config.recover.mode != "off" else None
    return earlier if earlier is not None and earlier.can_resume else None


def find_resumable_run(text: str, recipe: str) -> Path:
    """Return the folder that --resume names (`text`). Raises ConfigError if it has no run that can be resumed."""
    folder = Path(os.path.abspath(os.path.expanduser(text)))
    problem = ""
    if not folder.is_dir():
        problem = "there is no folder {}"
    elif run_folder.is_sweep(folder):
        problem = "{} holds a sweep: start it again with the same command and its trial_name, or name one of its runs"
    elif not run_folder.has_description(folder):
        problem = "{} is not the folder of a run: it has no config.yaml"
        if run_folder.has_description(folder.parent.parent):
            problem += f"; {folder.parent.parent} is one"
    elif not EarlierRun(folder).can_resume:
        problem = "{} has no state to resume from: it was started with recover.mode=off, or {} was removed"
    if problem:
        raise ConfigError(Problem("--resume", problem, folder, EarlierRun(folder).states.folder))
    EarlierRun(folder).refuse_recipe(recipe, "--resume")
    return folder


def resumes_existing(config: ExperimentConfig, folder: Path, sweep: list[str] | None) -> bool:
    """Return whether a command resumes what is in a folder. `sweep`: overrides of a sweep, None for one run."""
    if sweep is None:
        return run_to_resume(config, folder) is not None
    if config.recover.mode == "off" or not run_folder.is_sweep(folder):
        return False
    before = sweep_of(folder)
    if _comparable_overrides(type(config), before) != _comparable_overrides(type(config), sweep):
        there = " ".join(line.lstrip("+") for line in before)
        raise ConfigError(Problem("trial_name", "{} holds another sweep ({}); choose another name", folder, there))
    return True


def _comparable_overrides(cls: type[ExperimentConfig], sweep: list[str]) -> list[str]:
    """Return the overrides of a sweep in a form that can be compared with those of an earlier start.

    Renamed settings get their current names. trial_name is left out, because it may be the start time of the sweep.
    """
    pairs = [line.lstrip("+").partition("=") for line in sweep]
    return [current_key(cls, key) + equals + value for key, equals, value in pairs if key != "trial_name"]


def accept_changes(
    earlier: EarlierRun, config: ExperimentConfig, recipe: str, overrides: list[str], explicit: bool
) -> list[SettingChange]:
    """Check that a run can be resumed, write the changed settings into its folder, and return them.

    If the user has named the run by --resume (`explicit`), the recorded overrides are kept and `overrides` are added.
    Otherwise `overrides` replace them.
    """
    earlier.refuse_running()
    changed = earlier.check_resumable(config, recipe, explicit)
    if changed:
        before = overrides_of(earlier.folder) if explicit else []
        run_folder.rewrite_description(earlier.folder, config, [*before, *overrides])
    return changed


def as_new_folder(folder: Path) -> NewRunFolder:
    """Return a NewRunFolder whose `discard` keeps the files that the folder has now."""
    return NewRunFolder(folder, frozenset([folder, *folder.parents, *folder.glob("*")]))


# The functions below print messages for the command line.


def print_result(
    earlier: EarlierRun, config: ExperimentConfig, changed: Sequence[SettingChange], command: str
) -> float | None:
    """Print and return the result of a finished run. Also print the command that trains the run further.

    If the run has steps left, print nothing and return None.
    """
    finished = earlier.states.finished_record
    if finished is None or any(change.on_resume is RUN_LENGTH for change in changed):
        return None
    step, result = finished["step"], finished["result"]
    print(
        f"{shown_path(earlier.folder)} is finished: its {step} steps are done, with the result {result:.6g}.\n"
        f"To train on:    {resume_command(command, earlier.folder)} {_doubled_limit(finished, asdict(config))}\n"
        "For a new run:  the same command with another trial_name"
    )
    return result


def _doubled_limit(finished: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the override that doubles the length of a finished run, such as "total_train_steps=200"."""
    ended_by = finished["ended_by"]
    limit: Any = value_at(settings, ended_by) or finished["step"]
    return f"{ended_by}={2 * limit}"


def resume_command(command: str, folder: Path) -> str:
    return f"{command} --resume {shlex.quote(shown_path(folder))}"


def _sweep_command(folder: Path) -> str:
    return f"the same command with trial_name={folder.name}"


def print_resume_command(command: str, folder: Path) -> None:
    """Print the command that resumes a run which has just ended early. Nothing if it has no training state."""
    if EarlierRun(folder).states.steps():
        print(f"to resume it: {resume_command(command, folder)}", file=sys.stderr)


def print_sweep_command(folder: Path) -> None:
    """Print how to resume a sweep, if any of its runs is unfinished and has a training state."""
    if any(EarlierRun(path).states.is_run_unfinished for path in folder.iterdir()):
        print(f"to resume it: {_sweep_command(folder)}", file=sys.stderr)


def print_next_commands(command: str, folder: Path) -> None:
    """Print the commands that report, evaluate, serve and continue a finished run, if stderr is a terminal."""
    finished = EarlierRun(folder).states.finished_record
    if not sys.stderr.isatty():
        return
    quoted = shlex.quote(shown_path(folder))
    needs = "" if find_spec("plotly") else "  (it needs pip install 'areno[report]')"
    print(f"look at it:   areno report {quoted}{needs}", file=sys.stderr)
    run = RunReader(folder)
    if checkpoint := run.latest_checkpoint():
        if "gconfig" in run.config:
            more = "--n-samples 8" if run.config.get("valid_dataset") else "--data held_out.jsonl"
            print(f"evaluate it:  areno evaluate {quoted} {more}", file=sys.stderr)
        print(f"use it:       areno serve {shlex.quote(shown_path(checkpoint))}", file=sys.stderr)
    if finished is not None:
        print(
            f"train on:     {resume_command(command, folder)} {_doubled_limit(finished, run.config)}", file=sys.stderr
        )


def print_unfinished(command: str, experiment: Path) -> None:
    """Print how to resume the newest run or sweep of an experiment, if it is unfinished, stopped and resumable."""
    if not os.path.isdir(experiment):  # returns False for a name that is too long, where Path raises
        return
    folders = [path for path in experiment.iterdir() if run_folder.has_description(path) or run_folder.is_sweep(path)]
    newest = max(folders, key=run_folder.start_time, default=None)
    if newest is None:
        return
    is_sweep = run_folder.is_sweep(newest)
    runs = [EarlierRun(path) for path in (newest.iterdir() if is_sweep else [newest])]
    if not any(run.is_running for run in runs) and any(run.states.is_run_unfinished for run in runs):
        how = _sweep_command(newest) if is_sweep else resume_command(command, newest)
        print(f"This is a new run. {shown_path(newest)} is not finished; to resume it: {how}")


def shown_path(folder: Path) -> str:
    """Return an absolute path as text for users. It is relative if it is inside the working directory."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
