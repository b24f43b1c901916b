"""Compose a configuration from YAML files and overrides with Hydra.

The result is a plain dictionary and a list of all problems that were found. Modules outside of areno/launch do not use
Hydra.

Hydra's ConfigStore holds the defaults of the recipe's dataclass under the name `recipe`, without types, so that Hydra
does not stop at the first wrong key or value. For the same reason, values of the command line are added by force
(`++key=value`). `areno.schema.build` then checks all values at once.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from areno.errors import ArenoError, ConfigError, Problem, did_you_mean
from areno.files.interrupts import reraise_interrupts
from areno.files.paths import absolute_or_none, data_root
from areno.launch import yaml_files
from areno.launch.hints import setting_hint
from areno.launch.hydra import (
    SearchPath,
    check_references,
    checked_files,
    delete_key,
    describe_error,
    quoted,
    resolved_items,
)
from areno.launch.unused_settings import is_ignorable, remove_unused
from areno.schema.build import both_names_problem, build, current_key, with_defaults
from areno.schema.fields import Section, UnusedSetting, settings_unused_without
from areno.schema.values import value_at
from areno.version import __version__

T = TypeVar("T", bound=Section)

_RUN_DIR = "${areno.run_dir:${cluster.fileroot},${experiment_name},${trial_name}}"
N_JOBS = "hydra.launcher.n_jobs"
_SHOWN = 200  # characters of an override that cannot be read
_MARK = "areno's recipes"
_HYDRA = {
    "help": {"header": _MARK},  # a composition with this mark includes the recipe's defaults
    "run": {"dir": _RUN_DIR},
    "sweep": {"dir": _RUN_DIR, "subdir": "${hydra.job.num}"},
    "output_subdir": None,
    "job": {"chdir": False},
    # A root of null keeps Hydra from configuring logging, which is areno's own business.
    "job_logging": {"root": None},
    "hydra_logging": {"root": None},
}
_LAUNCHER = {"_target_": "hydra_plugins.areno_launcher.ArenoLauncher", "n_jobs": 1}  # in place of Hydra's `basic`
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError)


@dataclass
class Composition:
    """The configuration composed from files and command line, before its values are checked."""

    data: dict[str, Any]  # interpolations are resolved, and keys without a value left out
    raw: dict[str, Any]  # the same, with interpolations and ???
    problems: list[Problem]  # in files and command line; `build` finds those in values
    variant: tuple[str, Path] | None = None  # (name, file) of the choice `variant=name`
    output_dir: Path | None = None  # None if the settings that name it are wrong
    given: frozenset[str] = frozenset()  # dotted keys that YAML files and command line set
    files: Collection[Collection[str]] = ()  # dotted keys that each YAML file sets

    def build(self, cls: type[T], sources: bool = True) -> T:
        """Check all values and construct the configuration. The ConfigError lists all problems.

        With `sources`, the settings must name a dataset and a reward. Otherwise a script may pass them to a trainer.
        """

        def hint_of(key: str) -> str:
            return setting_hint(key, self.variant, cls, lambda key: value_at(self.data, key))

        try:
            return build(cls, self.data, self.problems, hint_of, sources)
        except ConfigError as error:
            idle = [
                p for p in error.problems if isinstance(p, UnusedSetting) and is_ignorable(p, self.data, self.files)
            ]
            if not idle:
                raise
            for problem in idle:
                delete_key(self.data, problem.key)
                delete_key(self.raw, problem.key)
            return self.build(cls, sources)


@dataclass
class Job:
    """One run that Hydra starts."""

    composition: Composition
    run_dir: Path
    overrides: list[str]
    number: int | None  # in its sweep, from 0; None outside of a sweep
    names: Mapping[str, str]  # setting -> flag, which errors quote
    task: str = ""  # one that comes with areno; "" for the user's, and for a run that resumes


@dataclass
class _CommandLine:
    """The user's overrides, sorted and rewritten for Hydra."""

    lines: list[str] = field(default_factory=list)  # for Hydra; in a sweep, one may list several values
    sample: list[str] = field(default_factory=list)  # with the values of the first combination of the sweep
    values: list[str] = field(default_factory=list)  # keys, without those of groups
    deletions: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)  # key -> the name that the user has given it by
    chosen: set[str] = field(default_factory=set)  # groups
    problems: list[Problem] = field(default_factory=list)

    def add(self, line: str, sample: str | None = None) -> None:
        self.lines.append(line)
        self.sample.append(line if sample is None else sample)


