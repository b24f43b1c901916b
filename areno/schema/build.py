"""Build configuration dataclasses from plain dictionaries.

`build` reports all problems at once. `with_defaults` fills a dictionary with the defaults of a dataclass.
`with_current_names` replaces earlier names of renamed settings (`setting(renamed_from=...)`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from areno.errors import ConfigError, Key, Problem, suggestion
from areno.schema.fields import (
    REQUIRED,
    MissingSetting,
    Section,
    UnusedSetting,
    partial_section,
    section_problems,
    setting_rows,
    settings,
)
from areno.schema.values import InvalidValue, flatten_settings, format_value, value_at

logger = logging.getLogger("areno.schema")

T = TypeVar("T", bound=Section)


def build(
    cls: type[T],
    data: Mapping[Any, Any],
    found: Iterable[Problem] = (),
    hint: Callable[[str], str] = lambda key: "",
    sources: bool = True,
) -> T:
    """Build a configuration from nested mappings, lists and scalars. Absent keys take their defaults.

    Args:
        data: Nested values by the names of the settings. Earlier names of renamed settings are accepted.
        found: Problems that the caller has already found. Their keys are not checked again.
        hint: Called with an unknown `key` or a refused `key=value`. Returns a text to append to the message about it.
        sources: Whether the settings must name rows and a reward. False: a script may pass them to a trainer.

    Raises:
        ConfigError: At least one key is unknown or missing, has a wrong type or value, or violates a check between
            fields. The error lists all problems with their full dotted keys.
    """
    problems = list(found)
    data = with_current_names(cls, data, problems)

    def explain(key: str, prefix: str, siblings: Iterable[str]) -> str:
        known = hint(prefix + key)
        return known if known or "=" in key else _suggest(key, prefix, siblings, [row.key for row in setting_rows(cls)])

    config = _build_section(cls, with_defaults(cls, data, required=REQUIRED), "", problems, explain, sources)
    if problems:
        keys = {problem.key for problem in problems}
        # If the other setting of an Unused problem is wrong itself, correcting it may give this setting an effect.
        causes = [
            problem for problem in problems if not isinstance(problem, UnusedSetting) or problem.other_key not in keys
        ]
        causes = [problem for problem in causes if not isinstance(problem, Consequence)]
        raise ConfigError(dict.fromkeys(causes or problems))
    return config


class Consequence(Problem):
    """A problem that is caused by another problem. `build` reports it only if there is no problem of another kind."""


@cache
def earlier_names(cls: type[Section]) -> dict[str, str]:
    """Return {earlier key: current key} for each renamed setting, relative to the section.

    A `*` in a key stands for the name of a named section, as in "sets.*.max_rows". Renamed sections come before the
    settings in them.
    """
    found: dict[str, str] = {}
    for row in setting_rows(cls):
        section, dot, _ = row.key.rpartition(".")
        for name in row.setting.renamed_from:
            found[name if "." in name else f"{section}{dot}{name}"] = row.key
        if row.setting.sections:
            inside = earlier_names(row.setting.sections)
            found |= {f"{row.key}.*.{old}": f"{row.key}.*.{new}" for old, new in inside.items()}
    return found


def with_current_names(
    cls: type[Section], data: Mapping[Any, Any], problems: list[Problem] | None = None, section: str = ""
) -> Mapping[Any, Any]:
    """Return `data` with earlier names of settings replaced by current ones. Logs each replaced name once.

    `data` holds the section at the dotted key `section` of the configuration `cls`. If there are no earlier names,
    `data` itself is returned. Settings that have both names are added to `problems`. Without it, the value under the
    current name is used.
    """
    start = f"{section}." if section else ""
    for old, new in earlier_names(cls).items():
        if not (old.startswith(start) and new.startswith(start)):
            continue
        for names in _matching_paths(data, old.removeprefix(start).split(".")):
            data = copy.deepcopy(data)
            # A `*` of the new key stands for the same name as in the old one.
            stars = [name for name, part in zip(names, old.removeprefix(start).split("."), strict=True) if part == "*"]
            target = [stars.pop(0) if part == "*" else part for part in new.removeprefix(start).split(".")]
            value = _pop_at(data, names)
            old_key, new_key = start + ".".join(names), start + ".".join(target)
            _warn_of_name(old_key, new_key)
            place = _section_at(data, target[:-1])
            if target[-1] not in place:
                place[target[-1]] = value
            elif problems is not None:
                problems.append(both_names_problem(old_key, new_key))
    return data


def current_key(cls: type[Section], key: str) -> str:
    """Return the current name of the setting `key`. Logs a warning if `key` is an earlier name."""
    nested: Any = None
    for name in reversed(key.split(".")):
        nested = {name: nested}
    [current] = flatten_settings(with_current_names(cls, nested))
    return current


def both_names_problem(old: str, new: str) -> Problem:
    """Return the problem that a setting is set under both its earlier and its current name."""
    return Problem(old, "is the earlier name of {}, and both are given; leave {} out", Key(new), Key(old))


@cache
def _warn_of_name(old: str, new: str) -> None:
    logger.warning("%s is now called %s; the earlier name is still read", old, new)


def _matching_paths(data: Any, parts: list[str]) -> list[list[str]]:
    """Return the paths in nested mappings that match a dotted key, split into `parts`. `*` matches any name."""
    if not parts:
        return [[]]
    if not isinstance(data, Mapping):
        return []
    names = list(data) if parts[0] == "*" else [parts[0]] if parts[0] in data else []
    return [[name, *rest] for name in names for rest in _matching_paths(data[name], parts[1:])]


def _pop_at(data: Any, names: list[str]) -> Any:
    name, *inner = names
    if not inner:
        return data.pop(name)
    value = _pop_at(data[name], inner)
    if not data[name]:
        del data[name]
    return value


def _section_at(data: Any, names: list[str]) -> Any:
    """Return the section at the path `names` in `data`. Sections that do not exist are added."""
    for name in names:
        if not isinstance(data.get(name), dict):
            data[name] = {}
        data = data[name]
    return data


def with_defaults(
    cls: type[Section], data: Mapping[Any, Any], section: Section | None = None, required: Any = "???"
) -> dict[Any, Any]:
    """Return `data` with defaults for settings that it leaves out, in the order of the fields. Unknown keys come last.

    If a named section (Setting.sections) leaves out a setting, it gets the value of its enclosing section. If `section`
    is given, its values are the defaults. A required setting that `data` leaves out gets the value `required`.
    """
    values: dict[Any, Any] = {}
    for name, setting in settings(cls).items():
        default = setting.default_in(section)
        # A section that is left out is filled too, so that messages name its missing keys.
        value = data.get(name, {} if setting.section and default is not None else default)
        if setting.section and isinstance(value, Mapping):
            inner = default if isinstance(default, Section) else None
            value = with_defaults(setting.section, value, inner, required)
        if setting.sections and isinstance(value, Mapping):
            around = {key: values[key] for key in settings(setting.sections) if key in values}
            value = {
                key: with_defaults(setting.sections, _fill_in(around, given)) if isinstance(given, Mapping) else given
                for key, given in value.items()
            }
        values[name] = required if value is REQUIRED else value
    return cls.canonical(values) | {key: value for key, value in data.items() if key not in values}


def _build_section(
    cls: type[T],
    data: Mapping[Any, Any],
    prefix: str,
    problems: list[Problem],
    explain: Callable[..., str],
    sources: bool,
) -> T:
    """Construct a section. If something is wrong, return a `partial_section` of its valid values.

    `explain` returns a text about an unknown key or a refused `key=value`. It is called with this key, `prefix`, and
    the names in the section.
    """
    known: dict[str, Any] = {}
    fields = settings(cls)
    reported = {problem.key for problem in problems}
    before = len(problems)
    for key in data:
        if key not in fields:
            problems.append(Problem(f"{prefix}{key}", f"unknown key{explain(str(key), prefix, fields)}"))
    for name, setting in fields.items():
        key, value = prefix + name, data[name]
        if key in reported:  # the caller has already found the value wrong
            continue
        if value is REQUIRED or (value is None and setting.required and setting.optional):
            problems.append(MissingSetting(key, f"missing ({setting.help})"))
        elif setting.section and isinstance(value, Mapping):
            known[name] = _build_section(setting.section, value, f"{key}.", problems, explain, sources)
        elif setting.sections and isinstance(value, Mapping):
            named = {}
            for inner, given in value.items():
                if isinstance(given, Mapping):
                    named[inner] = _build_section(
                        setting.sections, given, f"{key}.{inner}.", problems, explain, sources
                    )
                else:
                    problems.append(Problem(f"{key}.{inner}", _section_expected_text(given, setting.sections)))
            if len(named) == len(value):
                known[name] = named
        else:
            try:
                known[name] = setting.convert(value)
            except InvalidValue as error:
                text = f"{error}{explain(f'{name}={value}', prefix, ())}"
                problems.append(
                    Problem(key, _section_expected_text(value, setting.section) if setting.section else text)
                )
    section = partial_section(cls, known)
    found = section_problems(section, in_build=True, sources=sources)
    problems += [problem.under(prefix[:-1]) if prefix else problem for problem in found]
    for name in (name for name, setting in fields.items() if setting.sections and isinstance(data[name], Mapping)):
        _drop_repeated(problems, prefix, name, data)
    return section if len(problems) > before or len(known) < len(fields) else cls(**known)


def _drop_repeated(problems: list[Problem], prefix: str, name: str, data: Mapping[Any, Any]) -> None:
    """Remove problems of named sections that only repeat problems of the enclosing section.

    `data` is the enclosing section, at `prefix`. Its setting `name` holds the named sections, which inherit values. A
    problem of a named section is a repetition if the enclosing section has the same value and also a problem with it.
    """
    reported = {problem.key for problem in problems}
    for inner, given in data[name].items():
        start = f"{prefix}{name}.{inner}."
        for problem in [problem for problem in problems if problem.key.startswith(start)]:
            key = problem.key.removeprefix(start)
            if prefix + key in reported and value_at(given, key) == value_at(data, key):
                problems.remove(problem)


def _fill_in(around: Mapping[Any, Any], given: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `given`, with the values that it leaves out taken from `around`. Nested sections are merged."""
    inside = {
        name: _fill_in(value, given[name])
        for name, value in around.items()
        if isinstance(value, Mapping) and isinstance(given.get(name), Mapping)
    }
    return {**around, **given, **inside}


def _section_expected_text(value: Any, cls: type[Section]) -> str:
    return f"is {format_value(value)}; a section is expected, with keys {', '.join(settings(cls))}"


def _suggest(key: str, prefix: str, siblings: Iterable[str], all_keys: list[str]) -> str:
    """Return a "did you mean" text with similar names, of the same section if possible. "" if no name is similar."""
    import difflib

    close = [prefix + name for name in difflib.get_close_matches(key, list(siblings), n=2)]
    if not close:
        leaves = {full.rsplit(".", 1)[-1] for full in all_keys}
        names = [key] if key in leaves else difflib.get_close_matches(key, sorted(leaves), n=1, cutoff=0.75)
        close = [full for full in all_keys if full.rsplit(".", 1)[-1] in names]
    return suggestion(close[:3])
