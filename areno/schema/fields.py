"""Sections of the configuration, their settings and the checks between settings.

A section is a dataclass that inherits from `Section`. `setting(...)` declares one of its fields, with help text, bounds
and the settings that it needs (`Needs`). `check` marks a method as a rule between fields. `settings(cls)` returns the
declarations of a section, and `rows(cls)` also those of nested sections.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from areno.errors import ConfigError, Key, Problem
from areno.schema.values import InvalidValue, convert, format_value, type_in_words

REQUIRED: Any = dataclasses.MISSING
"""The default of a setting that has no default, so that a value is required."""
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
    flag: str | Flag = "",
    flags: Mapping[str, str | Flag] | None = None,
    may_be_blank: bool = False,
    on_resume: OnResume | None = None,
    read_by_rollout: bool | None = None,
) -> Any:
    """Declare one setting of a section. Without `default` and `factory` the setting is required.

    Args:
        help: What the setting does, for `--help` and the reference page.
        factory: Makes the default, for mutable values such as lists and sections.
        ge: Lower bound: the value must be at least this. null passes all bounds.
        gt: Lower bound: the value must be more than this.
        le: Upper bound: the value must be at most this.
        lt: Upper bound: the value must be less than this.
        required_in_build: Whether `build` requires a value although the dataclass does not. For example, a run that is
            described by files must name its data, while a script may pass the rows themselves.
        only_with: States of other settings without which this setting has no effect. It is an error to change a setting
            that has no effect. If the setting is a section, `only_with` applies to each setting in the section.
        renamed_from: Earlier names of the setting, which are still accepted: a name in the same section, or a dotted
            key of the whole configuration if the setting has moved.
        aliases: Other words for the choices of a `Literal`: word -> choice.
        flag: The setting's flag in `areno train`: a `Flag`, or only a name.
        flags: Flags of the settings inside a section, by name. They replace the flags that these settings declare.
        may_be_blank: Whether a text may consist of white space alone, such as a line break.
        on_resume: Whether the setting may change when a run is resumed. None: what its section declares. Without such a
            section, the setting may change only if the user names the run by --resume.
        read_by_rollout: Whether the samples or the rewards of a step depend on the setting, so that a recorded step
            cannot be computed with another value. None: what its section declares, else False.
    """
    bounds = {name: bound for name, bound in {"ge": ge, "gt": gt, "le": le, "lt": lt}.items() if bound is not None}
    declared = {
        "help": help,
        "required": required_in_build or default is factory is REQUIRED,
        "bounds": bounds,
        "only_with": (only_with,) if isinstance(only_with, Needs) else only_with,
        "renamed_from": (renamed_from,) if isinstance(renamed_from, str) else renamed_from,
        "aliases": aliases or {},
        "flag": _flag(flag),
        "flags": flags,
        "may_be_blank": may_be_blank,
        "on_resume": on_resume,
        "read_by_rollout": read_by_rollout,
    }
    return dataclasses.field(default=default, default_factory=factory, metadata={"declared": declared}, kw_only=True)


class Flag(NamedTuple):
    """A flag of `areno train`, for `setting(flag=...)`.

    Attributes:
        name: Its name, with dashes, or "" for no flag. The flag of a bool takes no value and sets true. If the default
            of the bool is true, --no-name is added.
        value: If given, the flag takes no value and sets `value`.
        help: Help of the flag, where the help of the setting does not suit it. "": the help of the setting.
        heading: Heading of the flag in the help of `areno train`. "": that of the section (`Section.heading`).
    """

    name: str
    value: str = ""
    help: str = ""
    heading: str = ""


def _flag(flag: str | Flag) -> Flag:
    return Flag(flag) if isinstance(flag, str) else flag


class OnResume(NamedTuple):
    """Whether a setting may change when a run is resumed, for `setting(on_resume=...)`.

    Attributes:
        kind: "harmless": samples and updates stay the same (a learning rate may follow the new length of the run).
            "explicit": the run changes from this point on, so the user must name the run by --resume.
            "never": the saved state of the run would not fit.
        effect: What a change does to the run, in words.
        decides_order: Whether a change alters which samples are finished first. Then the kind is "explicit" for a run
            whose steps train on the first prompts to finish.
    """

    kind: Literal["harmless", "explicit", "never"]
    effect: str
    decides_order: bool = False


def with_sections(found: Mapping[str, tuple[type[Section], str]], chosen_by: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds nested sections: name -> (dataclass, help text). Use it below `@dataclass`.

    With `chosen_by`, a section has no flags, and has an effect only if the setting of this name has its name.
    """

    def add(cls: type[T]) -> type[T]:
        for name, (section, text) in found.items():
            cls.__annotations__[name] = section
            chosen = {"only_with": Needs(chosen_by, name), "flags": {}} if chosen_by else {}
            setattr(cls, name, setting(factory=section, help=text, **chosen))
        return cls

    return add


