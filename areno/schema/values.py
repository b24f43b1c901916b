"""Convert values of a configuration to the types of their fields, format them, and read them by dotted keys."""

from __future__ import annotations

import itertools
import math
import os
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from areno.errors import did_you_mean

_SHOWN = 80  # characters of a value


class InvalidValue(Exception):
    """Raised if a value has a wrong type or is out of bounds. The message begins with "is ..." and follows the key."""


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to the type of a field, or raise InvalidValue.

    A field of type float or str accepts an int, and converts it. A float field also converts text that reads as a
    number, since YAML reads 1e-6 as text. All other values must already have the type.
    """
    origin, arms = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, arms)
    if origin is Literal:
        if isinstance(value, bool) and (word := "on" if value else "off") in arms:
            return word  # YAML takes the words on and off for true and false
        if any(type(value) is type(choice) and value == choice for choice in arms):
            return value
        hint = did_you_mean(str(value), map(str, arms))
        raise InvalidValue(f"is {format_value(value)}; expected one of {', '.join(map(format_value, arms))}{hint}")
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise InvalidValue(f"is {format_value(value)}; a list is expected: [{format_value(value)}]")
        return [_convert_element(element, position, arms[0]) for position, element in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise InvalidValue(f"is {format_value(value)}; a mapping of names is expected")
        return {str(name): _convert_element(element, name, arms[1]) for name, element in value.items()}
    if hint is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise InvalidValue(f"is {format_value(value)}; a number is expected") from None
        if not math.isfinite(number):
            raise InvalidValue(f"is {format_value(value)}; a finite number is expected")
        return number
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if hint is str and isinstance(value, str) and (problem := text_problem(value)):
        raise InvalidValue(f"{problem}; whole characters are expected")
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise InvalidValue(f"is {format_value(value)}; {_EXPECTED.get(hint, f'a {hint.__name__} is expected')}")


_EXPECTED = {
    int: "an integer is expected",
    float: "a number is expected",
    bool: "true or false is expected",
    str: "text is expected (put it in quotes)",
    type(None): "null is expected",
}


def _convert_union(value: Any, hint: Any, arms: tuple[Any, ...]) -> Any:
    if value is None and type(None) in arms:
        return None
    messages = []
    # The arm of the value's own type goes first, so that 3 stays an int in `str | int`.
    for arm in sorted((arm for arm in arms if arm is not type(None)), key=lambda arm: arm is not type(value)):
        try:
            return convert(value, arm)
        except InvalidValue as error:
            messages.append(str(error))
    if len(messages) > 1:
        raise InvalidValue(f"is {format_value(value)}; expected {type_in_words(hint)}")
    ends = type(None) not in arms or messages[0].endswith(", or null")
    raise InvalidValue(messages[0] if ends else f"{messages[0]}, or null")


def _convert_element(element: Any, position: int | str, hint: Any) -> Any:
    try:
        return convert(element, hint)
    except InvalidValue as error:
        raise InvalidValue(f"[{position}] {error}") from None


def text_problem(text: str) -> str | None:
    """Return why a text cannot be encoded as UTF-8 (half of a surrogate pair), or None if it can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds {text[error.start]!r} at character {error.start}, half of a surrogate pair"
    return None


def _truncated_value(value: Any, left: list[int]) -> Any:
    """Return as much of a value as a message can show. left[0] counts down the elements that still fit."""
    left[0] -= 1
    if isinstance(value, str):
        return value[: _SHOWN + 1]
    if type(value) is list:
        return [_truncated_value(each, left) for each in itertools.takewhile(lambda _: left[0] >= 0, value)]
    if type(value) is dict:
        shown = itertools.takewhile(lambda _: left[0] >= 0, value.items())
        return {_truncated_value(name, left): _truncated_value(each, left) for name, each in shown}
    return value


def format_value(value: Any) -> str:
    """Return a value in YAML-like notation: null, true, 'text', 1e-06. More than 80 characters are cut off."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(_truncated_value(value, [_SHOWN]))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to one dictionary with dotted keys. A list counts as one value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= (
            flatten_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return found


def value_at(settings: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings, or None if the key does not exist."""
    for name in key.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def type_in_words(hint: Any, bounds: str = "") -> str:
    """Return a type in words: `int, more than 0, or null`, `auto | cpu | cuda`, `list of str`."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = " or ".join(type_in_words(arm, bounds) for arm in arms if arm is not type(None))
        null = ", or null" if bounds else " or null"
        return words + (null if type(None) in arms else "")
    if origin is Literal:
        return " | ".join(str(choice) for choice in arms)
    if origin is list:
        return f"list of {type_in_words(arms[0])}"
    if origin is dict:
        if arms[1] is Any:
            return "mapping of names to values"
        element = "sections" if is_dataclass(arms[1]) else type_in_words(arms[1])
        return f"mapping of names to {f'({element})' if ' or ' in element else element}"
    if hint is type(None):  # a setting that a subclass takes away
        return "null"
    return f"{hint.__name__}, {bounds}" if bounds else hint.__name__


def may_be_folder(path: str | None) -> bool:
    """Return whether a value is None or can be the path of a folder. "" and `~name` of an unknown user cannot."""
    return path is None or (bool(path.strip()) and "\0" not in path and not os.path.expanduser(path).startswith("~"))
