"""Sections of the configuration, the settings they are made of and the checks between them.

A section is a dataclass below `Section`. `setting(...)` declares one of its fields, with help text and bounds; `check`
marks a method as a rule between fields. `settings(cls)` lists what is known about the fields, and `rows(cls)` also
lists those of the sections inside it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from areno.errors import ConfigError, Problem
from areno.schema.values import InvalidValue, convert, show, spelling

REQUIRED: Any = dataclasses.MISSING
"""The default of a setting that has none."""
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("more than", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("less than", operator.lt),
}
T = TypeVar("T", bound="Section")


def setting(
    default: Any = REQUIRED,
    *,
    help: str,
    factory: Any = REQUIRED,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    required_in_build: bool = False,
    aliases: Mapping[str, str] | None = None,
    flag: str = "",
    flags: Mapping[str, str] | None = None,
) -> Any:
    """Declare one setting. Without `default` and `factory` it is required.

    ge, gt, le, lt: bounds of a number; null is not compared. A `Literal` type declares choices.
    required_in_build: `build` requires a value, but the dataclass does not. A run that is described by files needs to
    name its data; a script may hand over the rows themselves.
    aliases: other words for choices, and the choice that each stands for.
    flag: how `areno train` calls it. "--name" takes a value; a bool is a switch, with a --no-name too where it is true
    by default. "--name=value" is a switch that sets this value.
    flags: of a section, the flags of the settings in it by their names, in place of the flags that these declare.
    """
    bounds = {name: bound for name, bound in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items() if bound is not None}
    names = {"aliases": aliases or {}, "flag": flag, "flags": flags}
    metadata = {"help": help, "required_in_build": required_in_build, "bounds": bounds, **names}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata, kw_only=True)


def with_sections(found: Mapping[str, tuple[type[Section], str]]) -> Callable[[type[T]], type[T]]:
    """Add a nested section for each part that declares its own settings. Stands below `@dataclass`.

    Args:
        found: The name of a section, with its dataclass and its help text.
    """

    def add(cls: type[T]) -> type[T]:
        for name, (section, text) in found.items():
            cls.__annotations__[name] = section
            setattr(cls, name, setting(factory=section, help=text))
        return cls

    return add


class Missing(Problem):
    """A required value is not given."""


class check:
    """Marks a method of a Section as a rule between its fields: it yields problems, with keys relative to the section.

    A check looks at one rule: a check that reads a wrong value is skipped, and whatever else it looks at with it.
    """

    def __init__(self, rule: Callable[[Any], Iterable[Problem]]):
        self.rule = rule

    def __get__(self, section: Section | None, cls: type[Section]) -> Any:
        return self.rule.__get__(section, cls)


class build_check(check):
    """Like check, but only `build` applies it and the dataclass does not: see `required_in_build` in setting."""


def forbid(key: str, text: str) -> Callable[[Callable[[Any], bool]], check]:
    """Mark a method of a Section that tells whether its values are in a forbidden state: a check with one problem.

    text: the problem, where `{self.name}` stands for the value of a field.
    """

    def mark(is_forbidden: Callable[[Any], bool]) -> check:
        return check(lambda section: [Problem(key, text.format(self=section))] if is_forbidden(section) else [])

    return mark


@dataclass(frozen=True)
class Setting:
    """What is known about one field. section: the dataclass that the field holds, where it is a nested section.

    sections: where it maps names to nested sections, the dataclass of these. It has fields of the section around it.
    """

    name: str
    hint: Any
    help: str
    required: bool
    default: Callable[[], Any]
    bounds: dict[str, float]
    aliases: Mapping[str, str]
    section: type[Section] | None
    sections: type[Section] | None
    optional: bool
    flag: str
    flags: Mapping[str, str] | None

    @property
    def type_text(self) -> str:
        """The type in words, bounds included: `int, more than 0, or null`."""
        return spelling(self.hint, ", ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in self.bounds.items()))

    def default_in(self, section: Section | None) -> Any:
        """The value where nothing is given; REQUIRED where one must be.

        section: the instance that the default of the section around this setting makes. Its value may differ from the
        default of the field. None: there is no such instance, so the field's own default counts.
        """
        value = self.default() if section is None else vars(section)[self.name]
        return REQUIRED if self.required and value is None else value

    def convert(self, value: Any) -> Any:
        """Return `value` in the field's type. Raises InvalidValue if it does not fit."""
        word = ("off", "on")[value] if isinstance(value, bool) else value  # YAML takes these words for false and true
        value = convert(self.aliases[word] if isinstance(word, str) and word in self.aliases else value, self.hint)
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            expected = "text without null characters" if value.strip() else "a text that is not empty"
            raise InvalidValue(f"is {show(value)}; {expected} is expected{', or null' if self.optional else ''}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for name, bound in self.bounds.items():
                words, holds = _BOUNDS[name]
                if not holds(value, bound):
                    raise InvalidValue(f"is {value!r}; it must be {words} {bound}")
        return value


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


@cache
def settings(cls: type[Section]) -> dict[str, Setting]:
    """The fields of a section in the order they are declared."""
    hints = get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        hint, metadata = hints[field.name], field.metadata
        factory: Any = field.default_factory
        arms = get_args(hint) or (hint,)
        found[field.name] = Setting(
            name=field.name,
            hint=hint,
            help=metadata["help"],
            required=metadata["required_in_build"] or field.default is factory is REQUIRED,
            default=(lambda field=field: field.default) if factory is REQUIRED else factory,
            bounds=metadata["bounds"],
            aliases=metadata["aliases"],
            section=next(filter(_is_section, arms), None),
            sections=next(filter(_is_section, (get_args(arm)[1] for arm in arms if get_origin(arm) is dict)), None),
            optional=type(None) in arms,
            flag=metadata["flag"],
            flags=metadata["flags"],
        )
    return found


@dataclass(frozen=True)
class Row:
    """One line about a setting. default: `required`, a YAML value, or empty for a section that is there by default.

    flag: see `setting`; "" where `areno train` has none for it.
    """

    key: str
    setting: Setting
    default: str
    flag: str


def rows(
    cls: type[Section], prefix: str = "", section: Section | None = None, flags: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Every setting of a section and of those inside it, in the order they are declared.

    section: the instance that is the section's default, where there is one; its values are the defaults to show.
    flags: those of the settings of this section, see `setting`.
    """
    for name, setting in settings(cls).items():
        default = setting.default_in(section)
        inner = default if isinstance(default, Section) else None
        there = setting.section is not None and default is not None
        text = "" if there else "required" if default is REQUIRED else show(default)
        flag = setting.flag if flags is None else flags.get(name, "")
        yield Row(prefix + name, setting, text, flag)
        if setting.section:
            of_section = setting.flags if flags is None else {}
            yield from rows(setting.section, f"{prefix}{name}.", inner, of_section)


def changed(section: Section, prefix: str = "", default: Section | None = None) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of the settings that do not have their defaults. default: see `rows`."""
    for name, field in settings(type(section)).items():
        value, usual = vars(section)[name], field.default_in(default)
        if isinstance(value, Section):
            yield from changed(value, f"{prefix}{name}.", usual if isinstance(usual, Section) else None)
        elif value != usual:
            yield prefix + name, value


@dataclass
class Section:
    """Base of every configuration dataclass. Its values are checked when it is made, whoever makes it."""

    def __post_init__(self) -> None:
        problems, known = [], {}
        for name, field in settings(type(self)).items():
            try:
                known[name] = field.convert(vars(self)[name])
            except InvalidValue as error:
                problems.append(Problem(name, str(error)))
        vars(self).update(known)
        problems += problems_between(partial_section(type(self), known))
        if problems:
            raise ConfigError(problems)

    def is_default(self, name: str) -> bool:
        """Whether the setting `name` has the default of its field."""
        if name not in vars(self):
            raise _UnknownValue(name)
        return vars(self)[name] == settings(type(self))[name].default()


class _UnknownValue(Exception):
    """A check read a value that is missing or wrong."""


def _unknown(section: Section) -> Any:
    raise _UnknownValue


def partial_section(cls: type[T], known: dict[str, Any]) -> T:
    """A `cls` with the values `known` and no others, whose values are not checked. To read another stops a check.

    It stands in for the dataclass, which cannot be made while one of its values is wrong, so that the checks that do
    not read that value still report.
    """
    unknown = {name: property(_unknown) for name in settings(cls) if name not in known}
    section: Any = object.__new__(type(cls.__name__, (cls,), unknown) if unknown else cls)
    vars(section).update(known)
    return section


def problems_between(section: Section, in_build: bool = False) -> list[Problem]:
    """What the checks of a section find. Nested sections have checks of their own, which are not run."""
    found, attributes = [], {}
    # Checks of a base come first, and one that is overridden keeps its place.
    for base in reversed(type(section).__mro__):
        attributes.update(vars(base))
    for attribute in attributes.values():
        if isinstance(attribute, check) and (in_build or not isinstance(attribute, build_check)):
            with suppress(_UnknownValue):
                found += list(attribute.rule(section))
    return found
