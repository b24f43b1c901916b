"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300).

    python -m areno.recipes.grpo --config-name=gsm8k actor.path=<model folder>

    A_i  = (R_i - mean R) / (std R + eps)        over the samples of a prompt
    r_t  = pi_t / pi_old_t                       one ratio for each token
    loss = mean_i mean_t -min(r_t A_i, clip(r_t, 1 - eps_clip, 1 + eps_clip) A_i) + kl_ctl KL(pi || ref)        (eq. 3)

Its successors change the reduction over tokens, the surrogate or the advantage; docs/algorithms.md has their settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar

from areno.api.algorithms import Algorithm
from areno.config.agent import TurnCredit
from areno.config.experiments import LossFn
from areno.config.models import KLConfig
from areno.config.policy_experiments import KLExperimentConfig
from areno.config.ratio import RatioConfig
from areno.launch import run_recipe
from areno.loss_fns.adv_estimators import AdvEstimatorConfig
from areno.loss_fns.entropy import EntropyConfig
from areno.loss_fns.masks import MaskConfig
from areno.loss_fns.surrogates import ImportanceLevel, Reduction, SurrogateConfig
from areno.loss_fns.teacher_signals import TeacherSignalConfig
from areno.loss_fns.token_selection import TokenSelectionConfig
from areno.schema.fields import require, setting


@dataclass(kw_only=True)
class TokenPolicyConfig(
    SurrogateConfig, MaskConfig, EntropyConfig, TokenSelectionConfig, TeacherSignalConfig, RatioConfig, KLConfig
):
    """The actor of GRPO and PPO. Its loss is `areno.loss_fns.grpo_loss_fn`, by default with one ratio per token."""

    reduction: Reduction = setting(
        "seq_mean_token_mean",
        help="How losses of tokens become one. seq_mean_token_mean: mean over the tokens of a row, then over rows "
        "(GRPO). token_mean: mean over all tokens (DAPO). seq_mean_token_sum_norm: sum over the tokens of a row / "
        "gconfig.max_new_tokens, then mean over rows (Dr.GRPO)",
    )
    importance_sampling_level: ImportanceLevel = setting(
        "token",
        help="token: each token has its own importance ratio. sequence: all share that of the row, with the gradient "
        "of each through its own log-probability (GSPO-token, arXiv 2507.18071, eq. 13)",
    )

    @require(
        "importance_sampling_level",
        "is sequence, but surrogate={self.surrogate} combines the ratios of a row's tokens itself; leave it out",
    )
    def level_suits_surrogate(self) -> bool:
        return self.importance_sampling_level == "token" or not self.chosen_surrogate.couples_tokens

    @require("importance_sampling_level", "is sequence, but surrogate={self.surrogate} has no ratio; leave it out")
    def level_is_of_a_ratio(self) -> bool:
        return self.importance_sampling_level == "token" or self.chosen_surrogate.uses_ratio

    @property
    def ratio_level(self) -> ImportanceLevel:
        return self.importance_sampling_level

    @property
    def corrects_staleness(self) -> bool:
        """Whether the loss takes into account that older weights may have sampled some tokens."""
        return super().corrects_staleness or self.mask is not None

    def loss_settings(self, max_new_tokens: int) -> dict[str, Any]:
        """Return the keyword arguments of `grpo_loss_fn`.

        `max_new_tokens` is the divisor of seq_mean_token_sum_norm.
        """
        return {
            **self.surrogate_settings(),
            **self.mask_settings(),
            **self.teacher_signal_settings(),
            "entropy_coef": 0.0 if self.entropy_bonus is None else self.entropy_bonus.coef,
            "kl_coef": self.kl_loss_coef,
            "kl_estimator": self.kl_estimator,
            "reduction": self.reduction,
            "norm_length": max_new_tokens,
            "importance_sampling_level": self.importance_sampling_level,
            "prox_logp_method": self.loss_prox_logp_method,
        }


@dataclass(kw_only=True)
class GRPOActorConfig(AdvEstimatorConfig, TokenPolicyConfig):
    """The actor of GRPO (2402.03300)."""

    eps_clip: float = setting(
        0.2, help="Clip range e: the importance ratio is clipped to [1 - e, 1 + e]", gt=0, flag="--grpo-clip-eps"
    )


@dataclass(kw_only=True)
class GRPOConfig(KLExperimentConfig):
    """Group Relative Policy Optimization, with one importance ratio per token."""

    other_credits: ClassVar[str] = "; gae needs the critic of the recipe ppo"
    actor: GRPOActorConfig = setting(help="The policy")

    @property
    def turn_credits(self) -> Sequence[TurnCredit]:
        return ["outcome", "return", "turn_baseline"]

    def advantages(self, rows: Any, groups: Any) -> Any:
        from areno.trainers.turn_credit import policy_advantages

        return policy_advantages(rows, groups, self.actor, self.agent)

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import grpo_loss_fn

        return partial(grpo_loss_fn, **self.actor.loss_settings(self.gconfig.max_new_tokens))


ALGORITHM = Algorithm(
    name="grpo", config=GRPOConfig, loop=partial(resolve_name, "areno.trainers.policy_only:PolicyOnlyTrainer")
)

if __name__ == "__main__":
    run_recipe("areno.recipes.grpo")
