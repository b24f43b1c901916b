"""Tests of programs: which are split, that right programs pass and wrong ones fail, and that none forges a pass."""

from __future__ import annotations

import json

import pytest

from areno.reward_fns.assertions import split_tests
from areno.reward_fns.built_in import CodeReward
from areno.sandbox import box
from areno.types import RewardRecord

PROBLEM, _ = box.try_box()
needs_sandbox = pytest.mark.skipif(bool(PROBLEM), reason=f"code {PROBLEM}")


def passed(program, tests):
    record = RewardRecord(completion=f"```python\n{program}\n```", solutions=tests)
    return CodeReward(timeout_s=8.0).load()(record)["passed"]


RIGHT = """
import math, itertools
from collections import OrderedDict, namedtuple, deque
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
import datetime
def add(a, b): return a + b
def half(x): return x / 2
def count(n): yield from range(n)
def pair(a, b): return namedtuple("Pair", "a b")(a, b)
def level(): return IntEnum("Level", "LOW HIGH").HIGH
def table(): return OrderedDict(a=1, b=[2.5, None, True, "\\ud800"])
def rare(): return Fraction(1, 3), Decimal("0.1"), datetime.date(2020, 1, 2), {1 + 2j}, b"x", range(3), 10 ** 30
def later(): return datetime.datetime(2020, 1, 2) + datetime.timedelta(1), deque([1, 2], 3), float("inf")
def reverse(values): values.reverse()
def apply(f, x): return f(x)
def sum(values): return 0 if not values else values[0] + sum(values[1:])
class Vector:
    def __init__(self, *of): self.of = of
    def __add__(self, other): return Vector(*map(add, self.of, other.of))
    def __eq__(self, other): return self.of == other.of
    def __str__(self): return f"<{self.of[0]}>"
    def __len__(self): return 2
    def __neg__(self): return Vector(*(-each for each in self.of))
    def norm(self): return math.hypot(*self.of)
class Solution:
    def twoSum(self, nums, target):
        return [[i, j] for i in range(len(nums)) for j in range(i) if nums[i] + nums[j] == target][0]
class Failure(ValueError): pass
def fail(): raise Failure("no")
"""
UNIT = """
import unittest
class Some(unittest.TestCase):
    def test_one(self):
        self.assertEqual(add(1, 2), 3, "no")
        found = half(3)
        self.assertLess(found, 1.6)
    def test_two(self):
        self.assertIsNone(reverse([]))
        self.assertFalse(add(0, 0))
        self.assertNotIn(add(1, 1), [3])
        self.assertTrue(Vector(1, 1))
if __name__ == "__main__":
    unittest.main()
"""
METHOD = "import unittest\nclass Some(unittest.TestCase):\n    def test_one(self):\n        "
SPLIT = [
    "assert add(1, 2) == 3, 'no'",
    "assert 3 == add(1, 2) and not add(0, 0) or add(1, 1) == 3",
    "assert add([1], [2])[0] == 1 and add('a', 'b').upper() == 'AB' and add(1, 2) in (3, 4)",
    "assert abs(half(3) - 1.5) < 1e-6",
    "assert math.isclose(half(3), 1.5)",
    "import math as m\nfrom itertools import count as c\n"
    "assert m.isclose(half(m.pi), 1.5707963267948966) and next(c(3)) == add(1, 2)",
    "assert list(count(3)) == [0, 1, 2] and set(count(2)) == {0, 1} and sorted(count(3), reverse=True) == [2, 1, 0]",
    "assert [x for x in count(3)] == [0, 1, 2] and len(list(count(4))) == 4",
    "assert pair(1, 2) == (1, 2) and pair(1, 2).b == 2 and level() == 2 and isinstance(add(1, 2), int)",
    "assert table() == {'a': 1, 'b': [2.5, None, True, '\\ud800']} and type(add(1, 2)) is int",
    "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\n"
    "assert rare() == (Fraction(1, 3), Decimal('0.1'), datetime.date(2020, 1, 2), {1 + 2j}, b'x', range(3), 10 ** 30)",
    "from collections import deque\nimport datetime\n"
    "assert later() == (datetime.datetime(2020, 1, 3), deque([1, 2]), float('inf'))",
    "assert str(Vector(1, 2)) == '<1>' and Vector(3, 4).norm() == 5 and len(Vector(1, 1)) == 2",
    "assert str(-(Vector(1, 2) + Vector(3, 4))) == '<-4>' and Vector(1, 2) is not None and Vector(1, 2)",
    "assert Solution().twoSum(nums=[2, 7, 11], target=9) == [1, 0]",
    "assert all(add(x, y) == x + y for x in range(3) for y in range(3)) and add(*[1, 2]) == 3",
    "assert apply(lambda x: x + 1, 3) == 4 and add(1, [2, 3][0]) == 3",
    "from program import add as plus\nassert plus(2, 2) == 4",
]
WHOLE = [
    "assert add(1, 2) == 3\nassert add(1, 1) == 2",
    "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert True, 'good'\n"
    "    for x, y in [(1, 1), (2, 3)]:\n        assert candidate(x, y) == x + y\n\ncheck(add)",
    UNIT,
    "from program import add\ndef test_a():\n    found = add(1, 2)\n    expected = 3\n    assert found == expected",
]
INSIDE = [
    "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)",
    "assert isinstance(Vector(1, 2), Vector) and callable(add)",
    "nums = [1, 2]\nreverse(nums)\nassert nums == [2, 1]",
    "v = Vector(3, 4)\nassert v.norm() == 5",
    f"{METHOD}self.assertRaises(Failure, fail)",
    f"{METHOD}self.assertEqual(add(self.two, 1), 3)\n    def setUp(self):\n        self.two = 2",
    "try:\n    fail()\n    assert False\nexcept Failure:\n    pass",
    "assert sum([1, 2]) == 3",
    "assert f'{add(1, 2)}' == '3' and (half(3) + 0.5).is_integer()",
    "from unittest.mock import patch\nwith patch('program.add', lambda a, b: 9):\n"
    "    assert apply(lambda x: add(x, x), 1) == 9",
    "class Sub(Vector): pass\nassert Sub(3, 4).norm() == 5",
    "assert add(1,",
]


