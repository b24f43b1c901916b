"""Advantages that are not rewards normalised by `actor.adv_norm`: estimators with their formulas and their settings.

The setting `actor.adv_estimator` chooses a class by the name under which ADV_ESTIMATORS has registered it. To add an
estimator, write a class with `ADV_ESTIMATORS.register`. Arrays are numpy float64. The module imports no numpy, because
the configuration of a run is read before it is needed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from areno.errors import ConfigError, Key, Problem
from areno.loss_fns.surrogates import SurrogateConfig
from areno.schema.choices import Choices
from areno.schema.fields import Section, check, setting

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger("areno")


@dataclass(kw_only=True)
class AdvEstimator(Section):
    """Base class of estimators. The fields of a subclass are keys of the section `actor.<name>`."""

    needs_group: ClassVar[bool] = False
    """Whether a prompt needs several samples."""
    follows_policy: ClassVar[bool] = False
    """Whether each update needs advantages of its own, from `current_advantages`, with whole groups in each update."""

    needs_logit_gradients: ClassVar[bool] = False
    """Whether a forward pass computes the gradients of `token_advantages`, which gives each token its advantage."""

    def advantages(
        self, rewards_B: np.ndarray, groups: Sequence[int], parts: Sequence[Mapping[str, float]]
    ) -> np.ndarray:
        """Compute the advantages of samples.

        Args:
            rewards_B: (B,) shaped rewards. NaN marks a sample whose reward is unknown. Its advantage is 0.
            groups: Index of the group of each sample. The samples of one prompt are a group.
            parts: For each sample, the parts of its reward by name, as the reward functions returned them.

        Returns:
            (B,) advantages.
        """
        raise NotImplementedError

    def token_advantages(
        self, rewards_B: np.ndarray, groups: Sequence[int], logit_gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Compute the advantages of the T_i trained tokens of each sample, (T_i,) each.

        `logit_gradients` are squared norms, (T_i,) each: of the gradient of the log-probability of a token with respect
        to the logits, under the policy before the update.
        """
        raise NotImplementedError

    def current_advantages(self, rewards_B: np.ndarray, groups: Sequence[int], log_ratios_B: np.ndarray) -> np.ndarray:
        """Compute the advantages of samples before an update of estimators that follow the policy.

        `log_ratios_B` are means over the tokens of a sample: of its log-probability under the current policy, less that
        before the first update of the batch.
        """
        raise NotImplementedError

    def problems(self, config: Any) -> Iterator[Problem]:
        """Yield a problem for each setting of a run that the estimator cannot honour. Called for the chosen one."""
        yield from ()


ADV_ESTIMATORS: Choices[AdvEstimator] = Choices("adv_estimator")


