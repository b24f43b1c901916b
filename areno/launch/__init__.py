"""From a command line to a run. `run_recipe` runs a recipe, `run_algorithm` runs an algorithm in your own file."""

from areno.launch.command import run_algorithm, run_recipe

__all__ = ["run_algorithm", "run_recipe"]
