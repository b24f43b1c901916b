"""Regular expressions of JSON numbers in a range.

Only numbers that are finite as doubles are matched. The bounds of fractions are doubles and inclusive. A fraction in a
text is compared after it is rounded to a double.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_DIGITS = 308  # an integer of more digits is infinite as a double
_MAX_WHOLE = 17  # digits before the point; Python writes larger fractions with an exponent
_LARGEST = math.nextafter(math.inf, 0)


@dataclass(frozen=True)
class Range:
    """A range. `low` and `high` are for integers (None: no bound), `low_float` and `high_float` for other numbers."""

    low: int | None = None
    high: int | None = None
    low_float: float = -_LARGEST
    high_float: float = _LARGEST

    def at_least(self, bound: Any, exclusive: bool) -> Range:
        if isinstance(bound, float) and math.isinf(bound):
            return self if bound < 0 else replace(self, low=1, high=0, low_float=_LARGEST, high_float=-_LARGEST)
        whole = math.floor(bound) + 1 if exclusive else math.ceil(bound)
        limit, exact = _to_double(bound), Fraction(bound)
        while limit < math.inf and (Fraction(limit) <= exact if exclusive else Fraction(limit) < exact):
            limit = math.nextafter(limit, math.inf)
        low = whole if self.low is None else max(self.low, whole)
        return replace(self, low=low, low_float=max(self.low_float, limit))

    def at_most(self, bound: Any, exclusive: bool) -> Range:
        return self.mirrored().at_least(-bound, exclusive).mirrored()

    def mirrored(self) -> Range:
        low, high = (None if bound is None else -bound for bound in (self.high, self.low))
        return Range(low, high, -self.high_float, -self.low_float)

    def contains(self, value: Any) -> bool:
        if isinstance(value, float) and not value.is_integer():
            return self.low_float <= value <= self.high_float
        return (self.low is None or self.low <= value) and (self.high is None or value <= self.high)

    def is_disjoint(self, other: Range, integer: bool) -> bool:
        def ends_before(one: Range, next_: Range) -> bool:
            is_below = one.high is not None and next_.low is not None and one.high < next_.low
            return is_below and (integer or one.high_float < next_.low_float)

        return ends_before(self, other) or ends_before(other, self)

    @lru_cache(1024)  # noqa: B019 - the ranges of schemas are few and small
    def terms(self, integer: bool) -> list[str]:
        """Return terms of a Lark terminal (llguidance). Each number of this range matches one of them."""
        found = self._positive_terms(integer)
        if self.low is None or self.low < 0 or (self.low_float < 0 and not integer):
            found += [f'"-" {term}' for term in self.mirrored()._positive_terms(integer)]
        return found

    def _positive_terms(self, integer: bool) -> list[str]:
        low, high = max(self.low or 0, 0), self.high
        has_whole = low < 10**MAX_DIGITS and (high is None or low <= high)
        found = [f"/{_natural_range(low, high)}/"] if has_whole else []
        if integer or self.high_float < 0 or self.low_float > self.high_float:
            return found
        start, end = max(self.low_float, 0.0), self.high_float
        return found + _decimal_terms(start, end) + _exponent_terms(start, end)

    def fraction_terms(self, n: int) -> list[str]:
        """Return terms for fractions in the range that are multiples of 1 / n. n has no prime factors but 2 and 5."""
        n_decimals = next(n_decimals for n_decimals in range(1, n + 1) if 10**n_decimals % n == 0)
        step = 10**n_decimals // n
        ends = [f"{digits:0{n_decimals}}".rstrip("0") for digits in range(step, 10**n_decimals, step)]
        ends = [f"[0-9]{{1,{n_decimals}}}"] if step == 1 else ends
        digits = f"({'|'.join([f'({chr(124).join(ends)})0*', '0+'])})"
        found = list[str]()
        for sign, each in (("", self), ('"-" ', self.mirrored())):
            if each.high_float >= 0 and each.low_float <= each.high_float:
                found += [sign + term for term in _decimal_terms(max(each.low_float, 0.0), each.high_float, digits)]
        return found


def _to_double(bound: Any) -> float:
    try:
        return float(bound)
    except OverflowError:
        return math.inf if bound > 0 else -_LARGEST


def _alternation(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _digits_between(low: str, high: str) -> str:
    """Return a regex of the digit strings from `low` to `high`, which have equal lengths."""
    n = len(low)
    same = next((at for at in range(n) if low[at] != high[at]), n)
    if same == n:
        return low
    ends_low, ends_high = set(low[same + 1 :]) <= {"0"}, set(high[same + 1 :]) <= {"9"}
    first, last = int(low[same]) + (not ends_low), int(high[same]) - (not ends_high)
    parts = [f"{low[:same]}[{first}-{last}]{_any_digits(n - same - 1)}"] if first <= last else []
    parts += [] if ends_low else [low]
    parts += [] if ends_high else [high]
    for at in range(same + 1, n):
        rest = _any_digits(n - at - 1)
        parts += [f"{low[:at]}[{int(low[at]) + 1}-9]{rest}"] if low[at] != "9" and not ends_low else []
        parts += [f"{high[:at]}[0-{int(high[at]) - 1}]{rest}"] if high[at] != "0" and not ends_high else []
    return _alternation(parts)


def _any_digits(n: int) -> str:
    return "" if n == 0 else "[0-9]" if n == 1 else f"[0-9]{{{n}}}"


def _natural_range(low: int, high: int | None) -> str:
    end = 10**MAX_DIGITS - 1 if high is None else min(high, 10**MAX_DIGITS - 1)
    parts = list[str]()
    if low == 0:
        parts, low = ["0"], 1
    if low <= end:
        first, last = len(str(low)), len(str(end))
        if first == last:
            parts.append(_digits_between(str(low), str(end)))
        else:
            is_whole = low == 10 ** (first - 1), end == 10**last - 1
            parts += [] if is_whole[0] else [_digits_between(str(low), "9" * first)]
            shortest, longest = first - is_whole[0], last - 2 + is_whole[1]
            if shortest <= longest:
                parts.append(f"[1-9][0-9]{{{shortest},{longest}}}")
            parts += [] if is_whole[1] else [_digits_between("1" + "0" * (last - 1), str(end))]
    return _alternation(parts)


def _at_least_regex(digits: str) -> str:
    """Return a regex of the decimal places that are at least `digits`. `digits` does not end in 0."""
    parts = [f"{digits[:at]}[{int(each) + 1}-9][0-9]*" for at, each in enumerate(digits) if each != "9"]
    return _alternation([*parts, f"{digits}[0-9]*" if digits else "[0-9]+"])


def _at_most_regex(digits: str) -> str:
    parts = [f"{digits[:at]}[0-{int(each) - 1}][0-9]*" for at, each in enumerate(digits) if each != "0"]
    shorter = [digits[:at] for at in range(1, len(digits))]
    return _alternation([*parts, *shorter, f"{digits}0*" if digits else "0+"])


def _decimal_terms(low: float, high: float, digits: str = "[0-9]+") -> list[str]:
    """Return a term for numbers with a decimal point and no exponent, [] if there are none. Skips values below 1e-17.

    `digits` is the regex of the digits after the point.
    """
    if low >= 10**_MAX_WHOLE:
        return []
    parts = [rf"/{_natural_range(0, 10**_MAX_WHOLE - 1)}\.{digits}/"]
    if low > 0:
        whole, digits = _positional_digits(max(low, 1e-17))
        above = rf"{_natural_range(whole + 1, 10**_MAX_WHOLE - 1)}\.[0-9]+|" if whole + 1 < 10**_MAX_WHOLE else ""
        parts.append(rf"/{above}{whole}\.{_at_least_regex(digits)}/")
    if high < 10**_MAX_WHOLE:
        whole, digits = _positional_digits(0.0 if high < 1e-17 else high)
        below = rf"{_natural_range(0, whole - 1)}\.[0-9]+|" if whole else ""
        parts.append(rf"/{below}{whole}\.{_at_most_regex(digits)}/")
    return [f"({' & '.join(parts)})"]


def _positional_digits(value: float) -> tuple[int, str]:
    """Return the integer before the point and the digits after it."""
    whole, _, digits = format(Decimal(repr(value)), "f").partition(".")
    return int(whole), digits.rstrip("0")


def _exponent_terms(low: float, high: float) -> list[str]:
    """Return terms for numbers with one digit before the point and an exponent."""
    if high == 0:
        return []
    first, least, parts = (-324, None, []) if low == 0 else (*_scientific(low), [])
    last, most = _scientific(high)
    lowest = "" if least is None else _mantissa(least, _at_least_regex, 9)
    highest = _mantissa(most, _at_most_regex, 1)
    if least is not None and first == last:
        return [f"( /({lowest}){_exponent(first, last)}/ & /({highest}){_exponent(first, last)}/ )"]
    parts = [f"/({lowest}){_exponent(first, first)}/"] if least is not None else []
    first += least is not None
    if first < last:
        parts.append(rf"/[1-9](\.[0-9]+)?{_exponent(first, last - 1)}/")
    return [*parts, f"/({highest}){_exponent(last, last)}/"]


def _scientific(value: float) -> tuple[int, str]:
    exact = Decimal(repr(value))
    return exact.adjusted(), "".join(map(str, exact.as_tuple().digits)).rstrip("0")


def _mantissa(digits: str, bound: Any, end: int) -> str:
    first, rest = int(digits[0]), digits[1:]
    beyond = [rf"[{min(first + 1, end)}-{end}](\.[0-9]+)?" if end == 9 else rf"[1-{first - 1}](\.[0-9]+)?"]
    is_bare = bound is _at_most_regex or not rest
    at_bound = rf"{first}(\.{bound(rest)})" + ("?" if is_bare else "")
    return "|".join([*(beyond if first != end else []), at_bound])


def _exponent(low: int, high: int) -> str:
    parts = [f"-0?{_natural_range(max(-high, 1), -low)}"] if low < 0 else []
    parts += [rf"\+?0?{_natural_range(max(low, 0), high)}"] if high >= 0 else []
    return f"[eE]{_alternation(parts)}"
