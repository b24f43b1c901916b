"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

    python -m areno.recipes.gspo --config-name=gsm8k actor.path=<model folder>

    A_i  = (R_i - mean R) / (std R + eps)        over the samples of a prompt
    s_i  = exp(mean_t log(pi_t / pi_old_t))      one ratio for the whole sequence
    loss = mean_i -min(s_i A_i, clip(s_i, 1 - eps_clip, 1 + eps_clip) A_i) + kl_ctl KL(pi || ref)        (eq. 5-7)

Not in the paper, and off by default: an upper clip of its own (eps_clip_higher), a dual clip (c_clip), the KL (kl_ctl).
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
from areno.loss_fns.surrogates import Clip, ImportanceLevel
from areno.schema.fields import require, setting


@dataclass(kw_only=True)
class GSPOActorConfig(AdvEstimatorConfig, Clip, RatioConfig, KLConfig):
    """The actor of GSPO (2507.18071). All tokens of a row share one ratio, so the default clip range is small."""

    eps_clip: float = setting(
        3e-4, help="Clip range e: the ratio of a row is clipped to [1 - e, 1 + e]", gt=0, flag="--gspo-clip-eps"
    )

    @property
    def ratio_level(self) -> ImportanceLevel:
        return "sequence"

    @require("prox_logp_method", "is loglinear, which needs token ratios; use recompute, or the grpo recipe")
    def proximal_policy_is_recomputed(self) -> bool:
        return self.prox_logp_method != "loglinear"


@dataclass(kw_only=True)
class GSPOConfig(KLExperimentConfig):
    """Group Sequence Policy Optimization, with one importance ratio per sequence."""

    other_credits: ClassVar[str] = (
        "; GSPO averages the advantages of a row, so set agent.export_style=individual, by which each turn is a row, "
        "or take the recipe grpo with actor.importance_sampling_level=sequence"
    )
    actor: GSPOActorConfig = setting(help="The policy")

    @property
    def turn_credits(self) -> Sequence[TurnCredit]:
        return ["outcome", "return", "turn_baseline"] if self.agent.export_style == "individual" else ["outcome"]

    def advantages(self, rows: Any, groups: Any) -> Any:
        from areno.trainers.turn_credit import policy_advantages

        return policy_advantages(rows, groups, self.actor, self.agent)

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import gspo_loss_fn

        actor = self.actor
        return partial(
            gspo_loss_fn,
            clip_eps=actor.eps_clip,
            clip_eps_higher=actor.eps_clip_higher,
            c_clip=actor.c_clip,
            kl_coef=actor.kl_loss_coef,
            kl_estimator=actor.kl_estimator,
        )


ALGORITHM = Algorithm(
    name="gspo", config=GSPOConfig, loop=partial(resolve_name, "areno.trainers.policy_only:PolicyOnlyTrainer")
)

if __name__ == "__main__":
    run_recipe("areno.recipes.gspo")
