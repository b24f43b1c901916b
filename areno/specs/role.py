"""A model of the engine, and the LoRA adapters that may be trained in place of its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areno.config.experiments import HeadName
from areno.config.fp8 import FP8Config
from areno.config.models import OptimizerConfig
from areno.config.optimizers import OPTIMIZERS, OptimizerType
from areno.layers.config import AdapterSpec
from areno.schema.values import flatten_settings


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The LoRA adapters that are trained in place of the actor's weights."""

    adapters: AdapterSpec
    init_from: str = ""  # folder in peft's format; "": initialised from the engine's seed
    base: str = ""  # name of the base model, written into the folders in which adapters are saved
    trained_on: str = ""  # name of the base model according to `init_from`


@dataclass(kw_only=True)
class RoleSpec:
    """One model of the engine.

    With `offload` the model rests in host memory while it is not in use. Master weights and moments are then always in
    host memory, and the weights of the actor stay on the device.

    If the vocabulary of a teacher differs from the actor's, `common_ids` are ranges (first, end) of the token ids that
    have the same text in both. The divergence compares both models over these ids.
    """

    path: str
    head: HeadName = "lm"
    key: str = field(default="actor.path", compare=False)  # setting with the path, for messages
    optimizer: OptimizerConfig | None = None  # None: frozen
    gradient_checkpointing: bool = True
    freeze_attention: bool = False  # of a role that trains its weights
    fp8_kv: bool = False  # TransformerConfig.fp8_kv
    offload: bool = False
    needs_head: bool = False  # the folder must hold a trained head that gives scores; a critic may train a new one
    random_init: bool = False  # weights from the engine's seed, not from the folder
    router_aux_loss_coef: float = 0.0  # of the loss that balances the load of experts
    lora: LoraSpec | None = None  # trained in place of the weights
    fp8: FP8Config | None = None  # of the linear layers
    pad_token_id: int | None = None  # for config.json of a head that gives scores: transformers finds a row's end by it
    step_separator: str | None = None  # text after each step, for config.json of a process reward model
    in_training: bool = False  # training passes of the actor use it, for a divergence
    own_tokenizer: bool = False  # encodes its rows; vocabulary and context length may differ, as a judge's
    common_ids: tuple[tuple[int, int], ...] = ()  # empty: all ids

    def with_own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json with the fields that the role adds to it."""
        pads = self.pad_token_id is not None and values.get("pad_token_id") is None
        added = {"pad_token_id": self.pad_token_id} if pads else {}
        return {**values, **added} | ({} if self.step_separator is None else {"step_separator": self.step_separator})

    @property
    def own_section(self) -> str:
        """Configuration section of the model: "teacher" for "teacher.path", and for "teacher.models.math"."""
        return self.key.removesuffix(".path").partition(".models.")[0]

    @property
    def section(self) -> str:
        """Configuration section with the role's micro-batch settings: its own if it is trained, else "actor"."""
        return self.own_section if self.optimizer else "actor"

    @property
    def is_actor(self) -> bool:
        return self.key == "actor.path"

    @property
    def adapters(self) -> AdapterSpec | None:
        return self.lora.adapters if self.lora else None

    @property
    def has_fp8_only(self) -> bool:
        """Whether the linear layers in FP8 have no weights in another dtype, because they are frozen under adapters."""
        return self.fp8 is not None and self.lora is not None

    @property
    def trains_weights(self) -> bool:
        return self.optimizer is not None and self.lora is None

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights stay on the device while the model is not used."""
        return not self.offload or self.is_actor

    @property
    def gains_from_offload(self) -> bool:
        """Whether this is an actor that trains its weights without `offload`, so `offload` would free memory."""
        return self.is_actor and self.trains_weights and not self.offload

    @property
    def smaller_optimizer(self) -> OptimizerType | None:
        return OPTIMIZERS[self.optimizer.type].smaller if self.optimizer else None

    def mismatch_message(self, name: str, wanted: RoleSpec) -> str:
        """Return the error message for a role that is loaded with this spec and requested with another one."""
        was, now = flatten_settings(dataclasses.asdict(self)), flatten_settings(dataclasses.asdict(wanted))
        fields = [field for field in {**now, **was} if now.get(field) != was.get(field)]
        changed = ", ".join(f"{field}={now.get(field)!r} (loaded with {was.get(field)!r})" for field in fields)
        how = "the actor is what the engine was built for" if name == "actor" else "call release_role to replace it"
        return f"role {name!r} is loaded already, asked for now with {changed}; {how}"
