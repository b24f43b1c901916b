"""Checks that warn when the scalars of a run show a problem in training.

Each check returns a warning, which names the settings to change, or "". Each kind of warning is given once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.tracking.changes import BEFORE, FAR, LASTING, gain, is_jump, lasting_change, without_trend

FIRST, LAST = 5, 5
"""The numbers of first and last steps over which a scalar is averaged, to compare the two means."""
N_FLAT = 10  # steps in a row in which the rewards prefer no sample
N_TRUNCATED = 5  # steps in a row in which every completion was truncated
HARMLESS_KL = 0.01  # nats; a target that policy updates are often limited to
HARMLESS_DIFFERENCE = 1e-3  # nats; rollout and training in one precision differ by less, or by as much in each step
_KL = ("train/approx_kl", "train/kl_loss", "rollout/ref_kl")
_PART = "rollout/reward/"
_MODELS = ("model", "judge")  # parts of a reward that a model gives
_LEAST_LENGTH_NOISE = 0.05  # of the logarithm of a length: a smaller change is none, however constant the length was


@dataclass(frozen=True)
class TrainingWarning:
    """A warning of a kind that says which samples are telling, see areno.tracking.telling_samples.

    Attributes:
        since: The step in which it began, if that is an earlier one.
        parts: Two parts of the reward that disagree, of the kind "hacked".
    """

    kind: str
    text: str
    since: int | None = None
    parts: tuple[str, str] = ("", "")


@dataclass
class History:
    """The values of one scalar in the first FIRST steps and in the latest ones, oldest first, and steps of the latter.

    Steps are not known where a state of an earlier version was loaded.
    """

    first: list[float]
    last: list[float]
    steps: list[int] = field(default_factory=list)

    def add(self, value: float, step: int) -> None:
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last = [*self.last, value][-BEFORE - LASTING :]
        self.steps = [*self.steps, step][-BEFORE - LASTING :]

    def since(self, holds: Callable[[float], bool]) -> int | None:
        """Return the first of the latest steps in a row whose values satisfy a condition. None if that is the last."""
        found = None
        for value, step in zip(reversed(self.last), reversed(self.steps), strict=False):
            if not holds(value):
                break
            found = step
        return None if not self.steps or found == self.steps[-1] else found

    @property
    def lasting_since(self) -> int | None:
        """The step in which a lasting change began."""
        return self.steps[-LASTING] if len(self.steps) >= LASTING else None

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


def length_drift_warning(length: History, reward: History) -> str:
    """Warn if completions became lastingly longer or shorter, and the reward did not gain by it.

    A moderate change counts if the reward fell lastingly in the same steps. A large one counts unless the reward rose,
    or the length only followed its trend.
    """
    logs = [math.log(max(value, 1.0)) for value in length.last]
    change, fell = lasting_change(logs, _LEAST_LENGTH_NOISE), lasting_change(reward.last) < 0
    is_large = lasting_change(without_trend(logs), _LEAST_LENGTH_NOISE, FAR) and gain(reward.last) < 1
    if not change or not (fell or is_large):
        return ""
    return (
        f"completions have become {'longer' if change > 0 else 'shorter'}: {length.last_mean:.4g} tokens, "
        f"{math.exp(change):.2g} times as many as in the steps before (rollout/response_len_mean), and the mean reward "
        f"{'fell' if fell else 'did not rise'}; read some; look for a reward that depends on the length, try "
        "variant=dr_grpo, or lower actor.optimizer.lr"
    )


def kl_jump_warning(name: str, kl: History) -> str:
    """Warn if a KL divergence (the scalar `name`, in nats) is suddenly far above that of the steps before."""
    if not is_jump(kl.last, HARMLESS_KL):
        return ""
    before = sorted(kl.last[:-1])[(len(kl.last) - 1) // 2]
    return (
        f"the policy has moved {kl.last[-1]:.3g} nats ({name}), before about {max(0.0, before):.2g} in a step: one "
        "update was too large; look for a very large reward or advantage, lower actor.optimizer.lr or set "
        "actor.optimizer.gradient_clipping"
    )


def stale_policy_warning(difference: History, are_stale: bool) -> str:
    """Warn if log-probabilities of rollout and training suddenly differ, though the same weights computed them.

    `are_stale` says that samples may be of older weights, so that they differ anyway.
    """
    if are_stale or not is_jump(difference.last, HARMLESS_DIFFERENCE):
        return ""
    before = sorted(difference.last[:-1])[(len(difference.last) - 1) // 2]
    return (
        f"the samples are not those of the policy that is trained: their log-probabilities differ by "
        f"{difference.last[-1]:.3g}, before by {before:.2g} (train/logp_abs_diff_mean); the rollout had older weights, "
        "another temperature or other tokens; engine.exact=true should make them equal"
    )


def aged_samples_warning(age: int, most: int) -> str:
    """Warn if a sample is older than the setting allows. Ages are in steps."""
    if age <= most:
        return ""
    return (
        f"a trained sample has tokens of weights that are {age} steps old, and "
        f"rollout.max_head_offpolicyness={most} allows {most}: the rollout did not get the newest weights"
    )


def hacked_reward_warning(model: str, by_model: History, rule: str, by_rule: History) -> str:
    """Warn if a part of the reward that a model gives rises lastingly while a rule's part falls in the same steps."""
    if not (lasting_change(by_model.last) > 0 > lasting_change(by_rule.last)):
        return ""
    return (
        f"the policy pleases the {model} and not the rule: {_PART}{model} rises to {by_model.last_mean:.3g} while "
        f"{_PART}{rule} falls to {by_rule.last_mean:.3g}; read what it likes, raise actor.kl_ctl, give the rule a "
        "weight (reward.weights), or go on from an earlier checkpoint"
    )