def load(
    cls: type[T],
    config_name: str,
    overrides: list[str] | None = None,
    config_dir: Path | None = None,
    sources: bool = False,
) -> T:
    """Compose and check the configuration of a task. With `sources`, it must name a dataset and a reward."""
    with HydraSession(cls, config_name, overrides or [], config_dir=config_dir) as session:
        composition = session.compose()
    return composition.build(cls, sources)


@contextmanager
def mention_version(folder: Path) -> Iterator[None]:
    """If another version of areno wrote the run in `folder`, add a note about this to a ConfigError in the block."""
    try:
        yield
    except ConfigError as error:
        with suppress(Exception):
            other = json.loads((folder / "versions.json").read_bytes())["areno"]
            if other != __version__:
                problem = Problem("", "{} is a run of areno {}, and this is areno {}", folder, other, __version__)
                error = ConfigError([*error.problems, problem])
        raise error


def to_yaml(data: dict[Any, Any]) -> str:
    """Convert values to YAML text that Hydra reads as the same values. Interpolations such as "${seed}" are kept."""
    # OmegaConf.to_yaml needs a DictConfig, which takes longer to construct than the text.
    dumper = get_omega_conf_dumper()
    return yaml.dump(data, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=dumper)


class HydraSession(AbstractContextManager["HydraSession"]):
    """Hydra, set up for one configuration class and one command line. Composes configurations, starts runs and sweeps.

    The override `hydra.mode=MULTIRUN` starts a sweep, as `multirun` does. `names` maps settings to flags: messages of
    errors name the flag.
    """

    def __init__(
        self,
        cls: type[Section],
        config_name: str,
        overrides: list[str],
        *,
        config_dir: Path | None = None,
        multirun: bool = False,
        job_name: str = "areno",
        names: Mapping[str, str] = MappingProxyType({}),
    ):
        self.cls = cls
        self.config_name = config_name.removesuffix(".yaml")
        self.config_dir = absolute_or_none(config_dir)
        self.overrides = overrides
        self.multirun = multirun or any("".join(line.split()) == "hydra.mode=MULTIRUN" for line in overrides)
        self.n_jobs = 1  # runs of a sweep at the same time
        self._job_name, self.names = job_name, dict(names)  # a plain dict, which can be pickled for a run
        self.named_by_time: set[Path] = set()  # folders whose name is the start time, since trial_name is null
        self._started = self._time_name = time.strftime("%Y%m%d-%H%M%S")
        self._counts = itertools.count(2)
        self._composed: DictConfig | None = None
        self._in_files: list[Problem] = []  # settings that a file has under two names
        self._keys_of_files: dict[Path, set[str]] = {}
        self._listed: set[str] | None = None  # groups in the defaults of the files; None: not looked up yet

    def __enter__(self) -> HydraSession:
        if self.config_dir and not self.config_dir.is_dir():
            raise ConfigError(f"--config-dir: there is no folder {str(self.config_dir)!r}")
        SearchPath.config_dir = self.config_dir
        Plugins.instance().register(SearchPath)
        ConfigStore.instance().store(group="hydra/launcher", name="basic", node=_LAUNCHER, provider="areno")
        # Hydra copies its sources and, with them, all that is stored. It does not change the copy.
        vars(ConfigStore.instance())["__deepcopy__"] = lambda memo: ConfigStore.instance()
        ConfigStore.instance().store("recipe", with_defaults(self.cls, {}) | {"hydra": _HYDRA}, provider="areno")
        OmegaConf.register_new_resolver("areno.run_dir", self._run_dir, replace=True)
        # HydraConfig is global, so it is restored: a later session must not see the value of this session.
        with ExitStack() as opened:
            opened.callback(setattr, HydraConfig.instance(), "cfg", HydraConfig.instance().cfg)
            opened.enter_context(checked_files(self.cls, self.config_name, self._in_files, self._keys_of_files))
            folder = str(data_root() / "conf")
            opened.enter_context(initialize_config_dir(config_dir=folder, job_name=self._job_name, version_base="1.3"))
            self._opened = opened.pop_all()
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        self._hydra = hydra
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._opened.close()

    def compose(self) -> Composition:
        """Compose the configuration of the run, or of the first run of a sweep, from files and command line.

        Raises ConfigError only if Hydra cannot compose, for example because the task does not exist.
        """
        with reraise_interrupts():
            return self._composition()

    def _composition(self) -> Composition:
        config = self._composed = self._compose()
        line = self._command_line
        self.multirun = self.multirun or config.hydra.mode == RunMode.MULTIRUN
        composition = self._to_composition(config, [*dict.fromkeys(self._in_files), *line.problems])
        composition.problems += self._read_n_jobs(config)
        with suppress(OmegaConfBaseException):
            composition.output_dir = Path(config.hydra.sweep.dir if self.multirun else config.hydra.run.dir).absolute()
        return composition

    def _compose(self) -> DictConfig:
        try:
            config = self._hydra.compose_config(self.config_name, self._command_line.sample, RunMode.RUN)
            if config.hydra.help.header != _MARK:
                self._look_up_defaults()
            HydraConfig.instance().set_config(config)
            return config
        except ArenoError as error:
            raise ConfigError([*self._command_line.problems, *error.problems]) from error
        except _HYDRA_ERRORS as error:
            if self._listed is None:
                self._look_up_defaults()
                return self._compose()
            raise ConfigError([*self._command_line.problems, Problem("", describe_error(error))]) from error

    def run(self, job: Callable[[Job], Any]) -> None:
        """Call `job` once for a single run, or once for each combination of a sweep.

        The calls are made in this process, one after another. `job` returns the objective, or starts the run in another
        process and returns a Future of the objective. If it raises JobFailed in a sweep, the next combinations are
        still called, and JobFailed is raised at the end. `job` must raise errors of the run as ArenoError, SystemExit
        or JobFailed, because an OSError or ValueError would be reported as an error of Hydra.
        """
        line = self._command_line
        try:
            if self.multirun:
                self._hydra.multirun(self.config_name, self._hydra_task(job), [*line.lines, "hydra.mode=MULTIRUN"])
            else:
                if (config := self._composed) is not None:  # composing again would take as long as the first time
                    OmegaConf.set_readonly(config.hydra, False)
                    vars(self._hydra.config_loader)["load_configuration"] = lambda *_, **__: config
                self._hydra.run(self.config_name, self._hydra_task(job), line.lines)
        except ArenoError:
            raise
        except _HYDRA_ERRORS as error:
            raise ConfigError(describe_error(error)) from error

    def _read_n_jobs(self, config: DictConfig) -> Iterator[Problem]:
        """Copy hydra.launcher.n_jobs, the number of runs at the same time, to `self.n_jobs`. Yield problems with it."""
        launcher = config.hydra.launcher
        if not isinstance(launcher, DictConfig):
            yield Problem("hydra.launcher", f"is {launcher!r}; a section is expected")
            return
        if launcher._target_ != _LAUNCHER["_target_"]:
            return
        n_jobs = launcher.n_jobs
        if not isinstance(n_jobs, int) or isinstance(n_jobs, bool) or n_jobs < 1:
            yield Problem(N_JOBS, f"is {n_jobs!r}; a number above 0 is expected")
        elif self.multirun:
            self.n_jobs = n_jobs
        elif any(line.lstrip("+").startswith(N_JOBS) for line in self.overrides):
            yield Problem(N_JOBS, f"is {n_jobs}, but this is a single run; add -m")

    @property
    def sweep_overrides(self) -> list[str]:
        """The overrides of a sweep as Hydra writes them to multirun.yaml, without those of Hydra's own settings."""
        return [line for line in self._command_line.lines if not line.startswith("hydra")]

    def show_info(self, topic: str) -> None:
        """Print Hydra's report: "all", "config", "defaults", "defaults-tree", "plugins" or "searchpath"."""
        self._look_up_defaults()
        with _restore_logging():
            self._hydra.show_info(topic, self.config_name, self._command_line.sample)

    def show_hydra(self, which: str, package: str | None, resolve: bool) -> None:
        """Print the configuration of Hydra alone ("hydra"), or together with that of the run ("all")."""
        self._look_up_defaults()
        with _restore_logging():
            self._hydra.show_cfg(self.config_name, self._command_line.sample, which, package, resolve)

    def _hydra_task(self, job: Callable[[Job], Any]) -> Callable[[DictConfig], Any]:
        def task(config: DictConfig) -> Any:
            hydra = HydraConfig.get()
            number = None if OmegaConf.is_missing(hydra.job, "num") else hydra.job.num
            overrides = [line.lstrip("+") for line in hydra.overrides.task]
            overrides += [f"~{key}" for key in self._command_line.deletions]
            folder = Path(hydra.runtime.output_dir)
            task = (
                self.config_name
                if self.config_name in {*yaml_files.task_files(), *yaml_files.experiment_files()}
                else ""
            )
            return job(Job(self._to_composition(config, []), folder, overrides, number, self.names, task))

        return task

    def _check_config_name(self) -> None:
        names = sorted({**yaml_files.task_files(self.config_dir), **yaml_files.experiment_files()})
        if self.config_name not in names and not self._hydra.config_loader.get_group_options(self.config_name):
            folder, _, name = self.config_name.rpartition("/")
            if not folder or name not in yaml_files.config_groups(self.config_dir).get(folder, []):
                raise ConfigError(
                    f"--config-name: there is no {self.config_name!r}; there are {', '.join(names)}"
                    f"{did_you_mean(self.config_name, names)}"
                )

    def _run_dir(self, fileroot: str, experiment: str, trial: str | None) -> str:
        """Return <fileroot>/<experiment>/<trial>.

        If `trial` is None, take the start time, equal for all runs of a sweep.
        """
        folder = Path(os.path.expanduser(fileroot)) / str(experiment)
        if trial is not None:
            return str(folder / str(trial))
        self.named_by_time.add((folder / self._time_name).absolute())
        return str(folder / self._time_name)

    def new_run_dir(self, run_dir: Path) -> Path:
        """Return a new path for a run folder whose name, the start time, is taken."""
        self._time_name = f"{self._started}-{next(self._counts)}"
        self.named_by_time.add(renamed := run_dir.with_name(self._time_name))
        return renamed

    @cached_property
    def _command_line(self) -> _CommandLine:
        self._check_config_name()
        line = _CommandLine()
        groups = yaml_files.config_groups(self.config_dir)
        parser = OverridesParser.create(config_loader=self._hydra.config_loader)
        for text in map(quoted, self.overrides):
            try:
                [override] = parser.parse_overrides([text])
                if not override.key_or_group:
                    raise HydraException
                if override.is_sweep_override() and not self.multirun:
                    several = (
                        f"has several values in {text!r}; add -m to try each, or write a list as [a,b] and text that "
                        "holds a comma in quotes"
                    )
                    line.problems.append(Problem(override.key_or_group, several))
                else:
                    self._classify_override(override, text, line, groups)
            except (HydraException, ValueError, RecursionError):  # too long numbers and too deep lists, for example
                hint = """, or 'key="value"' where the value has one of ,:=()[]{}'""" if "=" in text else ""
                shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
                line.problems.append(Problem("", f"cannot read {shown!r}; key=value is expected{hint}"))
        return line

    def _look_up_defaults(self) -> None:
        self._check_config_name()
        try:
            defaults = self._hydra.config_loader.compute_defaults_list(self.config_name, [], RunMode.RUN)
        except ArenoError:
            raise
        except _HYDRA_ERRORS as error:
            raise ConfigError("{}: {}", self.config_name, describe_error(error)) from error
        if not any(default.config_path == "recipe" for default in defaults.defaults):
            raise ConfigError(f"{self.config_name}: its defaults must begin with `- recipe`, the recipe's own settings")
        self._listed = set(defaults.overrides.known_choices)
        vars(self).pop("_command_line", None)

    def _is_in_defaults(self, group: str) -> bool:
        """Return whether a config group is in the defaults lists of the files.

        Looking this up takes half as long as composing, and most groups are listed. So the result is always True until
        `_look_up_defaults` has run, which happens when Hydra refuses a group.
        """
        return self._listed is None or group in self._listed

    def _classify_override(
        self, override: Override, text: str, line: _CommandLine, groups: dict[str, list[str]]
    ) -> None:
        key = current_key(self.cls, override.key_or_group)
        text = text.replace(override.key_or_group, key, 1)
        given = line.given.setdefault(key, override.key_or_group)
        if given != override.key_or_group:
            line.problems.append(both_names_problem(given if given != key else override.key_or_group, key))
        if override.is_hydra_override() or override.package:
            line.add(text)
        elif key in groups and not isinstance(override.value(), (dict, list)):
            if override.is_delete():
                line.add(text) if self._is_in_defaults(key) else line.deletions.append(key)
                return
            values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
            # Hydra takes no null for a choice, but takes a file of that name.
            names = ["null" if value is None else str(value).strip("'\"") for value in values]
            for name in names:
                if name not in groups[key]:
                    choices = ", ".join(groups[key])
                    close = did_you_mean(name, groups[key])
                    line.problems.append(Problem(key, f"has no choice {name!r}; there are {choices}{close}"))
            if key in line.chosen:
                line.problems.append(Problem(key, f"is chosen more than once, in {text!r} for the second time"))
            elif all(name in groups[key] for name in names):
                line.chosen.add(key)
                start = f"{'' if self._is_in_defaults(key) else '+'}{key}="
                quoted = ["'null'" if name == "null" else name for name in names]
                line.add(start + ",".join(quoted), start + quoted[0])
        elif override.is_delete():
            line.deletions.append(key)
        else:
            forced = f"++{text.lstrip('+')}"
            sample = forced
            if override.is_sweep_override():
                value = override.value()
                first = value.start if isinstance(value, IntervalSweep) else next(override.sweep_string_iterator())
                sample = f"++{key}={first}"
            line.values.append(key)
            line.add(forced, sample)

    def _to_composition(self, config: DictConfig, problems: list[Problem]) -> Composition:
        """Convert the configuration that Hydra composed.

        The conversion's problems are added to `problems` in the result.
        """
        found = list(problems)
        raw = OmegaConf.to_container(config)
        assert isinstance(raw, dict)
        raw.pop("hydra", None)
        check_references(raw)
        data = {str(key): value for key, value in resolved_items(config, "", found)}
        choices = HydraConfig.get().runtime.choices
        for group, choice in choices.items():
            if choice == "null":  # the section is null whatever it holds
                data[group] = raw[group] = None
                for name in settings_unused_without(self.cls, group):
                    data.pop(name, None)
                    raw.pop(name, None)
                found += self._overrides_without_effect(group)
        for key in self._command_line.deletions:
            if not (delete_key(data, key) | delete_key(raw, key)):
                found.append(Problem(key, "cannot be deleted: there is no such key"))
        asked = {group for group in self._command_line.chosen if choices.get(group) != "null"}
        found += remove_unused(self.cls, data, raw, asked=asked)
        raw = with_defaults(self.cls, {str(key): value for key, value in raw.items()})
        file = yaml_files.variant_files(self.config_dir).get(choices.get("variant", ""))
        variant = (choices["variant"], file) if file else None
        files = tuple(map(frozenset, self._keys_of_files.values()))
        given = frozenset({*itertools.chain(*files), *self._command_line.values})
        return Composition(data, raw, found, variant, given=given, files=files)

    def _overrides_without_effect(self, group: str) -> Iterator[Problem]:
        """Yield a problem for each override in `group`, a null section, or in sections that need this section."""
        line, choices = self._command_line, HydraConfig.get().runtime.choices
        sections = {group, *settings_unused_without(self.cls, group)}
        chosen = [name for name in line.chosen if name in sections and choices[name] != "null"]
        for key in [*chosen, *(key for key in line.values if key.partition(".")[0] in sections - {key})]:
            yield Problem(key, f"has no effect with {group}=null; leave one of the two out")


@contextmanager
def _restore_logging() -> Iterator[None]:
    """Restore the root logger at the end of a `with` block, because Hydra changes the logger when it prints."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
