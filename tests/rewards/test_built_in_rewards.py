"""The built-in rewards, of math only what all share: exact_match, choice, format, length, json, code."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from areno.config.reward import RewardConfig
from areno.errors import ConfigError
from areno.reward_fns.built_in import (
    BUILT_IN_REWARDS,
    ChoiceReward,
    CodeReward,
    ExactMatchReward,
    chosen_letter,
    fits_schema,
)
from areno.sandbox import box
from areno.scoring import functions
from areno.scoring.pool import RewardPool
from areno.types import RewardRecord

PROBLEM, _ = box.try_box()
needs_sandbox = pytest.mark.skipif(bool(PROBLEM), reason=f"code {PROBLEM}")


def config_of(name, **settings):
    """Settings, where those of a section are a dictionary."""
    rewards = BUILT_IN_REWARDS
    given = {key: rewards[key](**value) if key in rewards else value for key, value in settings.items()}
    return RewardConfig(fn=name, workers=1, **{"timeout_s": 60.0, **given})


def scores(name, *records, **settings):
    """What the reward gives, called as a run calls it."""
    with RewardPool(config_of(name, **settings)) as pool:
        return [outcome.value for outcome in pool.score(records)]


@pytest.mark.parametrize(
    ("completion", "solutions", "right"),
    [
        ("Paris", "Paris", True),
        ("  Paris \n", "Paris", True),
        ("New\n York", "New York", True),
        ("paris", "Paris", False),
        ("It is Paris", "Paris", False),
        ("I say <answer> Paris </answer>.", "Paris", True),
        ("<answer>Rome</answer> no, <answer>Paris</answer>", "Paris", True),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        ("work\n#### 1,200", "1,200", True),
        ("1200", "steps\n#### 1200", True),
        ("Rome", ["Paris", "Rome"], True),
        ("42", 42, True),
        ("", "Paris", False),
    ],
)
def test_exact_match(completion, solutions, right):
    assert ExactMatchReward().score(RewardRecord(completion=completion, solutions=solutions)) == float(right)


def test_exact_match_refuses_a_solution_of_several_boxes():
    with pytest.raises(ValueError, match="which has several boxes; exact_match compares one answer"):
        ExactMatchReward().score(RewardRecord(completion="b", solutions=[r"\boxed{a} or \boxed{b}"]))
    twice = r"\boxed{a}, that is \boxed{a}"
    assert ExactMatchReward().score(RewardRecord(completion="a", solutions=twice)) == 1.0


@pytest.mark.parametrize("solutions", [None, [], [None], {"a": 1}, ["a", {}]])
def test_rows_without_a_solution_are_errors(solutions):
    for reward in (ExactMatchReward(), ChoiceReward()):
        with pytest.raises(ValueError, match="field solutions is"):
            reward.score(RewardRecord(completion="a", solutions=solutions))


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) Paris", "B"),
        ("**B. Paris**", "B"),
        ("I think so.\nThe answer is (B).", "B"),
        ("The answer is B because C is wrong.", "B"),
        ("Answer: **C**", "C"),
        ("answer is A. No: the answer is D.", "D"),
        (r"thus \boxed{B}", "B"),
        (r"thus \boxed{\text{(B)}}", "B"),
        ("<answer>C</answer>", "C"),
        ("<answer>C. Rome</answer>", "C"),
        ("Some words.\n\nC", "C"),
        ("The answer is A or B", None),
        ("The answer is (A), (B) and (C)", None),
        ("The answer is a matter of taste", None),
        ("A cat sat on it", None),
        ("Berlin", None),
        ("<answer>A and B</answer>", None),
        ("", None),
    ],
)
def test_choice(completion, letter):
    assert chosen_letter(completion) == letter


def test_choice_of_letters_and_numbers():
    given = [("B", "B"), ("(b)", "B"), (1, "B"), (0, "B"), (["A", "B"], "B"), ("A", "B"), ("Paris", "B"), (True, "B")]
    records = [RewardRecord(completion=text, solutions=solutions) for solutions, text in given]
    assert scores("choice", *records) == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, None, None]


def test_format():
    texts = ["<think>a\nb</think>c", "a</think>\nc", "<think>a</think> ", "c", "<think>a</think>b</think>c"]
    records = [RewardRecord(completion=text) for text in texts]
    assert scores("format", *records) == [1.0, 1.0, 0.0, 0.0, 0.0]
    records = [RewardRecord(completion=text) for text in ["a=1", "a=1;", "\na=1"]]
    assert scores("format", *records, format={"pattern": r"\w=\d"}) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_tokens": 4}, [1.0, 1.0, 0.0, 0.0]),
        ({"min_tokens": 4}, [0.0, 1.0, 1.0, 1.0]),
        ({"min_tokens": 3, "max_tokens": 4, "margin_tokens": 4}, [0.5, 1.0, 0.5, 0.0]),
    ],
)
def test_length(settings, expected):
    records = [RewardRecord(tokens=[7] * n) for n in (1, 4, 6, 9)]
    assert scores("length", *records, RewardRecord(completion="a"), length=settings) == [*expected, None]


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("completion", "of_row", "expected"),
    [
        ('{"age": 3}', None, (1.0, 1.0)),
        ("[1, 2", None, (0.0, 0.0)),
        ("[NaN]", None, (0.0, 0.0)),
        ("[" * 100_000, None, (0.0, 0.0)),
        ('{"age": 3}', SCHEMA, (1.0, 1.0)),
        ('{"age": "3"}', json.dumps(SCHEMA), (0.0, 1.0)),
        ('<think>{</think>Here:\n```json\n{"age": 3}\n```\nDone.', SCHEMA, (1.0, 1.0)),
        ('```\n{"age": 3}\n```', SCHEMA, (1.0, 1.0)),
    ],
)
def test_json(completion, of_row, expected):
    pytest.importorskip("jsonschema")
    found = fits_schema(RewardRecord(completion=completion, record={"schema": of_row}))
    assert (found["reward"], found["parses"]) == expected


def test_json_of_a_schema_file(tmp_path, monkeypatch):
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    records = [RewardRecord(completion=text) for text in ('{"age": 3}', "{}")]
    assert scores("json", *records, json={"schema": str(file)}) == [1.0, 0.0]
    for text, message in [("{", "which is not JSON"), ('{"type": 3}', "which is no JSON schema")]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"reward\.json\.schema: is .*{message}"):
            scores("json", *records, json={"schema": str(file)})
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"the package jsonschema is not installed: pip install 'areno\[json\]'"):
        functions.reward_functions(config_of("json", json={"schema": str(file)}))


ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(1, 1) == 2", "assert add('a', 'b') == 'ab'"]
UNIT = """
import unittest
class Some(unittest.TestCase):
    def setUp(self):
        self.two = 2
    def test_one(self):
        self.assertEqual(add(self.two, 1), 3)
    def test_two(self):
        self.assertEqual(add(1, 1), 3)
