"""Settings that choose one of several classes. Each class is a section with its own formula and settings.

The configuration inherits from all classes, so it has the settings of each of them. The setting with the choice, such
as `surrogate` of a policy loss or `loss_type` of a preference loss, says which class computes the loss. It is an error
to change a setting that only other classes have, because it would have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from areno.errors import Problem
from areno.schema.fields import Needs, Section, partial_section, settings, value_of

T = TypeVar("T", bound=Section)
Class = TypeVar("Class", bound=type[Section])


class Choices(dict[str, type[T]]):
    """The classes that the setting `key` can choose, by name. `register` adds a class.

    The configuration inherits from `bases`, and its setting `key` has the type `Literal[tuple(choices)]`. `keywords`
    maps settings to their keyword arguments of the loss, where the names differ.
    """

    def __init__(self, key: str, **keywords: str):
        super().__init__()
        self.key = key
        self._keywords = keywords
        self._help: list[str] = []

    def register(self, name: str, help: str) -> Callable[[Class], Class]:
        """Return a decorator that adds a class under a name. `help` describes the choice in the help of the setting."""

        def add(cls: Class) -> Class:
            self[name] = cls  # type: ignore[assignment]  # a subclass of T, whose own type the decorator keeps
            self._help.append(f"{name}: {help}")
            return cls

        return add

    @property
    def help(self) -> str:
        """The descriptions of all choices."""
        return ". ".join(self._help)

    @property
    def bases(self) -> list[type[T]]:
        """All classes in reverse order of registration, so that a class comes before its base classes."""
        return list(reversed(self.values()))

    def all_settings(self) -> list[str]:
        """Return the names of the settings of all classes, without duplicates."""
        return list(dict.fromkeys(name for cls in self.values() for name in settings(cls)))

    def unused_setting_problems(self, section: Section) -> Iterator[Problem]:
        """Yield a problem for each changed setting that the chosen class does not have."""
        chosen = value_of(section, self.key)
        for name in self.all_settings():
            owners = [choice for choice, cls in self.items() if name in settings(cls)]
            if chosen not in owners and not section.is_default(name) and value_of(section, name) is not None:
                yield Needs(self.key, *owners).problem(name, value_of(section, name), chosen)

    def loss_kwargs(self, section: Section) -> dict[str, Any]:
        """Return the name and the settings of the class that `section` chooses, as keyword arguments of a loss."""
        chosen = value_of(section, self.key)
        own = {self._keywords.get(name, name): value_of(section, name) for name in settings(self[chosen])}
        return {self.key: chosen} | own

    def make_section(self, name: str, given: Mapping[str, Any]) -> T:
        """Make a section of the class `name` from `given`, the keyword arguments of a loss.

        Settings of other classes are ignored, so that a loss may give them defaults. Values are not checked, because a
        loss accepts more than a configuration does, such as tensors, or an infinite clip range, which clips nothing.
        """
        if name not in self:
            *names, last = self
            raise ValueError(f"{self.key} is {name!r}; expected {', '.join(names)} or {last}")
        names_of = {self._keywords.get(setting, setting): setting for setting in self.all_settings()}
        for keyword in given.keys() - names_of.keys():
            raise TypeError(f"{keyword} is not a setting of a {self.key}; expected one of {', '.join(names_of)}")
        values = {setting: field.default() for setting, field in settings(self[name]).items()}
        values |= {names_of[keyword]: value for keyword, value in given.items() if names_of[keyword] in values}
        return partial_section(self[name], values)
