"""Functions that all policy loops share to make training rows from scored samples: rewards, advantages, corrections.

Arrays are float64. A *trained* array has one entry for each trained token of a row, (T_i,). The sample of an agent may
have several rows. Advantages are computed for whole samples, so `join_rows` first concatenates the rows of each sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from areno.agents.turns_to_rows import train_sequences
from areno.config.models import KLConfig, PolicyConfig
from areno.errors import ConfigError, DataError, Key, Problem
from areno.loss_fns.advantages import gae, group_advantages, normalize_tokens, overlong_penalty, shape_rewards
from areno.loss_fns.kl import kl_array
from areno.scoring.records import reward_problem
from areno.types import RolloutSequence, ScoredSample, TokenArrays, TrainSequence

Arrays = list[np.ndarray]
AdvantageFn = Callable[[Sequence[TrainSequence], Sequence[int], Any], Any]
"""A function of (rows, the number of each row's group, the actor's settings) that computes advantages.

It returns an array over the trained tokens of each row. In the PPO loop, whose rows have values, it returns two such
lists: (advantages, returns). REINFORCE without a baseline would be

    def advantages(rows, groups, actor): return [np.full(len(logprobs), row.reward) for row, logprobs in zip(rows,
        trained(rows, "logprobs"))]
"""


def sample_rewards(samples: Sequence[ScoredSample], actor: PolicyConfig, max_new_tokens: int) -> np.ndarray:
    """Shape the rewards of samples by the actor's settings: overlong penalty, bias, scale, clip and normalisation.

    Returns (B,) float64. A sample without a reward gets NaN, or 0 if actor.reward_norm is set.
    """
    rewards_B = np.array([sample.outcome.value for sample in samples], dtype=np.float64)
    if actor.overlong_reward_penalty:
        lengths = [sample.sequence.n_tokens for sample in samples]
        assert actor.overlong_tokens is not None
        assert actor.overlong_penalty_factor is not None
        rewards_B += overlong_penalty(lengths, max_new_tokens, actor.overlong_tokens, actor.overlong_penalty_factor)
    rewards_B = shape_rewards(rewards_B, actor.reward_bias, actor.reward_scaling, actor.reward_clip)
    for sample, reward in zip(samples, rewards_B, strict=True):
        if reward_problem(reward):
            text = "the reward {:g} becomes {:g}, more than float32 holds; lower it, or {}, or set {}"
            others = Key("actor.reward_bias"), Key("actor.reward_clip")
            raise ConfigError(Problem("actor.reward_scaling", text, sample.outcome.value, reward, *others))
    if actor.reward_norm is not None:
        rewards_B = group_advantages(rewards_B, [sample.group for sample in samples], **asdict(actor.reward_norm))
    return rewards_B


def by_source(sources: Sequence[str], compute: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
    """Return what `compute` returns for the indices of each source alone, in the order of `sources`.

    Rewards of different sources are not on one scale, so nothing is normalised over several of them.
    """
    found: dict[int, Any] = {}
    for source in dict.fromkeys(sources):
        indices = [index for index, other in enumerate(sources) if other == source]
        found |= zip(indices, compute(indices), strict=True)
    return [found[index] for index in range(len(sources))]


def policy_rows(
    samples: Sequence[ScoredSample],
    rewards_B: Iterable[float],
    eos_token_id: int,
    drop_truncated: bool = False,
    weights_version: int = 0,
    reward_scaling: float = 1.0,
) -> list[TrainSequence]:
    """Make the rows to train on: one row for each completion, or the rows of an agent's trajectory.

    With `drop_truncated`, the rows of samples that were cut off at the length limit have no trained tokens. The
    staleness of a row is `weights_version` minus the oldest version that sampled one of its tokens.
    """
    rows = []
    for sample, reward in zip(samples, rewards_B, strict=True):
        prompt, sequence = sample.item.tokens, sample.sequence
        masked = drop_truncated and sequence.finish_reason == "length"
        if sample.trajectory is not None:
            of_agent = train_sequences(
                sample.trajectory,
                reward=reward,
                eos_token_id=eos_token_id,
                weights_version=weights_version,
                masked=masked,
                reward_scaling=reward_scaling,
            )
            rows += [replace(row, reward_parts=sample.outcome.parts) for row in of_agent]
            continue
        arrays = sample.arrays or token_arrays(prompt, sequence)
        oldest = weights_version if arrays.oldest_version is None else arrays.oldest_version
        prompt_mask = np.full(len(arrays.tokens), masked)
        prompt_mask[: len(prompt)] = True
        rows.append(
            TrainSequence(
                prompt_mask=prompt_mask,
                tokens=arrays.tokens,
                logprobs=arrays.logprobs,
                reward=float(reward),
                eos_token_id=eos_token_id,
                staleness=weights_version - oldest,
                routes=sequence.routes,
                teacher_top=recorded_lists(len(prompt), sequence),
                reward_parts=sample.outcome.parts,
            )
        )
    return rows


def token_arrays(prompt: Sequence[int] | np.ndarray, sequence: RolloutSequence) -> TokenArrays:
    """Concatenate a prompt and its completion: int64 tokens, and float64 log-probabilities, 0 for the prompt."""
    n_prompt, n_tokens = len(prompt), len(prompt) + sequence.n_tokens
    tokens, logprobs = np.empty(n_tokens, np.int64), np.zeros(n_tokens)
    given = vars(sequence)  # as arrays, if it came so
    tokens[:n_prompt], tokens[n_prompt:], logprobs[n_prompt:] = prompt, given["resp_tokens"], given["resp_logprobs"]
    versions = given["resp_versions"]
    return TokenArrays(tokens=tokens, logprobs=logprobs, oldest_version=int(versions[0]) if len(versions) else None)


def recorded_lists(n_prompt: int, sequence: RolloutSequence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the distributions that the rollout recorded, as `TrainSequence.teacher_top`."""
    if sequence.top_tokens is None or sequence.top_logprobs is None:
        return None
    of_prompt = ((n_prompt, 0), (0, 0))
    return np.pad(sequence.top_tokens, of_prompt), np.pad(sequence.top_logprobs, of_prompt)


