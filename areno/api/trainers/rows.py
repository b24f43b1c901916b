"""From scored samples to training rows: rewards, advantages, corrections. What is behind every policy loop, as plain
functions. Arrays are float64; `trained` ones hold the trained tokens of a row only, (T_i,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areno.agents.rows import train_sequences
from areno.config.models import PolicyConfig
from areno.errors import ConfigError, DataError, Key, Problem
from areno.loss_fns.advantages import gae, group_advantages, normalize_tokens
from areno.loss_fns.correction import behave_weights, m2_keep
from areno.loss_fns.kl import kl_array
from areno.loss_fns.shaping import overlong_penalty, shape_rewards
from areno.rewards.verdict import reward_problem
from areno.types import RolloutSequence, ScoredSample, TokenArrays, TrainSequence

Arrays = list[np.ndarray]
AdvantageFn = Callable[[Sequence[TrainSequence], Sequence[int], Any], Any]
"""(rows, the number of each row's group, the actor's settings) -> an array over the trained tokens of each row.

In the PPO loop, whose rows have values, two such lists: (advantages, returns). REINFORCE without a baseline would be

    def advantages(rows, groups, actor):
        return [np.full(len(logprobs), row.reward) for row, logprobs in zip(rows, trained(rows, "logprobs"))]
"""


def sample_rewards(samples: Sequence[ScoredSample], actor: PolicyConfig, max_new_tokens: int) -> np.ndarray:
    """The reward of each sample, (B,), as the actor's settings shape it: overlong penalty, bias, scale, clip, norm.

    Raises ConfigError if they make one that training cannot compute with.
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


def policy_rows(
    samples: Sequence[ScoredSample],
    rewards_B: Iterable[float],
    eos_token_id: int,
    drop_truncated: bool = False,
    weights_version: int = 0,
) -> list[TrainSequence]:
    """The row of each sample, or the rows of its trajectory.

    The response is trained, unless `drop_truncated` is set and it was cut off.

    weights_version: of the policy as it is; a row is as stale as the oldest weights that sampled one of its tokens.
    """
    rows = []
    for sample, reward in zip(samples, rewards_B, strict=True):
        prompt, sequence = sample.item.tokens, sample.sequence
        masked = drop_truncated and sequence.finish_reason == "length"
        if sample.trajectory is not None:
            rows += train_sequences(
                sample.trajectory, reward=reward, eos_token_id=eos_token_id, weights_version=weights_version,
                masked=masked,
            )  # fmt: skip
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
            )
        )
    return rows


def token_arrays(prompt: Sequence[int] | np.ndarray, sequence: RolloutSequence) -> TokenArrays:
    """A completion as arrays, with its prompt."""
    n_prompt, n_tokens = len(prompt), len(prompt) + sequence.n_tokens
    tokens, logprobs = np.empty(n_tokens, np.int64), np.zeros(n_tokens)
    given = vars(sequence)  # as arrays, if it came so
    tokens[:n_prompt], tokens[n_prompt:], logprobs[n_prompt:] = prompt, given["resp_tokens"], given["resp_logprobs"]
    versions = given["resp_versions"]
    return TokenArrays(tokens=tokens, logprobs=logprobs, oldest_version=int(versions[0]) if len(versions) else None)


def token_rows(rows: Sequence[TrainSequence]) -> list[Any]:
    """The token ids of each row."""
    return [[] if row.tokens is None else row.tokens for row in rows]


def trained(rows: Sequence[TrainSequence], name: str) -> Arrays:
    """The values of a per-token field at the trained tokens of each row."""
    return [np.asarray(vars(row)[name], dtype=np.float64)[places_of(row)] for row in rows]


def set_trained(rows: Sequence[TrainSequence], name: str, arrays: Sequence[np.ndarray]) -> None:
    """Set a per-token field from its values at trained tokens; 0.0 elsewhere.

    DataError where they are not as many, of which an advantage function of one's own should hear.
    """
    if not isinstance(arrays, Sequence) or len(arrays) != len(rows):
        found = f"{len(arrays)} arrays" if isinstance(arrays, Sequence) else f"a {type(arrays).__name__}"
        raise DataError(f"{name}: {found} for {len(rows)} rows; a list with an array for each row is expected")
    places = [places_of(row) for row in rows]
    for index, (of_row, array) in enumerate(zip(places, arrays, strict=True)):
        if np.shape(array) != (n := np.count_nonzero(of_row),):
            raise DataError(
                f"{name} of row {index} have shape {np.shape(array)}; one number for each of its {n} "
                "trained tokens is expected"
            )
    if not rows:
        return
    together = np.concatenate(places)  # one assignment for all rows, since each takes longer than its numbers
    values = np.zeros(len(together))
    values[together] = np.concatenate(arrays)
    start = 0
    for row, of_row in zip(rows, places, strict=True):
        vars(row)[name] = values[start : start + len(of_row)]
        start += len(of_row)


def places_of(row: TrainSequence) -> np.ndarray:
    """Where the trained tokens of a row are, (T,) bool."""
    return ~np.asarray(row.prompt_mask, dtype=bool)


def n_trained(row: TrainSequence) -> int:
    """Number of these."""
    mask = np.asarray(row.prompt_mask, dtype=bool)
    return mask.size - int(np.count_nonzero(mask))


