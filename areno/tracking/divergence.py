"""Signs that a run goes wrong, found in the scalars of its steps. Each is told once, with what to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST, LAST = 5, 5
"""Steps whose means are compared: the first and the last of a run that have the scalar."""
N_FLAT = 10
"""Steps in a row without anything to learn from, before that is told."""
N_TRUNCATED = 5
"""Steps in a row whose completions were all cut off, before that is told."""


@dataclass
class History:
    """What is kept of one scalar: its values in the first steps and in the last ones, oldest first."""

    first: list[float]
    last: list[float]

    def add(self, value: float) -> None:
        """Take the value of the next step."""
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last = [*self.last, value][-max(LAST, N_FLAT) :]

    @property
    def was(self) -> float:
        """The mean of the first steps."""
        return mean(self.first)

    @property
    def is_now(self) -> float:
        """The mean of the last steps."""
        return mean(self.last[-LAST:])


def entropy_collapsed(entropy: History, accuracy: History) -> str:
    """The policy has become nearly deterministic, although it is not right yet: it will not find better answers.

    Below a tenth of the first steps' entropy and below 0.05 nats. A policy that is right in 19 of 20 samples may be.
    """
    if not (entropy.is_now < 0.1 * entropy.was and entropy.is_now < 0.05 and accuracy.is_now < 0.95):
        return ""
    return (
        f"the entropy of the policy has fallen from {entropy.was:.3g} to {entropy.is_now:.3g} (train/entropy): its "
        "samples are nearly the same, so it explores no more; lower actor.optimizer.lr, raise actor.eps_clip_higher or "
        "gconfig.temperature, or go on from an earlier checkpoint"
    )


def nothing_to_learn(flat: History, reward: float) -> str:
    """No sample was better than another in N_FLAT steps. flat: 1.0 for such a step. reward: mean of the last step."""
    if len(flat.last) < N_FLAT or min(flat.last[-N_FLAT:]) < 1:
        return ""
    return (
        f"for {N_FLAT} steps no sample was better than another (mean reward {reward:.4g}), so nothing can be learned; "
        "look at the completions (rollouts/ in the run's folder) and at the reward function; use easier or harder "
        "prompts, more gconfig.n_samples or rollout.dynamic_sampling=true; if rewards were better before, lower "
        "actor.optimizer.lr"
    )


def all_truncated(truncated: History, length: float) -> str:
    """No completion came to its end in N_TRUNCATED steps. truncated: the share in each. length: mean of the last."""
    if len(truncated.last) < N_TRUNCATED or min(truncated.last[-N_TRUNCATED:]) < 1:
        return ""
    return (
        f"for {N_TRUNCATED} steps every completion was cut off at the length limit ({length:.0f} tokens, "
        "rollout/truncated), so a reward for a final answer has nothing to judge; raise gconfig.max_new_tokens, set "
        "gconfig.stop, or look at the chat template (rollout.enable_thinking=false)"
    )


def answers_missing(is_flat: bool, reward: float, rows: str) -> str:
    """All rewards of a step are equal, and the rows have no answers. rows: such as "no row of data.jsonl"; or ""."""
    if not rows or not is_flat:
        return ""
    return (
        f"all rewards of this step are {reward:.4g}, and {rows} has solutions; if the reward compares with them, give "
        "each row the field solutions (train_dataset.loader can make it of another one)"
    )


def logprobs_apart(difference: History) -> str:
    """Rollout and training disagree about the log-probabilities of tokens.

    By 0.1 nats and ten times as much as in the first steps: a ratio to the rollout is then no longer to be trusted.
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
    """Some rewards are NaN or infinite. reward: what gives them."""
    if not n:
        return ""
    return (
        f"{n:.0f} of {n_samples:.0f} rewards of {reward} are NaN, infinite or too large for float32 "
        "(rollout/reward_not_finite); these samples are not trained on; look for a division by zero or a log of zero "
        "in it"
    )


class Divergence:
    """Looks at the steps of a run one after another.

    Args:
        reward: What gives the rewards, for messages.
        unanswered: "no row of data.jsonl", where rows have no solutions.

    Attributes:
        ratio: Clip range of importance ratios that compare with the rollout (None where ratios do not), what has a
            ratio of its own ("token" or "sequence"), and the setting with which ratios do not compare with the rollout.
    """

    def __init__(self, reward: str = "", unanswered: str = ""):
        self.reward, self.unanswered = reward, unanswered
        self.ratio: tuple[float | None, str, str] = (None, "token", "")
        self._kept: dict[str, History] = {}
        self._told: list[str] = []

    def look(self, scalars: Mapping[str, float]) -> list[str]:
        """What is to be told after a step with these scalars, <namespace>/<name>. Steps without rewards: nothing."""
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
        """Whether a sign is seen for the first time; it counts as told from then on."""
        is_first = name not in self._told
        if is_first:
            self._told.append(name)
        return is_first

    def _history(self, name: str) -> History:
        return self._kept.setdefault(name, History([], []))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to tell the same things."""
        kept = {name: {"first": list(of.first), "last": list(of.last)} for name, of in self._kept.items()}
        return {"kept": kept, "told": list(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._kept = {name: History(list(of["first"]), list(of["last"])) for name, of in state["kept"].items()}
        self._told = list(state["told"])


def is_flat(scalars: Mapping[str, float]) -> bool:
    """Whether a step has nothing to learn from: one reward for all samples, or no advantage that is not 0."""
    advantages = scalars.get("rollout/advantages_mean", math.nan), scalars.get("rollout/advantages_std", math.nan)
    return scalars["rollout/rewards_max"] == scalars["rollout/rewards_min"] or advantages == (0, 0)


def mean(values: Sequence[float]) -> float:
    """NaN for no values, which is on no side of a limit."""
    return sum(values) / len(values) if values else math.nan