class Needs:
    """A state of another setting without which a setting has no effect, for `setting(only_with=...)`.

    Args:
        key: The other setting: its name in the same section, a name in a sibling section ("rollout.n"), or a name in an
            enclosing section ("actor.use_lora").
        *values: Values of the other setting with which the setting has an effect. Empty: any value except null, false,
            0 and empty values.
        so: Says in the message why there is no effect. It follows ", so", for example "nothing is uploaded".
        do: What to do instead of "set <key>", such as "set valid_dataset.path". Empty: derived from `values`.
        in_build: Whether only `build` reports an unused setting, while the dataclass accepts it. Use it for states that
            a script can reach without a configuration file.
        is_source: Whether a script may pass the other setting to a trainer, as in `source_check`.
    """

    def __init__(
        self, key: str, *values: Any, so: str = "", do: str = "", in_build: bool = False, is_source: bool = False
    ):
        self.key, self.values, self.so, self.do = key, values, so, do
        self.in_build, self.is_source = in_build or is_source, is_source

    def is_met_by(self, value: Any) -> bool:
        """Return whether the setting has an effect if the other setting has this value."""
        return value in self.values if self.values else bool(value)

    def problem(self, key: str, value: Any, other: Any) -> Problem:
        """Return the problem of a setting without effect: "is 5, but <key> is null, so ...; set <key>, or ..."."""
        values = self.values or ((True,) if isinstance(other, bool) else ())
        to = f" to {' or '.join(map(_plain_text, values))}" if values else ""
        so = f", so {self.so}" if self.so else ""
        args = [_plain_text(value), Key(self.key), _plain_text(other)]
        if self.do:
            return UnusedSetting(key, f"is {{}}, but {{}} is {{}}{so}; {self.do}, or leave this out", *args)
        return UnusedSetting(
            key, f"is {{}}, but {{}} is {{}}{so}; set {{}}{to}, or leave this out", *args, Key(self.key)
        )


class UnusedSetting(Problem):
    """The problem of a setting that has no effect because of another setting.

    Both keys, `key` and `other_key`, are relative to the same section.
    """

    @property
    def other_key(self) -> str:
        """Key of the other setting, which makes this setting have no effect."""
        return next(arg.name for arg in self.args if isinstance(arg, Key))

    def under(self, prefix: str) -> Problem:
        """Return a copy for the enclosing section: `prefix` is put before both keys, as in "n" -> "rollout.n"."""
        args = (Key(f"{prefix}.{arg.name}") if isinstance(arg, Key) else arg for arg in self.args)
        return type(self)(f"{prefix}.{self.key}", self.template, *args)


def _plain_text(value: Any) -> str:
    """Return a value in the form for messages: text without quotes, 5.0 as "5", a whole section as "set"."""
    value = int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
    return "set" if isinstance(value, Section) else value if isinstance(value, str) else format_value(value)


