"""Settings that choose one of several classes. Each class is a section with its own formula and settings.

The setting with the choice, such as `mask` of a policy loss or `loss_type` of a preference loss, says which class
computes the loss. The settings of a class that is registered with `section=True` stand in a section with its name:
`mask=dppo_tv` has the setting `dppo_tv.threshold`. The settings of a flat class stand beside the choice, and the
configuration inherits from the class. It is an error to change a setting that only other classes have, because it would
have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from areno.errors import Problem
from areno.schema.fields import Needs, Section, partial_section, settings, value_of, with_sections

T = TypeVar("T", bound=Section)
Class = TypeVar("Class", bound=type[Section])


class Choices(dict[str, type[T]]):
    """The classes that the setting `key` can choose, by name. `register` adds a class.

    The configuration inherits from `bases`, has the decorator `with_sections`, and its setting `key` has the type
    `Literal[tuple(choices)]`. `keywords` maps flat settings to their keyword arguments of the loss, where the names
    differ.
    """

    def __init__(self, key: str, **keywords: str):
        super().__init__()
        self.key = key
        self._keywords = keywords
        self._help: list[str] = []
        self._flat: dict[str, type[T]] = {}

    def register(self, name: str, help: str, *, section: bool = False) -> Callable[[Class], Class]:
        """Return a decorator that adds a class under a name. `help` describes the choice in the help of the setting."""

        def add(cls: Class) -> Class:
            self[name] = cls  # type: ignore[assignment]  # a subclass of T, whose own type the decorator keeps
            if not section:
                self._flat[name] = self[name]
            self._help.append(f"{name}: {help}")
            return cls

        return add

    @property
    def help(self) -> str:
        """The descriptions of all choices."""
        return ". ".join(self._help)

    @property
    def bases(self) -> list[type[T]]:
        """The flat classes in reverse order of registration, so that a class comes before its base classes."""
        return list(reversed(self._flat.values()))

    def with_sections(self, cls: Class) -> Class:
        """Add a section for each class with settings that is not flat. A decorator for use below `@dataclass`."""
        nested = {name: choice for name, choice in self.items() if name not in self._flat and settings(choice)}
        found = {name: (choice, f"Settings of {self.key}={name}") for name, choice in nested.items()}
        return with_sections(found, chosen_by=self.key)(cls)

    def flat_settings(self) -> list[str]:
        """Return the names of the settings of all flat classes, without duplicates."""
        return list(dict.fromkeys(name for cls in self._flat.values() for name in settings(cls)))

    def unused_setting_problems(self, section: Section) -> Iterator[Problem]:
        """Yield a problem for each changed flat setting that the chosen class does not have."""
        chosen = value_of(section, self.key)
        for name in self.flat_settings():
            owners = [choice for choice, cls in self._flat.items() if name in settings(cls)]
            if chosen not in owners and not section.is_default(name) and value_of(section, name) is not None:
                yield Needs(self.key, *owners).problem(name, value_of(section, name), chosen)

    def chosen(self, section: Section) -> T | None:
        """Return the choice of a configuration with its settings. None if its setting `key` is null."""
        name = value_of(section, self.key)
        if name is None:
            return None
        if name in self._flat:
            return partial_section(self[name], {own: value_of(section, own) for own in settings(self[name])})
        return value_of(section, name) if settings(self[name]) else self[name]()

    def loss_kwargs(self, section: Section) -> dict[str, Any]:
        """Return the choice of a configuration as keyword arguments of a loss.

        A flat class is given by its name and settings, any other as a section.
        """
        name = value_of(section, self.key)
        if name not in self._flat:
            return {self.key: self.chosen(section)}
        own = {self._keywords.get(field, field): value_of(section, field) for field in settings(self[name])}
        return {self.key: name} | own

    def make_section(self, choice: str | T, given: Mapping[str, Any]) -> T:
        """Return `choice`, or make a section of the class with this name from `given`, the keyword arguments of a loss.

        Settings of other classes are ignored, so that a loss may give them defaults. Values are not checked, because a
        loss accepts more than a configuration does, such as tensors, or an infinite clip range, which clips nothing.
        """
        names_of = {self._keywords.get(field, field): field for field in self.flat_settings()}
        for keyword in given.keys() - names_of.keys():
            raise TypeError(f"{keyword} is not a setting of a {self.key}; expected one of {', '.join(names_of)}")
        if isinstance(choice, Section):
            return choice
        if choice not in self:
            *names, last = self
            raise ValueError(f"{self.key} is {choice!r}; expected {', '.join(names)} or {last}")
        values = {field: declared.default() for field, declared in settings(self[choice]).items()}
        values |= {names_of[keyword]: value for keyword, value in given.items() if names_of[keyword] in values}
        return partial_section(self[choice], values)
