"""The models of one worker by role: the actor, and a reference, critic or reward model.

A role with `offload` rests in host memory while it is not used, except that the weights of the actor always stay on the
device. Offloading frees the storage under the model's flat buffers, and loading allocates the storage again. The tensor
objects stay the same, so parameters and gradients, which are views of the buffers, stay valid. If a role with `offload`
is trained, its master weights and moments are always in host memory.

The driver's Engine checks that a role supports a command, so this module does not check again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from areno.config.teacher import Divergence
from areno.cost import remedies
from areno.cost.footprint import Footprint, footprint_of
from areno.cost.kv_cache import WantedCache
from areno.cost.remedies import check_device_memory, check_host_memory
from areno.cost.token_budget import SCORE, TRAIN, choose_token_budget
from areno.engine import device_memory
from areno.engine.chosen_token_budgets import TokenBudgets
from areno.engine.decoder.grammar import Vocabulary
from areno.engine.device_memory import available_memory_bytes, out_of_memory_hint, total_memory_bytes
from areno.engine.exact import make_exact
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.train.backend import TrainBackend
from areno.engine.train.optimizer_offload import PINNED_BYTES
from areno.engine.train.teacher import TeacherPasses
from areno.errors import ConfigError, EngineError, Key
from areno.files.paths import name_model_setting_in_errors
from areno.kernels.backend import is_before_ampere, supports_triton
from areno.models.adapters import (
    adapter_weights,
    add_adapters,
    init_adapters,
    load_adapters,
    refresh_adapters,
    set_adapter_weights,
    stack_adapters,
    without_adapters,
)
from areno.models.config import TransformerConfig
from areno.models.quantization import quantize_linears, quantized_buffers
from areno.models.registry import build_model, layout_problems, load_config
from areno.models.transformer import Transformer
from areno.models.weights import load_weights
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.shared_models import have_same_base, have_same_folder, is_base_of_actor, roles_to_load


class OffloadedBuffers:
    """Moves the memory of a model between the device and host memory. Construction moves it to host memory.

    The memory consists of flat buffers: large 1-D tensors, of which the parameters and gradients are views. Master
    weights and moments are not among them, see `areno.engine.train.optimizer_offload`. `scratch` buffers are used only
    by training, and their content is not kept.
    """

    def __init__(self, params: Sequence[Tensor] = (), scratch: Sequence[Tensor] = ()):
        self._params = [_OffloadedBuffer(buffer) for buffer in params]
        self._scratch = [_OffloadedBuffer(buffer, scratch=True) for buffer in scratch]
        for buffer in (*self._params, *self._scratch):
            buffer.free_on_device(changed=True)

    @contextmanager
    def on_device(self, training: bool = False) -> Iterator[None]:
        """Hold the buffers on the device inside a `with` block.

        With `training`, the block also has the `scratch` buffers, and the `params` buffers are copied back to host
        memory when it ends. Without `training`, the buffers must not be changed.
        """
        arrived: list[_OffloadedBuffer] = []
        try:
            for buffer in (*self._params, *(self._scratch if training else ())):
                buffer.copy_to_device()
                arrived.append(buffer)
            yield
        finally:  # also after running out of memory: buffers that have arrived must leave again
            for buffer in arrived:
                buffer.free_on_device(changed=training)

    def host_copies(self, buffer: Tensor) -> list[Tensor]:
        """Return the host tensors that together hold an offloaded buffer. On CUDA, copies may be in progress."""
        return [copy for each in self._params if each.holds(buffer) for copy in each.copies]


class _OffloadedBuffer:
    """One buffer of a model and its copy in host memory (pinned on CUDA). A scratch buffer has no copy.

    All copies run on the stream on which the model computes, so no explicit wait is needed.
    """

    def __init__(self, buffer: Tensor, scratch: bool = False):
        self._storage = buffer.untyped_storage()
        self._n_bytes = self._storage.nbytes()
        n = PINNED_BYTES // buffer.element_size()
        parts = [buffer[start : start + n] for start in range(0, 0 if scratch else buffer.numel(), n)]
        self._copies = [(part, torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)) for part in parts]

    @property
    def copies(self) -> list[Tensor]:
        return [copy for _, copy in self._copies]

    def holds(self, buffer: Tensor) -> bool:
        return buffer.untyped_storage()._cdata == self._storage._cdata

    def copy_to_device(self) -> None:
        self._storage.resize_(self._n_bytes)
        for part, copy in self._copies:
            part.copy_(copy, non_blocking=True)

    def free_on_device(self, changed: bool) -> None:
        """Free the buffer on the device. If `changed`, first copy its content to host memory."""
        if changed:
            for part, copy in self._copies:
                copy.copy_(part, non_blocking=True)
        self._storage.resize_(0)


logger = logging.getLogger("areno")


@dataclass
class Role:
    """One model of this worker.

    `owner` names the role whose model this role shares, "" if it has its own. `adapters` are set if roles with
    different adapters share a model. They are then copied into the model whenever this role is used.
    """

    spec: RoleSpec
    backend: TrainBackend
    offload: OffloadedBuffers
    is_base: bool = False  # the actor with its adapters switched off, without weights of its own
    owner: str = ""
    adapters: list[Tensor] | None = None

    @contextmanager
    def on_device(self, training: bool = False) -> Iterator[TrainBackend]:
        """Hold the model on the device inside a `with` block, without its adapters if the role is the base model."""
        base = without_adapters(self.backend.model) if self.is_base else nullcontext()
        with self.offload.on_device(training), base:
            self._set_adapters()
            yield self.backend

    @contextmanager
    def as_teacher(self, divergence: Divergence) -> Iterator[TeacherPasses]:
        """Hold the model on the device, and yield its passes as the teacher of another model.

        If `is_base`, the model is the actor's, and its adapters are off during these passes only.
        """
        switch = partial(without_adapters, self.backend.model) if self.is_base else nullcontext
        with self.offload.on_device():
            self._set_adapters()
            yield self.backend.as_teacher(divergence, switch, self.spec.common_ids)

    def _set_adapters(self) -> None:
        if self.adapters is not None:
            set_adapter_weights(self.backend.model, self.adapters)


class Roles:
    """The models of this worker by role name. Construction loads the actor.

    `beside` returns setting changes that make the KV cache smaller, for out-of-memory errors in training. `free_cache`
    frees the cache if no sample uses it. Raises EngineError if the models do not fit into device or host memory.
    """

    def __init__(
        self,
        spec: EngineSpec,
        context: ParallelContext,
        attn_backend: str,
        beside: Callable[[], Iterable[remedies.Option]],
        free_cache: Callable[[], bool],
    ):
        self.spec, self.context, self.attn_backend, self._of_cache = spec, context, attn_backend, (beside, free_cache)
        self._roles: dict[str, Role] = {}
        self._vocabularies: dict[str, Vocabulary] = {}  # of roles that have decoded
        self._device_bytes = available_memory_bytes(context.device, spec.n_ranks_on_machine(context.rank))
        self.total_bytes = total_memory_bytes(context.device, spec.n_ranks_on_machine(context.rank))
        self._host_bytes = self._free_host_bytes()
        self.footprint = self._footprint_that_fits({"actor": spec.actor, **spec.planned})
        self._roles["actor"] = self._load(spec.actor)

    def __getitem__(self, name: str) -> Role:
        return self._roles[name]

    def __contains__(self, name: str) -> bool:
        return name in self._roles

    @property
    def actor(self) -> Transformer:
        return self._roles["actor"].backend.model

    def vocabulary(self, name: str) -> Vocabulary:
        if name not in self._vocabularies:
            role, config = self._roles[name].spec, self._roles[name].backend.model.config
            of_actor = self.spec.tokenizer_path or self.spec.actor.path
            folder, more = (role.path, None) if role.own_tokenizer else (of_actor, self.spec.eos_token_ids)
            texts = None if role.own_tokenizer else self.spec.texts
            self._vocabularies[name] = Vocabulary(folder, config, more, texts=texts)
        return self._vocabularies[name]

    def load(self, name: str, spec: RoleSpec) -> None:
        """Load one more role. All ranks must call this. If loading fails on any rank, no rank keeps the role.

        Only the ranks on which loading fails raise an error.
        """
        role, failure = None, None
        try:
            together = {**{name: role.spec for name, role in self._roles.items()}, name: spec}
            known = {"actor": self.spec.actor, **self.spec.planned}
            if any(known.get(name) != role for name, role in together.items()):
                self.footprint = self._footprint_that_fits(together)
            role = self._load(spec)
        except Exception as error:  # the other ranks must learn of a failure before this rank raises it
            failure = error
        failed = torch.tensor(float(failure is not None), device=self.context.device)
        if self.context.dp.all_reduce(self.context.tp.all_reduce(failed)).item():
            del role
            torch.cuda.empty_cache()
            if failure is not None:
                raise failure
        elif role is not None:
            self._roles[name] = role

    def memory_table(self) -> tuple[str, str]:
        return self.footprint.memory_summary(self._device_bytes), self.footprint.memory_table_text(self._device_bytes)

    def token_budgets(self, wanted: WantedCache | None) -> TokenBudgets:
        """Choose micro-batch tokens by role and phase. If `wanted` is given, this KV cache stays on the device."""
        total, footprint = self.total_bytes, self.footprint
        # A cache that is dropped after the rollout is None here, so this cache leaves room for offloaded models.
        cache = (
            0
            if wanted is None
            else wanted.bytes_within(total - footprint.total_resident_bytes - footprint.max_extra_bytes_in_use)
        )
        models = {model.name: model for model in footprint.models}
        found: TokenBudgets = {}
        for name, role in self._roles.items():
            model = models[role.owner or name]
            phases = (TRAIN, SCORE) if role.spec.optimizer else (SCORE,)
            found[name] = {phase: choose_token_budget(footprint, model, phase, total, cache) for phase in phases}
        return found

    def _footprint_that_fits(self, roles: Mapping[str, RoleSpec]) -> Footprint:
        """Return the memory that roles need together. Raises EngineError if the machine has too little."""
        roles = roles_to_load(roles, self.spec.actor)
        configs = {}
        for name, role in roles.items():
            with name_model_setting_in_errors(role.key):
                configs[name] = load_config(role.path, role.head, needs_head=role.needs_head)
        itemsize = getattr(torch, self.spec.dtype).itemsize
        footprint = footprint_of(self.spec, configs, roles, itemsize, supports_triton(self.context.device))
        footprint = replace(footprint, host_bytes=self._host_bytes)
        check_device_memory(footprint, self._device_bytes)
        check_host_memory(footprint, self.spec.n_ranks_on_machine(self.context.rank))
        return footprint

    def _free_host_bytes(self) -> int:
        """Return the free host memory per rank, on the machine where it is smallest.

        All ranks must call this. It returns after all ranks have measured, so no rank allocates its models before that.
        """
        share = device_memory.host_bytes_free() // self.spec.n_ranks_on_machine(self.context.rank)
        found = torch.tensor(float(share), dtype=torch.float64, device=self.context.device)
        lowest = torch.distributed.ReduceOp.MIN
        return int(self.context.dp.all_reduce(self.context.tp.all_reduce(found, lowest), lowest).item())

    def trained_roles(self) -> dict[str, Role]:
        return {name: role for name, role in self._roles.items() if role.spec.optimizer is not None}

    def release(self, name: str) -> None:
        """Remove a role and free its memory. A model that other roles use stays, and one of these roles owns it."""
        del self._roles[name]
        self._vocabularies.pop(name, None)
        heirs = [other for other, role in self._roles.items() if role.owner == name]
        for heir in heirs:
            self._roles[heir].owner = "" if heir == heirs[0] else heirs[0]
        torch.cuda.empty_cache()

    def largest_parameter_count(self) -> int:
        """Return the number of parameters of the largest model that this rank holds."""
        return max(sum(p.numel() for p in role.backend.model.parameters()) for role in self._roles.values())

    def _load(self, spec: RoleSpec) -> Role:
        if is_base_of_actor(spec, self.spec.actor):
            return Role(spec, self._roles["actor"].backend, OffloadedBuffers(), is_base=True, owner="actor")
        for name, role in self._roles.items():
            if have_same_base(spec, role.spec):
                return _with_own_adapters(role.owner or name, role, spec)
        context, is_actor = self.context, not self._roles
        key = Key(spec.key)
        options = remedies.loading_remedies(
            self.spec,
            spec,
            [role.spec for role in self._roles.values()],
            has_bf16=not is_before_ampere(context.device),
            can_offload=has_separate_memory(context.device),
        )
        with (
            name_model_setting_in_errors(spec.key),
            out_of_memory_hint("loading the model of {}", lambda: options, key),
        ):
            config = load_config(spec.path, spec.head, needs_head=spec.needs_head)
            config = replace(config, hf=spec.with_own_fields(config.hf), fp8_kv=spec.fp8_kv)
            if not is_actor:
                config = self._with_actor_vocab_size(config, spec, key)
            if not is_actor and (problems := layout_problems(config, self.spec.layout, f"the model of {key}")):
                raise ConfigError(problems)
            placed = spec.lora is not None  # frozen weights stay in place; without adapters all move to one buffer
            dtype = getattr(torch, self.spec.dtype)
            model = build_model(config, dtype=dtype, device=context.device, tp=context.tp, placed=placed)
            if spec.lora is not None:
                self._load_weights(model, spec)
                if spec.fp8 is not None:
                    quantize_linears(model, spec.fp8, free_weights=True)
                    logger.info(
                        "%s: the frozen weights of linear layers are kept in 8 bits only; checkpoints of the whole "
                        "model have these values, with the adapters added",
                        spec.own_section,
                    )
                self._add_adapters(model, spec)
            if spec.freeze_attention:
                model.freeze_attention()
            leaves = spec.offload and has_separate_memory(context.device)
            fill = partial(self._set_weights, model, spec)
            of_device = replace(spec, offload=leaves)
            backend = TrainBackend(model, of_device, self.spec, context, self.attn_backend, fill, *self._of_cache)
            return Role(
                spec, backend, _offloaded_buffers(backend, keeps_weights=is_actor) if leaves else OffloadedBuffers()
            )

    def _with_actor_vocab_size(self, config: TransformerConfig, spec: RoleSpec, key: Key) -> TransformerConfig:
        """Return `config`, with the actor's vocabulary size if the role is a teacher with common token ids.

        The vocabulary shard of each rank then has the same token ids in both models. Raises EngineError if another
        role's vocabulary has not as many tokens as the actor's.
        """
        theirs, ours = config.vocab_size, self.actor.config.vocab_size
        if theirs == ours or spec.own_tokenizer:
            return config
        if spec.common_ids:
            return replace(config, vocab_size=ours, stored_vocab_size=theirs)
        text = "{} has a vocabulary of {} tokens, the actor one of {}; both must use the same tokenizer"
        raise EngineError(text, key, theirs, ours)

    def _set_weights(self, model: Transformer, spec: RoleSpec) -> None:
        """Set the weights of a model and, if `engine.exact` is true, choose the kernels of its matrix products.

        The train backend calls this after it has moved the parameters to the memory in which they stay. If the model
        has adapters, its weights are already set, and are not set again.
        """
        if spec.lora is None:
            self._load_weights(model, spec)
            if spec.fp8 is not None:
                quantize_linears(model, spec.fp8)
        if self.spec.engine.exact:
            logger.info("exact: %s", make_exact(model, timed=not self.spec.engine.deterministic))

    @torch.no_grad()
    def _load_weights(self, model: Transformer, spec: RoleSpec) -> None:
        """Set the weights of a model: random, copied from the actor, or read from the model's folder.

        The weights are copied from the actor if the role has the folder of the actor, and no optimizer step has changed
        the actor's weights yet. An actor with adapters never changes its weights. If the role has a value head, which
        the actor lacks, the head is set to zero.
        """
        own, actor = have_same_folder(spec, self.spec.actor), self._roles.get("actor")
        optimizer = actor.backend.optimizer if actor else None
        own_and_kept = own and not self.spec.actor.has_fp8_only
        if spec.random_init:
            model.init_weights(self.spec.seed)
        elif own_and_kept and actor and (self.spec.actor.lora or optimizer is None or optimizer.steps == 0):
            theirs = dict(self.actor.named_parameters())
            for name, parameter in model.named_parameters():
                if name in theirs:
                    parameter.copy_(theirs[name])
                else:  # the value head, which the actor's language model does not have
                    parameter.zero_()
        elif self.spec.engine.dummy_load or (own and self.spec.actor.random_init):
            model.init_weights(self.spec.seed)  # the same weights that the actor started with
        else:
            load_weights(model, spec.path)

    def _add_adapters(self, model: Transformer, spec: RoleSpec) -> None:
        lora, key = spec.lora, "actor.init_lora_from" if spec.key == "actor.path" else spec.key
        assert lora is not None
        add_adapters(model, lora.adapters)
        if not self.spec.engine.exact and spec.fp8 is None:  # both compute each product separately
            stack_adapters(model)
        if not lora.init_from:
            init_adapters(model, self.spec.seed)
            return
        with name_model_setting_in_errors(key):
            load_adapters(model, lora.init_from)
        refresh_adapters(model)


def _with_own_adapters(owner: str, role: Role, spec: RoleSpec) -> Role:
    """Return a new role that shares the model of `role` (named `owner`), but has adapters of its own."""
    assert spec.lora is not None
    model = role.backend.model
    with role.on_device():
        if role.adapters is None:
            role.adapters = adapter_weights(model)
        with name_model_setting_in_errors(spec.key):
            load_adapters(model, spec.lora.init_from)
        return Role(spec, role.backend, role.offload, owner=owner, adapters=adapter_weights(model))


def has_separate_memory(device: torch.device) -> bool:
    return device.type == "cuda"


def _offloaded_buffers(backend: TrainBackend, keeps_weights: bool) -> OffloadedBuffers:
    scratch = [] if backend.flat is None else [backend.flat.grads, backend.flat.workspace]
    if keeps_weights:
        return OffloadedBuffers([], scratch)
    with_memory = [buffer for buffer in backend.params if buffer.is_contiguous()]  # `Linear.free_weight`
    return OffloadedBuffers([*with_memory, *quantized_buffers(backend.model)], scratch)
