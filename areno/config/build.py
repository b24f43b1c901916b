"""Plain dictionaries to configuration dataclasses and back; everything that is wrong is reported at once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from areno.config.fields import Section, View, settings
from areno.config.values import Mismatch, show
from areno.errors import ConfigError, Problem

T = TypeVar("T", bound=Section)

MISSING = "missing"  # what the message of a required key without a value begins with


def build(cls: type[T], data: Mapping[Any, Any], found: Iterable[Problem] = ()) -> T:
    """The configuration that `data` (nested mappings, lists and scalars) describes; absent keys take their defaults.

    `found` are problems that the caller met already. Raises one ConfigError that lists every problem: unknown,
    missing and mistyped keys, values out of bounds and rules between fields, each with its full dotted key.
    """
    problems = list(found)
    view = _examine(cls, data, "", problems, list(keys(cls)))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return view.build()


def to_dict(config: Section) -> dict[str, Any]:
    """The plain nested dictionary that `build` turns into an equal configuration."""
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def keys(cls: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a section, sections before what they hold."""
    for name, setting in settings(cls).items():
        yield prefix + name
        if setting.section:
            yield from keys(setting.section, f"{prefix}{name}.")


def twin(cls: type[Section], missing: str = "???") -> dict[str, Any]:
    """The section as a plain dictionary of its defaults; what is required and has none is `missing`."""
    values: dict[str, Any] = {}
    for name, setting in settings(cls).items():
        if setting.required:
            values[name] = twin(setting.section, missing) if setting.section else missing
        else:
            default = setting.default()
            values[name] = to_dict(default) if isinstance(default, Section) else default
    return values


def complete(cls: type[Section], data: Mapping[Any, Any], missing: str = "???") -> dict[Any, Any]:
    """`data` in the order of the fields, with the defaults that it leaves out; keys that do not belong come last."""
    values: dict[Any, Any] = {}
    blank = twin(cls, missing)
    for name, setting in settings(cls).items():
        value = data.get(name, blank[name])
        if setting.section and isinstance(value, Mapping):
            value = complete(setting.section, value, missing)
        values[name] = value
    return values | {key: value for key, value in data.items() if key not in values}


def _examine(
    cls: type[Section], data: Mapping[Any, Any], prefix: str, problems: list[Problem], all_keys: list[str]
) -> View:
    """Check one section and those in it; what is wrong goes to `problems`, what is right into the view."""
    known: dict[str, Any] = {}
    fields = settings(cls)
    for key in data:
        if key not in fields:
            problems.append(Problem(f"{prefix}{key}", f"unknown key{_suggest(str(key), prefix, fields, all_keys)}"))
    for name, setting in fields.items():
        key = prefix + name
        if setting.required and setting.optional and name in data and data[name] is None:
            problems.append(Problem(key, f"{MISSING} ({setting.help})"))
        elif name in data and not (setting.section and isinstance(data[name], Mapping)):
            try:
                known[name] = setting.convert(data[name])
            except Mismatch as mismatch:
                expected = (
                    f"is {show(data[name])}; a section is expected, with keys {', '.join(_names(setting.section))}"
                )
                problems.append(Problem(key, expected if setting.section else str(mismatch)))
        elif setting.section and (name in data or setting.required):
            # A required section that is absent is looked into all the same: its required keys are what is missing.
            known[name] = _examine(setting.section, data.get(name, {}), f"{key}.", problems, all_keys)
        elif setting.required:
            problems.append(Problem(key, f"{MISSING} ({setting.help})"))
        else:
            known[name] = setting.default()
    view = View(cls, known)
    problems += [problem.under(prefix[:-1]) if prefix else problem for problem in view.problems(files=True)]
    return view


def _names(cls: type[Section] | None) -> list[str]:
    return list(settings(cls)) if cls else []


def _suggest(key: str, prefix: str, siblings: Iterable[str], all_keys: list[str]) -> str:
    """Near names in the same section first, else the same or a near name in another."""
    close = [prefix + name for name in difflib.get_close_matches(key, list(siblings), n=2, cutoff=0.6)]
    if not close:
        leaves = {full.rsplit(".", 1)[-1] for full in all_keys}
        names = [key] if key in leaves else difflib.get_close_matches(key, sorted(leaves), n=1, cutoff=0.75)
        close = [full for full in all_keys if full.rsplit(".", 1)[-1] in names]
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""
