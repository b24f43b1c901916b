"""Start runs from a command line: `run_recipe` for a recipe, `run_algorithm` for an algorithm in your own file."""

from areno.launch.command import run_algorithm, run_recipe

__all__ = ["run_algorithm", "run_recipe"]
