"""Settings of low-rank adapters. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areno.config.resuming import NEVER, SAME_CONTENT
from areno.schema.fields import Needs, Section, require, setting

ALL_LINEAR = "all-linear"
FROM_FOLDER = ("lora_rank", "lora_alpha", "target_modules", "use_rslora")
"""Settings that are read from the folder init_lora_from."""
_ADAPTERS = Needs("use_lora", so="there are no adapters")


@dataclass(kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA 2106.09685): W x becomes W x + scale * B A x, and only A and B are trained.

    scale is lora_alpha / lora_rank, or lora_alpha / sqrt(lora_rank) with use_rslora.
    """

    use_lora: bool = setting(
        False,
        help="Train low-rank adapters on the linear layers (LoRA, arXiv 2106.09685) and freeze the model. A "
        "reference model without a path is then this model without its adapters",
        on_resume=NEVER,
    )
    lora_rank: int = setting(32, help="Rank of the adapters", gt=0, only_with=_ADAPTERS, on_resume=NEVER)
    lora_alpha: float = setting(
        16.0,
        help="The adapters' output is multiplied by lora_alpha / lora_rank, or by lora_alpha / sqrt(lora_rank) with "
        "use_rslora",
        gt=0,
        only_with=_ADAPTERS,
        on_resume=NEVER,
    )
    target_modules: list[str] = setting(
        factory=lambda: [ALL_LINEAR],
        help="Linear layers that get adapters, such as [q_proj,v_proj]. Experts have experts.gate_up_proj and "
        "experts.down_proj. [all-linear]: all but the output head and routers",
        only_with=_ADAPTERS,
        on_resume=NEVER,
    )
    peft_type: Literal["lora"] = setting("lora", help="Kind of adapters. Only lora is supported")
    use_rslora: bool = setting(
        False,
        help="Scale by lora_alpha / sqrt(lora_rank) (rsLoRA, arXiv 2312.03732), for high ranks",
        only_with=_ADAPTERS,
        on_resume=NEVER,
    )
    init_lora_from: str | None = setting(
        None,
        help="Folder or hub id of adapters (peft format) to start from, with their rank, alpha and target modules. "
        "null: new adapters, which at first change nothing",
        only_with=_ADAPTERS,
        on_resume=SAME_CONTENT,
    )

    @require("target_modules", "is empty; name linear layers, or leave it out for all of them")
    def has_target_modules(self) -> bool:
        return bool(self.target_modules)

    @require("target_modules", "has all-linear beside others; all-linear alone stands for all of them")
    def all_linear_stands_alone(self) -> bool:
        return ALL_LINEAR not in self.target_modules or len(self.target_modules) <= 1
