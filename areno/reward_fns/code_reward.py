"""The built-in reward `code`: 1.0 if the program in the completion passes all tests in its row, else 0.0.

The program is the last fenced Python block after </think>. Without a Python block, it is the last block of any kind
after </think>, and without any block all text after </think>. The tests are in the row's field `solutions`, in one of
these forms:

- a text with Python code that runs after the program: assertions, functions test_..., or unittest classes
- a list of texts, such as assertions. Each is one test
- {"inputs": [...], "outputs": [...]}: each input of the program with its expected output. White space at the ends of
  lines and of the output is ignored

Programs run in a box (areno/sandbox). Most tests are decided outside of the program's process. Tests that cannot be
split (assertions.py) run in it, so a program that takes over its interpreter can pass these. The result also has the
part `passed`, the fraction of tests that pass.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.reward_fns.answers import fenced_block
from areno.reward_fns.assertions import split_tests
from areno.sandbox.box import Box, run, temporary_folder

_RUNNER = Path(__file__).with_name("test_runner.py")
_MAX_OUTPUT_CHARS = 1 << 22  # characters
_N_PROCESSES = 4  # of a program may use all memory of a process at the same time


def score_program(
    record: Any, *, timeout_s: float, memory_mb: int, partial: bool, read_paths: Sequence[str] = ()
) -> dict[str, float]:
    """Run the tests in a RewardRecord on the program in its completion.

    Args:
        record: The sample. Its `solutions` are the tests.
        timeout_s: The time limit for all tests together, in seconds.
        memory_mb: The memory limit of each process of the program, in MiB. All together have four times as much.
        partial: If True, the reward is the fraction of tests that pass. If False, it is 1 only if all tests pass.
        read_paths: Further files and folders that the program may read.

    Returns:
        {"reward", "passed"}. "passed" is the fraction of tests that pass.

    Raises:
        ValueError: `record.solutions` has none of the supported forms: Python code, a list of texts, or inputs with
            outputs.
    """
    tests, end = _parse_tests(record.solutions), time.monotonic() + timeout_s
    program = fenced_block(record.completion, "python", "py", "python3")
    with temporary_folder("areno-code-") as folder:
        box = Box(folder, timeout_s, _N_PROCESSES * memory_mb, [_RUNNER, *read_paths], each_megabytes=memory_mb)
        if isinstance(tests, Mapping):
            (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
            results = [
                _prints_expected(
                    replace(box, seconds=end - time.monotonic()), _program_text(given), _program_text(expected)
                )
                for given, expected in zip(tests["inputs"], tests["outputs"], strict=True)
            ]
            passed = sum(results) / len(results)
        else:
            passed = _passed_fraction(box, program, tests)
    return {"reward": passed if partial else float(passed == 1.0), "passed": passed}


def _parse_tests(solutions: Any) -> Any:
    """Return the tests in a row's `solutions`: a text, a list of texts, or a dictionary of inputs and outputs.

    Raises ValueError if the solutions have another form. A text that is a JSON object is parsed.
    """
    if isinstance(solutions, str) and solutions.strip().startswith("{"):
        with contextlib.suppress(ValueError):  # Python may begin with a dictionary, too
            solutions = json.loads(solutions)
    if isinstance(solutions, str) and solutions.strip():
        return solutions
    if isinstance(solutions, list) and solutions and all(isinstance(test, str) for test in solutions):
        return solutions
    if isinstance(solutions, Mapping) and "fn_name" not in solutions:
        inputs, outputs = solutions.get("inputs"), solutions.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and 0 < len(inputs) == len(outputs):
            return solutions
    raise ValueError(
        f"field solutions is {str(solutions)[:200]!r}; tests are needed: Python code, a list of assertions, or "
        "inputs and outputs, as many of the one as of the other"
    )


def _program_text(lines: Any) -> str:
    """Return an input or an output of the program as text. A list becomes one line per entry."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def _prints_expected(box: Box, given: str, expected: str) -> bool:
    """Run program.py with the input `given`. Return whether it exits with status 0 and prints the expected output."""
    if box.seconds <= 0:
        return False
    command = [sys.executable, "-I", "program.py"]
    result = run(command, box, stdin=given, stderr=False, max_output=_MAX_OUTPUT_CHARS)
    return result.status == 0 and _stripped_lines(result.output) == _stripped_lines(expected)


def _stripped_lines(text: str) -> list[str]:
    """Return the lines of an output, without white space at the end of each line and of the output."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _passed_fraction(box: Box, program: str, tests: str | list[str]) -> float:
    """Run all tests on the program, and return the fraction of tests that pass.

    Tests that were not reached, for example because the time limit was exceeded, count as failed.
    """
    given = json.dumps({"program": program, "plan": split_tests(tests)})
    command = [sys.executable, "-I", str(_RUNNER)]
    output = run(command, box, stdin=given, stderr=False, max_output=_MAX_OUTPUT_CHARS).output
    total, *passed = output.splitlines() or ["total 1"]
    return len(passed) / int(total.removeprefix("total "))
