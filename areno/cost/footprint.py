"""Memory that models take on each device, computed from their configurations before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areno.config.models import OptimizerType
from areno.config.run import ALONE, Layout
from areno.cost.memory import ModelBytes, PassBytes, kv_bytes, kv_bytes_of_row, model_bytes, state_bytes
from areno.layers.config import AdapterSpec
from areno.models.config import TransformerConfig
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec

GIB = 2**30
_TYPICAL_TOKENS = 1024  # of a micro-batch
_MIN_TOKENS = 256  # of a micro-batch and of a KV cache that are of any use
_MIN_SLOTS = 2  # of recurrent states: one sequence, and what pads a batch


@dataclass(frozen=True)
class Model:
    """One model of the engine, with the facts that decide how much memory it takes.

    Attributes:
        name: Name of the model's role, such as "actor".
        config: Shape of the model.
        optimizer: Type of the optimizer. None for a frozen model.
        key: Configuration section of the role.
        offload: Whether the model rests in host memory while it is not used. If it is trained, its masters and moments
            are always in host memory. The weights of the actor always stay on the device.
        recompute: Whether layers recompute activations in the backward pass.
        adapters: The LoRA adapters, if they are trained in place of the weights. None otherwise.
        path: Folder of the model.
        in_training: Whether training passes of the actor use the model, as its teacher.
    """

    name: str
    config: TransformerConfig
    optimizer: OptimizerType | None
    key: str
    offload: bool = False
    recompute: bool = True
    adapters: AdapterSpec | None = None
    path: str = ""
    in_training: bool = False

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights stay on the device while the model is not used."""
        return not self.offload or self.key == "actor"

    @property
    def may_stream(self) -> bool:
        """Whether actor.offload would free device memory."""
        return self.key == "actor" and self.optimizer is not None and self.adapters is None and not self.offload

    @staticmethod
    def of(name: str, config: TransformerConfig, role: RoleSpec, can_offload: bool) -> Model:
        """Return the memory facts of a role.

        Args:
            name: Name of the role.
            config: Shape of the role's model.
            role: Spec of the role.
            can_offload: Whether the device has memory of its own. If not, `role.offload` has no effect.
        """
        kind = role.optimizer.type if role.optimizer else None
        section = section_of(role.key)
        adapters = role.lora.adapters if role.lora else None
        away = role.offload and can_offload
        return Model(
            name, config, kind, section, away, role.gradient_checkpointing, adapters, role.path, role.in_training
        )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory that the models of an engine take on each device.

    Attributes:
        models: The models, the actor first.
        itemsize: Bytes of a weight.
        layout: Division of the models over the devices.
        split: Whether sequence parallelism divides the residual stream over tensor-parallel ranks.
        zero_stage: Stage of ZeRO, from the setting engine.zero_stage.
        budget: Largest number of tokens in a micro-batch on one device. None if micro-batches are sized in rows.
        copies_a: Whether each weight with a LoRA adapter takes extra memory for a copy of the adapter's matrix A, see
            `Adapter.stack`.
        on_cuda: Whether the devices are GPUs, which have memory of their own.
        may_adapt: Whether error messages may suggest LoRA for the actor.
        host_bytes: Free host memory for each device. None if it is not known.
        share_prefixes: Whether models that can share prefixes may do so: true unless the setting is "off".
    """

    models: tuple[Model, ...]
    itemsize: int
    layout: Layout = ALONE
    split: bool = False
    zero_stage: int = 0
    budget: int | None = None
    copies_a: bool = False
    on_cuda: bool = True
    may_adapt: bool = False
    host_bytes: int | None = None
    share_prefixes: bool = False

    @staticmethod
    def of(spec: EngineSpec, itemsize: int, models: Sequence[Model], uses_triton: bool) -> Footprint:
        """Return the footprint of models on the layout of an engine.

        Args:
            spec: The engine.
            itemsize: Bytes of a weight.
            models: The models, the actor first.
            uses_triton: Whether Triton kernels run on the devices.
        """
        engine, within = spec.engine, models[0].config.within if models else ""
        return Footprint(
            models=tuple(models),
            itemsize=itemsize,
            layout=spec.layout,
            split=engine.sequence_parallel is not False and not engine.exact,
            zero_stage=engine.zero_stage,
            budget=spec.mb_spec.max_tokens_per_mb,
            copies_a=uses_triton and not engine.exact,
            on_cuda=spec.devices[0].startswith("cuda"),
            may_adapt=may_have_adapters(spec, within),
            share_prefixes=spec.share_prefixes != "off",
        )

    @property
    def batch_tokens(self) -> int:
        """Largest number of tokens in a micro-batch, over all context-parallel ranks.

        1,024 if micro-batches are sized in rows.
        """
        return self.budget * self.layout.cp_size if self.budget else _TYPICAL_TOKENS

    def of_model(self, model: Model) -> ModelBytes:
        """Return the memory of a model on each device, without activations, as if it were not offloaded."""
        return model_bytes(
            model.config,
            self.itemsize,
            model.optimizer,
            layout=self.layout,
            zero_stage=self.zero_stage,
            adapters=model.adapters,
            copies_a=self.copies_a,
        )

    def resident_bytes(self, model: Model) -> int:
        """Return the bytes of a model on each device while it is not used."""
        found = self.of_model(model)
        if not model.offload:
            return found.total
        return found.weights if model.keeps_weights else 0

    def extra_in_use(self, model: Model, training: bool) -> int:
        """Return the additional bytes of a model on each device while it is used, without activations.

        Args:
            model: The model.
            training: Whether the model is trained, rather than only computing scores.
        """
        teacher = self._teacher if training and model.key == "actor" else None
        beside = 0 if teacher is None else self.extra_in_use(teacher, training=False)
        if not model.offload:
            return beside
        found = self.of_model(model)
        weights = 0 if model.keeps_weights else found.weights
        return beside + weights + (found.gradients + found.windows if training and model.optimizer else 0)

    @property
    def _teacher(self) -> Model | None:
        """The model that training passes of the actor use: of several, the largest one that comes to the device.

        None if there is none.
        """
        found = [model for model in self.models if model.in_training]
        return max(found, key=lambda model: self.extra_in_use(model, training=False), default=None)

    @property
    def resident(self) -> int:
        """Bytes on each device that are always in use."""
        return sum(map(self.resident_bytes, self.models))

    @property
    def most_extra_in_use(self) -> int:
        """Largest number of additional bytes on each device while one of the models is used, without activations."""
        return max((self.extra_in_use(model, training=True) for model in self.models), default=0)

    @property
    def hosted(self) -> int:
        """Bytes in host memory for each device."""
        found = [(model, self.of_model(model)) for model in self.models if model.offload]
        return sum(each.masters + each.moments + (0 if model.keeps_weights else each.weights) for model, each in found)

    @property
    def least(self) -> int:
        """Minimum memory of each device in bytes.

        This is the memory that is always in use, plus the largest single need of these: training a model on a
        micro-batch of up to 256 tokens, holding an offloaded model, or a KV cache of 256 tokens. Training an offloaded
        model includes holding it, and the KV cache includes a few recurrent states if the actor has them.
        """
        work = [0]
        for model in self.models:
            of_tokens = self.training_bytes(model, min(_MIN_TOKENS, self.batch_tokens)) if model.optimizer else 0
            work.append(self.extra_in_use(model, training=True) + of_tokens)
        actor = self.models[0].config
        kv = _MIN_TOKENS * kv_bytes(actor, self.itemsize, self.layout)
        kv += _MIN_SLOTS * state_bytes(actor, self.itemsize, self.layout)
        return self.resident + max(*work, kv)

    def training_bytes(self, model: Model, n_tokens: int) -> int:
        """Return the bytes of activations and logits that a micro-batch needs on each device.

        Args:
            model: The model. If it recomputes activations, all of its layers count as recomputed.
            n_tokens: Tokens of the micro-batch over all context-parallel ranks.
        """
        return self.training_pass(model).total(-(-n_tokens // self.layout.cp_size))

    def training_pass(self, model: Model) -> PassBytes:
        """Return the bytes of a forward and a backward pass of a model on each device."""
        config, recompute = model.config, model.recompute
        found = PassBytes.of_training(config, self.itemsize, self.layout, recompute=recompute, split=self.split)
        return found.with_two_heads() if model.key == "actor" and self._teacher is not None else found

    def scoring_pass(self, model: Model) -> PassBytes:
        """Return the bytes of a forward pass of a model without gradient, on each device."""
        return PassBytes.of_scoring(model.config, self.itemsize, self.layout, split=self.split)

    # -- messages --------------------------------------------------------------------------------------------------

    def table(self, device_bytes: int) -> str:
        """Return a table of the memory on each device in GiB, as several lines of text.

        Args:
            device_bytes: Bytes that a device has for this engine.
        """
        rows: list[tuple[str, ...]] = [("", "weights", "gradients", "masters", "moments", "sum")]
        for model in self.models:
            found = self.of_model(model)
            where = " (in host memory)" if model.offload else ""
            if model.offload and model.keeps_weights:
                where = " (masters, moments in host memory)" if model.optimizer else ""
            name = f"{model.name}{where}"
            numbers = found.weights, found.gradients, found.masters, found.moments, found.total
            rows.append((name, *map(gib, numbers)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        actor, n_tokens = self.models[0], self.batch_tokens
        room = max(0, int((1 - RESERVE) * device_bytes) - self.resident)
        kv = kv_bytes(actor.config, self.itemsize, self.layout)
        work = [f"KV cache: {gib(1000 * kv)} for 1,000 tokens"]
        if windows := [kind.window for kind in actor.config.kinds if kind.window is not None]:
            ends = (max(windows), max(windows) + 1000)
            less, more = (kv_bytes_of_row(actor.config, end, self.itemsize, self.layout) for end in ends)
            work[0] += f", and {gib(more - less)} for each 1,000 of a sequence beyond {max(windows):,}"
        if state := state_bytes(actor.config, self.itemsize, self.layout):
            work.append(f"recurrent states: {gib(100 * state)} for 100 sequences")
        if actor.optimizer:
            need = gib(self.training_bytes(actor, n_tokens))
            work.append(f"activations of a micro-batch of {n_tokens:,} tokens: {need}")
        extra, hosted = gib(self.most_extra_in_use), gib(self.hosted)
        away = f"offload keeps {hosted} in host memory; a model in use takes up to {extra} more of its device"
        return "\n".join(
            [
                f"memory of each device in GiB, with {self.layout_in_words()}:",
                *lines,
                "; ".join(work),
                f"{gib(self.resident)} of {gib(device_bytes)} are taken, which leaves {gib(room)} for these",
                *([away] if self.hosted else []),
            ]
        )

    def short(self, device_bytes: int) -> str:
        """Return one line that says how much memory of each device the models take.

        Args:
            device_bytes: Bytes that a device has for this engine.
        """
        names = ", ".join(model.name for model in self.models)
        taken = gib(self.resident) if self.resident >= 0.01 * 2**30 else "less than 0.01"
        return f"memory of each device: {taken} of {gib(device_bytes)} GiB for {names}"

    def layout_in_words(self) -> str:
        """Return the layout as words of a message, such as "tp_size=2, 4 copies, zero_stage=1"."""
        layout = self.layout
        copies = f"{layout.dp_size} copies, zero_stage={self.zero_stage}" if layout.dp_size > 1 else "one copy"
        together = f", {layout.cp_size} of them to a row" if layout.cp_size > 1 else ""
        return f"tp_size={layout.tp_size}, {copies}{together}"

    def fits(self, device_bytes: int) -> bool:
        """Return whether the models fit a device with this many bytes, with 6 % left free.

        Only the smallest possible work counts, see `least`. Long rows and many requests may need more memory. If
        `host_bytes` is known, offloaded models must also fit the host memory.
        """
        return self.least <= (1 - RESERVE) * device_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether the host memory is large enough for the models, with 6 % left free. True if it is not known."""
        return self.host_bytes is None or self.hosted <= (1 - RESERVE) * self.host_bytes


