"""Split each test into expressions that the tested program evaluates and a comparison of their values.

The program may be hostile, so its process must not decide whether a test passes, nor know the expected values. In
`assert add(1, 2) == 3` it evaluates `add(1, 2)`, and the process of the tests (test_runner.py) compares the value. A
test that cannot be split like this runs in the program's process.
"""

from __future__ import annotations

import ast
import builtins
from typing import Any

_HELPERS = {
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "operator", "re", "statistics", "string", "typing"),
}
"""Modules with which a test may make or compare values."""
_OF_OBJECTS = {"format", "getattr", "hasattr", "repr", "str", "vars", "dir", "id", "hash"}
"""Built-in functions whose result depends on more than the value of their argument, such as its class or address."""
_UNITTEST = {
    **dict.fromkeys(("assertEqual", "assertListEqual", "assertDictEqual", "assertSetEqual", "assertTupleEqual"), "=="),
    "assertNotEqual": "!=",
    "assertIs": "is",
    "assertIsNot": "is not",
    "assertIn": "in",
    "assertNotIn": "not in",
    "assertLess": "<",
    "assertLessEqual": "<=",
    "assertGreater": ">",
    "assertGreaterEqual": ">=",
}
"""Method of unittest -> the operator between its two arguments."""
_UNITTEST_OF_ONE = {"assertTrue": "", "assertFalse": "not", "assertIsNone": "None is", "assertIsNotNone": "None is not"}
"""Method of unittest -> the operator to put before its argument."""
_BUILT_IN = frozenset(dir(builtins))

Names = dict[str, Any]
"""Names that are not the program's -> expression of a variable, None for a result of the program, or ... for others."""
Steps = list[dict[str, str]]
"""Each is {where: code}: "test" (process of the tests, calls `_ask`), "inside" (the program's process) or "both"."""


class _CannotSplit(Exception):
    pass


_ERRORS = (_CannotSplit, SyntaxError, ValueError, RecursionError, MemoryError)


def split_tests(tests: str | list[str]) -> dict[str, Any]:
    """Return the plan with which test_runner.py runs tests.

    Args:
        tests: Python code, or a list of texts, each of which is one test.

    Returns:
        {"first": steps before the tests, "cases": a list of steps for each test}. If Python code cannot be split,
        {"inside": the code}: all of it runs in the program's process.
    """
    known: Names = dict.fromkeys(dir(builtins), ...)
    if isinstance(tests, list):
        return {"first": [], "cases": [_split_listed_test(text, known) for text in tests]}
    try:
        return _split_code(ast.parse(tests).body, known)
    except _ERRORS:
        return {"inside": tests}


def _split_listed_test(text: str, known: Names) -> Steps:
    try:
        body = ast.parse(text).body
        if any(isinstance(each, ast.Assign) for each in body):
            raise _CannotSplit  # another text may use the variable
        return _split_statements(body, known)
    except _ERRORS:
        return [{"inside": text}]


def _split_code(body: list[ast.stmt], known: Names) -> dict[str, Any]:
    """Split code with functions test_..., unittest classes, a call of HumanEval's check, or only assertions."""
    checks = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}
    first, cases = [], []
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name):
                if name.startswith("test_") and not ast.unparse(statement.args) and not statement.decorator_list:
                    cases.append(statement.body)
            case ast.Expr(ast.Call(ast.Name(name), [ast.Name(tested)], [])) if name in checks and tested not in known:
                function = checks.pop(name)
                if len(function.args.args) != 1 or function.decorator_list:
                    raise _CannotSplit
                first += [_Renamer(function.args.args[0].arg, tested).visit(each) for each in function.body]
            case ast.ClassDef():
                cases += _test_method_bodies(statement)
            case ast.Import([ast.alias("unittest", None)]):
                known["unittest"] = ...
            case ast.If(ast.Compare(ast.Name("__name__"))):
                pass  # it is not "__main__"
            case _:
                first.append(statement)
    if any(not name.startswith("test_") for name in checks) or len(checks) > len(cases):
        raise _CannotSplit
    steps = _split_statements(first, known)
    return {
        "first": steps if cases else [],
        "cases": [_split_statements(case, dict(known)) for case in cases] or [steps],
    }


def _test_method_bodies(statement: ast.ClassDef) -> list[list[ast.stmt]]:
    """Return the bodies of the test methods of a unittest class. Calls such as self.assertEqual become assertions."""
    bodies = []
    for each in statement.body:
        match each:
            case ast.FunctionDef(name, ast.arguments(args=[_]), body, []) if name.startswith("test"):
                bodies.append([_to_assertion(inner) for inner in body])
            case ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case _:
                raise _CannotSplit
    used = {each.id for body in bodies for inner in body for each in ast.walk(inner) if isinstance(each, ast.Name)}
    if "self" in used or [ast.unparse(base) for base in statement.bases] != ["unittest.TestCase"]:
        raise _CannotSplit
    return bodies


def _to_assertion(statement: ast.stmt) -> ast.stmt:
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), name), [one, *_], [])) if name in _UNITTEST_OF_ONE:
            code = f"{_UNITTEST_OF_ONE[name]} ({ast.unparse(one)})"
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), name), [one, other, *_], [])) if name in _UNITTEST:
            code = f"({ast.unparse(one)}) {_UNITTEST[name]} ({ast.unparse(other)})"
        case _:
            return statement
    return ast.parse(f"assert {code}").body[0]


class _Renamer(ast.NodeTransformer):
    def __init__(self, old: str, new: str):
        self._old, self._new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._new, node.ctx) if node.id == self._old else node


