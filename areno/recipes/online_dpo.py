"""Online DPO: DPO on pairs of the policy's own samples, which rewards rank (OAIF, arXiv 2402.04792).

    python -m areno.recipes.online_dpo --config-name=quickstart_online_dpo

    y+, y- = the best and the worst of the samples of a prompt, by reward
    h      = sum over the sample's tokens of log(policy / ref)
    loss   = mean over pairs of -log sigmoid(beta (h(y+) - h(y-)))        (2402.04792 eq. 2, 2305.18290 eq. 7)

Rewards come from a function, a reward model or a judge, which may compare samples with each other. With
pairs_per_prompt above 1, the second best and the second worst sample are a pair, too, and so on. Two samples with equal
rewards are no pair. actor.loss_type chooses another loss of pairs, such as IPO (areno/loss_fns/preferences.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn
from areno.config.models import PolicyConfig, RefConfig
from areno.config.policy_experiments import PairedPolicyExperimentConfig
from areno.launch import run_recipe
from areno.loss_fns.preferences import PreferenceLossConfig
from areno.schema.fields import require, setting


@dataclass(kw_only=True)
class OnlineDPOActorConfig(PreferenceLossConfig, PolicyConfig):
    """The policy and its loss. Settings of rewards that do not change the order of samples are left out."""

    gradient_accumulation_steps: ClassVar[int | None] = None  # type: ignore[misc]  # the number of pairs varies
    reward_bias: ClassVar[float] = 0.0  # type: ignore[misc]
    reward_scaling: ClassVar[float] = 1.0  # type: ignore[misc]
    reward_clip: ClassVar[float | None] = None  # type: ignore[misc]
    reward_norm: ClassVar[None] = None  # type: ignore[misc]
    adv_norm: ClassVar[None] = None  # type: ignore[misc]
    ppo_n_minibatches: int = setting(1, help="Optimizer steps per rollout batch", gt=0)
    mask_no_eos_with_zero: bool = setting(False, help="Make no pairs with completions that were cut off")

    @property
    def old_logprobs(self) -> Literal["recompute", "loglinear", "rollout"]:
        """The argument `old_logprobs` of Trainer.train: "rollout", since the loss has no importance ratios."""
        return "rollout"


@dataclass(kw_only=True)
class OnlineDPOConfig(PairedPolicyExperimentConfig):
    """Online DPO, on pairs of the policy's own samples."""

    actor: OnlineDPOActorConfig = setting(help="The policy")
    ref: RefConfig | None = setting(
        factory=RefConfig,
        help="Frozen reference model of the loss. null: no reference model, for loss_type simpo and orpo",
    )

    def advantages(self, rows: Any, groups: Any) -> Any:
        """Return advantages for `areno replay`: 1 for chosen samples, -1 for rejected samples, 0 for all others."""
        import numpy as np

        from areno.loss_fns import choose_pairs
        from areno.trainers.online_dpo import pair_signs
        from areno.trainers.rows import n_trained

        pairs, _ = choose_pairs([row.reward for row in rows], groups, self.pairs_per_prompt)
        return [np.full(n_trained(row), sign) for row, sign in zip(rows, pair_signs(len(rows), pairs), strict=True)]

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import dpo_loss_fn

        return partial(dpo_loss_fn, **self.actor.loss_settings())

    @require("ref", "is null, but actor.loss_type={self.actor.loss_type} compares with a reference model; leave it out")
    def needed_reference_is_there(self) -> bool:
        return self.ref is not None or not self.actor.needs_reference

    @require("ref", "is loaded but not used by actor.loss_type={self.actor.loss_type}; set ref=null")
    def reference_is_used(self) -> bool:
        return self.ref is None or self.actor.needs_reference


ALGORITHM = Algorithm(
    name="online_dpo",
    config=OnlineDPOConfig,
    loop=partial(resolve_name, "areno.trainers.online_dpo:OnlineDPOTrainer"),
    default="quickstart_online_dpo",
)

if __name__ == "__main__":
    run_recipe("areno.recipes.online_dpo")
