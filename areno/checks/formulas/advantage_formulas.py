"""Rewards and advantages as their papers state them, in plain float64: what a check compares training rows with.

Nothing here is shared with `areno.loss_fns.advantages`. A group is the samples of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Rows = Sequence[np.ndarray]


class Norm(NamedTuple):
    """Which mean is subtracted and which deviation divides: "group", "batch" or None."""

    mean: str | None = "group"
    std: str | None = "group"
    is_unbiased: bool = False
    eps: float = 1e-6
    leaves_one_out: bool = False

    @staticmethod
    def of(section: Any) -> Norm | None:
        """Read a NormConfig."""
        if section is None:
            return None
        return Norm(section.mean_level, section.std_level, section.std_unbiased, section.eps, section.mean_leave1out)

    def apply(self, values: Sequence[float], groups: Sequence[int]) -> list[float]:
        found = []
        for index, value in enumerate(values):
            others = {
                None: [],
                "batch": [float(other) for other in values],
                "group": [float(other) for other, group in zip(values, groups, strict=True) if group == groups[index]],
            }
            over_mean, over_std = others[self.mean], others[self.std]
            if any(len(set(over)) == 1 for over in (over_mean, over_std)):
                found.append(0.0)  # no signal
                continue
            result = float(value)
            if self.mean is not None:
                mean = math.fsum(over_mean) / len(over_mean)
                if self.leaves_one_out:
                    mean = (math.fsum(over_mean) - value) / (len(over_mean) - 1)
                result -= mean
            if self.std is not None:
                centre = math.fsum(over_std) / len(over_std)
                squares = math.fsum((other - centre) ** 2 for other in over_std)
                result /= math.sqrt(squares / (len(over_std) - self.is_unbiased)) + self.eps
            found.append(result)
        return found


def shaped_rewards(rewards: Sequence[float], lengths: Sequence[int], actor: Any, limit: int) -> list[float]:
    """Apply the actor's settings of rewards, without reward_norm: overlong penalty, bias, scaling and clip."""
    found = []
    for reward, length in zip(rewards, lengths, strict=True):
        if actor.overlong_reward_penalty:
            over = length - (limit - actor.overlong_tokens)
            reward -= actor.overlong_penalty_factor * min(1.0, max(0.0, over / actor.overlong_tokens))
        reward = (reward + actor.reward_bias) * actor.reward_scaling
        if actor.reward_clip is not None:
            reward = max(-actor.reward_clip, min(actor.reward_clip, reward))
        found.append(reward)
    return found


