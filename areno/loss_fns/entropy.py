"""The entropy bonus of a policy loss: its coefficient, fixed or adapted to a target.

The bonus is coef times the entropy of the next-token distribution at the trained tokens, reduced like the policy term,
and is subtracted from the loss. The module imports no torch, because the configuration of a run is read before torch is
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areno.schema.fields import Needs, Section, require, setting


@dataclass(kw_only=True)
class EntropyBonus(Section):
    """A bonus for the entropy of the policy, after A3C (arXiv 1602.01783 sec. 4).

    With a target, the coefficient is adapted as in Skywork-OR1 (arXiv 2505.22312 sec. 4): c rises by delta after a step
    whose entropy is below the target and falls by delta after any other, down to 0. The bonus has the coefficient c
    after a step whose entropy was at most the target, else 0.
    """

    coef: float = setting(
        0.001, help="Coefficient of the entropy, in nats; with a target, that of the first step", ge=0
    )
    target: float | None = setting(
        None,
        help="Entropy in nats below which the coefficient rises, and above which there is no bonus (Skywork-OR1, "
        "arXiv 2505.22312). null: the coefficient stays",
        ge=0,
    )
    delta: float = setting(
        0.005,
        help="Change of the coefficient after each step",
        gt=0,
        only_with=Needs("target", so="the coefficient does not change"),
    )

    @require("coef", "is 0, and without a target there is no bonus; raise it, or set target")
    def has_effect(self) -> bool:
        return self.coef > 0 or self.target is not None

    def coefficient(self, entropies: Sequence[float]) -> float:
        """Return the coefficient of the next step with a target, from the entropies of all steps so far."""
        assert self.target is not None
        coef = self.coef
        if not entropies:
            return coef
        for entropy in entropies:
            coef = max(0.0, coef + (self.delta if entropy < self.target else -self.delta))
        return coef if entropies[-1] <= self.target else 0.0


@dataclass(kw_only=True)
class EntropyConfig(Section):
    """The choice of an entropy bonus. The actors of GRPO and PPO inherit from it."""

    entropy_bonus: EntropyBonus | None = setting(
        None, help="A bonus for the entropy of the policy, which is subtracted from the loss. null: no bonus"
    )

    def adapted_entropy_coef(self, entropies: Sequence[float]) -> float | None:
        """Return the coefficient of the next step, see `EntropyBonus`. None if it does not change."""
        bonus = self.entropy_bonus
        return None if bonus is None or bonus.target is None else bonus.coefficient(entropies)

    @property
    def differentiates_entropy(self) -> bool:
        """Whether training passes compute the gradient of the entropy."""
        return self.entropy_bonus is not None
