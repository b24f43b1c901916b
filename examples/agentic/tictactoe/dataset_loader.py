"""Positions of dataset_generator.py with their prompts; `dataset_loader.py:generated` makes them, without a file."""

from tictactoe import positions, prompt

from areno.data.sources import read_rows


def load_dataset(path, split):
    return with_prompts(read_rows(path, split))


def generated(split):
    """256 positions, others for each split."""
    return with_prompts(positions(256, seed=1 if split == "train" else 2))


def with_prompts(rows):
    return [{**row, "prompt": prompt(row["board"])} for row in rows]
