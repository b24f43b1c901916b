"""Checks that warn when the scalars of a run show a problem in training.

`Divergence.check` runs all checks after each step. Each warning is logged once, and names the settings to change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST, LAST = 5, 5
"""The numbers of first and last steps over which a scalar is averaged, to compare the two means."""
N_FLAT = 10
"""Warn after this many steps in a row in which the rewards prefer no sample."""
N_TRUNCATED = 5
"""Warn after this many steps in a row in which every completion was truncated."""


@dataclass
class History:
    """The first and the last values of one scalar, oldest first.

    Attributes:
        first: The values from the first steps, at most FIRST.
        last: The values from the latest steps, at most the larger of LAST and N_FLAT.
    """

    first: list[float]
    last: list[float]

    def add(self, value: float) -> None:
        """Append the value from the next step."""
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last = [*self.last, value][-max(LAST, N_FLAT) :]

    @property
    def was(self) -> float:
        """Return the mean of the scalar over the first FIRST steps."""
        return mean(self.first)

    @property
    def is_now(self) -> float:
        """Return the mean of the scalar over the last LAST steps."""
        return mean(self.last[-LAST:])


def entropy_collapsed(entropy: History, accuracy: History) -> str:
    """Return a warning if the policy has become nearly deterministic although its answers are not all right.

    That is the case if the entropy is below 0.05 nats and below a tenth of its mean over the first steps, unless the
    accuracy is 0.95 or more.

    Args:
        entropy: The scalar train/entropy, in nats.
        accuracy: The scalar rollout/accuracy, from 0 to 1. Empty if it is not measured.

    Returns:
        The warning, or "" if there is no problem.
    """
    if accuracy.is_now >= 0.95 or not (entropy.is_now < 0.1 * entropy.was and entropy.is_now < 0.05):
        return ""
    return (
        f"the entropy of the policy has fallen from {entropy.was:.3g} to {entropy.is_now:.3g} (train/entropy): its "
        "samples are nearly the same, so it explores no more; lower actor.optimizer.lr, raise actor.eps_clip_higher or "
        "gconfig.temperature, or go on from an earlier checkpoint"
    )


def nothing_to_learn(flat: History, reward: float) -> str:
    """Return a warning if each of the last N_FLAT steps was flat, or "".

    Args:
        flat: For each step, 1.0 if `is_flat` is true for the step, else 0.0.
        reward: The mean reward in the last step, for the message.
    """
    if len(flat.last) < N_FLAT or min(flat.last[-N_FLAT:]) < 1:
        return ""
    return (
        f"for {N_FLAT} steps no sample was better than those that it is compared with (mean reward {reward:.4g}), so "
        "nothing can be learned from rewards; look at the completions (rollouts/ in the run's folder) and at the "
        "reward function; use easier or harder prompts, more gconfig.n_samples or rollout.dynamic_sampling=true; if "
        "rewards were better before, lower actor.optimizer.lr"
    )


def all_truncated(truncated: History, length: float) -> str:
    """Return a warning if every completion in the last N_TRUNCATED steps was truncated at the length limit.

    Args:
        truncated: For each step, the fraction of truncated completions, from 0 to 1.
        length: The mean length of the completions in the last step, in tokens, for the message.

    Returns:
        The warning, or "" if there is no problem.
    """
    if len(truncated.last) < N_TRUNCATED or min(truncated.last[-N_TRUNCATED:]) < 1:
        return ""
    return (
        f"for {N_TRUNCATED} steps every completion was cut off at the length limit ({length:.0f} tokens, "
        "rollout/truncated), so a reward for a final answer has nothing to judge; raise gconfig.max_new_tokens, set "
        "gconfig.stop, or look at the chat template (rollout.enable_thinking=false)"
    )


def answers_missing(is_equal: bool, reward: float, rows: str) -> str:
    """Return a warning if all rewards of a step are equal and the rows of the dataset have no reference answers, or "".

    Args:
        is_equal: Whether all rewards of the step are equal.
        reward: The reward in the step, for the message.
        rows: A text such as "no row of data.jsonl" if no row has the field `solutions`. "" if rows have this field.
    """
    if not rows or not is_equal:
        return ""
    return (
        f"all rewards of this step are {reward:.4g}, and {rows} has solutions; if the reward compares with them, give "
        "each row the field solutions (train_dataset.loader can make it of another one)"
    )


def logprobs_apart(difference: History) -> str:
    """Return a warning if the log-probabilities from rollout and training differ too much.

    That is the case if the mean over the last steps exceeds 0.1 nats and ten times the mean over the first steps. The
    importance ratios to the rollout policy are then wrong.

    Args:
        difference: The scalar train/logp_abs_diff_mean, in nats.

    Returns:
        The warning, or "" if there is no problem.
    """
    if not difference.is_now > max(0.1, 10 * difference.was):
        return ""
    return (
        f"log-probabilities of rollout and training differ by {difference.is_now:.3g}, at first {difference.was:.3g} "
        "(train/logp_abs_diff_mean): the policy moves too far in one step; lower actor.optimizer.lr or "
        "actor.ppo_n_minibatches"
    )


def rounding_clips(apart: float, clip: float | None, remedy: str) -> str:
    """Return a warning if rounding differences between rollout and training exceed a quarter of the clip range.

    Clipping then removes the gradient of some tokens or sequences even before the first update of the weights.

    Args:
        apart: The mean absolute difference between the log-probabilities from rollout and training, in nats. It is
            taken per token, or per sequence for sequence-level ratios.
        clip: The clip range of the importance ratio (actor.eps_clip), or None if the ratio does not use the
            log-probabilities from the rollout.
        remedy: The setting, with its value, that makes the ratio use recomputed log-probabilities instead.

    Returns:
        The warning, or "" if there is no problem.
    """
    if clip is None or not apart > clip / 4:
        return ""
    return (
        f"rollout and training differ by {apart:.2g} before any update, and ratios that compare with the rollout are "
        f"clipped at {clip:g} (actor.eps_clip), so some tokens or sequences lose their gradient by rounding alone; set "
        f"{remedy}, or engine.exact=true"
    )


def rewards_not_finite(n: float, n_samples: float, reward: str) -> str:
    """Return a warning if some rewards of a step are NaN, infinite or too large for float32.

    Args:
        n: The number of rewards that are NaN, infinite or too large.
        n_samples: The number of samples in the step.
        reward: The name of the reward functions or the reward model, for the message.

    Returns:
        The warning, or "" if there is no problem.
    """
    if not n:
        return ""
    return (
        f"{n:.0f} of {n_samples:.0f} rewards of {reward} are NaN, infinite or too large for float32 "
        "(rollout/reward_not_finite); these samples are not trained on; look for a division by zero or a log of zero "
        "in it"
    )


class Divergence:
    """Checks the scalars of a run after each step, and returns each kind of warning only once.

    Args:
        reward: The name of the reward functions or the reward model, for messages.
        unanswered: A text such as "no row of data.jsonl" if no row of the dataset has reference answers. "" if rows
            have answers, or if no reward function reads them.
        needs_rewards: Whether the run trains on rewards. If not, equal rewards are no problem.

    Attributes:
        ratio: A tuple (clip range, level, setting) that describes the importance ratios. The clip range is None if
            the ratios do not use the log-probabilities of the rollout. The level is "token" or "sequence". The
            setting is a text such as "actor.recompute_logprob=true", which makes the ratios use recomputed
            log-probabilities instead.
    """

    def __init__(self, reward: str = "", unanswered: str = "", needs_rewards: bool = True):
        self.reward, self.unanswered, self._needs_rewards = reward, unanswered, needs_rewards
        self.ratio: tuple[float | None, str, str] = (None, "token", "")
        self._kept: dict[str, History] = {}
        self._warned: list[str] = []

    def check(self, scalars: Mapping[str, float]) -> list[str]:
        """Check the scalars of one step, and return the warnings that have not been returned before.

        Args:
            scalars: The scalars of the step by name. Without rollout/rewards_max the step is not checked.

        Returns:
            The new warnings. Empty if there is no new problem.
        """
        if "rollout/rewards_max" not in scalars:
            return []
        names = ("train/entropy", "train/logp_abs_diff_mean", "rollout/accuracy", "rollout/truncated")
        for name in (name for name in names if name in scalars):
            self._history(name).add(scalars[name])
        equal = self._needs_rewards and rewards_are_equal(scalars)
        self._history("flat").add(float(self._needs_rewards and is_flat(scalars)))
        clip, level, remedy = self.ratio
        apart = "logp_row_diff_mean" if level == "sequence" else "logp_abs_diff_mean"
        length, reward = scalars.get("rollout/response_len_mean", math.nan), scalars["rollout/rewards_mean"]
        found = {
            "answers": answers_missing(equal, reward, self.unanswered),
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
        """Return whether a warning is new, and record that it has been given.

        Args:
            name: A short name that identifies the kind of warning.

        Returns:
            True at the first call with this name, else False.
        """
        is_first = name not in self._warned
        if is_first:
            self._warned.append(name)
        return is_first

    def _history(self, name: str) -> History:
        """Return the history of a scalar. The first call for a name makes an empty history."""
        return self._kept.setdefault(name, History([], []))

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded values and the names of given warnings, for a resumed run."""
        kept = {name: {"first": list(of.first), "last": list(of.last)} for name, of in self._kept.items()}
        return {"kept": kept, "told": list(self._warned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the recorded values and the names of given warnings, so that a resumed run does not repeat warnings.

        Args:
            state: A dictionary returned by `state_dict`.
        """
        self._kept = {name: History(list(of["first"]), list(of["last"])) for name, of in state["kept"].items()}
        self._warned = list(state["told"])


def is_flat(scalars: Mapping[str, float]) -> bool:
    """Return whether the rewards of a step prefer no sample: all are equal, or those of each prompt are.

    In the second case all advantages are 0.
    """
    advantages = scalars.get("rollout/advantages_mean", math.nan), scalars.get("rollout/advantages_std", math.nan)
    return rewards_are_equal(scalars) or advantages == (0, 0)


def rewards_are_equal(scalars: Mapping[str, float]) -> bool:
    """Return whether all rewards of a step are equal. It must have some."""
    return scalars["rollout/rewards_max"] == scalars["rollout/rewards_min"]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values, or NaN if there are none.

    NaN triggers no warning, because every comparison with NaN is false.
    """
    return sum(values) / len(values) if values else math.nan
