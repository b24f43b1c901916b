"""A configuration field: a dataclass field with help text, bounds and the flag of `areno train` it becomes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from areno.config.values import Mismatch, convert, spelling
from areno.errors import ConfigError, Problem

_MISSING = dataclasses.MISSING
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("more than", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("less than", lambda value, bound: value < bound),
}
_Check = TypeVar("_Check", bound=Callable[[Any], Iterator[Problem]])


def knob(
    default: Any = _MISSING,
    *,
    help: str,
    factory: Any = _MISSING,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    flag: str | None = None,
    needed: bool = False,
) -> Any:
    """Declare one setting. Without `default` and `factory` it is required.

    ge, gt, le, lt bound a number (None values are not compared). Choices come from a `Literal` type. needed: required
    of a run that is described by files, but not of a script, which may hand over the thing itself (rows, a function).
    """
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt, "flag": flag, "needed": needed}
    kwargs: dict[str, Any] = {"metadata": metadata, "kw_only": True}
    if default is not _MISSING:
        kwargs["default"] = default
    if factory is not _MISSING:
        kwargs["default_factory"] = factory
    return dataclasses.field(**kwargs)


def check(method: _Check) -> _Check:
    """Mark a method of a Section as a cross-field check: it yields problems whose keys are relative to the section.

    Each check looks at one rule, because one that meets a value which is itself wrong is left out of the report.
    """
    method.is_check = True  # type: ignore[attr-defined]
    return method


def file_check(method: _Check) -> _Check:
    """Like check, for a rule that only a run described by files must keep: see `needed` in knob."""
    method.is_file_check = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class Setting:
    """What is known about one field. `section` is the dataclass a nested section is made of."""

    name: str
    hint: Any
    help: str
    flag: str | None
    required: bool
    default: Callable[[], Any]
    bounds: dict[str, float]
    section: type[Section] | None
    optional: bool

    @property
    def type_text(self) -> str:
        """The type in words, bounds included: `int, more than 0, or null`."""
        return spelling(self.hint, ", ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in self.bounds.items()))

    def convert(self, value: Any) -> Any:
        """`value` in the field's type. Raises Mismatch where that cannot be."""
        value = convert(value, self.hint)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for name, bound in self.bounds.items():
                words, holds = _BOUNDS[name]
                if not holds(value, bound):
                    raise Mismatch(f"is {value!r}; it must be {words} {bound}")
        return value


@cache
def settings(cls: type[Section]) -> dict[str, Setting]:
    """The fields of a section in the order they are declared."""
    hints = get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[field.name]
        arms = get_args(hint) or (hint,)
        has_default = field.default is not _MISSING or field.default_factory is not _MISSING
        required = field.metadata["needed"] or not has_default
        found[field.name] = Setting(
            name=field.name,
            hint=hint,
            help=field.metadata["help"],
            flag=field.metadata["flag"],
            required=required,
            default=field.default_factory
            if field.default_factory is not _MISSING
            else lambda field=field: field.default,
            bounds={name: field.metadata[name] for name in _BOUNDS if field.metadata[name] is not None},
            section=next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, Section)), None),
            optional=type(None) in arms,
        )
    return found


class Section:
    """Base of every configuration dataclass: values are checked when it is built, whoever builds it."""

    def __post_init__(self) -> None:
        found, known = [], {}
        for name, setting in settings(type(self)).items():
            try:
                known[name] = setting.convert(getattr(self, name))
                setattr(self, name, known[name])
            except Mismatch as mismatch:
                found.append(Problem(name, str(mismatch)))
        found += View(type(self), known).problems()
        if found:
            raise ConfigError(found)


class _Unknown(Exception):
    """A check read a value that is missing or wrong."""


class View:
    """A section of which some values may be unknown, as its checks see it.

    It stands in for the dataclass, which cannot exist while one of its values is wrong, so that the rules that do
    not need that value still report.
    """

    def __init__(self, cls: type[Section], known: dict[str, Any]):
        self._cls = cls
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        if name in settings(self._cls):
            raise _Unknown(name)
        return inspect.getattr_static(self._cls, name).__get__(self, self._cls)

    def problems(self, files: bool = False) -> list[Problem]:
        """What the section's own checks find; nested sections have theirs. files: those of `file_check` too."""
        found = []
        names = dict.fromkeys(name for base in reversed(self._cls.__mro__) for name in vars(base))
        for name in names:
            method = getattr(self._cls, name)
            if getattr(method, "is_check", False) or (files and getattr(method, "is_file_check", False)):
                try:
                    found += list(method(self))
                except _Unknown:
                    continue
        return found

    def build(self) -> Any:
        """The dataclass itself. Only where no problem was found."""
        values = {name: value.build() if isinstance(value, View) else value for name, value in self._known.items()}
        return self._cls(**values)
