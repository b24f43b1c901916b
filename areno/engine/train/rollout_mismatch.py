"""Compares the log-probabilities of the rollout with those of training."""

from __future__ import annotations

from torch import Tensor

from areno.engine.train.gradients import StepStats
from areno.loss_fns.data_pack import DataPack


def compare_with_rollout(stats: StepStats, pack: DataPack, logprobs_N: Tensor, before_N: Tensor | None) -> None:
    """Add statistics about the difference between the log-probabilities of the rollout and of training.

    logp_row_diff_mean is the mean over rows of |mean over tokens of the difference|, which is the error that rounding
    would add to the logarithm of a row's sequence ratio. `before_N` are the log-probabilities of training before the
    first update, or None if they are unknown.
    """
    stats.add({"train_logprobs_mean": pack.token_mean(pack.trained(logprobs_N))})
    if pack.rollout_logprobs is None:
        return
    rollout_T = pack.trained(pack.rollout_logprobs)
    stats.add({"rollout_logprobs_mean": pack.token_mean(rollout_T)})
    if before_N is None:
        return
    diff_T = rollout_T - pack.trained(before_N)
    of_rows = pack.row_mean(pack.mean_rows(diff_T).abs())
    means = {"logp_diff_mean": pack.token_mean(diff_T), "logp_abs_diff_mean": pack.token_mean(diff_T.abs())}
    stats.add({**means, "logp_row_diff_mean": of_rows})
    stats.add_maximum("logp_abs_diff_max", diff_T.abs())
    if pack.staleness is not None:
        on_policy_T = pack.of_rows(pack.staleness) == 0
        stats.add_maximum("on_policy_logp_abs_diff_max", diff_T.abs() * on_policy_T)
