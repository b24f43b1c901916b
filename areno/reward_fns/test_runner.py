"""Script that runs the tests for the reward `code` on a program. code_reward.py starts it in a box.

The script reads {"program", "plan"} as JSON from standard input. The plan comes from assertions.py. The script writes
"total <number of tests>", then "passed" for each test that passes. All other output is dropped.

The program runs in a child process that has no standard input or output, and no access to its parent's. The parent has
the tests, asks the child for values, and compares them. The child itself executes steps of the kind "inside" and
reports whether they pass, so a program that takes over its interpreter can pass them.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import sys
import types
from collections.abc import Callable
from typing import Any

_PR_SET_DUMPABLE = 4  # linux/prctl.h


def main() -> None:
    """Run the tests, report the results, and end the process without exit handlers."""
    (requests, ask), (answer, answers) = os.pipe(), os.pipe()
    output, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        for fd in (output, nothing, ask, answer):
            os.close(fd)
        _serve(_Channel(requests, answers))
        os._exit(0)
    # The child could open the files of this process otherwise, or trace it. It has not got the program yet.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, *[ctypes.c_ulong(0)] * 4)
    os.close(requests)
    os.close(answers)
    given = json.loads(sys.stdin.read())
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    try:
        _run(given, _Program(_Channel(answer, ask)), lambda text: os.write(output, f"{text}\n".encode()))
    finally:
        os._exit(0)


def _run(given: dict[str, Any], program: _Program, tell: Callable[[str], Any]) -> None:
    loads, plan = program.request_succeeds("load", given["program"]), given["plan"]
    if "inside" in plan:
        n = program.request("cases", plan["inside"])
        cases = [lambda number=number: program.request_succeeds("case", number) for number in range(n)]
    else:
        names: dict[str, Any] = {"_ask": program.ask}
        first = _passes(lambda: _all_pass(plan["first"], program, names))
        cases = [lambda steps=steps: first and _all_pass(steps, program, names) for steps in plan["cases"]]
    tell(f"total {len(cases)}")
    for case in cases if loads else []:
        if _passes(case):
            tell("passed")


def _all_pass(steps: list[dict[str, str]], program: _Program, names: dict[str, Any]) -> bool:
    for step in steps:
        for kind, code in step.items():
            if kind != "test" and not program.request_succeeds("run", code):
                return False
            if kind != "inside":
                exec(compile(code, "test.py", "exec"), names)
    return True


def _passes(case: Callable[[], Any]) -> bool:
    try:
        return case() is True
    except BaseException:
        return False


class _Channel:
    """Sends and receives JSON values through pipes."""

    def __init__(self, read: int, write: int):
        self._read, self._write = os.fdopen(read), os.fdopen(write, "w")

    def send(self, value: Any) -> None:
        self._write.write(json.dumps(value) + "\n")
        self._write.flush()

    def receive(self) -> Any:
        line = self._read.readline()
        if not line:
            raise EOFError
        return json.loads(line)


class _Program:
    """The child process, as seen from the process of the tests."""

    def __init__(self, channel: _Channel):
        self._channel = channel

    def request(self, kind: str, *arguments: Any) -> Any:
        word = secrets.token_hex(16)  # the child reads it when the code has run, so that an answer shows that it has
        self._channel.send([kind, *arguments])
        self._channel.send(word)
        answered, value = self._channel.receive()
        if answered != word:
            os._exit(0)
        return value

    def request_succeeds(self, kind: str, *arguments: Any) -> bool:
        return self.request(kind, *arguments) is True

    def ask(self, code: str, **names: Any) -> Any:
        """Let the program evaluate an expression, and return the value. Raises an exception if the program does."""
        return _decoded(*self.request("ask", code, {name: _encoded(value) for name, value in names.items()}))


class _Object:
    """Stands for an object of the program whose value cannot be sent. It equals no value in a test."""

    def __init__(self, is_true: Any):
        self._is_true = is_true is True

    def __bool__(self) -> bool:
        return self._is_true


def _encoded(value: Any) -> Any:
    """Convert a value to JSON. A value of a subclass of a built-in type is sent as that type."""
    kind = type(value)
    if kind.__module__ in ("numpy", "torch") and not value.shape:
        return _encoded(value.item())
    if value is None or kind is bool:
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 64 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    for base in (list, tuple, set, frozenset):
        if isinstance(value, base):
            return {base.__name__: [_encoded(each) for each in base(value)]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(each)] for key, each in dict.items(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    name = f"{kind.__module__}.{kind.__name__}"
    if name in ("decimal.Decimal", "fractions.Fraction", "datetime.date", "datetime.datetime", "datetime.time"):
        return {name: str(value)}
    if name == "datetime.timedelta":
        return {name: [value.days, value.seconds, value.microseconds]}
    if name == "collections.deque":
        return {name: [[_encoded(each) for each in value], value.maxlen]}
    if hasattr(kind, "__next__"):
        return {"iterator": [_encoded(each) for each in value]}
    return {"object": bool(value)}


def _decoded(value: Any) -> Any:
    """Convert JSON from `_encoded` back to the value. Raises an exception for other JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "object":
        return _Object(content)
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](map(_decoded, content))
    if kind == "dict":
        return {_decoded(key): _decoded(each) for key, each in content}
    if kind in _PLAIN:
        return _PLAIN[kind](content)
    return _library_value(kind, content)


