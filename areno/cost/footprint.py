"""Memory that models take on each device, computed from their configurations before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from areno.config.layout import ALONE, Layout
from areno.cost.flops import TokenCost
from areno.cost.memory import ModelBytes, PassBytes, kv_bytes_of_row, kv_bytes_per_token, model_bytes, state_bytes
from areno.layers.config import AdapterSpec
from areno.models.config import TransformerConfig
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec

GIB = 2**30
RESERVE = 0.06
"""Share of a device that is left for memory that is not counted: workspaces, fragments, graphs."""

RESTING = ("ref", "teacher", "reward", "reward.judge", "critic")
"""Configuration sections whose models may rest in host memory while they are not used."""
_TYPICAL_TOKENS = 1024  # of a micro-batch
_MIN_TOKENS = 256  # of a micro-batch and of a KV cache that are of any use
_MIN_SLOTS = 2  # of recurrent states: one sequence, and what pads a batch


@dataclass(kw_only=True)
class ModelFootprint(RoleSpec):
    """A role with the shape of its model. On a CPU, `offload` is off, because it has no effect there."""

    name: str
    config: TransformerConfig


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """Tokens of the longest row on which a model can be trained, over all context-parallel ranks."""

    tokens: int
    host_bytes: int  # of each device, for the inputs of layers of such a row
    tokens_on_device: int  # if all inputs of layers stay on the device

    @property
    def text(self) -> str:
        host = f"{gib_text(self.host_bytes)} GiB of host memory for the inputs of layers"
        return f"{self.tokens_on_device:,} tokens, or {self.tokens:,} with {host}"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory that the models of an engine take on each device."""

    models: tuple[ModelFootprint, ...]  # the actor first
    itemsize: int  # bytes of a weight
    layout: Layout = ALONE
    split: bool = False  # sequence parallelism divides the residual stream over tensor-parallel ranks
    zero_stage: int = 0
    budget: int | None = None  # tokens of a micro-batch on one device; None: it is sized in rows
    copies_a: bool = False  # adapted weights have room for copies of the LoRA matrix A, see `Adapter.stack`
    on_cuda: bool = True
    may_adapt: bool = False  # error messages may suggest LoRA for the actor
    host_bytes: int | None = None  # free host memory for each device; None: unknown
    share_prefixes: bool = False

    @property
    def batch_tokens(self) -> int:
        """Largest number of tokens in a micro-batch, over all context-parallel ranks."""
        return self.budget * self.layout.cp_size if self.budget else _TYPICAL_TOKENS

    def model_bytes(self, model: ModelFootprint) -> ModelBytes:
        """Return the memory of a model on each device, without activations, as if it were not offloaded."""
        return model_bytes(
            model.config,
            self.itemsize,
            model.optimizer and model.optimizer.type,
            layout=self.layout,
            zero_stage=self.zero_stage,
            adapters=model.adapters,
            copies_a=self.copies_a,
            fp8=model.fp8,
            freeze_attention=model.freeze_attention,
        )

    def token_cost(self, model: ModelFootprint, adapters: AdapterSpec | None) -> TokenCost:
        has_units = self.on_cuda and self.itemsize == 2  # other products in FP8 are emulated
        fp8 = model.fp8 if has_units else None
        return TokenCost.from_config(model.config, self.itemsize, adapters, fp8, model.freeze_attention)

    def resident_bytes(self, model: ModelFootprint) -> int:
        """Return the bytes of a model on each device while it is not used."""
        found = self.model_bytes(model)
        if not model.offload:
            return found.total
        return found.weights if model.keeps_weights else 0

    def extra_bytes_in_use(self, model: ModelFootprint, training: bool) -> int:
        """Return the additional bytes of a model on each device while it is used, without activations."""
        teacher = self._largest_teacher if training and model.is_actor else None
        beside = 0 if teacher is None else self.extra_bytes_in_use(teacher, training=False)
        if not model.offload:
            return beside
        found = self.model_bytes(model)
        weights = 0 if model.keeps_weights else found.weights
        return beside + weights + (found.gradients + found.windows if training and model.optimizer else 0)

    @property
    def _largest_teacher(self) -> ModelFootprint | None:
        """The teacher that training passes of the actor use. Of several, the one that takes most device memory."""
        found = [model for model in self.models if model.in_training]
        return max(found, key=lambda model: self.extra_bytes_in_use(model, training=False), default=None)

    @property
    def total_resident_bytes(self) -> int:
        return sum(map(self.resident_bytes, self.models))

    @property
    def max_extra_bytes_in_use(self) -> int:
        return max((self.extra_bytes_in_use(model, training=True) for model in self.models), default=0)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that offloading keeps in host memory for each device."""
        found = [(model, self.model_bytes(model)) for model in self.models if model.offload]
        return sum(each.masters + each.moments + (0 if model.keeps_weights else each.weights) for model, each in found)

    @property
    def min_device_bytes(self) -> int:
        """Bytes that each device needs at least.

        This is the memory that is always in use, plus the largest single need of these: training a model on a
        micro-batch of up to 256 tokens, holding an offloaded model, or a KV cache of 256 tokens.
        """
        work = [0]
        for model in self.models:
            of_tokens = self.training_bytes(model, min(_MIN_TOKENS, self.batch_tokens)) if model.optimizer else 0
            work.append(self.extra_bytes_in_use(model, training=True) + of_tokens)
        actor = self.models[0].config
        kv = _MIN_TOKENS * kv_bytes_per_token(actor, self.itemsize, self.layout)
        kv += _MIN_SLOTS * state_bytes(actor, self.itemsize, self.layout)
        return self.total_resident_bytes + max(*work, kv)

    def training_bytes(self, model: ModelFootprint, n_tokens: int) -> int:
        """Return the bytes of activations and logits of a micro-batch. `n_tokens` counts all context-parallel ranks."""
        return self.training_pass_bytes(model).total(-(-n_tokens // self.layout.cp_size))

    def training_pass_bytes(self, model: ModelFootprint) -> PassBytes:
        config, recompute = model.config, model.gradient_checkpointing
        found = PassBytes.for_training(config, self.itemsize, self.layout, recompute=recompute, split=self.split)
        return found.with_teacher_logits() if model.is_actor and self._largest_teacher is not None else found

    def longest_row(
        self, model: ModelFootprint, room: int, cache_bytes: int = 0, may_free_cache: bool = False
    ) -> LongestRow | None:
        """Return the longest row if a training pass may take `room` bytes beside a KV cache.

        With `may_free_cache`, the cache is freed for longer rows. None on a CPU and without recompute.
        """
        if not (self.on_cuda and model.gradient_checkpointing and model.optimizer):
            return None
        need, n_layers = self.training_pass_bytes(model), model.config.num_layers
        most = need.offloading(n_layers, n_layers)
        n_tokens = most.fitting_tokens(room if may_free_cache else room - cache_bytes)
        return LongestRow(
            tokens=self.layout.cp_size * n_tokens,
            host_bytes=n_tokens * (n_layers - 1) * need.of_inputs,
            tokens_on_device=self.layout.cp_size * need.fitting_tokens(room - cache_bytes),
        )

    def scoring_pass_bytes(self, model: ModelFootprint) -> PassBytes:
        return PassBytes.for_scoring(model.config, self.itemsize, self.layout, split=self.split)

    # -- messages --------------------------------------------------------------------------------------------------

    def memory_table_text(self, device_bytes: int) -> str:
        """Return a table of the memory on each device in GiB, as several lines of text."""
        rows: list[tuple[str, ...]] = [("", "weights", "gradients", "masters", "moments", "sum")]
        for model in self.models:
            found = self.model_bytes(model)
            where = " (in host memory)" if model.offload else ""
            if model.offload and model.keeps_weights:
                where = " (masters, moments in host memory)" if model.optimizer else ""
            name = f"{model.name}{where}"
            numbers = found.weights, found.gradients, found.masters, found.moments, found.total
            rows.append((name, *map(gib_text, numbers)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        actor, n_tokens = self.models[0], self.batch_tokens
        room = max(0, int((1 - RESERVE) * device_bytes) - self.total_resident_bytes)
        kv = kv_bytes_per_token(actor.config, self.itemsize, self.layout)
        work = [f"KV cache: {gib_text(1000 * kv)} for 1,000 tokens"]
        if windows := [kind.window for kind in actor.config.kinds if kind.window is not None]:
            ends = (max(windows), max(windows) + 1000)
            less, more = (kv_bytes_of_row(actor.config, end, self.itemsize, self.layout) for end in ends)
            work[0] += f", and {gib_text(more - less)} for each 1,000 of a sequence beyond {max(windows):,}"
        if state := state_bytes(actor.config, self.itemsize, self.layout):
            work.append(f"recurrent states: {gib_text(100 * state)} for 100 sequences")
        if actor.optimizer:
            need = gib_text(self.training_bytes(actor, n_tokens))
            work.append(f"activations of a micro-batch of {n_tokens:,} tokens: {need}")
            extra = self.extra_bytes_in_use(actor, training=True)
            if (row := self.longest_row(actor, room - extra)) is not None:
                work.append(f"without a KV cache, the longest row to train on has {row.text}")
        extra, hosted = gib_text(self.max_extra_bytes_in_use), gib_text(self.offloaded_bytes)
        away = f"offload keeps {hosted} in host memory; a model in use takes up to {extra} more of its device"
        return "\n".join(
            [
                f"memory of each device in GiB, with {self.layout_in_words()}:",
                *lines,
                "; ".join(work),
                f"{gib_text(self.total_resident_bytes)} of {gib_text(device_bytes)} are taken, which leaves "
                f"{gib_text(room)} for these",
                *([away] if self.offloaded_bytes else []),
            ]
        )

    def memory_summary(self, device_bytes: int) -> str:
        names = ", ".join(model.name for model in self.models)
        taken = gib_text(self.total_resident_bytes) if self.total_resident_bytes >= 0.01 * 2**30 else "less than 0.01"
        return f"memory of each device: {taken} of {gib_text(device_bytes)} GiB for {names}"

    def layout_in_words(self) -> str:
        """Return the layout as words of a message, such as "tp_size=2, 4 copies, zero_stage=1"."""
        layout = self.layout
        copies = f"{layout.dp_size} copies, zero_stage={self.zero_stage}" if layout.dp_size > 1 else "one copy"
        together = f", {layout.cp_size} of them to a row" if layout.cp_size > 1 else ""
        return f"tp_size={layout.tp_size}, {copies}{together}"

    def fits(self, device_bytes: int) -> bool:
        """Return whether the models fit with 6 % left free. Long rows and many requests may still run out of memory."""
        return self.min_device_bytes <= (1 - RESERVE) * device_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        return self.host_bytes is None or self.offloaded_bytes <= (1 - RESERVE) * self.host_bytes


def footprint_of(
    spec: EngineSpec,
    configs: Mapping[str, TransformerConfig],
    roles: Mapping[str, RoleSpec],
    itemsize: int,
    uses_triton: bool,
) -> Footprint:
    engine, on_cuda = spec.engine, spec.devices[0].startswith("cuda")
    models = tuple(
        ModelFootprint(
            **{**vars(role), "offload": role.offload and on_cuda},
            name=name,
            config=replace(configs[name], fp8_kv=role.fp8_kv),
        )
        for name, role in roles.items()
    )
    return Footprint(
        models=models,
        itemsize=itemsize,
        layout=spec.layout,
        split=engine.sequence_parallel is not False and not engine.exact,
        zero_stage=engine.zero_stage,
        budget=spec.mb_spec.max_tokens_per_mb,
        copies_a=uses_triton and not engine.exact,
        on_cuda=on_cuda,
        may_adapt=may_suggest_lora(spec),
        share_prefixes=spec.share_prefixes != "off",
    )


def gib_text(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f}" if n_bytes < 10 * GIB else f"{n_bytes / GIB:.1f}"


def may_suggest_lora(spec: EngineSpec) -> bool:
    """Return whether error messages may suggest LoRA for the actor."""
    actor = spec.actor
    return actor.trains_weights and not actor.random_init