def token_rows(rows: Sequence[TrainSequence]) -> list[Any]:
    return [[] if row.tokens is None else row.tokens for row in rows]


def prompt_masks(rows: Sequence[TrainSequence]) -> list[Any]:
    return [[] if row.prompt_mask is None else row.prompt_mask for row in rows]


def trained(rows: Sequence[TrainSequence], name: str) -> Arrays:
    """Return a per-token field at the trained tokens of each row, (T_i,) float64 each."""
    return [np.asarray(vars(row)[name], dtype=np.float64)[trained_mask(row)] for row in rows]


def set_trained(rows: Sequence[TrainSequence], name: str, arrays: Sequence[np.ndarray]) -> None:
    """Set a per-token field of rows from values at the trained tokens. All other tokens get 0.

    If shapes are wrong, a DataError tells users that their advantage function returned wrong `arrays`.
    """
    if not isinstance(arrays, Sequence) or len(arrays) != len(rows):
        found = f"{len(arrays)} arrays" if isinstance(arrays, Sequence) else f"a {type(arrays).__name__}"
        raise DataError(f"{name}: {found} for {len(rows)} rows; a list with an array for each row is expected")
    masks = [trained_mask(row) for row in rows]
    for index, (of_row, array) in enumerate(zip(masks, arrays, strict=True)):
        if np.shape(array) != (n := np.count_nonzero(of_row),):
            raise DataError(
                f"{name} of row {index} have shape {np.shape(array)}; one number for each of its {n} "
                "trained tokens is expected"
            )
    if not rows:
        return
    together = np.concatenate(masks)  # one assignment for all rows, which is faster than one per row
    values = np.zeros(len(together))
    values[together] = np.concatenate(arrays)
    start = 0
    for row, of_row in zip(rows, masks, strict=True):
        vars(row)[name] = values[start : start + len(of_row)]
        start += len(of_row)


