"""Adapters for Hydra: its search path, its override grammar, its errors and its results.

`quoted` adapts overrides to Hydra's grammar, and `describe_error` describes errors of Hydra in one line. `SearchPath`
adds the folders of YAML files, and `checked_files` checks each file before Hydra reads it. `resolved_items` converts a
composed configuration to plain values, after `check_references` has checked that its interpolations expand to a bounded
number of values.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.errors import MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from areno.errors import ConfigError, Problem, did_you_mean
from areno.files.durable import delay_interrupts
from areno.files.paths import data_root, read_first_bytes
from areno.files.small_yaml import MAX_BYTES, YamlFault, checked_text
from areno.launch import yaml_files
from areno.schema.build import Consequence, with_current_names
from areno.schema.fields import Section
from areno.schema.values import flatten_settings, format_value

_WORD = re.compile(r"(\$\{[^}]*\}|[^][{}(),=\\])+")  # text between the special characters of Hydra's grammar
_REFERENCE = re.compile(r"\$\{([^${}:]*)\}")
_HYDRA_WORD = re.compile(r"(\$\{[^}]*\}|[\w/+.$%*@?|:\s-])*", re.ASCII)


def quoted(override: str) -> str:
    """Put quotes around the words of an override that Hydra's grammar cannot read, such as words with an ä."""
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"cannot read {override!r}; it is not UTF-8") from None
    key, equals, value = override.partition("=")
    if "'" in value or '"' in value:
        return override

    def quote(found: re.Match[str]) -> str:
        word = found[0].strip()
        return found[0] if _HYDRA_WORD.fullmatch(word) else found[0].replace(word, f'"{word}"')

    return key + equals + _WORD.sub(quote, value)


def references(text: str) -> list[str]:
    """Return the keys in the references ${key} of a text. Of nested references, only the innermost are returned."""
    return _REFERENCE.findall(text)


def describe_error(error: BaseException) -> str:
    """Describe an error of Hydra, OmegaConf or the YAML reader in one line."""
    if isinstance(error, RecursionError):
        in_defaults = any(frame.name == "_create_defaults_tree" for frame in traceback.extract_tb(error.__traceback__))
        return "its defaults lead back to the file itself" if in_defaults else "a value is nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}, line {mark.line + 1}: {error.problem or error.context}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MissingConfigException):
        options = sorted(error.options or ())
        choices = f"; there are {', '.join(options)}" if options else ""
        folder, _, name = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        close = (
            did_you_mean(name, options)
            if options
            else did_you_mean(folder, yaml_files.config_groups(SearchPath.config_dir))
        )
        return f"{lines[0].rstrip('.')}{choices}{close}"
    if not lines and error.__cause__ is not None:
        return describe_error(error.__cause__)
    if len(lines) > 1 and lines[0].endswith(":"):  # "In 'task': ValidationError raised while composing config:"
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__


class SearchPath(SearchPathPlugin):
    """A Hydra plugin that sets the search path of YAML files: the user's --config-dir, then conf/, then recipes/."""

    config_dir: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.config_dir:
            search_path.prepend("--config-dir", f"file://{self.config_dir}", anchor="main")
        search_path.append("recipes", f"file://{data_root() / 'recipes'}")


