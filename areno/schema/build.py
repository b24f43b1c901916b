"""Turns plain dictionaries into configuration dataclasses. It reports all problems at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from areno.errors import ConfigError, Problem, question
from areno.schema.fields import REQUIRED, Missing, Section, Unused, partial_section, problems_between, rows, settings
from areno.schema.values import InvalidValue, show, value_at

T = TypeVar("T", bound=Section)


def build(
    cls: type[T], data: Mapping[Any, Any], found: Iterable[Problem] = (), hint: Callable[[str], str] = lambda key: ""
) -> T:
    """Make a configuration of `data`: nested mappings, lists and scalars. Absent keys take their defaults.

    found: problems that the caller has found before; nothing more is said of their keys. hint: returns the end of the
    message about an unknown key, or about `key=value`, a value that is refused. Raises one ConfigError that lists every
    problem with its full dotted key: unknown, missing and mistyped keys, values out of bounds, and what the checks
    between fields find.
    """
    problems = list(found)

    def explain(key: str, prefix: str, siblings: Iterable[str]) -> str:
        known = hint(prefix + key)
        return known if known or "=" in key else _suggest(key, prefix, siblings, [row.key for row in rows(cls)])

    config = _examine(cls, with_defaults(cls, data, required=REQUIRED), "", problems, explain)
    if problems:
        keys = {problem.key for problem in problems}
        # A setting that needs one with a problem of its own may have an effect once that one is right.
        causes = [problem for problem in problems if not isinstance(problem, Unused) or problem.other not in keys]
        causes = [problem for problem in causes if not isinstance(problem, Consequence)]
        raise ConfigError(dict.fromkeys(causes or problems))
    return config


class Consequence(Problem):
    """A problem that goes away with another one. It is told only if there is no other."""


def with_defaults(
    cls: type[Section], data: Mapping[Any, Any], section: Section | None = None, required: Any = "???"
) -> dict[Any, Any]:
    """`data` in the order of the fields, with the defaults that it leaves out; keys that do not belong come last.

    A section that has a name (Setting.sections) takes what it leaves out from the section around it.

    section: the default of this section, where there is one. required: stands for a required value that is left out.
    """
    values: dict[Any, Any] = {}
    for name, setting in settings(cls).items():
        default = setting.default_in(section)
        # A section that is left out is filled all the same: its required keys are what is missing.
        value = data.get(name, {} if setting.section and default is not None else default)
        if setting.section and isinstance(value, Mapping):
            inner = default if isinstance(default, Section) else None
            value = with_defaults(setting.section, value, inner, required)
        if setting.sections and isinstance(value, Mapping):
            around = {key: values[key] for key in settings(setting.sections) if key in values}
            value = {
                key: with_defaults(setting.sections, _over(around, given)) if isinstance(given, Mapping) else given
                for key, given in value.items()
            }
        values[name] = required if value is REQUIRED else value
    return values | {key: value for key, value in data.items() if key not in values}


def _examine(
    cls: type[T], data: Mapping[Any, Any], prefix: str, problems: list[Problem], explain: Callable[..., str]
) -> T:
    """The section that `data` describes in full. What is wrong goes to `problems`, and the section is then partial.

    explain: (unknown key or refused key=value, its prefix, the keys beside it) -> the end of the message.
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
        if key in reported:  # its value is not known, so nothing else can be said of it
            continue
        if value is REQUIRED or (value is None and setting.required and setting.optional):
            problems.append(Missing(key, f"missing ({setting.help})"))
        elif setting.section and isinstance(value, Mapping):
            known[name] = _examine(setting.section, value, f"{key}.", problems, explain)
        elif setting.sections and isinstance(value, Mapping):
            known[name] = dict.fromkeys(value)
            for inner, given in value.items():
                if isinstance(given, Mapping):
                    known[name][inner] = _examine(setting.sections, given, f"{key}.{inner}.", problems, explain)
                else:
                    problems.append(Problem(f"{key}.{inner}", _expects(given, setting.sections)))
        else:
            try:
                known[name] = setting.convert(value)
            except InvalidValue as error:
                text = f"{error}{explain(f'{name}={value}', prefix, ())}"
                problems.append(Problem(key, _expects(value, setting.section) if setting.section else text))
    section = partial_section(cls, known)
    found = problems_between(section, in_build=True)
    problems += [problem.under(prefix[:-1]) if prefix else problem for problem in found]
    for name in (name for name, setting in fields.items() if setting.sections and isinstance(data[name], Mapping)):
        _drop_repeated(problems, prefix, name, data)
    return section if len(problems) > before or len(known) < len(fields) else cls(**known)


def _drop_repeated(problems: list[Problem], prefix: str, name: str, data: Mapping[Any, Any]) -> None:
    """Of a value that named sections have from the section around them, enough is said there. name: of their field."""
    reported = {problem.key for problem in problems}
    for inner, given in data[name].items():
        start = f"{prefix}{name}.{inner}."
        for problem in [problem for problem in problems if problem.key.startswith(start)]:
            key = problem.key.removeprefix(start)
            if prefix + key in reported and value_at(given, key) == value_at(data, key):
                problems.remove(problem)


def _over(around: Mapping[Any, Any], given: Mapping[Any, Any]) -> dict[Any, Any]:
    """`given`, with what it leaves out from `around`; so, too, in sections inside."""
    inside = {
        name: _over(value, given[name])
        for name, value in around.items()
        if isinstance(value, Mapping) and isinstance(given.get(name), Mapping)
    }
    return {**around, **given, **inside}


def _expects(value: Any, cls: type[Section]) -> str:
    return f"is {show(value)}; a section is expected, with keys {', '.join(settings(cls))}"


def _suggest(key: str, prefix: str, siblings: Iterable[str], all_keys: list[str]) -> str:
    """Names like `key` in the same section; if there are none, the same or a similar name in other sections."""
    close = [prefix + name for name in difflib.get_close_matches(key, list(siblings), n=2)]
    if not close:
        leaves = {full.rsplit(".", 1)[-1] for full in all_keys}
        names = [key] if key in leaves else difflib.get_close_matches(key, sorted(leaves), n=1, cutoff=0.75)
        close = [full for full in all_keys if full.rsplit(".", 1)[-1] in names]
    return question(close[:3])
