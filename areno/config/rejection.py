"""Settings of `actor.rejection_sampling`: masks or truncates the weights of the decoupled loss. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.errors import Problem
from areno.schema.fields import Needs, Section, check, forbid, setting


@dataclass(kw_only=True)
class RejectionSamplingConfig(Section):
    """What happens to tokens or rows on which the proximal policy and the behaviour policy disagree."""

    level: Literal["token", "sequence"] = setting("token", help="Judge each token alone, or each row as a whole")
    action: Literal["mask", "clamp"] = setting(
        "mask", help="mask: leave it out of training. clamp: limit its weight to [lower, upper] (truncated IS)"
    )
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = setting(
        "ratio",
        help="ratio: r = proximal / behaviour probability. kl_k1: log r. kl_k2: (log r)^2 / 2. kl_k3: r - log r - 1. "
        "binary_kl: the larger of the two KL directions, where the only outcomes are this token and any other token",
    )
    agg: Literal["sum", "mean", "max"] = setting(
        "mean",
        help="How level=sequence combines tokens. Ratios are combined in log space: mean is geometric",
        only_with=Needs("level", "sequence", so="tokens are not combined"),
    )
    upper: float = setting(5.0, help="Largest metric that is accepted", gt=0)
    lower: float | None = setting(None, help="Smallest metric that is accepted. null: no bound")

    @forbid("action", "is clamp, which limits a ratio, but metric is {self.metric}; use mask")
    def clamp_without_ratio(self) -> bool:
        return self.action == "clamp" and self.metric != "ratio"

    @check
    def a_kl_of_zero_passes(self) -> Iterator[Problem]:
        if self.lower is None or self.metric == "ratio":
            return
        if self.metric != "kl_k1":
            yield Problem("lower", f"is {self.lower}, but {self.metric} is never negative, and 0 must pass; use null")
        elif self.lower >= 0:
            yield Problem("lower", f"is {self.lower}, but a kl_k1 of 0 (no difference) must pass; use lower < 0")

    @forbid("lower", "is {self.lower}, but it must be less than upper={self.upper}")
    def bounds_out_of_order(self) -> bool:
        return self.lower is not None and self.lower >= self.upper

    @forbid("upper", "is {self.upper} and lower is {self.lower}; a ratio needs 0 < lower < 1 < upper")
    def ratio_of_one_outside(self) -> bool:
        return self.metric == "ratio" and (self.upper <= 1 or (self.lower or 0.5) >= 1 or (self.lower or 0.5) <= 0)