def kl_estimate(logprobs: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    apart = reference - logprobs
    return {"k1": -apart, "k2": apart**2 / 2, "k3": np.exp(apart) - apart - 1}[estimator]


def gae(rewards: np.ndarray, values: np.ndarray, discount: float, decay: float) -> np.ndarray:
    """Generalised advantage estimation (1506.02438 eq. 16), as the sum that the paper writes."""
    n = len(rewards)
    after = [*values[1:], 0.0][:n]
    errors = [rewards[t] + discount * after[t] - values[t] for t in range(n)]
    return np.array([math.fsum((discount * decay) ** (u - t) * errors[u] for u in range(t, n)) for t in range(n)])


def token_rewards(rewards: Sequence[float], logprobs: Rows, reference: Rows | None, actor: Any) -> list[np.ndarray]:
    """Return the reward of a row at its last token, and a KL penalty at each token if the settings subtract one."""
    found = []
    for index, new in enumerate(logprobs):
        of_row = np.zeros(len(new))
        if actor.kl_reward_coef and reference is not None:
            of_row -= actor.kl_reward_coef * kl_estimate(new, reference[index], actor.kl_estimator)
        if len(of_row):
            of_row[-1] += rewards[index]
        found.append(of_row)
    return found


def outcome_advantages(
    rewards: Sequence[float], groups: Sequence[int], logprobs: Rows, reference: Rows | None, actor: Any
) -> list[np.ndarray]:
    """Advantages without a critic, of each trained token.

    With a KL penalty in the rewards, normalisation over a group takes whole rows (RLOO), and over the batch the
    reward-to-go of tokens (REINFORCE++).
    """
    norm = Norm.of(actor.adv_norm)
    if not actor.kl_reward_coef:
        of_rows = list(rewards) if norm is None else norm.apply(rewards, groups)
        return [np.full(len(row), value) for row, value in zip(logprobs, of_rows, strict=True)]
    per_token = token_rewards(rewards, logprobs, reference, actor)
    if norm is not None and "group" in (norm.mean, norm.std):
        of_rows = norm.apply([float(row.sum()) for row in per_token], groups)
        return [np.full(len(row), value) for row, value in zip(logprobs, of_rows, strict=True)]
    to_go = [np.cumsum(row[::-1])[::-1] for row in per_token]
    return to_go if norm is None else over_tokens(norm, to_go, groups)


def maxrl(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """MaxRL (2602.02710): what a reward is above the mean of its group, as a share of the mean."""
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [other for other, of in zip(rewards, groups, strict=True) if of == group]
        mean = math.fsum(own) / len(own)
        if len(own) == 1:
            found.append(reward)
        else:
            found.append(reward / mean - 1 if mean > 0 and len(set(own)) > 1 else 0.0)
    return found


def real(rewards: Sequence[float], groups: Sequence[int], tau: float) -> list[float]:
    """REAL (2602.05630) before the first update: the slope of each sample in the loss of its group, times its size."""
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [other for other, of in zip(rewards, groups, strict=True) if of == group]
        mean = math.fsum(own) / len(own)
        n_better = sum(other > mean for other in own)
        if math.isclose(min(own), max(own), rel_tol=1e-9, abs_tol=1e-12):
            found.append(0.0)  # equal but for rounding
        elif reward > mean:
            found.append(len(own) / tau / (1 + n_better))
        else:
            found.append(-len(own) / tau / (1 + len(own) - n_better))
    return found


def otb(rewards: Sequence[float], groups: Sequence[int], distributions: Rows, tokens: Rows) -> list[np.ndarray]:
    """OTB (2602.07078), from the distribution at each trained token, (T, V) for each row, and the tokens."""
    weights = []
    for q, chosen in zip(distributions, tokens, strict=True):
        apart = [np.eye(len(of_token))[token] - of_token for of_token, token in zip(q, chosen, strict=True)]
        weights.append([math.fsum(float(x @ x) for x in apart[: t + 1]) for t in range(len(chosen))])
    found = []
    for index, group in enumerate(groups):
        own = [other for other, of in enumerate(groups) if of == group]
        of_row = []
        for t in range(len(weights[index])):
            alive = [other for other in own if len(weights[other]) > t]
            total = math.fsum(weights[other][t] for other in alive)
            baseline = math.fsum(rewards[other] * weights[other][t] for other in alive) / total
            is_equal = len({rewards[other] for other in alive}) == 1
            of_row.append(0.0 if is_equal else rewards[index] - baseline)
        found.append(np.array(of_row))
    return found


def gdpo(
    parts: Mapping[str, Sequence[float]], weights: Mapping[str, float], groups: Sequence[int], eps: float
) -> list[float]:
    """GDPO (2601.05242): the weighted sum of parts, each normalised over its group, normalised over the batch."""
    of_parts = {name: Norm(eps=eps).apply(values, groups) for name, values in parts.items()}
    sums = [math.fsum(weights[name] * of_parts[name][index] for name in parts) for index in range(len(groups))]
    return Norm("batch", "batch", eps=eps).apply(sums, groups)


def turn_returns(rewards: Sequence[float] | np.ndarray, discount: float) -> list[float]:
    """Return the reward of each turn and those after it, discounted once for each turn."""
    found = [0.0] * len(rewards)
    for k in reversed(range(len(rewards))):
        found[k] = rewards[k] + (discount * found[k + 1] if k + 1 < len(rewards) else 0.0)
    return found


def turn_advantages(
    rewards: Rows, groups: Sequence[int], discount: float, norm: Norm | None, *, same_turn: bool
) -> list[np.ndarray]:
    """Return the advantage of each turn of each sample: its return, normalised over turns of the group or batch.

    With `same_turn`, a turn is compared with the same turn of the other samples of its group.
    """
    returns = [turn_returns(of_sample, discount) for of_sample in rewards]
    flat = [value for of_sample in returns for value in of_sample]
    if norm is not None:
        of_turns = [(group, k * same_turn) for group, own in zip(groups, returns, strict=True) for k in range(len(own))]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(of_turns))}
        flat = norm.apply(flat, [numbers[key] for key in of_turns])
    return np.split(np.array(flat), np.cumsum([len(of_sample) for of_sample in returns])[:-1])


def turn_gae(
    rewards: np.ndarray, values: np.ndarray, turns: np.ndarray, discount: float, decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, returns) of trained tokens by GAE over turns, with the value before each turn's first token.

    The reward of a turn without trained tokens counts in the turn before, or in the first.
    """
    there = sorted(set(turns.tolist()))
    if not there:
        return np.zeros(0), np.zeros(0)
    of_turn = dict.fromkeys(there, 0.0)
    for k, reward in enumerate(rewards):
        of_turn[max((turn for turn in there if turn <= k), default=there[0])] += reward
    first = np.array([values[turns.tolist().index(turn)] for turn in there])
    advantages = gae(np.array([of_turn[turn] for turn in there]), first, discount, decay)
    places = np.array([there.index(turn) for turn in turns.tolist()])
    return advantages[places], (advantages + first)[places]


def over_tokens(norm: Norm, rows: Rows, groups: Sequence[int]) -> list[np.ndarray]:
    """Normalise the values of tokens over the tokens of the batch or of a group."""
    of_tokens = [group for row, group in zip(rows, groups, strict=True) for _ in row]
    flat = norm.apply([float(value) for row in rows for value in row], of_tokens)
    return np.split(np.array(flat), np.cumsum([len(row) for row in rows])[:-1])


def critic_advantages(
    rewards: Sequence[float], groups: Sequence[int], logprobs: Rows, reference: Rows | None, values: Rows, actor: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(advantages, returns) by GAE. Only advantages are normalised."""
    per_token = token_rewards(rewards, logprobs, reference, actor)
    raw, returns = [], []
    for row, own in zip(per_token, values, strict=True):
        decay = actor.gae_lambda
        if actor.length_lambda is not None and len(own):  # VAPO (2504.05118 sec. 4.2)
            decay = max(0.0, 1.0 - 1.0 / (actor.length_lambda * len(own)))
        raw.append(gae(row, own, actor.discount, decay))
        of_critic = decay if actor.critic_lambda is None else actor.critic_lambda
        returns.append(gae(row, own, actor.discount, of_critic) + own)
    norm = Norm.of(actor.adv_norm)
    return (raw if norm is None else over_tokens(norm, raw, groups)), returns