def setting_as_in(
    section: type[Section], name: str, default: Any = REQUIRED, on_resume: OnResume | None = None, **bounds: float
) -> Any:
    """Declare a copy of the setting `name` of `section`, with another default, bounds or on_resume if given."""
    there = next(field for field in dataclasses.fields(section) if field.name == name)
    declared = there.metadata["declared"]
    declared = {**declared, "bounds": {**declared["bounds"], **bounds}, "on_resume": on_resume or declared["on_resume"]}
    value = there.default if default is REQUIRED else default
    return dataclasses.field(default=value, metadata={**there.metadata, "declared": declared}, kw_only=True)


def with_settings_of(section: type[Section], *names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds settings of another section, before the own ones. Use it below `@dataclass`."""

    def add(cls: type[T]) -> type[T]:
        cls.__annotations__ = {name: settings(section)[name].hint for name in names} | cls.__annotations__
        for name in names:
            setattr(cls, name, setting_as_in(section, name))
        return cls

    return add


class MissingSetting(Problem):
    """The problem of a required setting that has no value."""


class check:
    """Marks a method of a Section as a rule between fields. The method yields a Problem for each violation.

    The keys of the problems are relative to the section. If a check reads a field whose value is wrong, the whole check
    is skipped, so each check should contain only one rule.
    """

    def __init__(self, rule: Callable[[Any], Iterable[Problem]]):
        self.rule = rule

    def __get__(self, section: Section | None, cls: type[Section]) -> Any:
        return self.rule.__get__(section, cls)


class build_check(check):
    """Marks a rule that only `build` applies. A section that a script constructs need not satisfy it."""


class source_check(build_check):
    """Marks a rule about rows or rewards, which a script may pass to a trainer in place of naming them."""


def require(key: str, text: str) -> Callable[[Callable[[Any], bool]], check]:
    """Return a decorator for a method that returns whether a rule holds. If not, the check reports a problem of `key`.

    The problem's message is `text`, in which `{self.name}` stands for the value of a field.
    """

    def mark(holds: Callable[[Any], bool]) -> check:
        return check(lambda section: [] if holds(section) else [Problem(key, text.format(self=section))])

    return mark


@dataclass(frozen=True)
class Setting:
    """The declaration of one field of a section, see `setting`.

    Attributes:
        hint: Type annotation of the field.
        required: Whether `build` requires a value.
        section: Dataclass of the nested section that the field holds. None if the field holds a value.
        sections: Dataclass of the named sections, for a field that maps names to sections. None otherwise.
        optional: Whether null is allowed.
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
    flag: Flag
    flags: Mapping[str, str | Flag] | None
    may_be_blank: bool
    on_resume: OnResume | None
    read_by_rollout: bool | None

    @property
    def type_text(self) -> str:
        """The type in words, with its bounds: `int, more than 0, or null`."""
        return type_in_words(self.hint, ", ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in self.bounds.items()))

    @property
    def plain_type_text(self) -> str:
        """The type in words, without its bounds: `int or null`."""
        return type_in_words(self.hint)

    def default_in(self, section: Section | None) -> Any:
        """Return the setting's value in `section`. For None, return the field's default, or REQUIRED."""
        value = self._default if section is None else vars(section)[self.name]
        if isinstance(value, (list, dict)):
            value = value.copy()
        return REQUIRED if self.required and value is None else value

    @cached_property
    def _default(self) -> Any:
        return self.default()

    def convert(self, value: Any) -> Any:
        """Check a value and convert it to the type of the field. Raises InvalidValue."""
        word = ("off", "on")[value] if isinstance(value, bool) else value  # YAML takes these words for false and true
        value = convert(self.aliases[word] if isinstance(word, str) and word in self.aliases else value, self.hint)
        is_empty = isinstance(value, str) and not (value if self.may_be_blank else value.strip())
        if is_empty or (isinstance(value, str) and "\0" in value):
            expected = "a text that is not empty" if is_empty else "text without null characters"
            raise InvalidValue(
                f"is {format_value(value)}; {expected} is expected{', or null' if self.optional else ''}"
            )
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
    """Return name -> declaration of the fields of a section, in order. Nested sections are not expanded."""
    hints = get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        factory: Any = field.default_factory
        arms = get_args(hint) or (hint,)
        found[field.name] = Setting(
            name=field.name,
            hint=hint,
            default=(lambda field=field: field.default) if factory is REQUIRED else factory,
            section=next(filter(_is_section, arms), None),
            sections=next(filter(_is_section, (get_args(arm)[1] for arm in arms if get_origin(arm) is dict)), None),
            optional=type(None) in arms,
            **field.metadata["declared"],
        )
    return found


def is_read_by_rollout(cls: type[Section], key: str) -> bool:
    """Return whether samples or rewards depend on a setting, as it or the nearest section around it declares."""
    found, section = False, cls
    for name in key.split("."):
        if section is None or name not in settings(section):
            break
        declared = settings(section)[name].read_by_rollout
        found, section = found if declared is None else declared, settings(section)[name].section
    return found


class SettingRow(NamedTuple):
    """One line about a setting, for help texts and the reference page."""

    key: str  # dotted
    setting: Setting
    default: str  # "required", a value in YAML, or "" for a section that exists by default
    flag: Flag  # in `areno train`
    heading: str  # of the flag


def setting_rows(
    cls: type[Section],
    prefix: str = "",
    section: Section | None = None,
    flags: Mapping[str, str | Flag] | None = None,
    heading: str = "",
) -> Iterator[SettingRow]:
    """Yield a row for every setting in a section and its nested sections, in the order of declaration.

    `prefix` is the dotted key of the section, with a dot at its end. Defaults are the values of `section`, if given.
    `flags` replaces declared flags. `heading` is that of the enclosing section.
    """
    heading = cls.heading or heading
    for name, setting in settings(cls).items():
        default = setting.default_in(section)
        inner = default if isinstance(default, Section) else None
        there = setting.section is not None and default is not None
        text = "" if there else "required" if default is REQUIRED else format_value(default)
        flag = setting.flag if flags is None else _flag(flags.get(name, ""))
        yield SettingRow(prefix + name, setting, text, flag, flag.heading or heading)
        if setting.section:
            of_section = setting.flags if flags is None else {}
            yield from setting_rows(setting.section, f"{prefix}{name}.", inner, of_section, heading)


def changed_settings(section: Section, prefix: str = "", default: Section | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting that differs from `default` or, without it, from its own default."""
    for name, field in settings(type(section)).items():
        value, usual = value_of(section, name), field.default_in(default)
        if isinstance(value, Section):
            yield from changed_settings(value, f"{prefix}{name}.", usual if isinstance(usual, Section) else None)
        elif field.sections and isinstance(value, dict) and value != usual:
            around = {key: vars(section)[key] for key in settings(field.sections) if key in vars(section)}
            for key, inner in value.items():  # which takes from around it what it leaves out
                found = changed_settings(inner, "")
                yield from ((f"{prefix}{name}.{key}.{at}", of) for at, of in found if around.get(at) != of)
        elif value != usual:
            yield prefix + name, value


@dataclass
class Section:
    """Base class of every configuration dataclass. Its values are checked whenever an object is constructed.

    One ConfigError reports all problems: wrong types, violated bounds and failed checks.
    """

    heading: ClassVar[str] = ""
    """Heading of the section's flags in the help of `areno train`. "": that of the enclosing section."""

    def __post_init__(self) -> None:
        vars(self).update(self.canonical(vars(self)))
        problems, known = [], {}
        for name, field in settings(type(self)).items():
            try:
                known[name] = field.convert(vars(self)[name])
            except InvalidValue as error:
                problems.append(Problem(name, str(error)))
        vars(self).update(known)
        problems += section_problems(partial_section(type(self), known))
        if problems:
            raise ConfigError(problems)

    @classmethod
    def of(cls: type[T], record: Any, **more: Any) -> T:
        """Make the section from another object, such as parsed arguments, whose attributes have the names of settings.

        Other attributes are ignored. `more` are further settings, which take precedence.
        """
        return cls(**{**{name: value for name, value in vars(record).items() if name in settings(cls)}, **more})

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace settings that stand for a value of another setting, such as use_sapo_loss for surrogate=sapo.

        The base class changes nothing. A subclass with such settings overrides this method. It is applied to
        constructor arguments, to files and to the settings of earlier runs. Values that contradict each other are
        returned unchanged.
        """
        return dict(values)

    def is_default(self, name: str) -> bool:
        """Return whether a setting has the default of its field."""
        return value_of(self, name) == settings(type(self))[name].default()


class _UnknownValue(Exception):
    """Raised when a check reads a value that is missing or wrong."""


def value_of(section: Section, name: str) -> Any:
    """Return a setting. If its value is unknown, raise _UnknownValue, which ends the check that reads it."""
    if name not in vars(section):
        raise _UnknownValue(name)
    return vars(section)[name]


def _raise_unknown_value(section: Section) -> Any:
    raise _UnknownValue


def partial_section(cls: type[T], known: dict[str, Any]) -> T:
    """Make a section from the values in `known`, without checks. Its other values are missing or wrong.

    `section_problems` can check the section later. It skips each check that reads an unknown value.
    """
    unknown = {name: property(_raise_unknown_value) for name in settings(cls) if name not in known}
    section: Any = object.__new__(type(cls.__name__, (cls,), unknown) if unknown else cls)
    vars(section).update(known)
    return section


def section_problems(section: Section, in_build: bool = False, sources: bool = True) -> list[Problem]:
    """Run the checks of a section, but not those of nested sections. Some values of the section may be unknown.

    `in_build` adds the rules that apply only in `build`. `sources` adds those about rows and rewards (`source_check`).
    """
    found, attributes, skipped = [], {}, build_check if not in_build else () if sources else source_check
    # Checks of base classes come first. An overridden check keeps the place of the original.
    for base in reversed(type(section).__mro__):
        attributes.update(vars(base))
    for attribute in attributes.values():
        if isinstance(attribute, check) and not isinstance(attribute, skipped):
            with suppress(_UnknownValue):
                found += list(attribute.rule(section))
    return found + unused_setting_problems(section, in_build, sources)


def unused_setting_problems(section: Section, in_build: bool = False, sources: bool = True) -> list[Problem]:
    """Report the settings that are changed but have no effect because of another setting (`only_with`).

    Settings in nested sections count too, and keys are relative to `section`. A setting with its default value is never
    reported. With `in_build` and `sources`, the needs that are declared with `in_build` and `is_source` count (see
    `Needs`).
    """
    found = []
    for key, field, need in _needs_of(type(section)):
        if (need.in_build and not in_build) or (need.is_source and not sources):
            continue
        with suppress(_UnknownValue):
            if not need.is_met_by(other := _value_at(section, need.key)):
                found += [
                    need.problem(name, value, other) for name, value in _changed_settings(section, key, field, need.key)
                ]
    return found


def settings_unused_without(cls: type[Section], name: str) -> list[str]:
    """Return the settings of a section that have no effect while the setting `name` is null."""
    return [key for key, _, need in _needs_of(cls) if need.key == name and key in settings(cls) and not need.values]


@cache
def _needs_of(cls: type[Section]) -> list[tuple[str, Setting, Needs]]:
    """Return (dotted key, declaration, need) for each setting that needs (`only_with`) a setting of this section."""
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
    """Return the value at a dotted key. Raises _UnknownValue if a section on the path is null or unknown."""
    for name in key.split("."):
        if section is None:
            raise _UnknownValue(key)
        section = value_of(section, name)
    return section


def _changed_settings(section: Section, key: str, field: Setting, besides: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) if the setting `key` is changed. If it is a section, check its settings except `besides`."""
    value, default = _value_at(section, key), field.default()
    if isinstance(value, Section) and isinstance(default, Section):
        yield from (pair for pair in changed_settings(value, f"{key}.", default) if pair[0] != besides)
    elif value != default:
        yield key, value