_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
}
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
}


def _library_value(kind: str, content: Any) -> Any:
    import datetime  # rare, and not fast
    from collections import deque
    from decimal import Decimal
    from fractions import Fraction

    readers: dict[str, Callable[[Any], Any]] = {
        "decimal.Decimal": Decimal,
        "fractions.Fraction": Fraction,
        "datetime.date": datetime.date.fromisoformat,
        "datetime.datetime": datetime.datetime.fromisoformat,
        "datetime.time": datetime.time.fromisoformat,
        "datetime.timedelta": lambda parts: datetime.timedelta(*parts),
        "collections.deque": lambda parts: deque(map(_decoded, parts[0]), parts[1]),
    }
    return readers[kind](content)


def _serve(channel: _Channel) -> None:
    """Run the program's process: answer the requests of the tests until there are no more."""
    module = types.ModuleType("program")
    sys.modules["program"] = sys.modules["__main__"] = module
    cases: list[Callable[[], Any]] = []
    run, compiled, evaluate = exec, compile, eval  # the program may replace them

    def execute(code: str, name: str = "test.py") -> bool:
        run(compiled(code, name, "exec"), vars(module))
        return True

    def load(code: str) -> bool:
        try:
            return execute(code, "program.py")
        except SystemExit as end:
            return not end.code

    def evaluate_expression(code: str, names: dict[str, Any]) -> Any:
        function = evaluate(compiled(f"lambda {', '.join(names)}: ({code})", "test.py", "eval"), vars(module))
        return [_encoded(function(*map(_decoded, names.values())))]

    def find_cases(code: str) -> int:
        cases.extend(_cases(code, module, execute))
        return len(cases)

    def run_case(number: int) -> bool:
        cases[number]()
        return True

    answers = {"load": load, "run": execute, "ask": evaluate_expression, "cases": find_cases, "case": run_case}
    while True:
        try:
            kind, *arguments = channel.receive()
        except EOFError:
            return
        try:
            answer = answers[kind](*arguments)
        except BaseException:
            answer = []
        channel.send([channel.receive(), answer])


def _cases(code: str, module: types.ModuleType, execute: Callable[[str], bool]) -> list[Callable[[], Any]]:
    """Run Python code with tests in a module, and return the tests as functions.

    The tests are the methods of unittest classes and the functions test_... in the code. If there are none, or if the
    code raises an exception, the code as a whole is one test.
    """
    import unittest  # takes long, and most tests do without

    before = set(vars(module))
    ran = _passes(lambda: execute(code))
    new = {name: value for name, value in vars(module).items() if name not in before}
    cases: list[Callable[[], Any]] = [
        value for name, value in new.items() if name.startswith("test_") and callable(value)
    ]
    for value in new.values():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            cases += [case.debug for case in unittest.defaultTestLoader.loadTestsFromTestCase(value)]
    if ran and cases:
        return cases

    def raise_if_failed() -> None:
        if not ran:
            raise AssertionError("the tests raised an error")

    return [raise_if_failed]


if __name__ == "__main__":
    main()