def _split_statements(body: list[ast.stmt], known: Names) -> Steps:
    """Split statements into steps, and add the names that they import or assign to `known`."""
    steps = []
    for statement in body:
        code = ast.unparse(statement)
        match statement:
            case ast.Import() | ast.ImportFrom():
                steps.append({_import_step_kind(statement, known): code})
            case ast.Assert() | ast.Assign([ast.Name()]) | ast.For():
                splitter = _Splitter(known)
                test = ast.unparse(ast.fix_missing_locations(splitter.visit(statement)))
                if not splitter.asks and any(isinstance(each, ast.Call) for each in ast.walk(statement)):
                    raise _CannotSplit  # perhaps of a function of the program with the name of a built-in one
                steps += [{"both": f"import {name}"} for name in sorted(splitter.modules)] + [{"test": test}]
                if isinstance(statement, ast.Assign):
                    known[ast.unparse(statement.targets[0])] = None if splitter.asks else statement.value
            case ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case _:
                raise _CannotSplit
    return steps


def _import_step_kind(statement: ast.Import | ast.ImportFrom, known: Names) -> str:
    if isinstance(statement, ast.ImportFrom) and statement.module == "program":
        return "inside"
    modules = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [x.name for x in statement.names]
    names = {each.asname or each.name.partition(".")[0] for each in statement.names}
    if "*" in names or any(name.partition(".")[0] not in _HELPERS for name in modules):
        raise _CannotSplit
    known |= dict.fromkeys(names, ...)
    return "both"


class _Splitter(ast.NodeTransformer):
    """Replaces each expression that the program must evaluate by `_ask(its source, variables that it uses)`."""

    def __init__(self, known: Names):
        self._known, self._bound = known, set[str]()
        self.asks, self.modules = 0, set[str]()

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt):
            if isinstance(node, ast.For):
                if node.orelse or any(not isinstance(each, ast.Assert | ast.For) for each in node.body):
                    raise _CannotSplit
            elif isinstance(node, ast.Assert):
                node.msg = None
            self._bound |= _bound_names(node.value if isinstance(node, ast.Assign) else node)
        elif isinstance(node, ast.expr) and self._needs_program(node):
            return self._ask(node)
        elif self._is_hidden(node):
            raise _CannotSplit
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if isinstance(node.ctx, ast.Load) and self._names_program(node.id):
            raise _CannotSplit
        return node

    def _names_program(self, name: str) -> bool:
        return name not in self._known and name not in self._bound

    def _needs_program(self, node: ast.expr) -> bool:
        """Return whether the program must evaluate an expression: a call of it, or an operation on only such calls."""
        match node:
            case ast.Call(ast.Name(name), arguments, keywords):
                alone = len(arguments) == 1 and not keywords and name in _BUILT_IN and name != "type"
                return self._names_program(name) or (alone and self._needs_program(arguments[0]))
            case ast.Call(ast.Attribute() as function):
                return self._begins_with_program(function)
            case ast.Call(ast.expr() as inner) | ast.Attribute(inner) | ast.Subscript(inner):
                return self._needs_program(inner)
            case ast.UnaryOp(ast.USub() | ast.UAdd() | ast.Invert(), inner):
                return self._needs_program(inner)
            case ast.BinOp(left, _, right):
                return self._needs_program(left) and self._needs_program(right)
        return False

    def _begins_with_program(self, node: ast.Attribute) -> bool:
        match node.value:
            case ast.Name(name) if name in _HELPERS and self._names_program(name):
                self.modules.add(name)  # a test may use what the program imports
                self._bound.add(name)
                return False
            case ast.Name(name):
                return self._names_program(name)
            case ast.Attribute() as inner:
                return self._begins_with_program(inner)
            case inner:
                return self._needs_program(inner)

    def _is_hidden(self, node: ast.AST) -> bool:
        """Return whether an expression depends on more than the value of a program's result, such as the class."""
        match node:
            case ast.Compare(left, _, others):
                return sum(map(self._has_program, (left, *others))) > 1  # perhaps objects of its own classes
            case ast.Call(ast.Name("isinstance"), [value, kinds]) if self._has_program(value):
                names = [each for each in ast.walk(kinds) if isinstance(each, ast.Name)]
                return any(each.id not in _BUILT_IN for each in names)
            case ast.Call(ast.Name(name), arguments) if name in _OF_OBJECTS:
                return any(map(self._has_program, arguments))
            case ast.FormattedValue(inner) | ast.Attribute(inner):
                return self._has_program(inner)
            case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom() | ast.Starred():
                return True
        return False

    def _has_program(self, node: ast.expr) -> bool:
        if self._needs_program(node):
            return True
        if isinstance(node, ast.Name):
            return self._names_program(node.id) or self._known.get(node.id, ...) is None
        return any(self._has_program(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))

    def _ask(self, node: ast.expr) -> ast.Call:
        self.asks += 1
        used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - _bound_names(node)
        variables = {name for name in used & self._known.keys() if self._known[name] is not ...}
        if not all(isinstance(self._known[name], ast.Constant) for name in variables):
            raise _CannotSplit  # the program may change it, or it is an object of the program
        values = sorted(used & (self._bound - self.modules) | variables)
        keywords = [ast.keyword(name, ast.Name(name, ast.Load())) for name in values]
        return ast.Call(ast.Name("_ask", ast.Load()), [ast.Constant(ast.unparse(node))], keywords)


def _bound_names(node: ast.AST) -> set[str]:
    """Return the names that an expression or a loop binds."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return names | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
