"""The text of `--help` of a recipe: usage, the YAML files that --config-name accepts, and every setting."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

from areno.launch import yaml_files
from areno.schema.fields import Section, SettingRow, setting_rows
from areno.schema.values import flatten_settings

_USAGE = """\
usage: {command} [--config-name NAME] [key=value ...]

{what}

  {command} --config-name={default}
  {command} --config-name={default} actor.optimizer.lr=2e-6 seed=2    change settings
  {command} --config-name={default} -m seed=1,2,3                     one run for each value
  {command} --resume outputs/{default}/NAME                           go on with a run

options:
  --config-name, -cn NAME   name of a task or experiment file (default: {default})
  --config-dir, -cd DIR     folder of your own YAML files, which is searched first
  --config FILE             task file, in place of --config-dir and --config-name
  --resume FOLDER           go on with the run in this folder, with its own settings and the changes that follow
  --from-step S             with --resume: go on after step S, in a new folder
  --multirun, -m            run every combination of the values that are given as a,b;
                            with hydra.launcher.n_jobs=4, four at a time
  --cfg, -c job             print the configuration and do not run (or: hydra, all; more: --resolve, --package NAME)
  --info, -i [TOPIC]        show how Hydra reads the command line: defaults, searchpath, config, plugins, all
  --version                 print the version
  --help, -h                print this text"""


def recipe_help(command: str, cls: type[Section], default: str, config_dir: Path | None = None) -> str:
    """Compose the help text of a recipe, whose `default` configuration runs without --config-name."""
    keys = {row.key for row in setting_rows(cls)}
    variants = {
        name: file
        for name, file in yaml_files.variant_files(config_dir).items()
        if keys.issuperset(_keys_of_file(file))
    }
    groups = {
        group: names for group, names in yaml_files.config_groups(config_dir).items() if group.replace("/", ".") in keys
    }
    parts = [
        _USAGE.format(command=command, what=(cls.__doc__ or "").strip(), default=default),
        file_list_text("tasks (conf/)", yaml_files.task_files(config_dir)),
        file_list_text("experiments (recipes/)", yaml_files.experiment_files()),
        file_list_text("variants (variant=name)", variants),
        two_column_text("groups (group=choice)", {group: ", ".join(names) for group, names in groups.items()}),
        *_setting_blocks(cls),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _keys_of_file(file: Path) -> Iterator[str]:
    """Yield the dotted keys that a YAML file sets. Yield nothing if the file cannot be read as YAML."""
    from areno.files.small_yaml import YamlFault, load_yaml

    with contextlib.suppress(YamlFault):
        values = load_yaml(file)
        yield from flatten_settings(values) if isinstance(values, dict) else ()


def _setting_blocks(cls: type[Section]) -> Iterator[str]:
    """Yield a block of text for the top-level settings, then a block for each section."""
    found = list(setting_rows(cls))
    top = [row for row in found if "." not in row.key]
    yield "settings\n" + "\n".join(_setting_line(row) for row in top if not row.setting.section)
    for section in (row for row in top if row.setting.section):
        optional = f" (default: {section.default})" if section.default else ""
        title = f"{section.key}: {section.setting.help}{optional}"
        inside = [row for row in found if row.key.startswith(f"{section.key}.") and not row.setting.section]
        yield title + "\n" + "\n".join(_setting_line(row) for row in inside)


def _setting_line(row: SettingRow) -> str:
    kind = f"{row.setting.type_text}; {row.default if row.default == 'required' else f'default {row.default}'}"
    body = textwrap.fill(f"{row.setting.help} [{kind}]", width=116, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {row.key}\n{body}"


def file_list_text(title: str, files: dict[str, Path]) -> str:
    """Return a title, and for each file a line with its name, the recipes that it is for and its first comment."""
    lines = {name: yaml_files.headline(file) for name, file in files.items()}
    for name, file in files.items():
        if recipes := yaml_files.recipes_of(file):
            lines[name] = f"[{', '.join(recipes)}] {lines[name]}"
    return two_column_text(title, lines)


def two_column_text(title: str, lines: dict[str, str]) -> str:
    """Return a title, and a line for each name with its description. Long descriptions are wrapped."""
    if not lines:
        return ""
    width = max(map(len, lines))
    how = {"width": 120, "subsequent_indent": " " * (width + 4), "break_on_hyphens": False}
    return "\n".join([title, *(textwrap.fill(f"  {name:<{width}}  {about}", **how) for name, about in lines.items())])
