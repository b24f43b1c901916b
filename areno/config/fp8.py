"""Settings of linear layers in FP8. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areno.errors import Key, Problem
from areno.schema.fields import Needs, Section, setting

FP8_UNITS = (8, 9)
"""The first compute capability of GPUs with products in e4m3."""
SIZE_MULTIPLE = 16
"""Of the sizes of the matrices that FP8 units multiply."""
_ON = Needs("mode", "e4m3", "int8", so="no layer is in 8 bits")
_GRADIENTS = Needs("mode", "e4m3", so="no product is in FP8")
_ENDS = Needs("first_last_layers_bf16", so="no layer is left out")


@dataclass(kw_only=True)
class FP8Config(Section):
    """Linear layers whose inputs and weights are rounded to FP8 (e4m3, arXiv 2209.05433), in rollout and training.

    The scales are powers of two, one for each token and one for each output of a weight. Weights are rounded again
    after each update, from the weights that checkpoints hold. Gradients pass the rounding unchanged.
    """

    mode: Literal["e4m3", "int8", "disabled"] = setting(
        "e4m3",
        help="Format of the values. int8: only frozen weights under adapters (use_lora) are rounded, without FP8 "
        "units. disabled: as fp8_config=null",
    )
    dgrad: bool = setting(
        True,
        help="Round the gradients of outputs to FP8 for the gradients of inputs, which is faster. false: compute "
        "these in actor.dtype",
        only_with=_GRADIENTS,
    )
    wgrad: bool = setting(
        False,
        help="Round inputs and gradients of outputs to FP8, over the tokens, for the gradients of weights. false: "
        "compute these in actor.dtype",
        only_with=_GRADIENTS,
    )
    exclude_modules: list[str] = setting(
        factory=list,
        help="Linear layers that stay in actor.dtype: whole parts of their names in the checkpoint, such as o_proj "
        "or layers.0.mlp. Projections of one input (q_proj, k_proj, v_proj) are one layer. Embedding, output head and "
        "value heads are never in FP8",
        only_with=_ON,
    )
    first_last_layers_bf16: bool = setting(
        False, help="Leave the first and last layers of the model in actor.dtype", only_with=_ON
    )
    num_layers_at_start_in_bf16: int = setting(
        1, help="Number of first layers that are left out", ge=0, only_with=_ENDS
    )
    num_layers_at_end_in_bf16: int = setting(1, help="Number of last layers that are left out", ge=0, only_with=_ENDS)

    @property
    def rounds_inputs(self) -> bool:
        """Whether products are in FP8, and not only frozen weights kept in 8 bits."""
        return self.mode == "e4m3"

    def leaves_out(self, layer: int, n_layers: int) -> bool:
        """Return whether a layer of the model stays in actor.dtype as a whole."""
        if not self.first_last_layers_bf16:
            return False
        return layer < self.num_layers_at_start_in_bf16 or layer >= n_layers - self.num_layers_at_end_in_bf16


@dataclass(kw_only=True)
class FP8ModelConfig(Section):
    """The setting of a model whose linear layers may compute in FP8."""

    fp8_config: FP8Config | None = setting(
        None,
        help="Compute linear layers in FP8, in rollout, training and reference. With use_lora, their frozen weights "
        "are kept in 8 bits only. mode=e4m3 needs compute capability 8.9 or more, or a CPU, which emulates FP8. null: "
        "compute in dtype",
        read_by_rollout=True,
    )

    @property
    def fp8(self) -> FP8Config | None:
        """fp8_config, and None if it is disabled."""
        return None if self.fp8_config is None or self.fp8_config.mode == "disabled" else self.fp8_config


def no_units_problem(key: str, gpu: str) -> Problem:
    """Return the problem with a setting that asks for FP8 on a GPU without FP8 units. `gpu` describes it."""
    text = "is set, but {} has no FP8 units, which GPUs of compute capability 8.9 or more have; leave it out"
    if key == "actor.fp8_config":
        return Problem(key, text + ", or with adapters set {}=int8", gpu, Key(f"{key}.mode"))
    return Problem(key, text, gpu)
