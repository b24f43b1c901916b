"""The rollout/* numbers of a step, from its samples or its rows.

rollout/accuracy is the share of scored samples whose reward is at least 1.0, the value that stands for a right answer;
partial credit below it does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from areno.tracking.stopwatch import Stopwatch
from areno.types import ScoredSample, TrainSequence

_RIGHT = 1.0 - 1e-6


def rollout_metrics(
    samples: Sequence[ScoredSample],
    advantages: Sequence[float] | np.ndarray,
    *,
    skipped_long: int = 0,
    total_skipped_long: int | None = None,
) -> dict[str, float]:
    """The rollout/* scalars of one step. `advantages`: one for each sample. Lengths are in tokens.

    Rewards and advantages are over the samples that have a reward; logprobs_mean is over all response tokens. What has
    no value, such as the mean of no rewards, is left out.
    """
    scored = [sample.outcome.value is not None for sample in samples]
    stats = _sample_stats(
        prompts=[len(sample.item.tokens) for sample in samples],
        responses=[len(sample.sequence.resp_tokens) for sample in samples],
        logprobs=[math.fsum(sample.sequence.resp_logprobs) for sample in samples],
        rewards=[sample.outcome.value for sample in samples if sample.outcome.value is not None],
        advantages=np.asarray(advantages, dtype=np.float64)[np.array(scored, dtype=bool)],
    )
    if samples:
        stats |= {
            "truncated": float(np.mean([sample.sequence.finish_reason == "length" for sample in samples])),
            "reward_timeouts": sum(sample.outcome.status == "timeout" for sample in samples),
            "reward_errors": sum(sample.outcome.status == "error" for sample in samples),
        }
    stats["skipped_long"] = skipped_long
    if total_skipped_long is not None:
        stats["total_skipped_long"] = total_skipped_long
    return with_prefix("rollout", stats)


def row_metrics(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """The rollout/* scalars that training rows tell of; none where rows have no log-probabilities of a rollout.

    The prompt of a row is what comes before its first trained token; the response are its trained tokens. A row's
    advantage is the mean over these.
    """
    if any(row.logprobs is None for row in rows):
        return {}
    trained = [~np.asarray(row.prompt_mask, dtype=bool) for row in rows]
    return with_prefix(
        "rollout",
        _sample_stats(
            prompts=[int(mask.argmax()) if mask.any() else len(mask) for mask in trained],
            responses=[int(mask.sum()) for mask in trained],
            logprobs=[float(np.asarray(row.logprobs)[mask].sum()) for row, mask in zip(rows, trained, strict=True)],
            rewards=[row.reward for row in rows],
            advantages=[
                float(np.asarray(row.advantages)[mask].mean())
                for row, mask in zip(rows, trained, strict=True)
                if row.advantages is not None and mask.any()
            ],
            lengths=[len(mask) for mask in trained],
        ),
    )


def _sample_stats(
    *,
    prompts: Sequence[int],
    responses: Sequence[int],
    logprobs: Sequence[float],
    rewards: Sequence[float],
    advantages: Sequence[float] | np.ndarray,
    lengths: Sequence[int] | None = None,
) -> dict[str, float]:
    """Per sample: tokens of prompt and response, sum of the response's log-probabilities, all tokens where those are
    more than the two. Rewards and advantages of those that have one."""
    stats: dict[str, float] = {"num_sequences": len(prompts)}
    if not prompts:
        return stats
    both = np.add(prompts, responses) if lengths is None else lengths
    for name, values in (("seq_len", both), ("prompt_len", prompts), ("response_len", responses)):
        stats[f"{name}_mean"] = float(np.mean(values))
    stats |= _moments("rewards", rewards, ("mean", "std", "max", "min"))
    stats |= _moments("advantages", advantages, ("mean", "std"))
    if len(rewards):
        stats["accuracy"] = accuracy(rewards)
    if n_tokens := sum(responses):
        stats["logprobs_mean"] = math.fsum(logprobs) / n_tokens
    return stats


def accuracy(rewards: Sequence[float] | np.ndarray) -> float:
    """Share of rewards that stand for a right answer: 1.0 or more. NaN for no rewards."""
    return float(np.mean(np.asarray(rewards) >= _RIGHT)) if len(rewards) else math.nan


def step_times(clock: Stopwatch) -> dict[str, float]:
    """The seconds of a step that stand among its training statistics."""
    return {
        "step_rollout_time_s": clock.seconds.get("rollout", 0.0),
        "step_train_time_s": clock.seconds.get("train", 0.0),
        "step_e2e_time_s": clock.total,
    }


def step_scalars(stats: Mapping[str, float], clock: Stopwatch) -> dict[str, float]:
    """The train/* scalars of a step, from its statistics, and the time/* ones."""
    return with_prefix("train", stats) | with_prefix("time", {**clock.seconds, "step": clock.total})


def with_prefix(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    """`{"loss": 1.0}` under "train" is `{"train/loss": 1.0}`."""
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}


def _moments(name: str, values: Sequence[float] | np.ndarray, wanted: Sequence[str]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    return {f"{name}_{what}": float(getattr(array, what)()) for what in wanted} if len(array) else {}