@ADV_ESTIMATORS.register(
    "maxrl", section=True, help="the reward is divided by the mean of its group (MaxRL, arXiv 2602.02710)"
)
class MaxRL(AdvEstimator):
    """MaxRL (arXiv 2602.02710): A = (R - mean) / mean over the group, 0 if the mean is 0. A single sample has A = R.

    For rewards of 0 and 1 this estimates the gradient of the maximum likelihood of a right answer, where GRPO's is that
    of the rate of right answers.
    """

    def advantages(
        self, rewards_B: np.ndarray, groups: Sequence[int], parts: Sequence[Mapping[str, float]]
    ) -> np.ndarray:
        import numpy as np

        if (negative := rewards_B < 0).any():
            text = "is maxrl, whose baseline divides by the mean reward, but a reward is {:g}; shift it, such as by {}"
            found = float(rewards_B[negative][0])
            raise ConfigError(Problem("actor.adv_estimator", text, found, Key("actor.reward_bias")))
        advantages_B, groups_B = np.zeros_like(rewards_B), np.asarray(groups)
        for group in np.unique(groups_B):
            members = np.flatnonzero((groups_B == group) & ~np.isnan(rewards_B))
            rewards = rewards_B[members]
            if len(members) == 1:
                advantages_B[members] = rewards
            elif len(members) and rewards.mean() > 0 and not np.all(rewards == rewards[0]):
                advantages_B[members] = (rewards - rewards.mean()) / rewards.mean()
        return advantages_B

    def problems(self, config: Any) -> Iterator[Problem]:
        actor, bias = config.actor, Key("actor.reward_bias")
        if actor.reward_norm is not None:
            yield Problem("actor.reward_norm", "makes negative rewards, and {} is maxrl; set it to null", _KEY)
        factor = actor.overlong_penalty_factor if actor.overlong_reward_penalty else None
        if factor is not None and actor.reward_scaling > 0 and actor.reward_bias < factor:
            text = "is true, which makes the reward of long wrong answers negative, and {} is maxrl; leave it out, or "
            text += "raise {} to at least {} ({}), so that no reward of 0 or more becomes negative"
            about = _KEY, bias, f"{factor:g}", Key("actor.overlong_penalty_factor")
            yield Problem("actor.overlong_reward_penalty", text, *about)
        if actor.reward_scaling < 0 and actor.reward_bias >= 0:
            text = (
                "is {:g}, which makes positive rewards negative, and {} is maxrl; set a positive number, or {} to at "
            )
            text += "most -1 times the largest reward"
            yield Problem("actor.reward_scaling", text, actor.reward_scaling, _KEY, bias)


@ADV_ESTIMATORS.register(
    "gdpo", section=True, help="each part of the reward is normalised by itself (GDPO, arXiv 2601.05242)"
)
@dataclass(kw_only=True)
class GDPO(AdvEstimator):
    """GDPO (arXiv 2601.05242 eq. 4-7): A_k = (R_k - mean) / (std + eps) over the group, for each part k of the reward.

    Then A = (S - mean) / (std + eps) over the batch, with S = sum_k w_k A_k. A sample without part k does not count in
    the mean of R_k, and A_k is not in its sum.
    """

    needs_group: ClassVar[bool] = True
    weights: dict[str, float] | None = setting(
        None,
        help="Parts of the reward and their weights, such as {answer: 1.0, format: 0.5}: entries of a returned "
        "dictionary, or one part per function. null: all, each with the weight 1",
    )
    eps: float = setting(1e-6, help="Small number that is added to standard deviations before the division", gt=0)

    def advantages(
        self, rewards_B: np.ndarray, groups: Sequence[int], parts: Sequence[Mapping[str, float]]
    ) -> np.ndarray:
        import numpy as np

        from areno.loss_fns.advantages import group_advantages

        known_B = ~np.isnan(rewards_B)
        names = sorted({name for of, is_known in zip(parts, known_B, strict=True) if is_known for name in of})
        weights = self.weights or {name: 1.0 for name in names if "/" not in name}
        if known_B.any() and not names:
            text = "is gdpo, but the rewards of this step have no parts; return a dictionary, or set several functions"
            raise ConfigError(Problem("actor.adv_estimator", text))
        if missing := ", ".join(sorted(weights.keys() - set(names))) if names else "":
            if weights.keys().isdisjoint(names):
                text = "names {}, which no reward of this step has; the parts are {}"
                raise ConfigError(Problem("actor.gdpo.weights", text, missing, ", ".join(names)))
            _warn_of_missing_parts(missing, ", ".join(names))
        sums_B, has_B = np.zeros_like(rewards_B), np.zeros_like(known_B)
        for name, weight in weights.items():
            values_B = np.array([of.get(name, np.nan) for of in parts])
            values_B[~known_B] = np.nan
            sums_B += weight * group_advantages(values_B, groups, eps=self.eps)
            has_B |= ~np.isnan(values_B)
        sums_B[~has_B] = np.nan
        return group_advantages(sums_B, groups, "batch", "batch", eps=self.eps)

    def problems(self, config: Any) -> Iterator[Problem]:
        text = "is {}, but with {}=gdpo the parts of the reward train, and not their sum; leave it out"
        for name in ("reward_bias", "reward_scaling", "reward_clip", "overlong_reward_penalty", "reward_norm"):
            if not config.actor.is_default(name):
                value = vars(config.actor)[name]
                yield Problem(f"actor.{name}", text, "set" if isinstance(value, Section) else value, _KEY)
        if config.rollout.dynamic_sampling:
            text = "drops groups whose sums of rewards are equal, but with {}=gdpo their parts differ; set it to false"
            yield Problem("rollout.dynamic_sampling", text, _KEY)
        if self.weights is None and (config.reward.weights is not None or config.reward.has_model):
            text = "is null, but {} weigh the functions, or a model has a part; set the weight of each part by its name"
            yield Problem("actor.gdpo.weights", text, Key("reward.weights"))


