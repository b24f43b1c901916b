"""The command `areno train`, which starts a training run by flags that stand for settings of the recipes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areno.api.algorithms import Algorithm, algorithm_names, algorithm_of, built_in_algorithms, get_algorithm
from areno.cli import train_flags
from areno.cli.train_flags import HEADINGS, TASK, TrainFlag
from areno.errors import ArenoError, ConfigError, Problem, did_you_mean, keys_renamed
from areno.schema.fields import setting_rows
from areno.tracking.run_folder import has_description, recipe_of

_DEFAULT = "gspo"
_ABOUT = """\
Trains a model by SFT, DPO, GSPO, GRPO or PPO: data, rollout, rewards, loss, optimizer, metrics and checkpoints.

  areno train --ckpt Qwen/Qwen3-0.6B --dataset-path rows.jsonl --reward-fn-path reward.py --algo gspo --batch-size 8
  areno train --algo gspo --config-name quickstart --max-steps 20        a task that comes with areno

Each flag sets a setting of the configuration. Settings without a flag are given as key=value. `areno recipes` lists the
tasks that --config-name can name. The run first prints the command of the recipe that does the same."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT
    parser.usage = "%(prog)s --ckpt MODEL --dataset-path DATA [flags] [key=value ...]"
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118)
    groups = {name: parser.add_argument_group(name, about) for name, about in HEADINGS.items()}
    names = algorithm_names()
    about = f"{', '.join(names)} (default {_DEFAULT}; with --resume, that of the run)"
    groups["Basic"].add_argument("--algo", metavar="TEXT", help=about)
    for flag in train_flags.all_train_flags().values():
        _add_flag(groups[flag.row.heading], flag)
    more = parser.add_argument_group("Settings", "the settings of the recipes, and the task that they belong to")
    config_name = more.add_argument("--config-name", metavar="NAME", help=f"name of the task (default {TASK})")
    more.add_argument("--config", metavar="FILE", help="task file, in place of --config-dir and --config-name")
    more.add_argument("--config-dir", metavar="DIR", help="folder with your own task files")
    more.add_argument("--resume", metavar="RUN", help="resume the run in this folder")
    help = "with --resume: go on after step S, in a new folder"
    more.add_argument("--from-step", metavar="S", type=int, help=help)
    more.add_argument("--cfg", choices=["job"], help="print the configuration and do not start a run")
    settings = more.add_argument("settings", nargs="*", default=[], metavar="key=value", help="any other setting")
    vars(config_name)["completer"], vars(settings)["completer"] = (
        _task_names,
        _setting_keys,
    )  # argcomplete looks for these


def _add_flag(group: Any, flag: TrainFlag) -> None:
    only = "" if len(flag.keys) == len(built_in_algorithms()) else f"[{', '.join(flag.keys)}] "
    help = f"{only}{flag.help}".replace("%", "%%")
    options: dict[str, Any] = {"dest": flag.name, "default": None, "help": help}
    if flag.value is None:
        group.add_argument(flag.name, metavar=flag.type_text, **options)
    elif flag.negative:
        group.add_argument(flag.name, action=argparse.BooleanOptionalAction, **options)
    else:
        group.add_argument(flag.name, action="store_const", const=True, **options)


def run(arguments: argparse.Namespace) -> int:
    from areno.launch import command

    algorithm, settings, names = settings_of(arguments, complete=arguments.resume is None and not arguments.cfg)
    start = f"python -m areno.recipes.{algorithm.name}"
    if algorithm.file is not None:
        start = f"python {shlex.quote(str(algorithm.file))}"
    elif algorithm.name not in built_in_algorithms():
        start = f"areno train --algo {algorithm.name}"
    options = [] if arguments.resume is not None else [f"--config-name={arguments.config_name}"]
    options += [
        f"--{name.replace('_', '-')}={value}"
        for name in ("config_dir", "resume", "from_step", "cfg")
        if (value := vars(arguments)[name]) is not None
    ]
    print(f"the same run: {start} {shlex.join([*options, *settings])}", file=sys.stderr)
    return command.run(algorithm, start, [*options, *settings], greet=False, names=names)


def settings_of(arguments: argparse.Namespace, complete: bool = False) -> tuple[Algorithm, list[str], dict[str, str]]:
    """Return (algorithm, settings as key=value, setting -> flag) of the flags of `areno train`.

    With `complete`, missing settings, such as the data, are problems.
    """
    from areno.launch.command import split_config_path

    split_config_path(arguments)
    arguments.config_name = arguments.config_name or TASK
    algorithm = _chosen_algorithm(arguments)
    own_task = arguments.config_name != TASK or arguments.resume is not None
    given = {name: value for name, value in vars(arguments).items() if name.startswith("--") and value is not None}
    of_flags, problems = train_flags.overrides_of_flags(algorithm.name, given, own_task, algorithm.config)
    names = _flag_names(algorithm, arguments.settings)
    settings, twice = train_flags.merge_with_settings(of_flags, arguments.settings, _flag_names(algorithm, []))
    problems += twice
    if complete:  # --cfg and `areno plan` also show incomplete settings
        problems += _setting_problems(algorithm, arguments, settings, names)
    if problems:
        raise ConfigError(problems)
    return algorithm, settings, names


def _chosen_algorithm(arguments: argparse.Namespace) -> Algorithm:
    """Return the algorithm that `--algo` names, or the algorithm of the run that `--resume` names."""
    name = arguments.algo
    folder = Path(arguments.resume).expanduser() if arguments.resume else None
    if folder is not None and has_description(folder):  # otherwise --resume raises the error of the folder
        of_run = recipe_of(folder)
        if not (name or of_run):
            raise ConfigError(Problem("--algo", "is missing; {} does not say which algorithm it is a run of", folder))
        if of_run and name in (None, of_run):
            try:
                return algorithm_of(folder)
            except ArenoError as error:
                raise ConfigError(Problem("--resume", "{}", error)) from error
    name, names = name or _DEFAULT, algorithm_names()
    if name not in names:
        there = f"; there are {', '.join(names)}"
        raise ConfigError(Problem("--algo", f"there is no {name!r}{did_you_mean(name, names)}{there}"))
    return get_algorithm(name)


def _flag_names(algorithm: Algorithm, settings: Sequence[str]) -> dict[str, str]:
    """Return setting -> flag, by which errors name a setting. Settings given as key=value are left out."""
    names = {row.key: row.flag.name for row in setting_rows(algorithm.config) if row.flag.name}
    for setting in settings:
        names.pop(setting.lstrip("+~").partition("=")[0], None)
    return names


def _setting_problems(
    algorithm: Algorithm, arguments: argparse.Namespace, settings: list[str], names: Mapping[str, str]
) -> list[Problem]:
    from areno.files.paths import absolute_or_none
    from areno.launch.command import mention_recipes
    from areno.launch.compose import load

    config_dir = absolute_or_none(arguments.config_dir)
    try:
        with keys_renamed(names.get), mention_recipes(algorithm.name, arguments.config_name, config_dir):
            load(algorithm.config, arguments.config_name, settings, config_dir, sources=True)
    except ConfigError as error:
        return error.problems
    return []


def _task_names(**_: Any) -> list[str]:
    from areno.launch import yaml_files

    return [*yaml_files.task_files(), *yaml_files.experiment_files()]


def _setting_keys(parsed_args: argparse.Namespace, **_: Any) -> Iterator[str]:
    algorithm = parsed_args.algo if parsed_args.algo in algorithm_names() else _DEFAULT
    return (f"{row.key}=" for row in setting_rows(get_algorithm(algorithm).config) if not row.setting.section)
