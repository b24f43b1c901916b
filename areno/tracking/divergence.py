"""Finds signs in the scalars of a run that training goes wrong. Each is logged once, with the settings to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST, LAST = 5, 5
"""How many of the first and of the last steps with a scalar are averaged and compared."""
N_FLAT = 10
"""Warn after this many steps in a row in which all advantages are 0."""
N_TRUNCATED = 5
"""Warn after this many steps in a row in which every completion was truncated."""


@dataclass
class History:
    """The first and the last values of one scalar, oldest first.

    Attributes:
        first: The values of the first steps, at most FIRST.
        last: The values of the last steps.
    """

    first: list[float]
    last: list[float]

    def add(self, value: float) -> None:
        """Add the value of the next step."""
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last = [*self.last, value][-max(LAST, N_FLAT) :]

    @property
    def was(self) -> float:
        """Return the mean of the first steps."""
        return mean(self.first)

    @property
    def is_now(self) -> float:
        """Return the mean of the last steps."""
        return mean(self.last[-LAST:])


def entropy_collapsed(entropy: History, accuracy: History) -> str:
    """Return a warning if the policy has become nearly deterministic before its answers are right.

    The entropy is then below a tenth of that of the first steps, and below 0.05 nats. A policy that is right in 19 of
    20 samples may be deterministic.

    Args:
        entropy: train/entropy, in nats.
        accuracy: rollout/accuracy.

    Returns:
        The warning; "" if there is nothing to warn of.
    """
    if not (entropy.is_now < 0.1 * entropy.was and entropy.is_now < 0.05 and accuracy.is_now < 0.95):
        return ""
    return (
        f"the entropy of the policy has fallen from {entropy.was:.3g} to {entropy.is_now:.3g} (train/entropy): its "
        "samples are nearly the same, so it explores no more; lower actor.optimizer.lr, raise actor.eps_clip_higher or "
        "gconfig.temperature, or go on from an earlier checkpoint"
    )


def nothing_to_learn(flat: History, reward: float) -> str:
    """Return a warning if no sample was better than another in the last N_FLAT steps.

    Args:
        flat: 1.0 for each step without a difference, see is_flat.
        reward: The mean reward of the last step.

    Returns:
        The warning; "" if there is nothing to warn of.
    """
    if len(flat.last) < N_FLAT or min(flat.last[-N_FLAT:]) < 1:
        return ""
    return (
        f"for {N_FLAT} steps no sample was better than another (mean reward {reward:.4g}), so nothing can be learned; "
        "look at the completions (rollouts/ in the run's folder) and at the reward function; use easier or harder "
        "prompts, more gconfig.n_samples or rollout.dynamic_sampling=true; if rewards were better before, lower "
        "actor.optimizer.lr"
    )


def all_truncated(truncated: History, length: float) -> str:
    """Return a warning if every completion of the last N_TRUNCATED steps was truncated.

    Args:
        truncated: The share of truncated completions of each step.
        length: The mean length of the last step, in tokens.

    Returns:
        The warning; "" if there is nothing to warn of.
    """
    if len(truncated.last) < N_TRUNCATED or min(truncated.last[-N_TRUNCATED:]) < 1:
        return ""
    return (
        f"for {N_TRUNCATED} steps every completion was cut off at the length limit ({length:.0f} tokens, "
        "rollout/truncated), so a reward for a final answer has nothing to judge; raise gconfig.max_new_tokens, set "
        "gconfig.stop, or look at the chat template (rollout.enable_thinking=false)"
    )


def answers_missing(is_flat: bool, reward: float, rows: str) -> str:
    """Return a warning if all rewards of a step are equal and the rows have no reference answers.

    Args:
        is_flat: Whether the rewards are equal.
        reward: The mean reward.
        rows: Which rows have no answers, such as "no row of data.jsonl"; "" if rows have answers.

    Returns:
        The warning; "" if there is nothing to warn of.
    """
    if not rows or not is_flat:
        return ""
    return (
        f"all rewards of this step are {reward:.4g}, and {rows} has solutions; if the reward compares with them, give "
        "each row the field solutions (train_dataset.loader can make it of another one)"
    )


def logprobs_apart(difference: History) -> str:
    """Return a warning if rollout and training disagree about the log-probabilities of tokens.

    Ratios to the rollout are wrong if the difference exceeds 0.1 nats and ten times that of the first steps.

    Args:
        difference: train/logp_abs_diff_mean, in nats.

    Returns:
        The warning; "" if there is nothing to warn of.
    """
    if not difference.is_now > max(0.1, 10 * difference.was):
        return ""
    return (
        f"log-probabilities of rollout and training differ by {difference.is_now:.3g}, at first {difference.was:.3g} "
        "(train/logp_abs_diff_mean): the policy moves too far in one step; lower actor.optimizer.lr or "
        "actor.ppo_n_minibatches"
    )


def rounding_clips(apart: float, clip: float | None, remedy: str) -> str:
    """Return a warning if rounding between rollout and training is not small against the clip range.

    Args:
        apart: Absolute difference of the log-probabilities that a ratio is made of, mean over tokens or sequences.
        clip: Clip range, None where ratios do not compare with the rollout.
        remedy: Setting with which they do not.
    """
    if clip is None or not apart > clip / 4:
        return ""
    return (
        f"rollout and training differ by {apart:.2g} before any update, and ratios that compare with the rollout are "
        f"clipped at {clip:g} (actor.eps_clip), so some tokens or sequences lose their gradient by rounding alone; set "
        f"{remedy}, or engine.exact=true"
    )


def rewards_not_finite(n: float, n_samples: float, reward: str) -> str:
    """Return a warning if some rewards are NaN or infinite.

    Args:
        n: The number of such rewards.
        n_samples: The number of samples.
        reward: The name of the reward functions or the reward model.

    Returns:
        The warning; "" if there is nothing to warn of.
    """
    if not n:
        return ""
    return (
        f"{n:.0f} of {n_samples:.0f} rewards of {reward} are NaN, infinite or too large for float32 "
        "(rollout/reward_not_finite); these samples are not trained on; look for a division by zero or a log of zero "
        "in it"
    )


class Divergence:
    """Examines the scalars of a run, one step after another.

    Args:
        reward: The name of the reward functions or the reward model, for messages.
        unanswered: Which rows have no solutions, such as "no row of data.jsonl"; "" if rows have solutions.

    Attributes:
        ratio: The clip range of importance ratios, the level of a ratio ("token" or "sequence"), and the setting with
            which ratios do not compare with the rollout. The clip range is None if they already do not.
    """

    def __init__(self, reward: str = "", unanswered: str = ""):
        self.reward, self.unanswered = reward, unanswered
        self.ratio: tuple[float | None, str, str] = (None, "token", "")
        self._kept: dict[str, History] = {}
        self._warned: list[str] = []

    def check(self, scalars: Mapping[str, float]) -> list[str]:
        """Return the new warnings after a step.

        Args:
            scalars: The scalars of the step. A step without rewards has no warnings.
        """
        if "rollout/rewards_max" not in scalars:
            return []
        names = ("train/entropy", "train/logp_abs_diff_mean", "rollout/accuracy", "rollout/truncated")
        for name in (name for name in names if name in scalars):
            self._history(name).add(scalars[name])
        self._history("flat").add(float(is_flat(scalars)))
        clip, level, remedy = self.ratio
        apart = "logp_row_diff_mean" if level == "sequence" else "logp_abs_diff_mean"
        length, reward = scalars.get("rollout/response_len_mean", math.nan), scalars["rollout/rewards_mean"]
        found = {
            "answers": answers_missing(is_flat(scalars), reward, self.unanswered),
            "truncated": all_truncated(self._history("rollout/truncated"), length),
            "entropy": entropy_collapsed(self._history("train/entropy"), self._history("rollout/accuracy")),
            "flat": nothing_to_learn(self._history("flat"), reward),
            "rounding": rounding_clips(scalars.get(f"train/{apart}", 0.0), clip, remedy),
            "logprobs": logprobs_apart(self._history("train/logp_abs_diff_mean")),
            "not_finite": rewards_not_finite(
                scalars.get("rollout/reward_not_finite", 0.0), scalars["rollout/num_sequences"], self.reward
            ),
        }
        return [text for name, text in found.items() if text and self.is_first(name)]

    def is_first(self, name: str) -> bool:
        """Return whether a warning has not been given before, and mark it as given.

        Args:
            name: The short name of the warning.
        """
        is_first = name not in self._warned
        if is_first:
            self._warned.append(name)
        return is_first

    def _history(self, name: str) -> History:
        """Return the history of a scalar, which is new at first."""
        return self._kept.setdefault(name, History([], []))

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run gives the same warnings."""
        kept = {name: {"first": list(of.first), "last": list(of.last)} for name, of in self._kept.items()}
        return {"kept": kept, "told": list(self._warned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier session.

        Args:
            state: The result of `state_dict`.
        """
        self._kept = {name: History(list(of["first"]), list(of["last"])) for name, of in state["kept"].items()}
        self._warned = list(state["told"])


def is_flat(scalars: Mapping[str, float]) -> bool:
    """Return whether a step has nothing to learn from: all rewards are equal, or all advantages are 0.

    Args:
        scalars: The scalars of the step, with rollout/rewards_max and rollout/rewards_min.
    """
    advantages = scalars.get("rollout/advantages_mean", math.nan), scalars.get("rollout/advantages_std", math.nan)
    return scalars["rollout/rewards_max"] == scalars["rollout/rewards_min"] or advantages == (0, 0)


def mean(values: Sequence[float]) -> float:
    """Return the mean of values; NaN for no values, since NaN compares false with every limit."""
    return sum(values) / len(values) if values else math.nan
