"""Sections of the configuration, their settings and the checks between settings.

A section is a dataclass below `Section`. `setting(...)` declares one of its fields, with help text, bounds and the
settings that it needs (`Needs`). `check` marks a method as a rule between fields. `settings(cls)` returns the
declarations of a section, and `rows(cls)` those of nested sections too.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from areno.errors import ConfigError, Key, Problem
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
    only_with: Needs | tuple[Needs, ...] = (),
    renamed_from: str | tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    flag: str = "",
    flags: Mapping[str, str] | None = None,
) -> Any:
    """Declare one setting of a section. Without `default` and `factory` the setting is required.

    Args:
        default: The value of the setting where none is given.
        help: What the setting does, for `--help` and the reference page.
        factory: Makes the default, for values that can be changed, such as lists and sections.
        ge: The least number that is allowed. A null is not compared, here and in the other bounds.
        gt: The number that the value must be above.
        le: The greatest number that is allowed.
        lt: The number that the value must be below.
        required_in_build: Whether `build` requires a value although the dataclass does not. A run that is described by
            files must name its data; a script may pass the rows themselves.
        only_with: States of other settings without which this one has no effect. `unused` reports a value that is set
            and has no effect. Where the setting is a section, `only_with` applies to each setting in the section.
        renamed_from: Earlier names of the setting, which are still read: a name in the same section, or a dotted key of
            the whole configuration for a setting that has moved.
        aliases: Other words for the choices of a `Literal`, and the choice that each word stands for.
        flag: The name of the setting in `areno train`. "--name" takes a value. For a bool it is a switch, and a true
            default adds --no-name. "--name=value" is a switch that sets this value.
        flags: Flags of the settings inside a section by their names. They replace the flags that these declare.

    Returns:
        A dataclass field.
    """
    bounds = {name: bound for name, bound in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items() if bound is not None}
    names: dict[str, Any] = {"aliases": aliases or {}, "flag": flag, "flags": flags}
    needs = (only_with,) if isinstance(only_with, Needs) else only_with
    names["renamed_from"] = (renamed_from,) if isinstance(renamed_from, str) else renamed_from
    metadata = {"help": help, "required_in_build": required_in_build, "bounds": bounds, "only_with": needs, **names}
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


class Needs:
    """A state of another setting that a setting needs to have an effect. It is given to `setting(only_with=...)`.

    Attributes:
        key: The other setting: its name in the same section, a name in a section beside it ("rollout.n"), or a name in
            a section around it ("actor.use_lora").
        values: Values of the other setting that give an effect. Empty: any value except null, false, 0 and empty ones.
        so: The end of a sentence that begins with ", so", such as "nothing is uploaded". It tells why there is no
            effect. Empty: the message gives no reason.
        do: What to do instead of "set <key>", such as "set valid_dataset.path". Empty: derived from `values`.
        in_build: Whether only `build` reports the setting, and the dataclass accepts it. For states that a script may
            reach with settings of its own.
    """

    def __init__(self, key: str, *values: Any, so: str = "", do: str = "", in_build: bool = False):
        self.key, self.values, self.so, self.do, self.in_build = key, values, so, do, in_build

    def met_by(self, value: Any) -> bool:
        """Return whether a value of the other setting gives an effect."""
        return value in self.values if self.values else bool(value)

    def problem(self, key: str, value: Any, other: Any) -> Problem:
        """Make the message about a setting without effect.

        Args:
            key: The setting.
            value: The value of the setting.
            other: The value of the setting that `self.key` names.

        Returns:
            A problem of the form "is 5, but <key> is null, so ...; set <key>, or leave this out".
        """
        values = self.values or ((True,) if isinstance(other, bool) else ())
        to = f" to {' or '.join(map(_plain, values))}" if values else ""
        so = f", so {self.so}" if self.so else ""
        args = [_plain(value), Key(self.key), _plain(other)]
        if self.do:
            return Unused(key, f"is {{}}, but {{}} is {{}}{so}; {self.do}, or leave this out", *args)
        return Unused(key, f"is {{}}, but {{}} is {{}}{so}; set {{}}{to}, or leave this out", *args, Key(self.key))


class Unused(Problem):
    """A setting that has no effect because of another setting, whose key is relative to the same section."""

    @property
    def other(self) -> str:
        """The key of the other setting."""
        return next(arg.name for arg in self.args if isinstance(arg, Key))

    def under(self, prefix: str) -> Problem:
        """Return the same problem, seen from the section that holds this one."""
        args = (Key(f"{prefix}.{arg.name}") if isinstance(arg, Key) else arg for arg in self.args)
        return type(self)(f"{prefix}.{self.key}", self.template, *args)


def _plain(value: Any) -> str:
    """Return a value as a message shows it: a section as `set`, text without quotes, 5.0 as 5."""
    value = int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
    return "set" if isinstance(value, Section) else value if isinstance(value, str) else show(value)


def as_in(section: type[Section], name: str, default: Any = REQUIRED, **bounds: float) -> Any:
    """Declare a setting with the help, bounds and flag of another section's setting.

    Args:
        section: The section that declares the setting.
        name: Name of the setting there.
        default: Another default. REQUIRED keeps the default of `section`.
        bounds: Bounds (ge, gt, le, lt) that replace bounds of the same names.
    """
    there = next(field for field in dataclasses.fields(section) if field.name == name)
    metadata = {**there.metadata, "bounds": {**there.metadata["bounds"], **bounds}}
    value = there.default if default is REQUIRED else default
    return dataclasses.field(default=value, metadata=metadata, kw_only=True)


class Missing(Problem):
    """A required value is not given."""


class check:
    """Marks a method of a Section as a rule between its fields. The method yields problems.

    The keys of the problems are relative to the section. A check that reads a wrong value is skipped as a whole, so a
    check contains one rule.
    """

    def __init__(self, rule: Callable[[Any], Iterable[Problem]]):
        self.rule = rule

    def __get__(self, section: Section | None, cls: type[Section]) -> Any:
        return self.rule.__get__(section, cls)


class build_check(check):
    """Marks a rule that only `build` applies, and not the dataclass that a script makes."""


def forbid(key: str, text: str) -> Callable[[Callable[[Any], bool]], check]:
    """Make a check of a method of a Section that returns whether the values are in a forbidden state.

    Args:
        key: The setting that the problem is about, relative to the section.
        text: The problem. `{self.name}` stands for the value of a field.

    Returns:
        A decorator.
    """

    def mark(is_forbidden: Callable[[Any], bool]) -> check:
        return check(lambda section: [Problem(key, text.format(self=section))] if is_forbidden(section) else [])

    return mark


@dataclass(frozen=True)
class Setting:
    """The declaration of one field of a section.

    Attributes:
        name: The name of the field.
        hint: Its type.
        help: Its help text.
        required: Whether `build` requires a value.
        default: Makes the default.
        bounds: The bounds of a number by the names of the arguments of `setting`, such as "gt".
        only_with: The states of other settings without which the setting has no effect.
        renamed_from: Earlier names of the setting.
        aliases: Other words for choices.
        section: The dataclass of the nested section that the field holds. None: the field holds a value.
        sections: The dataclass of named sections, for a field that maps names to sections.
        optional: Whether null is allowed.
        flag: The name of the setting in `areno train`.
        flags: Flags of the settings inside the section.
    """

    name: str
    hint: Any
    help: str
    required: bool
    default: Callable[[], Any]
    bounds: dict[str, float]
    only_with: tuple[Needs, ...]
    renamed_from: tuple[str, ...]
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
        """Return the default of the setting, or REQUIRED if a value must be given.

        Args:
            section: The default of the section around this setting, whose value may differ from the default of the
                field. None: the default of the field counts.
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
    """Return the declarations of the fields of a section, by name and in their order."""
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
            only_with=metadata["only_with"],
            renamed_from=metadata["renamed_from"],
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
    """One line about a setting, for help texts and the reference.

    Attributes:
        key: The dotted key.
        setting: The declaration.
        default: `required`, a YAML value, or empty for a section that exists by default.
        flag: The name of the setting in `areno train`. Empty: it has none.
    """

    key: str
    setting: Setting
    default: str
    flag: str


