"""Settings of low-rank adapters, which are trained in the place of a model's weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.errors import Problem
from areno.schema.fields import Section, check, forbid, setting
from areno.schema.values import show

ALL_LINEAR = "all-linear"
FROM_FOLDER = ("lora_rank", "lora_alpha", "target_modules", "use_rslora")
"""What the adapters of init_lora_from bring along."""


@dataclass(kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA 2106.09685): W x becomes W x + scale * B A x, and only A and B are trained."""

    use_lora: bool = setting(
        False,
        help="Train low-rank adapters on the linear layers (LoRA 2106.09685) and leave the model's weights as they "
        "are. The reference policy is then the model without its adapters",
    )
    lora_rank: int = setting(32, help="Rank of the adapters", gt=0)
    lora_alpha: float = setting(16.0, help="Adapters are scaled by lora_alpha / lora_rank", gt=0)
    target_modules: list[str] = setting(
        factory=lambda: [ALL_LINEAR],
        help="Linear layers that have adapters, such as [q_proj,v_proj]. [all-linear]: all that the model has",
    )
    peft_type: Literal["lora"] = setting("lora", help="Kind of adapters")
    use_rslora: bool = setting(
        False, help="Scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA 2312.03732). For high ranks"
    )
    init_lora_from: str | None = setting(
        None,
        help="Folder or hub id of adapters in the form of peft to start from, which bring their own rank, alpha and "
        "target modules. null: new adapters, with which the model computes what it did without",
    )

    @check
    def settings_of_no_adapters(self) -> Iterator[Problem]:
        for name in (*FROM_FOLDER, "init_lora_from"):
            if not self.use_lora and not self.is_default(name):
                yield Problem(name, f"is {show(vars(self)[name])}, but use_lora is false; set it to true")

    @forbid("target_modules", "is empty; name linear layers, or leave it out for all of them")
    def adapters_of_nothing(self) -> bool:
        return not self.target_modules

    @forbid("target_modules", "has all-linear beside others; all-linear alone stands for all of them")
    def all_and_some(self) -> bool:
        return ALL_LINEAR in self.target_modules and len(self.target_modules) > 1
