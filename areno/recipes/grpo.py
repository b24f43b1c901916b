"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300).

    python -m areno.recipes.grpo --config-name=gsm8k actor.path=<model folder>

    A_i  = (R_i - mean R) / (std R + eps)        over the samples of a prompt
    r_t  = pi_t / pi_old_t                       one ratio for each token
    loss = mean_i mean_t -min(r_t A_i, clip(r_t, 1 - eps_clip, 1 + eps_clip) A_i) + kl_ctl KL(pi || ref)        (eq. 3)

Its successors change the reduction over tokens, the surrogate or the advantage; docs/algorithms.md has their settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from areno.api.algorithms import Algorithm
from areno.config.experiments import KLExperimentConfig, LossFn
from areno.config.models import TokenPolicyConfig
from areno.launch import run_recipe
from areno.schema.fields import setting

if TYPE_CHECKING:
    from areno.trainers.policy_only import PolicyOnlyTrainer


@dataclass(kw_only=True)
class GRPOActorConfig(TokenPolicyConfig):
    """The actor of GRPO (2402.03300)."""

    eps_clip: float = setting(
        0.2, help="Clip range of the ratio: 1 - eps_clip to 1 + eps_clip", gt=0, flag="--grpo-clip-eps"
    )


@dataclass(kw_only=True)
class GRPOConfig(KLExperimentConfig):
    """Group Relative Policy Optimization, token ratios."""

    actor: GRPOActorConfig = setting(help="The policy")

    def advantages(self, rows: Any, groups: Any) -> Any:
        from areno.trainers.rows import outcome_advantages

        return outcome_advantages(rows, groups, self.actor)

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import grpo_loss_fn

        return partial(grpo_loss_fn, **token_loss_settings(self.actor, self.gconfig.max_new_tokens))


def token_loss_settings(actor: TokenPolicyConfig, max_new_tokens: int) -> dict[str, Any]:
    """The keyword arguments of a loss of token ratios. PPO has the same."""
    return {
        "clip_eps": actor.eps_clip,
        "clip_eps_higher": actor.eps_clip_higher,
        "c_clip": actor.c_clip,
        "kl_coef": actor.kl_in_loss,
        "kl_estimator": actor.kl_estimator,
        "reduction": actor.reduction,
        "norm_length": max_new_tokens,
        "importance_sampling_level": actor.importance_sampling_level,
        "surrogate": actor.surrogate,
        "sapo_tau_pos": actor.sapo_tau_pos,
        "sapo_tau_neg": actor.sapo_tau_neg,
        "prox_logp_method": "loglinear" if actor.prox_logp_method == "loglinear" else "recompute",
    }


def loop() -> type[PolicyOnlyTrainer]:
    """Import the training loop, which takes longer than `--help` may."""
    from areno.trainers.policy_only import PolicyOnlyTrainer

    return PolicyOnlyTrainer


ALGORITHM = Algorithm(name="grpo", config=GRPOConfig, loop=loop)

if __name__ == "__main__":
    run_recipe("areno.recipes.grpo")
