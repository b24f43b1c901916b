"""Grids of dataset_generator.py with their prompts; `dataset_loader.py:generated` makes them, without a file."""

from types import SimpleNamespace

from duelgrid import arenas
from duelgrid_task import DuelGrid

from areno.data.sources import read_rows


def load_dataset(path, split):
    return with_prompts(read_rows(path, split))


def generated(split):
    """256 grids, others for each split."""
    return with_prompts(arenas(256, seed=1 if split == "train" else 2))


def with_prompts(rows):
    return [{**row, "prompt": DuelGrid(SimpleNamespace(record=row)).reset()} for row in rows]
