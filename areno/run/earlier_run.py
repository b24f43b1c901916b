"""What an earlier session left in the folder of a run, and whether a run with these settings may go on there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areno.config.experiments import ExperimentConfig
from areno.config.schema.fields import Section
from areno.errors import ConfigError, Problem
from areno.files.durable import locked
from areno.run.changes import Change, changes
from areno.run.state import States
from areno.tracking import new_run
from areno.tracking.description import recipe_of, settings_of

STATE = "state"


class EarlierRun:
    """The run in a folder that holds a config.yaml."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.states = States(folder / STATE, keep=1)

    @classmethod
    def find(cls, folder: Path) -> EarlierRun | None:
        """The run of this folder; None where there is none, or one that ended while its folder was made."""
        return cls(folder) if new_run.is_described(folder) else None

    @property
    def config(self) -> dict[str, Any]:
        """Its settings. Raises ArenoError if they cannot be read."""
        return settings_of(self.folder)

    @property
    def goes_on(self) -> bool:
        """Whether a state or the lack of results lets a run go on here."""
        return self.states.has_begun or not new_run.has_results(self.folder)

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
        folder = new_run.folder_of(config, config.trial_name)
        earlier = EarlierRun.find(folder)
        if earlier is not None and earlier.goes_on:
            earlier.refuse_running()
            if earlier.refuse_other(config, None):
                new_run.describe_again(folder, config)
            return folder
    return new_run.for_script(config)