def skipped_update_warning(broken: Sequence[str]) -> str:
    return (
        f"the update was skipped, since {' and '.join(broken)} is not finite; the learning rate may be too high "
        "(actor.optimizer.lr), or a reward or advantage too large; train/skipped_steps counts such updates"
    )


def nothing_trained_warning(masks_truncated: bool) -> str:
    text = "no token is trained, so the update was skipped (train/skipped_steps)"
    if masks_truncated:
        text += "; actor.mask_no_eos_with_zero leaves out samples that are cut off: raise gconfig.max_new_tokens"
    return text


def unrewarded_step_warning(most: int | None) -> str:
    """Warn of a step without any reward. `most` such steps in a row end the run."""
    text = "no sample has a reward, so none is trained (train/skipped_steps)"
    return text + ("" if most is None else f"; {most} such steps in a row end the run (actor.max_skipped_steps)")


_WATCHED = {
    *("train/entropy", "train/logp_abs_diff_mean", "rollout/accuracy", "rollout/truncated", "rollout/rewards_mean"),
    *("rollout/response_len_mean", *_KL),
}


def _is_part(name: str) -> bool:
    return name.startswith(_PART) and not name.endswith("_std")


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

    def new_warnings(self, step: int, scalars: Mapping[str, float]) -> list[TrainingWarning]:
        """Return the new warnings about a step. Without rollout/rewards_max there is no check."""
        if "rollout/rewards_max" not in scalars:
            return []
        equal, flat = self._needs_rewards and rewards_are_equal(scalars), self._needs_rewards and is_flat(scalars)
        watched = {name: value for name, value in scalars.items() if name in _WATCHED or _is_part(name)}
        for name, value in {**watched, "flat": float(flat)}.items():
            self._history(name).add(value, step)
        found = [*self._of_levels(scalars, equal), *self._of_changes(scalars)]
        return [each for each in found if each.text and self.add_if_new(each.kind)]

    def _of_levels(self, scalars: Mapping[str, float], equal: bool) -> Iterator[TrainingWarning]:
        """Yield warnings of values that are bad at any time. A text is "" if all is well."""
        clip, level, remedy = self.ratio
        apart = "logp_row_diff_mean" if level == "sequence" else "logp_abs_diff_mean"
        length, reward = scalars.get("rollout/response_len_mean", math.nan), scalars["rollout/rewards_mean"]
        yield TrainingWarning("answers", missing_solutions_warning(equal, reward, self.unanswered))
        truncated, flat = self._history("rollout/truncated"), self._history("flat")
        at_end = truncated.since(lambda value: value >= 1)
        yield TrainingWarning("truncated", truncation_warning(truncated, length), at_end)
        entropy = self._history("train/entropy")
        low = entropy.since(lambda value: value < min(0.1 * entropy.first_mean, 0.05))
        yield TrainingWarning("entropy", entropy_collapse_warning(entropy, self._history("rollout/accuracy")), low)
        yield TrainingWarning("flat", flat_rewards_warning(flat, reward), flat.since(lambda value: value >= 1))
        text = rounding_clip_warning(scalars.get(f"train/{apart}", 0.0), clip, remedy)
        yield TrainingWarning("rounding", text)
        difference = self._history("train/logp_abs_diff_mean")
        large = difference.since(lambda value: value > max(0.1, 10 * difference.first_mean))
        yield TrainingWarning("logprobs", logprob_difference_warning(difference), large)
        text = nonfinite_rewards_warning(
            scalars.get("rollout/reward_not_finite", 0.0), scalars["rollout/num_sequences"], self.reward
        )
        yield TrainingWarning("not_finite", text)

    def _of_changes(self, scalars: Mapping[str, float]) -> Iterator[TrainingWarning]:
        """Yield warnings of changes within the run, see areno.tracking.changes."""
        length = self._history("rollout/response_len_mean")
        text = length_drift_warning(length, self._history("rollout/rewards_mean"))
        grew = length.last_mean > mean(length.last[:-LASTING])
        yield TrainingWarning("longer" if grew else "shorter", text, length.lasting_since)
        for name in _KL:
            if name in scalars:
                yield TrainingWarning("kl", kl_jump_warning(name, self._history(name)))
        if "train/logp_abs_diff_mean" in scalars:
            text = stale_policy_warning(self._history("train/logp_abs_diff_mean"), "rollout/oldest_gap" in scalars)
            yield TrainingWarning("stale", text)
        parts = [name.removeprefix(_PART) for name in scalars if _is_part(name)]
        for model in (part for part in parts if part in _MODELS):
            for rule in (part for part in parts if part.partition("/")[0] not in _MODELS):
                by_model = self._history(_PART + model)
                text = hacked_reward_warning(model, by_model, rule, self._history(_PART + rule))
                yield TrainingWarning("hacked", text, by_model.lasting_since, (model, rule))

    def add_if_new(self, name: str) -> bool:
        """Return whether a kind of warning is new, and record that it has been given."""
        is_first = name not in self._warned
        if is_first:
            self._warned.append(name)
        return is_first

    def _history(self, name: str) -> History:
        return self._kept.setdefault(name, History([], []))

    def state_dict(self) -> dict[str, Any]:
        kept = {name: {key: list(of_key) for key, of_key in vars(of).items()} for name, of in self._kept.items()}
        return {"kept": kept, "told": list(self._warned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = {
            name: History(list(of["first"]), list(of["last"]), list(of.get("steps", ())))
            for name, of in state["kept"].items()
        }
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
