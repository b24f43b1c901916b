"""Settings of the normalisation of rewards and advantages. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areno.schema.fields import Needs, Section, setting

_DEVIATION = Needs("std_level", so="nothing is divided by a deviation")


@dataclass(kw_only=True)
class NormConfig(Section):
    """Normalisation of rewards or advantages: (x - mean) / (std + eps).

    The mean and the standard deviation are each computed over the group (the samples of a prompt) or over the batch.
    Each can also be left out.
    """

    mean_level: Literal["batch", "group"] | None = setting(
        "group", help="Mean that is subtracted: over the samples of a prompt, or the batch. null: none"
    )
    mean_leave1out: bool = setting(
        False,
        help="Compute a sample's mean from the other samples only (RLOO, arXiv 2402.14740)",
        only_with=Needs("mean_level", so="no mean is subtracted"),
    )
    std_level: Literal["batch", "group"] | None = setting(
        "group",
        help="Standard deviation that divides: over the samples of a prompt, or the batch. null: none (Dr.GRPO)",
    )
    std_unbiased: bool = setting(False, help="Variance with n - 1 in place of n", only_with=_DEVIATION)
    eps: float = setting(
        1e-6,
        help="Small number that is added to the standard deviation before the division",
        gt=0,
        only_with=_DEVIATION,
    )
