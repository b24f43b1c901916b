"""Regular expressions of numbers in a range: exactly the numbers that a reader of JSON finds in the range."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from areno.server.parsers.numbers import Range
from tests.helpers.grammars import ByteGrammar

pytest.importorskip("llguidance")

SPECIAL = [0, 1, -1, 2**53, -(2**53), 2**63 - 1, -(2**63), 2**64 - 1, 10**16, 10**17, 2**100, 1e-5, 1e16, 1e17]
SPECIAL += [0.1, 0.1 + 0.2, 5e-324, -1e-7, 1.7976931348623157e308, -1e308, 0.5, 3.63]


def some_number(rng: random.Random) -> Any:
    found = [rng.choice(SPECIAL), rng.randrange(-20, 20), rng.randrange(-1000, 1000) / 100]
    return rng.choice([*found, rng.uniform(-1, 1) * 10.0 ** rng.randrange(-300, 300), rng.randrange(-(2**64), 2**64)])


def near(bound: Any) -> list[Any]:
    found = [bound, bound + 1, bound - 1, float(bound), int(bound)]
    found += [math.nextafter(float(bound), end) for end in (math.inf, -math.inf)]
    return [value for value in found if math.isfinite(value)]


def check(rng: random.Random) -> None:
    low, high = sorted((some_number(rng), some_number(rng)))
    low, high = (None if rng.randrange(4) == 0 else bound for bound in (low, high))
    is_open, is_integer = (rng.randrange(2) == 0, rng.randrange(2) == 0), rng.randrange(3) == 0
    found = Range()
    found = found if low is None else found.at_least(low, is_open[0])
    found = found if high is None else found.at_most(high, is_open[1])

    def holds(value: Any) -> bool:
        if is_integer and value != int(value):
            return False
        above = low is None or (value > low if is_open[0] else value >= low)
        return above and (high is None or (value < high if is_open[1] else value <= high))

    terms = found.terms(is_integer)
    grammar = ByteGrammar(f"start: N\nN: {' | '.join(terms)}") if terms else None
    values = [some_number(rng) for _ in range(10)] + [each for b in (low, high) if b is not None for each in near(b)]
    for value in values:
        value = int(value) if value == int(value) else value
        if abs(value) < 10**308:
            text = json.dumps(value)
            assert (grammar is not None and grammar.accepts(text)) == holds(value), (low, high, is_open, text)
        # More digits than a double has: rounding must not leave the range.
        text = f"{float(value):.25g}" if rng.randrange(2) else f"{float(value):f}{rng.randrange(10**6)}"
        if grammar is not None and grammar.accepts(text):
            assert holds(json.loads(text)), (low, high, is_open, text)


def test_texts_of_numbers_are_those_in_the_range() -> None:
    for seed in range(60):
        check(random.Random(seed))


@pytest.mark.slow
def test_many_ranges() -> None:
    for seed in range(60, 1500):
        check(random.Random(seed))


def test_numbers_that_no_double_holds_are_never_written() -> None:
    grammar = ByteGrammar(f"start: N\nN: {' | '.join(Range().terms(False))}")
    for text in (
        "1e9999",
        "-1e309",
        "1.8e308",
        "9" * 309,
        "9" * 400 + ".5",
        "01",
        "1.",
        ".5",
        "+1",
        "NaN",
        "-Infinity",
    ):
        assert not grammar.accepts(text), text
    for text in ("-0", "1e308", "1.7976931348623157e+308", "5e-324", "-2.5E-3", "9" * 308, "1.50", "0.0"):
        assert grammar.accepts(text), text


def test_bounds_that_no_double_holds() -> None:
    assert Range().at_least(10**400, False).terms(False) == []
    assert Range().at_most(-math.inf, False).terms(False) == []
    assert Range().at_most(10**400, False).terms(False) == Range().terms(False)
    assert Range().at_least(-math.inf, True).terms(True) == Range().terms(True)


@pytest.mark.parametrize("n", [2, 4, 10, 20, 100, 1000])
def test_multiples_of_a_part_of_one(n: int) -> None:
    grammar = ByteGrammar(f"start: N\nN: {' | '.join(Range().at_least(-2, False).at_most(2, True).fraction_terms(n))}")
    for thousandths in range(-2100, 2101, 5):
        text = f"{thousandths / 1000:.3f}"
        assert grammar.accepts(text) == (-2000 <= thousandths < 2000 and thousandths * n % 1000 == 0), text
