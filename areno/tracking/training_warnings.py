"""Checks that warn when the scalars of a run show a problem in training.

Each check returns a warning, which names the settings to change, or "". Each kind of warning is given once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST, LAST = 5, 5
"""The numbers of first and last steps over which a scalar is averaged, to compare the two means."""
N_FLAT = 10  # steps in a row in which the rewards prefer no sample
N_TRUNCATED = 5  # steps in a row in which every completion was truncated


@dataclass
class History:
    """The values of one scalar in the first FIRST steps and in the latest ones, oldest first."""

    first: list[float]
    last: list[float]

    def add(self, value: float) -> None:
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last = [*self.last, value][-max(LAST, N_FLAT) :]

    @property
    def first_mean(self) -> float:
        return mean(self.first)

    @property
    def last_mean(self) -> float:
        return mean(self.last[-LAST:])

    def was_always_1(self, n: int) -> bool:
        """Return whether the last `n` values exist and none is below 1."""
        return len(self.last) >= n and not min(self.last[-n:]) < 1


def entropy_collapse_warning(entropy: History, accuracy: History) -> str:
    """Warn of a nearly deterministic policy (entropy in nats), unless nearly all its answers are right.

    The entropy is then below 0.05 nats and below a tenth of its mean over the first steps. `accuracy` is empty if it is
    not measured.
    """
    if accuracy.last_mean >= 0.95 or not (entropy.last_mean < 0.1 * entropy.first_mean and entropy.last_mean < 0.05):
        return ""
    return (
        f"the entropy of the policy has fallen from {entropy.first_mean:.3g} to {entropy.last_mean:.3g} "
        "(train/entropy): its samples are nearly the same, so it explores no more; lower actor.optimizer.lr, raise "
        "actor.eps_clip_higher or gconfig.temperature, or go on from an earlier checkpoint"
    )


def flat_rewards_warning(flat: History, reward: float) -> str:
    """Warn if the last N_FLAT steps were flat. `flat` has 1.0 for each flat step. `reward` is the mean reward."""
    if not flat.was_always_1(N_FLAT):
        return ""
    return (
        f"for {N_FLAT} steps no sample was better than those that it is compared with (mean reward {reward:.4g}), so "
        "nothing can be learned from rewards; look at the completions (rollouts/ in the run's folder) and at the "
        "reward function; use easier or harder prompts, more gconfig.n_samples or rollout.dynamic_sampling=true; if "
        "rewards were better before, lower actor.optimizer.lr"
    )


def truncation_warning(truncated: History, length: float) -> str:
    """Warn if all of the last N_TRUNCATED steps had nothing but truncated completions. `length` is in tokens."""
    if not truncated.was_always_1(N_TRUNCATED):
        return ""
    return (
        f"for {N_TRUNCATED} steps every completion was cut off at the length limit ({length:.0f} tokens, "
        "rollout/truncated), so a reward for a final answer has nothing to judge; raise gconfig.max_new_tokens, set "
        "gconfig.stop, or look at the chat template (rollout.enable_thinking=false)"
    )


def missing_solutions_warning(is_equal: bool, reward: float, rows: str) -> str:
    """Warn if all rewards of a step are equal and the dataset has no reference answers.

    `is_equal` says whether the rewards are equal. `rows` is "" if some row has the field `solutions`, otherwise a text
    such as "no row of data.jsonl".
    """
    if not rows or not is_equal:
        return ""
    return (
        f"all rewards of this step are {reward:.4g}, and {rows} has solutions; if the reward compares with them, give "
        "each row the field solutions (train_dataset.loader can make it of another one)"
    )


def logprob_difference_warning(difference: History) -> str:
    """Warn if the log-probabilities from rollout and training differ by much more (in nats) than in the first steps.

    The importance ratios to the rollout policy are then wrong.
    """
    if not difference.last_mean > max(0.1, 10 * difference.first_mean):
        return ""
    return (
        f"log-probabilities of rollout and training differ by {difference.last_mean:.3g}, at first "
        f"{difference.first_mean:.3g} (train/logp_abs_diff_mean): the policy moves too far in one step; lower "
        "actor.optimizer.lr or actor.ppo_n_minibatches"
    )


def rounding_clip_warning(apart: float, clip: float | None, remedy: str) -> str:
    """Warn if rounding differences between rollout and training exceed a quarter of the clip range `clip`.

    Clipping then removes the gradient of some tokens or sequences even before the first update of the weights. `apart`
    is the mean absolute difference in nats of a token or, for sequence-level ratios, of a sequence. `clip` is None if
    the ratio does not use log-probabilities from the rollout. `remedy` is a setting that makes ratios use other
    log-probabilities.
    """
    if clip is None or not apart > clip / 4:
        return ""
    return (
        f"rollout and training differ by {apart:.2g} before any update, and ratios that compare with the rollout are "
        f"clipped at {clip:g} (actor.eps_clip), so some tokens or sequences lose their gradient by rounding alone; set "
        f"{remedy}, or engine.exact=true"
    )


def nonfinite_rewards_warning(n: float, n_samples: float, reward: str) -> str:
    if not n:
        return ""
    return (
        f"{n:.0f} of {n_samples:.0f} rewards of {reward} are NaN, infinite or too large for float32 "
        "(rollout/reward_not_finite); these samples are not trained on; look for a division by zero or a log of zero "
        "in it"
    )


class TrainingWarnings:
    """Checks the scalars of a run after each step, and returns each kind of warning only once.

    `reward` names the reward functions or the reward model. `unanswered` is the argument `rows` of
    `missing_solutions_warning`. `ratio` is (clip range, "token" or "sequence", setting), as `rounding_clip_warning`
    needs them.
    """

    def __init__(self, reward: str = "", unanswered: str = "", needs_rewards: bool = True):
        self.reward, self.unanswered, self._needs_rewards = reward, unanswered, needs_rewards
        self.ratio: tuple[float | None, str, str] = (None, "token", "")
        self._kept: dict[str, History] = {}
        self._warned: list[str] = []

    def new_warnings(self, scalars: Mapping[str, float]) -> list[str]:
        """Return the new warnings about a step. Without rollout/rewards_max there is no check."""
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
            "answers": missing_solutions_warning(equal, reward, self.unanswered),
            "truncated": truncation_warning(self._history("rollout/truncated"), length),
            "entropy": entropy_collapse_warning(self._history("train/entropy"), self._history("rollout/accuracy")),
            "flat": flat_rewards_warning(self._history("flat"), reward),
            "rounding": rounding_clip_warning(scalars.get(f"train/{apart}", 0.0), clip, remedy),
            "logprobs": logprob_difference_warning(self._history("train/logp_abs_diff_mean")),
            "not_finite": nonfinite_rewards_warning(
                scalars.get("rollout/reward_not_finite", 0.0), scalars["rollout/num_sequences"], self.reward
            ),
        }
        return [text for name, text in found.items() if text and self.add_if_new(name)]

    def add_if_new(self, name: str) -> bool:
        """Return whether a kind of warning is new, and record that it has been given."""
        is_first = name not in self._warned
        if is_first:
            self._warned.append(name)
        return is_first

    def _history(self, name: str) -> History:
        return self._kept.setdefault(name, History([], []))

    def state_dict(self) -> dict[str, Any]:
        kept = {name: {"first": list(of.first), "last": list(of.last)} for name, of in self._kept.items()}
        return {"kept": kept, "told": list(self._warned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = {name: History(list(of["first"]), list(of["last"])) for name, of in state["kept"].items()}
        self._warned = list(state["told"])


def is_flat(scalars: Mapping[str, float]) -> bool:
    """Return whether nothing can be learned from rewards: all are equal, or equal within each prompt (advantages 0)."""
    advantages = scalars.get("rollout/advantages_mean", math.nan), scalars.get("rollout/advantages_std", math.nan)
    return rewards_are_equal(scalars) or advantages == (0, 0)


def rewards_are_equal(scalars: Mapping[str, float]) -> bool:
    return scalars["rollout/rewards_max"] == scalars["rollout/rewards_min"]


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN without values. NaN triggers no warning, because every comparison with it is false."""
    return sum(values) / len(values) if values else math.nan
