"""Choices: a setting that names one of several classes, each a section with its own formula and settings.

The configuration inherits from all classes, so that it has the settings of each of them. A choice in the setting
`surrogate` of a policy loss, or `loss_type` of a preference loss, says which class computes. A setting that belongs
only to classes that are not chosen has no effect, which is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from areno.errors import Problem
from areno.schema.fields import Needs, Section, partial_section, settings

T = TypeVar("T", bound=Section)


def all_settings(choices: Mapping[str, type[Section]]) -> list[str]:
    """Return the names of the settings of all classes, without duplicates."""
    return list(dict.fromkeys(name for cls in choices.values() for name in settings(cls)))


def unused_settings(section: Section, key: str, chosen: str, choices: Mapping[str, type[Section]]) -> Iterator[Problem]:
    """Yield a problem for each changed setting of classes alone that the setting `key` has not chosen."""
    for name in all_settings(choices):
        owners = [choice for choice, cls in choices.items() if name in settings(cls)]
        if chosen not in owners and not section.is_default(name) and vars(section)[name] is not None:
            yield Needs(key, *owners).problem(name, vars(section)[name], chosen)


def make_chosen(
    choices: Mapping[str, type[T]], key: str, name: str, given: Mapping[str, Any], keywords: Mapping[str, str]
) -> T:
    """Make the chosen section from the keyword arguments of a loss. `keywords`: setting -> keyword, where these differ.

    Settings of other classes are ignored, so that a loss may give them defaults. Values are taken as they are, because
    a loss accepts more than a configuration does: an infinite clip range, which clips nothing, or a value that is a
    tensor.
    """
    if name not in choices:
        *names, last = choices
        raise ValueError(f"{key} is {name!r}; expected {', '.join(names)} or {last}")
    names_of = {keywords.get(setting, setting): setting for setting in all_settings(choices)}
    for keyword in given.keys() - names_of.keys():
        raise TypeError(f"{keyword} is not a setting of a {key}; expected one of {', '.join(names_of)}")
    values = {setting: field.default() for setting, field in settings(choices[name]).items()}
    values |= {names_of[keyword]: value for keyword, value in given.items() if names_of[keyword] in values}
    return partial_section(choices[name], values)
