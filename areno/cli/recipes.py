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
        help.two_column_text("algorithms (areno train --algo NAME, or python -m areno.recipes.NAME)", about),
        help.file_list_text("tasks (--config-name NAME)", yaml_files.task_files()),
        help.file_list_text("tested runs (--config-name NAME)", yaml_files.experiment_files()),
        help.file_list_text("variants (variant=NAME)", yaml_files.variant_files()),
    ]
    print("\n\n".join(parts))
    return 0
