"""One value of a configuration: does it have the type its field declares, and if not, what was expected."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin


class Mismatch(Exception):
    """The value does not fit; the message starts with `is ...` and follows the key in a report."""


def convert(value: Any, hint: Any) -> Any:
    """`value` in the type `hint`: str, int, float, bool, a dataclass, Literal, list[...], or a union of them.

    An int is taken where a float or a str is meant, and text that reads as a number where a float is (YAML takes
    1e-6 for text). Nothing else is guessed. Raises Mismatch.
    """
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, arms)
    if origin is Literal:
        for choice in arms:
            if type(value) is type(choice) and value == choice:
                return choice
        raise Mismatch(f"is {show(value)}; expected one of {', '.join(map(show, arms))}{did_you_mean(value, arms)}")
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise Mismatch(f"is {show(value)}; a list is expected: [{show(value)}]")
        return [_convert_element(element, position, arms[0]) for position, element in enumerate(value)]
    if hint is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise Mismatch(f"is {show(value)}; a number is expected") from None
        if not math.isfinite(number):
            raise Mismatch(f"is {show(value)}; a finite number is expected")
        return number
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise Mismatch(f"is {show(value)}; {_EXPECTED.get(hint, f'a {hint.__name__} is expected')}")


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
    mismatches = []
    # The arm of the value's own type goes first, so that 3 stays an int in `str | int`.
    for arm in sorted((arm for arm in arms if arm is not type(None)), key=lambda arm: arm is not type(value)):
        try:
            return convert(value, arm)
        except Mismatch as mismatch:
            mismatches.append(str(mismatch))
    if len(mismatches) > 1:
        raise Mismatch(f"is {show(value)}; expected {spelling(hint)}")
    raise Mismatch(f"{mismatches[0]}, or null" if type(None) in arms else mismatches[0])


def _convert_element(element: Any, position: int, hint: Any) -> Any:
    try:
        return convert(element, hint)
    except Mismatch as mismatch:
        raise Mismatch(f"[{position}] {mismatch}") from None


def show(value: Any) -> str:
    """A value as YAML has it: null, true, 'text', 1e-06."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def spelling(hint: Any, bounds: str = "") -> str:
    """A type in words: `int, more than 0, or null`, `auto | cpu | cuda`, `list of str`."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = " or ".join(spelling(arm, bounds) for arm in arms if arm is not type(None))
        null = ", or null" if bounds else " or null"
        return words + (null if type(None) in arms else "")
    if origin is Literal:
        return " | ".join(str(choice) for choice in arms)
    if origin is list:
        return f"list of {spelling(arms[0])}"
    if hint is type(None):  # a setting that a subclass takes away
        return "null"
    return f"{hint.__name__}, {bounds}" if bounds else hint.__name__


def did_you_mean(word: Any, options: Iterable[Any]) -> str:
    """`; did you mean x?` for the options that resemble `word`, else nothing."""
    close = difflib.get_close_matches(str(word), [str(option) for option in options], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