def rows(
    cls: type[Section], prefix: str = "", section: Section | None = None, flags: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Yield a row for every setting of a section and of nested sections, in the order of declaration.

    Args:
        cls: The dataclass of the section.
        prefix: The dotted key of the section with a dot at its end. Empty: the whole configuration.
        section: The default of the section, whose values are the defaults to show. None: the defaults of the fields.
        flags: Flags by the names of the settings, in place of those that the settings declare.
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
    """Yield dotted key and value of the settings that do not have their defaults.

    Args:
        section: The section, with nested sections.
        prefix: The dotted key of the section with a dot at its end. Empty: the whole configuration.
        default: The section to compare with. None: the defaults of the fields.
    """
    for name, field in settings(type(section)).items():
        value, usual = _value(section, name), field.default_in(default)
        if isinstance(value, Section):
            yield from changed(value, f"{prefix}{name}.", usual if isinstance(usual, Section) else None)
        elif value != usual:
            yield prefix + name, value


@dataclass
class Section:
    """Base of every configuration dataclass. Its values are checked when it is made, whoever makes it."""

    def __post_init__(self) -> None:
        vars(self).update(self.canonical(vars(self)))
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

    @classmethod
    def of(cls: type[T], record: Any, **more: Any) -> T:
        """Make the section from a record that has some of its settings under the same names.

        Args:
            record: A dataclass or a namespace, such as parsed arguments. It may have other fields.
            more: Settings that the record does not have, or has with another meaning.

        Returns:
            The section, with defaults for all other settings.

        Raises:
            ConfigError: A value is wrong.
        """
        return cls(**{**{name: value for name, value in vars(record).items() if name in settings(cls)}, **more})

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace settings that are another name of a choice by the choice.

        A subclass with such settings overrides this method. It is applied wherever values enter: to arguments, to files
        and to the settings of earlier runs.

        Args:
            values: A value for each setting of the section, not checked.

        Returns:
            The values, of which those that contradict each other are not changed.
        """
        return dict(values)

    def is_default(self, name: str) -> bool:
        """Return whether the setting `name` has the default of its field."""
        return _value(self, name) == settings(type(self))[name].default()


class _UnknownValue(Exception):
    """A check read a value that is missing or wrong."""


def _value(section: Section, name: str) -> Any:
    """Return the value of a setting. Raises _UnknownValue in a partial section that does not have the value."""
    if name not in vars(section):
        raise _UnknownValue(name)
    return vars(section)[name]


def _unknown(section: Section) -> Any:
    raise _UnknownValue


def partial_section(cls: type[T], known: dict[str, Any]) -> T:
    """Make a section of the values that are right, while others are missing or wrong.

    The dataclass itself cannot be made then. Checks of the partial section report what they find, and a check that
    reads an unknown value is skipped.

    Args:
        cls: The dataclass of the section.
        known: Values by the names of the settings. They are not checked.
    """
    unknown = {name: property(_unknown) for name in settings(cls) if name not in known}
    section: Any = object.__new__(type(cls.__name__, (cls,), unknown) if unknown else cls)
    vars(section).update(known)
    return section


def problems_between(section: Section, in_build: bool = False) -> list[Problem]:
    """Run the checks of a section. Those of nested sections are not run.

    Args:
        section: The section, which may be a partial one.
        in_build: Whether rules that only `build` applies count too.

    Returns:
        The problems, with keys relative to the section.
    """
    found, attributes = [], {}
    # Checks of a base come first, and one that is overridden keeps its place.
    for base in reversed(type(section).__mro__):
        attributes.update(vars(base))
    for attribute in attributes.values():
        if isinstance(attribute, check) and (in_build or not isinstance(attribute, build_check)):
            with suppress(_UnknownValue):
                found += list(attribute.rule(section))
    return found + unused(section, in_build)


def unused(section: Section, in_build: bool = False) -> list[Problem]:
    """Report the settings that have no effect because of another setting, as their `only_with` declares.

    A setting with its default value is never reported.

    Args:
        section: The section, which may be a partial one (`partial_section`).
        in_build: Whether needs that only `build` reports count too.

    Returns:
        A problem for each setting whose need can be judged in this section. Its key is relative to the section.
    """
    found = []
    for key, field, need in _needs_of(type(section)):
        if need.in_build and not in_build:
            continue
        with suppress(_UnknownValue):
            if not need.met_by(other := _value_at(section, need.key)):
                found += [need.problem(name, value, other) for name, value in _given(section, key, field, need.key)]
    return found


def dependents(cls: type[Section], name: str) -> list[str]:
    """Return the settings of a section that have no effect while the setting `name` in it is null."""
    return [key for key, _, need in _needs_of(cls) if need.key == name and key in settings(cls) and not need.values]


@cache
def _needs_of(cls: type[Section]) -> list[tuple[str, Setting, Needs]]:
    """Return dotted key, setting and need of all settings whose need names a setting of this section."""
    found = []

    def visit(inner: type[Section], prefix: str, nearer: frozenset[str]) -> None:
        for name, field in settings(inner).items():
            for need in field.only_with:
                first = need.key.partition(".")[0]
                if first in settings(cls) and first not in nearer:
                    found.append((prefix + name, field, need))
            if field.section is not None:
                visit(field.section, f"{prefix}{name}.", nearer | settings(field.section).keys())

    visit(cls, "", frozenset())
    return found


def _value_at(section: Any, key: str) -> Any:
    """Return the value at a dotted key. Raises _UnknownValue where a section on the way is null."""
    for name in key.split("."):
        if section is None:
            raise _UnknownValue(key)
        section = _value(section, name)
    return section


def _given(section: Section, key: str, field: Setting, besides: str) -> Iterator[tuple[str, Any]]:
    """Return key and value of a setting that is not at its default, or of those inside it but for `besides`."""
    value, default = _value_at(section, key), field.default()
    if isinstance(value, Section) and isinstance(default, Section):
        yield from (pair for pair in changed(value, f"{key}.", default) if pair[0] != besides)
    elif value != default:
        yield key, value