def token_rewards(rows: Sequence[TrainSequence], actor: PolicyConfig) -> Arrays:
    """The reward of each trained token: the row's at its last one, less kl_ctl * KL at each with use_kl_in_reward."""
    if actor.use_kl_in_reward and actor.kl_ctl:
        pairs = zip(trained(rows, "logprobs"), trained(rows, "ref_logprobs"), strict=True)
        arrays = [-actor.kl_ctl * kl_array(new, ref, actor.kl_estimator) for new, ref in pairs]
    else:
        arrays = [np.zeros(n_trained(row)) for row in rows]
    for row, array in zip(rows, arrays, strict=True):
        if array.size:
            array[-1] += row.reward
    return arrays


def outcome_advantages(rows: Sequence[TrainSequence], groups: Sequence[int], actor: PolicyConfig) -> Arrays:
    """Advantages without a critic, one for each trained token.

    Those of a row are equal and come from its reward, normalised over samples by adv_norm, unless the KL is part of the
    reward: then a group still compares the samples by what their tokens earn in all (RLOO), while without a group each
    token has the sum of what follows, normalised over the tokens of the batch (REINFORCE++).
    """
    norm = actor.adv_norm
    per_token = token_rewards(rows, actor) if actor.use_kl_in_reward else []
    if actor.use_kl_in_reward and (norm is None or "group" not in (norm.mean_level, norm.std_level)):
        returns = [np.cumsum(rewards[::-1])[::-1] for rewards in per_token]
        return returns if norm is None else normalize_tokens(returns, groups, **asdict(norm))
    earned = [row.reward for row in rows]
    if actor.use_kl_in_reward:
        earned = [rewards.sum() if rewards.size else row.reward for rewards, row in zip(per_token, rows, strict=True)]
    values_B = np.asarray(earned) if norm is None else group_advantages(earned, groups, **asdict(norm))
    return [np.full(n_trained(row), value) for row, value in zip(rows, values_B, strict=True)]


def critic_advantages(rows: Sequence[TrainSequence], groups: Sequence[int], actor: Any) -> tuple[Arrays, Arrays]:
    """(advantages, returns) by GAE from the rows' values; the advantages are then normalised over tokens (whitened)."""
    found = [
        gae(rewards, values, actor.discount, actor.gae_lambda)
        for rewards, values in zip(token_rewards(rows, actor), trained(rows, "values"), strict=True)
    ]
    advantages, returns = [one for one, _ in found], [other for _, other in found]
    if actor.adv_norm is not None:
        advantages = normalize_tokens(advantages, groups, **asdict(actor.adv_norm))
    return advantages, returns


def needs_proximal(actor: PolicyConfig) -> bool:
    """Return whether `correct_rows` needs a scoring pass of the policy before the update."""
    decoupled = actor.use_decoupled_loss and actor.prox_logp_method != "loglinear"
    return decoupled or actor.m2_threshold is not None


def correct_rows(rows: Sequence[TrainSequence], prox_logprobs: Sequence[Any], actor: PolicyConfig) -> dict[str, float]:
    """Weigh and mask tokens by how the policy before the update differs from the policy that sampled them.

    Args:
        rows: Rows to train on. Sets their `weights` and, where tokens are rejected, their `prompt_mask`.
        prox_logprobs: Log-probabilities of all tokens of each row, by a forward pass before the update.
        actor: Settings of the decoupled loss and M2PO.

    Returns:
        The shares of masked tokens, and with prox_logp_method "metrics" the error of the interpolation.
    """
    behave = trained(rows, "logprobs")
    prox = [np.asarray(all_)[places_of(row)] for all_, row in zip(prox_logprobs, rows, strict=True)]
    stats: dict[str, float] = {}
    if actor.prox_logp_method == "metrics":
        # The error of what prox_logp_method=loglinear would have taken for `prox`.
        errors = [np.abs(old - new) / (row.staleness + 1) for row, old, new in zip(rows, behave, prox, strict=True)]
        stats["prox_approx_abs_diff_mean"] = np.concatenate(errors).mean()
    # Ratios compare with the proximal policy, so weights carry the rest of the way from the one that sampled.
    limits = {} if actor.rejection_sampling is None else asdict(actor.rejection_sampling)
    weights, passed = behave_weights(prox, behave, **limits)
    if not actor.recompute_logprob:
        weights = [np.ones(len(old)) for old in behave]
    if actor.use_decoupled_loss:
        stats["rejected_frac"] = _share_masked(passed)
    if actor.m2_threshold is not None:
        keep = m2_keep(prox, behave, trained(rows, "advantages"), actor.m2_threshold)
        stats["m2_masked_frac"] = _share_masked(keep)
        weights = [one * other for one, other in zip(weights, keep, strict=True)]
    if actor.use_decoupled_loss or actor.m2_threshold is not None:
        set_trained(rows, "weights", weights)
    if actor.use_decoupled_loss:
        for row, kept in zip(rows, passed, strict=True):
            places = places_of(row)
            places[places] = kept
            row.prompt_mask = ~places
    return {name: float(value) for name, value in stats.items()}


def _share_masked(keep: Arrays) -> float:
    kept = np.concatenate(keep)
    return float(1.0 - kept.mean()) if kept.size else 0.0
