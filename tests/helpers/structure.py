"""Checks on the shape of a package: who imports whom, how long files are, and habits that a parser can see.

A check is a function from modules to the set of violations it finds. tests/repository/test_structure.py applies them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPO = Path(__file__).parents[2]
STAIRCASE = (  # a module imports from its own step or from those after it; names in one tuple never import each other
    *("areno", "cli", "bench", "league", "report", "checks", "recipes", "launch", "trainers", "run", "api", "agents"),
    "server",
    *(
        ("scoring", "plan"),
        "user_processes",
        ("data", "tracking"),
        "engine",
        "cost",
        "specs",
        "models",
        "layers",
        "kernels",
        "loss_fns",
    ),
    *(
        "types",
        "config",
        "environments",
        ("services", "reward_fns"),
        "schema",
        "sandbox",
        "files",
        "errors",
        ("heartbeat", "trace", "version"),
    ),
)
STEPS = {name: at for at, step in enumerate(STAIRCASE) for name in ([step] if isinstance(step, str) else step)}
BY_NAME = {"getattr", "hasattr", "setattr"}
REWRITING = {"replace", "startswith", "endswith", "find", "index", "removeprefix", "removesuffix"}
HEAVY = {"torch", "transformers", "datasets", "numpy"}


@dataclass(frozen=True)
class Module:
    name: str  # dotted; that of the folder for an __init__.py
    path: Path
    all_names: frozenset[str]  # of the modules around it

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def step(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def folder(self) -> str:
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    def imported(self, *, at_start: bool = False) -> set[str]:
        """Dotted names it imports, modules of ours as such; with `at_start`, only what runs when it is imported."""
        found: set[str] = set()
        for node in _run_at_start(self.tree) if at_start else self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = self.folder.split(".")
                    base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
                for alias in node.names:
                    name = f"{base}.{alias.name}"
                    found.add(name if name in self.all_names else base)
        return found

    def named(self) -> set[str]:
        """Modules of ours in strings: `"areno.x"`, `f"areno.x.{name}"`, or code to run. Docstrings do not count."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in self._prose:
                for path in re.findall(r"(?:^|\bimport |\bfrom |-m )(areno(?:\.\w+)+)", node.value):
                    while path not in self.all_names:
                        path = path.rpartition(".")[0]
                    found.add(path)
        return found - {"areno"}

    @cached_property
    def _prose(self) -> set[ast.AST]:
        """Docstrings and the names of loggers."""
        found: set[ast.AST] = set()
        for node in self.nodes:
            if isinstance(node, ast.Expr):
                found.add(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
                found.update(node.args)
        return found

    @cached_property
    def edges(self) -> set[str]:
        """Modules of ours that it imports or names, at any time."""
        return {name for name in self.imported() | self.named() if name in self.all_names} - {self.name}


def modules(root: Path) -> dict[str, Module]:
    """The modules of the package root/areno."""
    paths = {}
    for path in sorted((root / "areno").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: Module(name, path, frozenset(paths)) for name, path in paths.items()}


def _run_at_start(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.expr):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run_at_start(child)


# Imports


def _packages(module: Module) -> set[str]:
    """Packages whose `__init__.py` runs before a module that `module` imports. Its own packages run before itself."""
    own = _ancestors(module.name)
    return {package for name in module.edges for package in _ancestors(name)} - own - {module.name}


def _ancestors(name: str) -> set[str]:
    """Dotted names of the packages that a module lies in."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def upward(tree: dict[str, Module]) -> set[str]:
    """Edges that go up the staircase or across a step. The public table of areno/__init__.py may name anything."""
    found = set()
    for module in tree.values():
        for target in module.edges if module.name != "areno" else ():
            own, other = module.step, tree[target].step
            if STEPS[other] < STEPS[own] or (STEPS[other] == STEPS[own] and other != own):
                found.add(f"{module.name} -> {target}")
            if {tuple(name.split(".")[1:3]) for name in (module.name, target)} == {
                ("engine", "decoder"),
                ("engine", "train"),
            }:
                found.add(f"{module.name} -> {target}")
    return found


def circles(tree: dict[str, Module]) -> set[str]:
    """Groups of modules that import one another, directly or in a longer circle."""
    graph = {name: module.edges | _packages(module) for name, module in tree.items() if name != "areno"}
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        reach[start] = seen
    return {
        " <-> ".join(sorted(other for other in seen if name in reach.get(other, ())))
        for name, seen in reach.items()
        if name in seen
    }


def heavy_at_start(tree: dict[str, Module], steps: Iterable[str]) -> set[str]:
    """Modules, reached when one of these steps is imported, that import torch or its like."""
    seen: set[str] = set()
    todo = [name for name, module in tree.items() if module.step in steps]
    while todo:
        name = todo.pop()
        if name in tree and name not in seen:
            seen.add(name)
            todo += [*tree[name].imported(at_start=True), name.rpartition(".")[0]]
    return {name for name in seen if HEAVY & {found.split(".")[0] for found in tree[name].imported(at_start=True)}}


def mutual_folders(tree: dict[str, Module]) -> set[tuple[str, str]]:
    """Pairs of folders whose modules import each other, one way in one module and the other way in another."""
    pairs = {
        (module.folder, tree[target].folder)
        for module in tree.values()
        for target in module.edges
        if "areno" not in (module.name, target)  # areno/__init__.py may name anything
    }
    return {(one, other) for one, other in pairs if one < other and (other, one) in pairs}


def imports_of_tests(paths: Iterable[Path]) -> set[str]:
    """Files that import a test file, also in code that they run in another process; a test file may name itself."""
    found = set()
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if not re.search(r"(?<!def )\btest_", source):
            continue
        for node in ast.walk(ast.parse(source)):
            texts = []
            if isinstance(node, ast.Import):
                texts = [f"import {alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                texts = [f"import {node.module or ''}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts = [node.value]
            names = {name for text in texts for name in re.findall(r"\b(?:import|from) (?:\w*\.)*(test_\w+)", text)}
            if names - {path.stem}:
                found.add(path.name)
    return found


# Lengths


def long_files(paths: Iterable[Path], root: Path, most: int) -> set[str]:
    """Files with more lines than the limit. Docstrings do not count: they may be as long as arguments need."""
    found = set()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > most and lines - _docstring_lines(ast.parse(text)) > most:
            found.add(str(path.relative_to(root)))
    return found


def _docstring_lines(tree: ast.AST) -> int:
    """Lines of all docstrings in a module or function."""
    holders = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, holders) and ast.get_docstring(node)]
    return sum((body[0].end_lineno or 0) - body[0].lineno + 1 for body in bodies)


def long_functions(tree: dict[str, Module], most: int) -> set[str]:
    """Functions with more lines than the limit. Their docstrings do not count."""
    return {
        f"{module.name}.{node.name}"
        for module in tree.values()
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno - _docstring_lines(node) >= most
    }


def crowded_folders(tree: dict[str, Module], limit: int) -> set[str]:
    """Folders with more modules than the limit. The `__init__.py` and folders below do not count."""
    counts = Counter(module.folder for module in tree.values() if module.path.stem != "__init__")
    return {folder for folder, count in counts.items() if count > limit}


def small_folders(tree: dict[str, Module], least: int) -> set[str]:
    """Folders with fewer modules than that. The `__init__.py` and folders below do not count."""
    counts = Counter({module.folder: 0 for module in tree.values()})
    counts.update(module.folder for module in tree.values() if module.path.stem != "__init__")
    return {folder for folder, count in counts.items() if count < least}


# Habits


def own_attributes(tree: dict[str, Module]) -> set[str]:
    """Names that classes of ours define, as fields, methods or on self; no dunders, which are Python's."""
    found = set()
    for node in (node for module in tree.values() for node in module.nodes):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found.add(part.target.id)
                elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(part.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return {name for name in found if not name.startswith("__")}


def attributes_by_name(tree: dict[str, Module]) -> set[str]:
    """getattr, hasattr and setattr with a literal name that a class of ours defines.

    The type of the object is not known here: it may be a foreign one with an attribute of that name.
    """
    ours = own_attributes(tree)
    return {
        f"{module.name}: {name.value}"
        for module, name in _by_name(tree)
        if isinstance(name, ast.Constant) and name.value in ours
    }


def computed_attributes(tree: dict[str, Module]) -> set[str]:
    """Modules with a getattr, hasattr or setattr of a computed name."""
    return {module.name for module, name in _by_name(tree) if not isinstance(name, ast.Constant)}


def _by_name(tree: dict[str, Module]) -> Iterator[tuple[Module, ast.expr]]:
    """The name of each such call, but for those of foreign modules, as in getattr(torch, "bfloat16")."""
    for module in tree.values():
        foreign = {name.split(".")[0] for name in module.imported()} - {"areno"}
        for node in module.nodes:
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME
            if is_call and ast.unparse(node.args[0]) not in foreign:
                yield module, node.args[1]


def matched_messages(tree: dict[str, Module]) -> set[str]:
    """Modules that decide by the text of an exception they caught: `in str(error)`, `str(error).replace`, `re` on it.

    Cutting a text to quote it (`split`, `partition`) is no decision.
    """
    found = set()
    for module in tree.values():
        for handler in (node for node in module.nodes if isinstance(node, ast.ExceptHandler) and node.name):
            texts = (f"str({handler.name})", f"{handler.name}.args")
            for node in ast.walk(handler):
                looked_at: ast.AST | None = None
                if isinstance(node, ast.Compare):
                    looked_at = node
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    if isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
                        looked_at = node
                    elif node.func.attr in REWRITING:
                        looked_at = node.func.value
                if looked_at is not None and any(text in ast.unparse(looked_at) for text in texts):
                    found.add(module.name)
    return found


def importing_re(tree: dict[str, Module]) -> set[str]:
    return {module.name for module in tree.values() if "re" in module.imported()}
