"""Rows and samples: an agent's sample may have several rows, and advantages are of samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areno.api.trainer import Trainer
from areno.trainers.agent_rows import score_missing
from areno.trainers.rows import Arrays, n_trained, set_trained
from areno.types import ScoredSample, TrainSequence

logger = logging.getLogger("areno")


def rows_per_sample(samples: Sequence[ScoredSample]) -> list[int]:
    """How many of the rows of `policy_rows` each sample has."""
    return [1 if sample.trajectory is None else len(sample.trajectory.rows) for sample in samples]


def joined(rows: Sequence[TrainSequence], sizes: Sequence[int]) -> list[TrainSequence]:
    """One row for each sample, of the rows that it has one after another. sizes: of `rows_per_sample`.

    Advantages are of samples: one with two rows counts once in its group, and its tokens are one sequence.
    """
    found, start = [], 0
    for size in sizes:
        of_sample = rows[start : start + size]
        start += size
        if size == 1:
            found += of_sample
            continue
        names = ("prompt_mask", "tokens", "logprobs", "values", "ref_logprobs", "advantages")
        whole = {name: [vars(row)[name] for row in of_sample] for name in names}
        fields = {name: np.concatenate(arrays) for name, arrays in whole.items() if arrays[0] is not None}
        found.append(replace(of_sample[0], **fields))
    return found


def set_advantages(
    rows: Sequence[TrainSequence], sizes: Sequence[int], found: Sequence[np.ndarray], name: str = "advantages"
) -> None:
    """Set a per-token field of the rows from its values at the trained tokens of each sample, as of `joined`."""
    samples = joined(rows, sizes)
    set_trained(samples, name, found)  # tells what does not fit
    if all(size == 1 for size in sizes):
        return  # these are the rows
    arrays: Arrays = []
    for array, start, size in zip(found, np.cumsum([0, *sizes]), sizes, strict=False):
        counts = [n_trained(row) for row in rows[start : start + size]]
        arrays += np.split(np.asarray(array), np.cumsum(counts)[:-1])
    set_trained(rows, name, arrays)


def without_truncated(
    rows: Sequence[TrainSequence], samples: Sequence[ScoredSample], sizes: Sequence[int]
) -> list[TrainSequence]:
    """Return the rows, with no token trained of samples that were cut off at a length limit. sizes: see `joined`."""
    truncated = np.repeat([sample.sequence.finish_reason == "length" for sample in samples], sizes)
    return [
        replace(row, prompt_mask=np.ones_like(np.asarray(row.prompt_mask, dtype=bool))) if masked else row
        for row, masked in zip(rows, truncated, strict=True)
    ]


def score_agents(
    trainer: Trainer, samples: Sequence[ScoredSample], rows: Sequence[TrainSequence], temperature: float
) -> None:
    """`score_missing` for the rows of agents' samples. Warns where these sampled at temperatures of their own."""
    sampled = [row for sample in samples if sample.trajectory is not None for row in sample.trajectory.rows]
    if others := score_missing(trainer, sampled, rows, temperature):
        logger.warning(
            "agents sampled at temperatures %s, and training is at gconfig.temperature=%g: ratios are approximate",
            ", ".join(map(str, others)), temperature,
        )  # fmt: skip