def footprint_of(
    spec: EngineSpec,
    configs: Mapping[str, TransformerConfig],
    roles: Mapping[str, RoleSpec],
    itemsize: int,
    uses_triton: bool,
) -> Footprint:
    """Compute the footprint of an engine's models from the specs of their roles.

    Args:
        spec: The engine.
        configs: Shape of each role's model, by role name.
        roles: Spec of each role, by role name, the actor first.
        itemsize: Bytes of a weight.
        uses_triton: Whether Triton kernels run on the devices.
    """
    on_cuda = spec.devices[0].startswith("cuda")
    models = [Model.of(name, configs[name], role, on_cuda) for name, role in roles.items()]
    return Footprint.of(spec, itemsize, models, uses_triton)


def gib(n_bytes: float) -> str:
    """Return a number of bytes in GiB, as text without the unit."""
    return f"{n_bytes / GIB:.2f}" if n_bytes < 10 * GIB else f"{n_bytes / GIB:.1f}"


RESERVE = 0.06
"""Share of a device that is left for memory that is not counted: workspaces, fragments, graphs."""

RESTING = ("ref", "teacher", "reward", "reward.judge", "critic")
"""Configuration sections whose models may rest in host memory while they are not used."""


def section_of(key: str) -> str:
    """Return the configuration section of a model, such as "teacher".

    Args:
        key: The setting with its path, such as "teacher.path", or "teacher.models.math" for one of several.
    """
    return key.removesuffix(".path").partition(".models.")[0]


def may_have_adapters(spec: EngineSpec, within: str = "") -> bool:
    """Return whether error messages may suggest LoRA for the actor.

    False if the actor is frozen, has adapters already, starts from random weights, or is a part of a larger model.

    Args:
        spec: The engine.
        within: Kind of the larger model, such as an image-text model, that contains the actor. "" if the actor is a
            whole model.
    """
    actor = spec.actor
    return actor.optimizer is not None and actor.lora is None and not actor.random_init and not within
