"""PPO: Proximal Policy Optimization (arXiv 1707.06347) with a critic.

    python -m areno.recipes.ppo --config-name=gsm8k actor.path=<model folder>

    d_t  = R_t + discount V_(t+1) - V_t          the critic's error at each token
    A_t  = sum_k (discount gae_lambda)^k d_(t+k), then whitened over the batch        (GAE, arXiv 1506.02438)
    r_t  = pi_t / pi_old_t                       one ratio for each token
    loss = mean over tokens of -min(r_t A_t, clip(r_t, 1 - eps_clip, 1 + eps_clip) A_t) + kl_ctl KL(pi || ref)

A dual clip (c_clip, arXiv 1912.09729) bounds the loss of negative advantages. The critic learns the returns A_t + V_t
by a clipped squared error (areno.loss_fns.value_loss_fn).

Rewards come from reward.fn, from the reward model reward.path, or from both. The critic is a transformer body with one
output for each token. It starts from the actor's body, or from critic.path, and trains alone for critic.warmup_steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar

from areno.api.algorithms import Algorithm
from areno.config.agent import TurnCredit
from areno.config.experiments import LossFn
from areno.config.models import RefConfig
from areno.config.norms import NormConfig
from areno.config.policy_experiments import CriticExperimentConfig
from areno.errors import Key, Problem
from areno.launch import run_recipe
from areno.loss_fns.surrogates import Reduction
from areno.recipes.grpo import TokenPolicyConfig
from areno.schema.fields import check, require, setting, setting_as_in


@dataclass(kw_only=True)
class PPOActorConfig(TokenPolicyConfig):
    """The actor of PPO (1707.06347). Advantages come from the critic by GAE (1506.02438)."""

    c_clip: float | None = setting_as_in(TokenPolicyConfig, "c_clip", 3.0)
    reduction: Reduction = setting_as_in(TokenPolicyConfig, "reduction", "token_mean")
    kl_ctl: float = setting_as_in(TokenPolicyConfig, "kl_ctl", 0.001)
    adv_norm: NormConfig | None = setting(
        factory=lambda: NormConfig(mean_level="batch", std_level="batch"),
        help="Normalisation of advantages over all response tokens of the batch (whitening). null: none",
    )
    discount: float = setting(
        1.0, help="Discount factor (gamma) per token, by which later rewards are multiplied", gt=0, le=1, flag="--gamma"
    )
    gae_lambda: float = setting(
        0.95,
        help="Lambda of GAE. Near 0, advantages depend on the critic, near 1 on the rewards",
        ge=0,
        le=1,
        flag="--lam",
    )

    length_lambda: float | None = setting(
        None,
        help="Lambda by the length of the row, as in VAPO (arXiv 2504.05118, which uses 0.05): 1 - 1 / "
        "(length_lambda * trained tokens), at least 0. null: gae_lambda",
        gt=0,
    )
    critic_lambda: float | None = setting(
        None,
        help="Lambda of GAE for the critic's targets; VAPO and SAO use 1. null: that of the advantages",
        ge=0,
        le=1,
    )

    @require("gae_lambda", "is {self.gae_lambda}, but length_lambda sets lambda by the length of rows; leave one out")
    def one_setting_decides_lambda(self) -> bool:
        return self.length_lambda is None or self.is_default("gae_lambda")

    def lambdas(self, n_tokens: int) -> tuple[float, float]:
        """Return lambda of the advantages and of the critic's targets, for a row with this many trained tokens."""
        of_policy = self.gae_lambda
        if self.length_lambda is not None:
            of_policy = max(0.0, 1.0 - 1.0 / (self.length_lambda * max(n_tokens, 1)))
        return of_policy, of_policy if self.critic_lambda is None else self.critic_lambda

    @require("adv_norm.mean_leave1out", "needs one advantage per sample; PPO has one per token")
    def leave_one_out_is_over_samples(self) -> bool:
        return self.adv_norm is None or not self.adv_norm.mean_leave1out


@dataclass(kw_only=True)
class PPOConfig(CriticExperimentConfig):
    """Proximal Policy Optimization, with a critic."""

    other_credits: ClassVar[str] = "; the others need the recipe grpo"
    actor: PPOActorConfig = setting(help="The policy")
    ref: RefConfig | None = setting(
        factory=RefConfig,
        help="Frozen reference model for the KL term. null: no reference model. Then actor.kl_ctl must be 0",
    )

    @property
    def turn_credits(self) -> Sequence[TurnCredit]:
        return ["outcome", "gae"]

    @check
    def check_discount_is_per_token(self) -> Iterator[Problem]:
        """Report a discount of tokens with GAE over turns."""
        if self.agent.turn_credit == "gae" and self.actor.discount != 1:
            text, keys = "is {:g}, but {} is gae, which discounts turns; set {}", ("turn_credit", "turn_discount")
            yield Problem("actor.discount", text, self.actor.discount, *(Key(f"agent.{key}") for key in keys))

    @check
    def check_lambda_is_of_tokens(self) -> Iterator[Problem]:
        """Report settings of lambda that GAE over turns does not use."""
        for name in ("length_lambda", "critic_lambda"):
            if self.agent.turn_credit == "gae" and (value := vars(self.actor)[name]) is not None:
                text = "is {:g}, but {} is gae, whose lambda is that of turns; leave it out"
                yield Problem(f"actor.{name}", text, value, Key("agent.turn_credit"))

    def advantages(self, rows: Any, groups: Any) -> Any:
        """Return (advantages, returns) by GAE. Each is a list with an array for the trained tokens of each row."""
        from areno.trainers.turn_credit import value_advantages

        return value_advantages(rows, groups, self.actor, self.agent)

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import ppo_loss_fn

        return partial(ppo_loss_fn, **self.actor.loss_settings(self.gconfig.max_new_tokens))


ALGORITHM = Algorithm(
    name="ppo", config=PPOConfig, loop=partial(resolve_name, "areno.trainers.ppo:PPOTrainer"), default="quickstart_ppo"
)

if __name__ == "__main__":
    run_recipe("areno.recipes.ppo")