def kinds(plan):
    return {kind for steps in [plan.get("first", []), *plan.get("cases", [])] for step in steps for kind in step}


def test_which_tests_are_split():
    for text in SPLIT:
        assert "test" in kinds(split_tests([text])), text
        assert "inside" not in kinds(split_tests([text])) or "from program" in text
    for text in WHOLE:
        assert "test" in kinds(split_tests(text)), text
    for text in INSIDE:
        assert (split_tests([text])["cases"], split_tests(text)) == ([[{"inside": text}]], {"inside": text}), text


def test_the_program_is_not_given_the_expected_values():
    assert split_tests(["assert abs(half(3) - 1.5) < 1e-6 and len(list(count(n for n in [2]))) == 9"])["cases"] == [
        [{"test": "assert abs(_ask('half(3)') - 1.5) < 1e-06 and _ask('len(list(count((n for n in [2]))))') == 9"}]
    ]
    assert split_tests(["assert all(add(a, b) == c for a, b, c in [(1, 2, 3)])"])["cases"] == [
        [{"test": "assert all((_ask('add(a, b)', a=a, b=b) == c for a, b, c in [(1, 2, 3)]))"}]
    ]


@needs_sandbox
def test_right_programs_pass():
    texts = [*SPLIT, *INSIDE[:-1]]
    assert [passed(RIGHT, text) for text in INSIDE if METHOD in text] == [1.0, 1.0]
    failed = [] if passed(RIGHT, texts) == 1.0 else [text for text in texts if passed(RIGHT, [text]) != 1.0]
    assert failed == []
    assert [passed(RIGHT, text) for text in WHOLE] == [1.0] * len(WHOLE)
    mixed = ["assert add(1, 2) == 4", "assert fail() == 1", "assert add(1, 2) == 3"]
    assert passed(RIGHT, mixed) == pytest.approx(1 / 3)


@needs_sandbox
def test_wrong_programs_fail():
    wrong = RIGHT
    for old, new in {
        "return a + b": "return [a, b, 0.1]",
        "/ 2": "/ 3",
        "range(n)": "range(n + 1)",
        "= of": "= (of[0] + 1, 9)",
        'b")(a': 'b")(b',
        "a=1": "a=2",
        ").HIGH": ").LOW",
        "(1, 3)": "(1, 4)",
        "delta(1)": "delta(2)",
        "target][0]": "target][0][::-1]",
        "f(x)": "f(x + 1)",
    }.items():
        assert old in wrong
        wrong = wrong.replace(old, new)
    passing = [text for text in SPLIT if passed(wrong, [text])] if passed(wrong, SPLIT) else []
    assert passing == []
    assert [passed(wrong, text) for text in WHOLE[1:]] == [0.0, 0.0, 0.0]