@functools.cache  # once for each combination
def _warn_of_missing_parts(missing: str, names: str) -> None:
    text = "actor.gdpo.weights names %s, which no reward of this step has; the parts are %s"
    logger.warning(text, missing, names)


@ADV_ESTIMATORS.register(
    "real", section=True, help="rewards are labels, and their classifier is the policy (REAL, arXiv 2602.05630)"
)
@dataclass(kw_only=True)
class REAL(AdvEstimator):
    """REAL (arXiv 2602.05630): log(1 + sum_+ e^(-s / tau)) + log(1 + sum_- e^(s / tau)), for each group.

    s is the mean log-ratio of a sample to the policy before the first update of the batch. Samples with rewards above
    the mean of their group are in the first sum, others in the second. The gradient with respect to the weights is the
    sum over samples of dL/ds times that of s. So the advantage of a sample is -dL/ds times the size of its group, and
    the mean over rows of -A mean(log pi) has the gradient of the mean of L. Groups with equal rewards have no gradient,
    nor have groups whose rewards differ by rounding.
    """

    needs_group: ClassVar[bool] = True
    follows_policy: ClassVar[bool] = True
    tau: float = setting(0.5, help="Temperature of the classification. The smaller, the steeper", gt=0)

    def advantages(
        self, rewards_B: np.ndarray, groups: Sequence[int], parts: Sequence[Mapping[str, float]]
    ) -> np.ndarray:
        return self.current_advantages(rewards_B, groups, rewards_B * 0.0)

    def current_advantages(self, rewards_B: np.ndarray, groups: Sequence[int], log_ratios_B: np.ndarray) -> np.ndarray:
        import numpy as np

        advantages_B, groups_B = np.zeros_like(rewards_B), np.asarray(groups)
        for group in np.unique(groups_B):
            members = np.flatnonzero((groups_B == group) & ~np.isnan(rewards_B))
            rewards = rewards_B[members]
            if not len(members) or np.allclose(rewards, rewards[0], rtol=1e-9, atol=1e-12):
                continue
            signs = np.where(rewards > rewards.mean(), 1.0, -1.0)
            logits = -signs * log_ratios_B[members] / self.tau
            for sign in (1.0, -1.0):
                of_sign = signs == sign
                top = max(0.0, logits[of_sign].max())
                shares = np.exp(logits[of_sign] - top)
                shares /= np.exp(-top) + shares.sum()
                advantages_B[members[of_sign]] = sign * len(members) * shares / self.tau
        return advantages_B

    def problems(self, config: Any) -> Iterator[Problem]:
        actor = config.actor
        if not isinstance(actor, SurrogateConfig) or actor.surrogate != "reinforce":
            yield Problem(
                "actor.adv_estimator", "is real, whose loss has no ratio; use the recipe grpo with variant=real"
            )
            return
        if actor.reduction != "seq_mean_token_mean":
            text = "is {}, but {} is real, which takes the mean over the tokens of each row; leave it out"
            yield Problem("actor.reduction", text, actor.reduction, _KEY)
        if not actor.recompute_logprob or actor.prox_logp_method == "loglinear":
            name = "prox_logp_method" if actor.recompute_logprob else "recompute_logprob"
            text = "is {}, but {} is real, which compares with the policy before the update; leave it out"
            yield Problem(f"actor.{name}", text, str(vars(actor)[name]).lower(), _KEY)
        if actor.gradient_accumulation_steps is not None:
            text = "is {}, but {} is real, whose updates have whole groups; set {} instead"
            key = Key("actor.ppo_n_minibatches")
            yield Problem("actor.gradient_accumulation_steps", text, actor.gradient_accumulation_steps, _KEY, key)
        if actor.ppo_n_minibatches > config.train_dataset.batch_size:
            text = "is {}, but {} is real, whose updates have whole groups, and a step has {} ({}); lower it"
            n_groups, key = config.train_dataset.batch_size, Key("train_dataset.batch_size")
            yield Problem("actor.ppo_n_minibatches", text, actor.ppo_n_minibatches, _KEY, n_groups, key)


