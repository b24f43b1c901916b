"""Settings of low-rank adapters, which are trained instead of the weights of a model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areno.schema.fields import Needs, Section, forbid, setting

ALL_LINEAR = "all-linear"
FROM_FOLDER = ("lora_rank", "lora_alpha", "target_modules", "use_rslora")
"""Settings that the adapters of init_lora_from bring with them."""
_ADAPTERS = Needs("use_lora", so="there are no adapters")


@dataclass(kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA 2106.09685): W x becomes W x + scale * B A x, and only A and B are trained."""

    use_lora: bool = setting(
        False,
        help="Train low-rank adapters on the linear layers (LoRA 2106.09685) and leave the model's weights as they "
        "are. The reference policy is then the model without its adapters",
    )
    lora_rank: int = setting(32, help="Rank of the adapters", gt=0, only_with=_ADAPTERS)
    lora_alpha: float = setting(16.0, help="Adapters are scaled by lora_alpha / lora_rank", gt=0, only_with=_ADAPTERS)
    target_modules: list[str] = setting(
        factory=lambda: [ALL_LINEAR],
        help="Linear layers that have adapters, such as [q_proj,v_proj]. [all-linear]: all that the model has",
        only_with=_ADAPTERS,
    )
    peft_type: Literal["lora"] = setting("lora", help="Kind of adapters")
    use_rslora: bool = setting(
        False,
        help="Scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA 2312.03732). For high ranks",
        only_with=_ADAPTERS,
    )
    init_lora_from: str | None = setting(
        None,
        help="Folder or hub id of adapters in the form of peft to start from, which bring their own rank, alpha and "
        "target modules. null: new adapters, with which the model computes what it did without",
        only_with=_ADAPTERS,
    )

    @forbid("target_modules", "is empty; name linear layers, or leave it out for all of them")
    def adapters_of_nothing(self) -> bool:
        """Return whether no layer has adapters."""
        return not self.target_modules

    @forbid("target_modules", "has all-linear beside others; all-linear alone stands for all of them")
    def all_and_some(self) -> bool:
        """Return whether all-linear stands beside other layers."""
        return ALL_LINEAR in self.target_modules and len(self.target_modules) > 1
