"""The texts of the warnings and errors in our code, found by their syntax. A hole for a value is `…`."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEVELS = {"warning", "error", "exception", "critical"}
ERRORS = {"ArenoError", "EngineError", "CheckpointError", "WorkerLost"}
HOLE = re.compile(r"%-?[\d.]*[a-z]|\{[^{}]*\}")


@dataclass(frozen=True)
class Message:
    place: str  # file and line
    text: str

    @property
    def is_only_a_hole(self) -> bool:
        """Whether its words come from elsewhere, as in logger.warning("%s", text)."""
        return len(re.sub("[^a-z]", "", self.text)) < 8


def warnings(folder: Path) -> Iterator[Message]:
    """What is given to a logger as a warning or an error, and to warnings.warn."""
    for source in _sources(folder):
        for call in source.calls:
            if isinstance(call.func, ast.Attribute) and call.args:
                owner = call.func.value
                name = owner.id if isinstance(owner, ast.Name) else ""
                if (name.lower().endswith("logger") and call.func.attr in LEVELS) or (name, call.func.attr) == (
                    "warnings",
                    "warn",
                ):
                    yield from _messages(source, call, call.args[0])


def errors(folder: Path) -> Iterator[Message]:
    """What is raised or made as one of ERRORS."""
    for source in _sources(folder):
        for made in source.calls:
            if isinstance(made.func, ast.Name) and made.func.id in ERRORS and made.args:
                yield from _messages(source, made, made.args[0])


def arguments(file: Path, function: str) -> Iterator[Message]:
    """The first argument of each call of a function in a file."""
    [source] = _sources(file)
    for call in source.calls:
        if function == getattr(call.func, "attr", getattr(call.func, "id", None)) and call.args:
            yield from _messages(source, call, call.args[0])


def returned(file: Path) -> Iterator[Message]:
    """The texts that the functions of a file return or yield."""
    [source] = _sources(file)
    for node in (node for node in source.nodes if isinstance(node, ast.Return | ast.Yield) and node.value):
        yield from (each for each in _messages(source, node, node.value) if not each.is_only_a_hole)


class _Source:
    """A file, parsed once."""

    def __init__(self, path: Path):
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.nodes = list(ast.walk(self.tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]


_source = cache(_Source)


def _sources(where: Path) -> list[_Source]:
    return [_source(file) for file in (sorted(where.rglob("*.py")) if where.is_dir() else [where])]


def _messages(source: _Source, at: ast.AST, value: ast.expr) -> Iterator[Message]:
    place = f"{source.path.relative_to(ROOT)}:{at.lineno}"  # type: ignore[attr-defined]
    inside = [function for function in source.functions if _spans(function, at)]
    scope = max(inside, key=lambda node: node.lineno, default=source.tree)
    for text in dict.fromkeys(_texts(value, scope)):
        yield Message(place, re.sub("(… ?)+…", "…", text))


def _spans(function: ast.FunctionDef, node: ast.AST) -> bool:
    return function.lineno <= node.lineno <= (function.end_lineno or 0)  # type: ignore[attr-defined]


def _texts(value: Any, scope: ast.AST) -> Iterator[str]:
    """What an expression of text can be."""
    if isinstance(value, str):  # between the holes of an f-string
        yield value
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield HOLE.sub("…", value.value)
    elif isinstance(value, ast.JoinedStr):
        parts = [_texts(getattr(part, "value", part), scope) for part in value.values]
        yield from map("".join, itertools.product(*parts))
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        for left in _texts(value.left, scope):
            yield from (left + right for right in _texts(value.right, scope))
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body, scope)
        yield from _texts(value.orelse, scope)
    elif isinstance(value, ast.Call) and getattr(value.func, "id", "") == "Problem":
        yield from _texts(value.args[1], scope)
    elif isinstance(value, ast.Call) and getattr(value.func, "attr", "") == "format":
        yield from _texts(value.func.value, scope)  # type: ignore[attr-defined]
    elif isinstance(value, ast.Name) and (given := list(_assigned(value.id, scope))):
        yield from given
    else:
        yield "…"


def _assigned(name: str, scope: ast.AST) -> Iterator[str]:
    """The texts that a function gives to a variable; what is added to it later ends each."""
    ends = [""]
    for node in ast.walk(scope):
        if isinstance(node, ast.AugAssign) and getattr(node.target, "id", "") == name:
            ends = [end + more for end in ends for more in _texts(node.value, scope)]
    for node in ast.walk(scope):
        given = isinstance(node, ast.Assign) and name in {getattr(target, "id", "") for target in node.targets}
        if given and name not in {getattr(part, "id", "") for part in ast.walk(node.value)}:
            yield from (text + end for text in _texts(node.value, scope) for end in ends)