"""
WORDS = {"inputs": ["a b\n", ["c", "d e"]], "outputs": ["2", ["1", "2"]]}
COUNT = "import sys\nfor line in sys.stdin:\n    print(len(line.split()), end='  \\n')\n"


def passed(program, tests, **settings):
    found = CodeReward(**settings).load()(RewardRecord(completion=program, solutions=tests))
    assert found["reward"] == (found["passed"] if settings.get("partial") else float(found["passed"] == 1))
    return found["passed"]


def passed_together(*programs, **settings):
    """`passed` of programs with their tests, at the same time: each waits for its limit."""
    with ThreadPoolExecutor(len(programs)) as beside:
        return list(beside.map(lambda each: passed(*each, **settings), programs))


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        (ADD, ASSERTS, 1.0),
        (f"<think>```python\nno\n```</think>Here it is:\n```python\n{ADD}```\nand\n```text\nno\n```", ASSERTS, 1.0),
        ("def add(a, b):\n    return 3 if (a, b) == (1, 2) else 0", ASSERTS, 0.5),
        ("def add(a, b:", ASSERTS, 0.0),
        (ADD + "1 / 0", ASSERTS, 0.0),
        (ADD + "exit()", ASSERTS, 1.0),
        (ADD + "if __name__ == '__main__':\n    input()", ASSERTS, 1.0),
        ("import os\ndef add(a, b):\n    os._exit(0)", ASSERTS, 0.0),
        ("def add(a, b):\n    raise SystemExit(0)", ASSERTS, 0.0),
        ("print('0 total 1', '0 passed')\ndef add(a, b):\n    return 0", ["assert add(1, 2) == 3"], 0.0),
        (ADD, "\n".join(ASSERTS), 1.0),
        (ADD, "assert add(1, 1) == 3", 0.0),
        (ADD, UNIT, 0.5),
        (ADD, "def test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(1, 2) == 4", 0.5),
        (ADD, "from program import add as plus\nassert plus(2, 2) == 4", 1.0),
        (COUNT, WORDS, 1.0),
        (COUNT, json.dumps(WORDS), 1.0),
        (COUNT.replace("print", "print(1) or print", 1), WORDS, 0.0),
        ("print(2)", {"inputs": ["", "x"], "outputs": [2, "3"]}, 0.5),
        ("import sys\nprint(2)\nprint('note', file=sys.stderr)", {"inputs": [""], "outputs": ["2"]}, 1.0),
        ("print(2)\nexit(1)", {"inputs": [""], "outputs": ["2"]}, 0.0),
    ],
)
def test_code(program, tests, expected):
    assert passed(program, tests) == expected


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(1 << 30)",
        "import socket; socket.socket()",
        "open('x', 'wb').write(b'a' * (1 << 25))",
    ],
)
def test_code_has_limits(program):
    function = f"{program}\ndef add(a, b):\n    return a + b", ASSERTS
    script = f"{program}\nprint(1)", {"inputs": [""], "outputs": ["1"]}
    assert passed_together(function, script, timeout_s=1.0, memory_mb=256) == [0.0, 0.0]


@pytest.mark.slow
@needs_sandbox
def test_code_that_hangs_in_one_test_has_passed_those_before_it():
    function = "def add(a, b):\n    while (a, b) == (1, 1): pass\n    return a + b", ASSERTS
    tests = {"inputs": ["0", "0", "1", "0"], "outputs": ["0"] * 4}
    script = "n = int(input())\nwhile n: pass\nprint(0)", tests
    assert passed_together(function, script, timeout_s=2.5, partial=True) == [0.5, 0.5]


@needs_sandbox
def test_code_in_the_processes_of_a_run():
    records = [RewardRecord(completion=program, solutions=ASSERTS) for program in (ADD, "def add(a, b): return 3")]
    records += [RewardRecord(completion=ADD, solutions=tests) for tests in (None, {"inputs": ["1"], "outputs": []})]
    assert scores("code", *records, code={"partial": True}) == [1.0, 0.25, None, None]


def test_code_where_nothing_limits_it(monkeypatch):
    monkeypatch.setattr(box.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"reward\.fn: names code, which needs Linux"):
        functions.reward_functions(RewardConfig(fn=["code"]))


@pytest.mark.parametrize(
    ("name", "solution", "right", "wrong"),
    [
        ("math", "42", r"\boxed{42}", r"\boxed{41}"),
        ("math", "42", "#### 42", "#### 41"),
        ("math", "42", "The answer is 42.", "It is 41."),
        ("math", "8", "the answer is 8", r"so \boxed{7}"),
        ("exact_match", "B", r"\boxed{B}", r"\boxed{A}"),
        ("exact_match", "B", "<answer>B</answer>", "A"),
        ("exact_match", "B", "B", "A"),
        ("choice", "B", "The answer is (B).", "The answer is (A)."),
        ("choice", "B", r"\boxed{B}", "A"),
    ],
)
def test_reasoning_is_not_read(name, solution, right, wrong):
    def score(completion, solution=solution):
        return BUILT_IN_REWARDS[name]().load()(RewardRecord(completion=completion, solutions=solution))

    assert score(f"<think>{right}</think>{wrong}") == score(f"{right}\n</think>\n\n{wrong}") == 0.0
    assert score(f"{right}</think>") == 0.0
    assert score(f"<think>{wrong}</think>\n{right}") == score(f"a</think>{wrong}</think>{right}") == 1.0
    assert score(right) == 1.0
    assert score(right, f"<think>not {wrong}</think>{solution}") == 1.0


@pytest.mark.parametrize("unlimited", [[], ["files"], ["signals"], ["files", "signals"]])
def test_code_warns_of_what_the_machine_does_not_limit(unlimited, monkeypatch, caplog):
    means = {each: "" for each in ("files", "signals") if each not in unlimited}
    monkeypatch.setattr(box, "try_box", lambda: ("", means))
    functions.reward_functions(RewardConfig(fn=["code"]))
    words = {"files": "can read and change all files", "signals": "can end processes"}
    assert [words[each] in said for each, said in zip(unlimited, caplog.messages, strict=True)] == [True] * len(
        unlimited
    )


@needs_sandbox
def test_code_reads_what_the_settings_name(tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("12")
    record = RewardRecord(
        completion=f"print(open({str(data)!r}).read())", solutions={"inputs": [""], "outputs": ["12"]}
    )
    assert scores("code", record) == [0.0]
    assert scores("code", record, code={"read_paths": [str(tmp_path)]}) == [1.0]
    with pytest.raises(ConfigError, match=r"reward\.code\.read_paths: has nothing.txt, which does not exist"):
        functions.reward_functions(config_of("code", code={"read_paths": ["nothing.txt"]}))
