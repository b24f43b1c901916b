"""From samples to training rows: what is behind every policy loop. Plain functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from areno.api.types import ScoredSample
from areno.config.model_roles import NormConfig
from areno.engine.types import TrainSequence
from areno.loss_fns.advantages import group_advantages


def sample_advantages(samples: Sequence[ScoredSample], norm: NormConfig) -> np.ndarray:
    """One advantage for each sample, float64. One without a reward (timeout, error) gets 0 and is not in its group."""
    rewards = [np.nan if s.outcome.value is None else s.outcome.value for s in samples]
    groups = [id(s.item) for s in samples]  # a group is the samples of one PromptItem
    return group_advantages(
        rewards,
        groups,
        mean_level=norm.mean_level,
        std_level=norm.std_level,
        std_unbiased=norm.std_unbiased,
        eps=norm.eps,
    )


def policy_rows(samples: Sequence[ScoredSample], advantages: Iterable[float], eos_token_id: int) -> list[TrainSequence]:
    """A row for each sample with a reward: prompt masked, its advantage on every token of the response."""
    rows = []
    for sample, advantage in zip(samples, advantages, strict=True):
        if sample.outcome.value is None:
            continue
        prompt, response = sample.item.tokens, sample.sequence.resp_tokens
        rows.append(
            TrainSequence(
                prompt_mask=[True] * len(prompt) + [False] * len(response),
                tokens=prompt + response,
                logprobs=[0.0] * len(prompt) + sample.sequence.resp_logprobs,
                advantages=[0.0] * len(prompt) + [float(advantage)] * len(response),
                reward=sample.outcome.value,
                eos_token_id=eos_token_id,
            )
        )
    return rows


def replace_logprobs(rows: Sequence[TrainSequence], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Give rows the log-probabilities of a forward pass in place of the rollout's; 0.0 stays where nothing is trained.

    Returns how far the two were apart, under the names that the train backend uses for its own comparison.
    """
    diffs = []
    for row, recomputed in zip(rows, logprobs, strict=True):
        trained = ~np.asarray(row.prompt_mask, dtype=bool)
        new = np.where(trained, np.asarray(recomputed), 0.0)
        diffs.append((np.asarray(row.logprobs) - new)[trained])
        row.logprobs = new.tolist()
    diff = np.concatenate(diffs) if diffs else np.zeros(1)
    return {
        "logp_diff_mean": float(diff.mean()),
        "logp_abs_diff_mean": float(np.abs(diff).mean()),
        "logp_abs_diff_max": float(np.abs(diff).max()),
    }