def trained_mask(row: TrainSequence) -> np.ndarray:
    return ~np.asarray(row.prompt_mask, dtype=bool)


def n_trained(row: TrainSequence) -> int:
    mask = np.asarray(row.prompt_mask, dtype=bool)
    return mask.size - int(np.count_nonzero(mask))


def token_rewards(rows: Sequence[TrainSequence], actor: PolicyConfig) -> Arrays:
    """Return the reward of each trained token: the row's reward at its last trained token and 0 elsewhere.

    If the KL is part of the reward, the coefficient actor.kl_in_reward times the estimated KL of each token is
    subtracted.
    """
    if isinstance(actor, KLConfig) and actor.kl_reward_coef:
        pairs = zip(trained(rows, "logprobs"), trained(rows, "ref_logprobs"), strict=True)
        arrays = [-actor.kl_reward_coef * kl_array(new, ref, actor.kl_estimator) for new, ref in pairs]
    else:
        arrays = [np.zeros(n_trained(row)) for row in rows]
    for row, array in zip(rows, arrays, strict=True):
        if array.size:
            array[-1] += row.reward
    return arrays


def outcome_advantages(rows: Sequence[TrainSequence], groups: Sequence[int], actor: PolicyConfig) -> Arrays:
    """Return advantages without a critic, one for each trained token.

    Usually all tokens of a row have the same advantage: that of actor.adv_estimator, or the reward of the row,
    normalised over samples by actor.adv_norm. If a KL penalty is part of the reward, there are two cases. When adv_norm
    has a level "group", the reward of a row is the sum of its token rewards (RLOO). Otherwise each token has its
    reward-to-go, normalised over the tokens of the batch (REINFORCE++).

    The standard deviation is taken over a group or a batch. If all rewards there are equal, only KL terms differ, and
    the differences may be rounding errors. The advantages are then centred, but not divided by the standard deviation.
    """
    norm = actor.adv_norm
    if (estimator := actor.chosen_adv_estimator) is not None:
        rewards_B, parts = np.array([row.reward for row in rows]), [row.reward_parts or {} for row in rows]
        if estimator.needs_logit_gradients:
            return estimator.token_advantages(rewards_B, groups, trained(rows, "logit_gradients"))
        return _expand_to_tokens(rows, estimator.advantages(rewards_B, groups, parts))
    if not actor.kl_reward_coef:
        rewards_B = np.array([row.reward for row in rows])
        values_B = rewards_B if norm is None else group_advantages(rewards_B, groups, **asdict(norm))
        return _expand_to_tokens(rows, values_B)
    per_token = token_rewards(rows, actor)
    if norm is None or "group" not in (norm.mean_level, norm.std_level):
        returns = [np.cumsum(rewards[::-1])[::-1] for rewards in per_token]
        if norm is None:
            return returns
        how: dict[str, Any] = asdict(norm)
        if _are_equal([row.reward for row in rows]):
            how["std_level"] = None
        return normalize_tokens(returns, groups, **how)
    earned_B = [rewards.sum() if rewards.size else row.reward for rewards, row in zip(per_token, rows, strict=True)]
    how = asdict(norm)
    divided_B = group_advantages(earned_B, groups, **how)
    centred_B = group_advantages(earned_B, groups, **{**how, "std_level": None})
    sets = [0] * len(rows) if norm.std_level == "batch" else groups
    rewards_of = defaultdict(list)
    for row, of_set in zip(rows, sets, strict=True):
        rewards_of[of_set].append(row.reward)
    are_equal_B = [_are_equal(rewards_of[of_set]) for of_set in sets]
    return _expand_to_tokens(rows, np.where(are_equal_B, centred_B, divided_B))


