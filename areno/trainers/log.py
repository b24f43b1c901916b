"""What the trackers of a run hear of a rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from areno.api.metrics import rewards_by_group, rollout_metrics
from areno.run.setup import PolicySetup
from areno.trainers.by_sample import joined
from areno.trainers.collect import Rollout
from areno.trainers.rows import n_trained, trained
from areno.types import ScoredSample, TrainSequence


def log_rollout(setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]) -> None:
    """Give rollout/* to the trackers; `rows` are those of `rollout.kept`, with their advantages."""
    run, samples = setup.run, rollout.samples
    advantages_B = np.zeros(len(samples))
    by_sample = joined(rows, rollout.sizes)
    # Not the mean() of trained(), which takes longer than to add up so few numbers. Others than trained tokens have 0.
    advantages_B[rollout.keep] = [
        np.add.reduce(np.asarray(row.advantages)) / max(1, n_trained(row)) for row in by_sample
    ]
    metrics = rollout_metrics(
        samples, advantages_B, skipped_long=rollout.skipped_long, total_skipped_long=rollout.total_skipped_long
    )
    n_tokens = sum(sample.sequence.n_tokens for sample in samples)
    metrics["rollout/tokens_per_second"] = n_tokens / run.clock.seconds["rollout"]
    run.log({**metrics, **group_metrics(samples), **rollout.scalars})
    run.keep(reward_mean=metrics["rollout/rewards_mean"])


def group_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """rollout/frac_groups_zero_std: the share of groups whose rewards are all equal, so that no sample is better.

    Only groups of two or more rewards count; {} if there are none.
    """
    equal = [min(group) == max(group) for group in rewards_by_group(samples).values() if len(group) > 1]
    return {"rollout/frac_groups_zero_std": float(np.mean(equal))} if equal else {}


@contextmanager
def samples_logged(setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]) -> Iterator[None]:
    """Give the samples to the trackers after the update of their rows, also after one that fails.

    The update leaves the log-probabilities of the policy before it in the rows.
    """
    try:
        yield
    finally:
        _log_samples(setup, rollout, rows)


def _log_samples(setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]) -> None:
    for sample, row in zip(rollout.kept, joined(rows, rollout.sizes), strict=True):
        if sample.trajectory is not None:
            sample.advantages = trained([row], "advantages")[0]
            continue
        start = len(sample.item.tokens)
        sample.advantages = np.asarray(row.advantages)[start:]
        if row.old_logprobs is not None:
            sample.train_logprobs = np.asarray(row.old_logprobs)[start:]
    setup.run.trackers.samples(setup.run.step, rollout.samples)
