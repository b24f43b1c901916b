"""Script that runs the tests for the reward `code` on a program. code_reward.py starts it in a box.

The script reads {"word", "program", "tests"} as JSON from standard input. The word is secret, so that the program
cannot report that it has passed. The script writes "<word> total <number of tests>", then "<word> passed" for each
test that passes. All other output, from the program and the tests, is dropped.
"""

from __future__ import annotations

import json
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Read the tests, run them, report the results, and end the process without the program's exit handlers."""
    given = json.loads(sys.stdin.read())
    word, program, tests = given.pop("word"), given.pop("program"), given.pop("tests")
    output, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)

    def tell(text: str) -> None:
        os.write(output, f"{word} {text}\n".encode())

    module = types.ModuleType("program")
    sys.modules["program"] = module
    loads = _passes(lambda: _load(program, module))
    cases = (
        [lambda test=test: _execute(test, "test.py", module) for test in tests]
        if isinstance(tests, list)
        else _cases(tests, module)
    )
    tell(f"total {len(cases)}")
    for case in cases if loads else []:
        if _passes(case):
            tell("passed")
    os._exit(0)


def _execute(text: str, name: str, module: types.ModuleType) -> None:
    """Run Python code in the namespace of a module. `name` is the file name in tracebacks."""
    exec(compile(text, name, "exec"), vars(module))


def _load(program: str, module: types.ModuleType) -> None:
    """Run the program in the namespace of a module.

    An exit with status 0 counts as success. Any other exit or exception is raised.
    """
    try:
        _execute(program, "program.py", module)
    except SystemExit as end:
        if end.code:
            raise


def _passes(case: Callable[[], Any]) -> bool:
    """Call a test, and return whether it raises no exception."""
    try:
        case()
    except BaseException:
        return False
    return True


def _cases(text: str, module: types.ModuleType) -> list[Callable[[], Any]]:
    """Run Python code with tests in a module, and return the tests as functions.

    These are the methods of its unittest classes and its test_... functions. If there are none, or if the code raises
    an exception, the code as a whole is one test.
    """
    before = set(vars(module))
    ran = _passes(lambda: _execute(text, "test.py", module))
    new = {name: value for name, value in vars(module).items() if name not in before}
    cases: list[Callable[[], Any]] = [
        value for name, value in new.items() if name.startswith("test_") and callable(value)
    ]
    for value in new.values():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            cases += [case.debug for case in unittest.defaultTestLoader.loadTestsFromTestCase(value)]
    if ran and cases:
        return cases

    def result() -> None:
        if not ran:
            raise AssertionError("the tests raised an error")

    return [result]


if __name__ == "__main__":
    main()