def current_advantages(
    rows: Sequence[TrainSequence],
    logprobs: Sequence[Any],
    sizes: Sequence[int],
    groups: Sequence[int],
    actor: PolicyConfig,
) -> Arrays:
    """Return advantages of samples by an estimator that follows the policy, one for each trained token.

    `logprobs` are those of the current policy for each row, and `sizes` are from `rows_per_sample`.
    """
    moved = [
        (np.asarray(now) - np.asarray(row.old_logprobs))[trained_mask(row)]
        for now, row in zip(logprobs, rows, strict=True)
    ]
    ends, samples = np.cumsum(sizes), join_rows(rows, sizes)
    of_samples = [np.concatenate(moved[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    log_ratios_B = np.array([each.sum() / max(1, len(each)) for each in of_samples])
    rewards_B = np.array([row.reward for row in samples])
    return _expand_to_tokens(samples, actor.chosen_adv_estimator.current_advantages(rewards_B, groups, log_ratios_B))


def _expand_to_tokens(rows: Sequence[TrainSequence], values_B: np.ndarray) -> Arrays:
    return [np.full(n_trained(row), value) for row, value in zip(rows, values_B, strict=True)]


def _are_equal(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) <= 1


def critic_advantages(rows: Sequence[TrainSequence], groups: Sequence[int], actor: Any) -> tuple[Arrays, Arrays]:
    """Return (advantages, returns) by GAE from the critic's values. Only advantages are normalised, over tokens."""
    advantages, returns = [], []
    for rewards, values in zip(token_rewards(rows, actor), trained(rows, "values"), strict=True):
        of_policy, of_critic = actor.lambdas(len(values))
        advantages.append(gae(rewards, values, actor.discount, of_policy)[0])
        returns.append(gae(rewards, values, actor.discount, of_critic)[1])
    if actor.adv_norm is not None:
        advantages = normalize_tokens(advantages, groups, **asdict(actor.adv_norm))
    return advantages, returns


def rows_per_sample(samples: Sequence[ScoredSample]) -> list[int]:
    return [1 if sample.trajectory is None else len(sample.trajectory.rows) for sample in samples]


def join_rows(rows: Sequence[TrainSequence], sizes: Sequence[int]) -> list[TrainSequence]:
    """Join the rows of each sample into one row. A single row stays the same object.

    Advantages are computed for samples, so a sample with two rows must count once in its group, with its tokens as one
    sequence. `sizes` is from `rows_per_sample`.
    """
    found, start = [], 0
    for size in sizes:
        of_sample = rows[start : start + size]
        start += size
        if size == 1:
            found += of_sample
            continue
        names = (
            "prompt_mask",
            "tokens",
            "logprobs",
            "values",
            "ref_logprobs",
            "advantages",
            "turns",
            "logit_gradients",
        )
        whole = {name: [vars(row)[name] for row in of_sample] for name in names}
        fields = {name: np.concatenate(arrays) for name, arrays in whole.items() if arrays[0] is not None}
        found.append(replace(of_sample[0], **fields))
    return found


def set_advantages(
    rows: Sequence[TrainSequence], sizes: Sequence[int], found: Sequence[np.ndarray], name: str = "advantages"
) -> None:
    """Set a per-token field of rows. `found` has, for each sample, the values at the trained tokens of all its rows."""
    samples = join_rows(rows, sizes)
    set_trained(samples, name, found)  # checks the shapes
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
    """Return the rows. If a sample was cut off at the length limit, its rows are copies without trained tokens."""
    truncated = np.repeat([sample.sequence.finish_reason == "length" for sample in samples], sizes)
    return [
        replace(row, prompt_mask=np.ones_like(np.asarray(row.prompt_mask, dtype=bool))) if masked else row
        for row, masked in zip(rows, truncated, strict=True)
    ]
