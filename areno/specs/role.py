"""A model of the engine, and the LoRA adapters that may be trained in place of its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areno.config.experiments import HeadName
from areno.config.models import OptimizerConfig
from areno.layers.config import AdapterSpec
from areno.schema.values import flat

if TYPE_CHECKING:
    pass  # imports numpy, which takes a tenth of the time of `areno plan`


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The LoRA adapters that are trained in place of the actor's weights.

    Attributes:
        adapters: Rank, scaling and target layers.
        init_from: Folder in peft's format with the initial weights of the adapters. If "", they are initialised from
            the engine's seed.
        base: Name of the base model, written into the folders in which adapters are saved.
        trained_on: Name of the base model according to the folder `init_from`. "" if the folder does not name it.
    """

    adapters: AdapterSpec
    init_from: str = ""
    base: str = ""
    trained_on: str = ""


@dataclass(kw_only=True)
class RoleSpec:
    """One model of the engine.

    Attributes:
        path: Folder of the model.
        head: Kind of the model's head.
        key: Name of the setting that holds the path, for messages. Equality ignores it.
        optimizer: Settings of the optimizer. None freezes the model.
        gradient_checkpointing: Whether layers recompute activations in the backward pass.
        offload: Whether the model rests in host memory while it is not in use. If it is trained, its master weights
            and moments are always in host memory. The weights of the actor stay on the device.
        needs_head: Whether the folder must hold a trained head that gives scores, as for a reward model. A critic may
            train a new head.
        random_init: Whether to draw the weights from the engine's seed instead of reading them from the folder.
        router_aux_loss_coef: Coefficient of the loss that balances the load of experts.
        lora: The adapters that are trained in place of the weights. None trains all weights.
        pad_token_id: For a head that gives scores, the padding token if config.json of the folder names none.
            transformers needs it to find the last token of a row. None leaves config.json as it is.
        step_separator: Text after each step, which is written to config.json of a process reward model. None leaves
            config.json as it is.
        in_training: Whether training passes of the actor use the model, as those with a divergence from a teacher do.
        own_tokenizer: Whether rows for the model are encoded by its own tokenizer, as those of a judge. Its vocabulary
            and context length may then differ from the actor's.
        common_ids: For a teacher whose vocabulary differs from the actor's: ranges (first, end) of the token ids that
            have the same text in both. The divergence compares both models over these ids. Empty: over all ids.
    """

    path: str
    head: HeadName = "lm"
    key: str = field(default="actor.path", compare=False)
    optimizer: OptimizerConfig | None = None
    gradient_checkpointing: bool = True
    offload: bool = False
    needs_head: bool = False
    random_init: bool = False
    router_aux_loss_coef: float = 0.0
    lora: LoraSpec | None = None
    pad_token_id: int | None = None
    step_separator: str | None = None
    in_training: bool = False
    own_tokenizer: bool = False
    common_ids: tuple[tuple[int, int], ...] = ()

    def with_own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json with the fields that the role adds to it.

        Args:
            values: Content of config.json in the folder of the model.
        """
        pads = self.pad_token_id is not None and values.get("pad_token_id") is None
        added = {"pad_token_id": self.pad_token_id} if pads else {}
        return {**values, **added} | ({} if self.step_separator is None else {"step_separator": self.step_separator})

    @property
    def section(self) -> str:
        """Configuration section with the role's micro-batches: its own section if it is trained, else "actor"."""
        return self.key.removesuffix(".path") if self.optimizer else "actor"

    def difference(self, name: str, wanted: RoleSpec) -> str:
        """Return the error message for a role that is loaded with this spec, and is now requested with another spec.

        Args:
            name: Name of the role.
            wanted: The requested spec.
        """
        was, now = flat(dataclasses.asdict(self)), flat(dataclasses.asdict(wanted))
        fields = [field for field in {**now, **was} if now.get(field) != was.get(field)]
        changed = ", ".join(f"{field}={now.get(field)!r} (loaded with {was.get(field)!r})" for field in fields)
        how = "the actor is what the engine was built for" if name == "actor" else "call release_role to replace it"
        return f"role {name!r} is loaded already, asked for now with {changed}; {how}"
