"""The command `areno recipes`, which lists algorithms (--algo), tasks and tested runs (--config-name)."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the algorithms, the tasks and the tested runs with the algorithms that each is for, and the named "
        "variants. For the settings of an algorithm, use python -m areno.recipes.gspo --help."
    )


def run(arguments: argparse.Namespace) -> int:
    from areno.api.algorithms import algorithm_names, get_algorithm
    from areno.launch import help, yaml_files

    about = {name: (get_algorithm(name).config.__doc__ or "").strip().splitlines()[0] for name in algorithm_names()}
    parts = [
        help.columns("algorithms (areno train --algo NAME, or python -m areno.recipes.NAME)", about),
        help.files("tasks (--config-name NAME)", yaml_files.tasks()),
        help.files("tested runs (--config-name NAME)", yaml_files.experiments()),
        help.files("variants (variant=NAME)", yaml_files.variants()),
    ]
    print("\n\n".join(parts))
    return 0