@contextmanager
def checked_files(cls: type[Section], name: str, problems: list[Problem], keys: dict[Path, set[str]]) -> Iterator[None]:
    """Check each YAML file before Hydra reads it, and give renamed settings in it their current names.

    A task file without a defaults list gets the list [recipe, _self_]. `keys` receives the dotted keys of each file.

    Hydra has no hook for this, so the class that reads files is replaced in Hydra's registry during the `with` block.
    """
    types = SourcesRegistry.instance().types
    hydras: Any = types["file"]

    class CheckedFiles(hydras):
        def load_config(self, config_path: str) -> Any:
            path = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
            try:
                checked_text(read_first_bytes(path, MAX_BYTES + 1))
            except YamlFault as error:
                raise ConfigError("{}: {}", path, error) from error
            # OmegaConf replaces any exception by one of its own, so the interrupt of a signal would be lost.
            with delay_interrupts():
                found = super().load_config(config_path)
            section = found.config.get("hydra", {}) if isinstance(found.config, DictConfig) else {}
            if not isinstance(section, (dict, DictConfig)):  # Hydra assumes that it is a section
                raise ConfigError("{}: hydra: is {}; a section is expected", path, format_value(section))
            if isinstance(found.config, DictConfig):
                if self._normalize_file_name(config_path) == f"{name}.yaml" and "defaults" not in found.config:
                    own: Any = OmegaConf.to_container(found.config)
                    found.config = OmegaConf.create({"defaults": ["recipe", "_self_"], **own})
                package = found.header.get("package") or os.path.dirname(config_path).replace("/", ".")
                place = "" if package == "_global_" else package
                found.config = renamed_keys(cls, found.config, place, problems)
                values: Any = OmegaConf.to_container(found.config)
                keys[path] = set(flatten_settings(values, f"{place}." if place else ""))
            return found

    types["file"] = CheckedFiles
    try:
        yield
    finally:
        types["file"] = hydras


def renamed_keys(cls: type[Section], config: DictConfig, section: str, problems: list[Problem]) -> DictConfig:
    """Return the settings of a file under their current names. Without renamed settings, this is `config` itself.

    `section` is the dotted key of the section that the file fills. `problems` receives settings given under both names.
    """
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    renamed = with_current_names(cls, values, problems, section)
    return config if renamed is values else OmegaConf.create(dict(renamed))


_MAX_VALUES = 30_000


def resolved_items(node: DictConfig, prefix: str, problems: list[Problem]) -> Iterator[tuple[Any, Any]]:
    """Yield (key, value) for each key of a configuration or section, with interpolations resolved.

    Missing values, interpolations that fail, and Hydra's own section are left out. `prefix` ends with a dot.
    """
    for key in node:
        full = f"{prefix}{key}"
        if full == "hydra" or OmegaConf.is_missing(node, key):
            continue
        try:
            value = node[key]
            if isinstance(value, DictConfig):
                value = dict(resolved_items(value, f"{full}.", problems))
            elif isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            kind = Consequence if isinstance(error, InterpolationToMissingValueError) else Problem
            problems.append(kind(full, describe_error(error)))
            continue
        yield key, value


def check_references(raw: Mapping[Any, Any]) -> None:
    """Raise ConfigError if the interpolations of a configuration expand to too many values."""
    known: dict[tuple[str, ...], int] = {}

    def expanded_size(path: tuple[str, ...]) -> int:
        """Return the number of values that the value at `path` expands to."""
        if path not in known:
            known[path] = 1  # for a circle, which OmegaConf finds itself
            value = functools.reduce(_value_at_name, path, raw)
            if isinstance(value, (dict, list)):
                inner = value if isinstance(value, dict) else map(str, range(len(value)))
                known[path] += sum(expanded_size((*path, str(name))) for name in inner)
            elif isinstance(value, str):
                known[path] += sum(expanded_size(_reference_target(path, key.strip())) for key in references(value))
        return known[path]

    try:
        if expanded_size(()) <= _MAX_VALUES:
            return
    except RecursionError:
        pass
    raise ConfigError(f"interpolations (${{...}}) expand to more than {_MAX_VALUES:,} values")


def _reference_target(path: tuple[str, ...], key: str) -> tuple[str, ...]:
    """Return the path that a reference ${key} at `path` points to. Leading dots make a key relative."""
    names = key.lstrip(".")
    n_dots = len(key) - len(names)
    start = path[: max(0, len(path) - n_dots)] if n_dots else ()
    return (*start, *(name for name in names.replace("[", ".").replace("]", "").split(".") if name))


def _value_at_name(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return next((inner for key, inner in value.items() if str(key) == name), None)
    return value[int(name)] if isinstance(value, list) and name.isdecimal() and int(name) < len(value) else None


def delete_key(data: dict[Any, Any], key: str) -> bool:
    """Remove a dotted key from nested dictionaries, and return whether it existed."""
    section, _, inner = key.partition(".")
    if inner:
        return isinstance(data.get(section), dict) and delete_key(data[section], inner)
    return data.pop(key, delete_key) is not delete_key