@ADV_ESTIMATORS.register(
    "otb", help="a baseline of each token, weighted by how far each sample could move (OTB, arXiv 2602.07078)"
)
class OTB(AdvEstimator):
    """Optimal token baseline (arXiv 2602.07078): A_t = R - B_t, B_t = sum of R W_t / sum of W_t over the group.

    W_t = sum over j <= t of (1 - 2 pi_j + sum_v pi_v^2), over trained tokens: the squared norm of the gradient of the
    log-probability with respect to the logits. Samples with fewer than t tokens do not count in B_t. So the last tokens
    of a sample that is longer than all others have the advantage 0.
    """

    needs_group: ClassVar[bool] = True
    needs_logit_gradients: ClassVar[bool] = True

    def token_advantages(
        self, rewards_B: np.ndarray, groups: Sequence[int], logit_gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        import numpy as np

        found, groups_B = [np.zeros(len(each)) for each in logit_gradients], np.asarray(groups)
        for group in np.unique(groups_B):
            members = np.flatnonzero((groups_B == group) & ~np.isnan(rewards_B)).tolist()
            longest = max((len(found[i]) for i in members), default=0)
            if not longest:
                continue
            weights_ST = np.zeros((len(members), longest))
            for place, i in enumerate(members):
                # Where all tokens are certain, the baseline is the mean.
                weights_ST[place, : len(found[i])] = np.cumsum(np.maximum(logit_gradients[i], 0.0)) + 1e-12
            for i in members:
                apart_S = rewards_B[i] - rewards_B[members]  # exactly 0 for equal rewards
                found[i][:] = ((apart_S @ weights_ST) / weights_ST.sum(axis=0))[: len(found[i])]
        return found

    def problems(self, config: Any) -> Iterator[Problem]:
        if not isinstance(config.actor, SurrogateConfig):
            yield Problem("actor.adv_estimator", "is otb, with an advantage for each token; use the recipe grpo")


_KEY = Key("actor.adv_estimator")


@dataclass(kw_only=True)
@ADV_ESTIMATORS.with_sections
class AdvEstimatorConfig(Section):
    """The choice of an estimator, with the settings of all of them. The actors of GRPO and GSPO inherit from it."""

    adv_estimator: Literal[tuple(ADV_ESTIMATORS)] | None = setting(  # type: ignore[valid-type]
        None, help=f"How advantages come from rewards. {ADV_ESTIMATORS.help}. null: rewards normalised by adv_norm"
    )

    @property
    def chosen_adv_estimator(self) -> AdvEstimator | None:
        """The estimator that the settings choose. None for rewards normalised by adv_norm."""
        return ADV_ESTIMATORS.chosen(self)

    @check
    def adv_norm_is_used(self) -> Iterator[Problem]:
        """Report a normalisation beside an estimator, which does not use it."""
        if self.adv_estimator is not None and not self.is_default("adv_norm"):
            yield Problem("adv_norm", "is set, but adv_estimator={} does not use it; leave one out", self.adv_estimator)