# Programs that do not solve their task, and would pass.
EQUAL = """
class Equal(float):
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __sub__(self, other): return Equal()
    __abs__ = __hash__ = lambda self: Equal()
"""
TAKE_OVER = """
import gc, sys, json, os
def solve(*_):
    # All of the protocol is known: answer each request, and tell that everything has passed.
    channel = next(each for each in gc.get_objects() if type(each).__name__ == "_Channel")
    while True:
        channel.send([channel.receive(), ANSWER])
        channel.receive()
"""
FORGED = {
    "exec": "import builtins\nbuiltins.exec = builtins.eval = builtins.compile = lambda *a: None",
    "frames": """
import os, sys
frame, words, files = sys._getframe(), [], [1]
while frame:
    words += [value for value in frame.f_locals.values() if isinstance(value, str)]
    files += [value for value in frame.f_locals.values() if isinstance(value, int)]
    frame = frame.f_back
for word in [*words, ""]:
    for file in files:
        try: os.write(file, f"{word} total 1\\n{word} passed\\n".encode() * 2)
        except OSError: pass
def solve(*_): return 0
""",
    "files": """
import os, glob
for name in [*glob.glob("/proc/self/fd/*"), *(f"/proc/{os.getppid()}/fd/{fd}" for fd in range(20))]:
    try:
        with open(name, "w") as file: file.write("total 1\\npassed\\n")
    except OSError: pass
os._exit(0)
""",
    "unittest": "import unittest\nfor each in dir(unittest.TestCase):\n    if each.startswith('assert'):\n"
    "        setattr(unittest.TestCase, each, lambda *_: None)\ndef solve(*_): return 0",
    "end": "import os, sys\nos.kill(os.getppid(), 9)\ndef solve(*_): os._exit(0)",
    "memory": """
import ctypes, os
libc, parent = ctypes.CDLL(None), os.getppid()
traced = libc.ptrace(16, parent, None, None) == 0
try: traced = traced or bool(open(f"/proc/{parent}/mem"))
except OSError: pass
def solve(x): return 1 / traced and 2 * x
""",
    "equal": f"{EQUAL}\ndef solve(*_): return Equal()",
    "object": f"{EQUAL.replace('(float)', '')}\ndef solve(*_): return Equal()",
    "class": f"{EQUAL.replace('Equal', 'solve').replace('(float)', '')}    def __init__(self, *_): pass",
    "any": "from unittest.mock import ANY\ndef solve(*_): return ANY",
    "helpers": f"{EQUAL}\nabs = all = len = isinstance = round = lambda *_: Equal()\n"
    "class math: isclose = abs\ndef solve(*_): return 9",
    "true": TAKE_OVER.replace("ANSWER", "[True]"),
    "passed": TAKE_OVER.replace("ANSWER", "True"),
    "json": TAKE_OVER.replace("ANSWER", '[{"unittest.mock.ANY": ""}]'),
    "main": "import __main__, sys\n__main__._passes = __main__._all_pass = lambda *_: True\ndef solve(*_): return 0",
}


BESIDE = "for x in [1]:\n    y = solve(x)\n    assert y == 2 * x"


@needs_sandbox
@pytest.mark.parametrize("name", FORGED)
def test_no_program_forges_a_pass(name):
    tests = ["assert solve(1) == 2", "assert abs(solve(3) - 6.5) < 1e-6 or math.isclose(solve(3), 6)"]
    assert passed(FORGED[name], tests) == 0.0
    assert passed(FORGED[name], "def check(candidate):\n    assert candidate(1) == 2\ncheck(solve)") == 0.0
    assert passed(FORGED[name], f"{METHOD}self.assertEqual(solve(1), 2)") == 0.0


@needs_sandbox
@pytest.mark.parametrize("name", ["exec", "frames", "files", "end", "main"])
def test_known_ways_do_not_pass_tests_that_run_inside(name):
    assert passed(FORGED[name], [BESIDE]) == 0.0


@needs_sandbox
@pytest.mark.parametrize("name", ["passed", "equal"])
def test_programs_that_forge_a_pass_of_tests_that_run_inside(name):
    """The tests of forging would not see attacks that fail everywhere. The docs name these."""
    assert passed(FORGED[name], [BESIDE]) == 1.0


def test_a_plan_is_json():
    assert json.loads(json.dumps(split_tests(SPLIT))) == split_tests(SPLIT)
