"""Imports go one way: a module imports from its own step of the staircase or from those below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "areno"
STAIRCASE = [
    "cli", "bench", "recipes", "api", "engine", "models", "layers", "kernels", "loss_fns", "config", "errors",
]  # fmt: skip
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imports(path: Path, *, at_start: bool = False) -> set[str]:
    """Dotted names a file imports; with `at_start`, only those that run when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_start and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if at_start and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{name.name}" for name in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_the_staircase(path: Path) -> None:
    own = STAIRCASE.index(path.relative_to(PACKAGE).parts[0])
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "areno" and len(parts) > 1 and parts[1] in STAIRCASE:
            assert STAIRCASE.index(parts[1]) >= own, f"{path.name} imports {name}"


def test_decoder_and_train_never_import_each_other() -> None:
    for one, other in (("decoder", "train"), ("train", "decoder")):
        for path in (PACKAGE / "engine" / one).glob("*.py"):
            assert not any(name.startswith(f"areno.engine.{other}") for name in imports(path)), path


@pytest.mark.parametrize("folder", ["config", "recipes"])
def test_configuration_and_recipes_load_without_torch(folder: str) -> None:
    heavy = {"torch", "transformers", "datasets", "numpy"}
    for path in (PACKAGE / folder).glob("*.py"):
        roots = {name.split(".")[0] for name in imports(path, at_start=True)}
        assert not roots & heavy, f"{path.name} imports {roots & heavy}"


def test_losses_know_torch_and_nothing_of_ours_but_errors() -> None:
    for path in (PACKAGE / "loss_fns").glob("*.py"):
        ours = {name for name in imports(path) if name.startswith("areno.")}
        assert all(name.startswith(("areno.loss_fns", "areno.errors")) for name in ours), path
