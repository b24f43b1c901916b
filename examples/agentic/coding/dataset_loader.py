"""Tasks of dataset_generator.py; `dataset_loader.py:generated` makes them, without a file."""

from coding_bugs import repairs

from areno.data.sources import read_rows


def load_dataset(path, split):
    return list(read_rows(path, split))


def generated(split):
    """64 tasks, others for each split."""
    return repairs(64, seed=1 if split == "train" else 2)
