"""The models of one worker by role: the actor, and a reference, critic or reward model.

A role with `offload` rests in host memory while it is not used, except that the weights of the actor always stay on
the device. Offloading frees the storage under the model's flat buffers, and loading allocates the storage again. The
tensor objects stay the same, so parameters and gradients, which are views of the buffers, stay valid. If the role is
trained, its master weights and moments are always in host memory.

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
from areno.engine import memory
from areno.engine.decoder.cache_size import WantedCache
from areno.engine.decoder.grammar import Vocabulary
from areno.engine.exact import make_exact
from areno.engine.footprint import Footprint, check_fits, check_host_memory, footprint_of
from areno.engine.memory import device_bytes, out_of_memory_hint, total_bytes
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.spec import EngineSpec, RoleSpec
from areno.engine.token_budget import SCORE, TRAIN, TokenBudgets, choose_token_budget
from areno.engine.train.backend import TrainBackend
from areno.engine.train.host_memory import PINNED_BYTES
from areno.engine.train.teacher import TeacherPasses
from areno.errors import ConfigError, EngineError, Key
from areno.files.paths import model_setting
from areno.kernels.backend import is_before_ampere, runs_triton
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
from areno.models.registry import build_model, layout_problems, load_config
from areno.models.transformer import Transformer
from areno.models.weights import load_weights


class Offload:
    """Moves the memory of a model between the device and host memory. Construction moves it to host memory.

    The memory consists of flat buffers: large 1-D tensors, of which the parameters, gradients and so on are views.
    Master weights and moments are not among them, see `areno.engine.train.host_memory`.

    Args:
        params: Buffers that scoring and training need.
        scratch: Buffers that only training uses, such as gradients. Their content is not kept, so they are freed
            instead of copied.
    """

    def __init__(self, params: Sequence[Tensor] = (), scratch: Sequence[Tensor] = ()):
        self._params = [_Buffer(buffer) for buffer in params]
        self._scratch = [_Buffer(buffer, scratch=True) for buffer in scratch]
        for buffer in (*self._params, *self._scratch):
            buffer.leave(changed=True)

    @contextmanager
    def on_device(self, training: bool = False) -> Iterator[None]:
        """Hold the buffers on the device inside a `with` block.

        Args:
            training: If True, `scratch` is also on the device, and changes of `params` are copied back to host memory
                at the end. If False, only `params` are on the device, and must not be changed.
        """
        arrived: list[_Buffer] = []
        try:
            for buffer in (*self._params, *(self._scratch if training else ())):
                buffer.arrive()
                arrived.append(buffer)
            yield
        finally:  # also after running out of memory: buffers that have arrived must leave again
            for buffer in arrived:
                buffer.leave(changed=training)

    def at_rest(self, buffer: Tensor) -> list[Tensor]:
        """Return the copies of a buffer in host memory, as consecutive parts of the buffer.

        The list is empty if the buffer is not offloaded or has no copy. On CUDA the copies may still be in progress.
        """
        return [copy for each in self._params if each.holds(buffer) for copy in each.copies]


class _Buffer:
    """One buffer of a model and its copy in host memory (pinned on CUDA). A scratch buffer has no copy.

    All copies run on the current stream, like the work on the buffer, so no explicit wait is needed.
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

    def arrive(self) -> None:
        """Allocate the buffer on the device, and copy its content from host memory."""
        self._storage.resize_(self._n_bytes)
        for part, copy in self._copies:
            part.copy_(copy, non_blocking=True)

    def leave(self, changed: bool) -> None:
        """Free the buffer on the device. If `changed`, first copy its content to host memory."""
        if changed:
            for part, copy in self._copies:
                copy.copy_(part, non_blocking=True)
        self._storage.resize_(0)


logger = logging.getLogger("areno")


@dataclass
class Role:
    """One model of this worker.

    Attributes:
        spec: Spec of the role.
        backend: The model and, if it is trained, its optimizer.
        offload: Moves the model between host memory and the device. Has no buffers if everything stays on the device.
        is_base: Whether the role is the actor with its adapters switched off, and holds no weights of its own.
        owner: Name of the role whose model this role uses. "" if this role has a model of its own.
        adapters: The role's adapter weights, if other roles share its backend with other adapters. They are copied into
            the model whenever the role is used. None: no other role uses the backend with other adapters.
    """

    spec: RoleSpec
    backend: TrainBackend
    offload: Offload
    is_base: bool = False
    owner: str = ""
    adapters: list[Tensor] | None = None

    @contextmanager
    def on_device(self, training: bool = False) -> Iterator[TrainBackend]:
        """Hold the model on the device inside a `with` block, and yield its backend.

        If `training` is True, the gradients are also on the device. If `self.is_base`
        is True, the adapters of the actor are switched off in the block.
        """
        base = without_adapters(self.backend.model) if self.is_base else nullcontext()
        with self.offload.on_device(training), base:
            self._set_adapters()
            yield self.backend

    @contextmanager
    def as_teacher(self, divergence: Divergence) -> Iterator[TeacherPasses]:
        """Hold the model on the device inside a `with` block, and yield its passes as the teacher of another model.

        If `self.is_base` is True, the adapters of the actor are switched off in these passes alone.
        """
        switch = partial(without_adapters, self.backend.model) if self.is_base else nullcontext
        with self.offload.on_device():
            self._set_adapters()
            yield self.backend.as_teacher(divergence, switch, self.spec.common_ids)

    def _set_adapters(self) -> None:
        """Copy this role's adapters into the model, if other roles use the model with other adapters."""
        if self.adapters is not None:
            set_adapter_weights(self.backend.model, self.adapters)


class Roles:
    """The models of this worker by role name. Construction loads the actor.

    Args:
        spec: The engine.
        context: Parallel groups and device of this rank.
        attn_backend: Attention kernel of training, as `choose_backend` returns it.
        beside: Function that returns setting changes that make the KV cache smaller, for out-of-memory errors in
            training.

    Attributes:
        total_bytes: Whole memory of the device. For a CPU, this rank's share of the machine's whole memory.
        footprint: The memory of the models.

    Raises:
        EngineError: The models of the engine do not fit the device, or the host memory is too small for models with
            `offload`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        context: ParallelContext,
        attn_backend: str,
        beside: Callable[[], Iterable[memory.Option]],
    ):
        self.spec, self.context, self.attn_backend, self._beside = spec, context, attn_backend, beside
        self._roles: dict[str, Role] = {}
        self._vocabularies: dict[str, Vocabulary] = {}  # of roles that have decoded
        self._device_bytes = device_bytes(context.device, spec.n_ranks_on_machine(context.rank))
        self.total_bytes = total_bytes(context.device, spec.n_ranks_on_machine(context.rank))
        self._host_bytes = self._free_host_bytes()
        self.footprint = self._fitting({"actor": spec.actor, **spec.planned})
        self._roles["actor"] = self._load(spec.actor)

    def __getitem__(self, name: str) -> Role:
        return self._roles[name]

    def __contains__(self, name: str) -> bool:
        return name in self._roles

    @property
    def actor(self) -> Transformer:
        """The model of the actor."""
        return self._roles["actor"].backend.model

    def vocabulary(self, name: str) -> Vocabulary:
        """Return the vocabulary of a role.

        Args:
            name: Name of the role.
        """
        if name not in self._vocabularies:
            role, config = self._roles[name].spec, self._roles[name].backend.model.config
            of_actor = self.spec.tokenizer_path or self.spec.actor.path
            folder, more = (role.path, None) if role.own_tokenizer else (of_actor, self.spec.eos_token_ids)
            texts = None if role.own_tokenizer else self.spec.texts
            self._vocabularies[name] = Vocabulary(folder, config, more, texts=texts)
        return self._vocabularies[name]

    def load(self, name: str, spec: RoleSpec) -> None:
        """Load one more role. All ranks must call this. If loading fails on any rank, no rank keeps the role.

        Args:
            name: Name of the role.
            spec: Spec of the role.

        Raises:
            EngineError: The model does not fit the device, or does not match the actor. Only the ranks on which
                loading fails raise an error.
        """
        role, failure = None, None
        try:
            together = {**{name: role.spec for name, role in self._roles.items()}, name: spec}
            known = {"actor": self.spec.actor, **self.spec.planned}
            if any(known.get(name) != role for name, role in together.items()):
                self.footprint = self._fitting(together)
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
        """Return the computed memory of the models on a device, as two texts.

        Returns:
            A summary in one line, and a table of several lines.
        """
        return self.footprint.short(self._device_bytes), self.footprint.table(self._device_bytes)

    def token_budgets(self, wanted: WantedCache | None) -> TokenBudgets:
        """Choose the number of tokens in a micro-batch for each loaded role, in training and in scoring.

        Args:
            wanted: The KV cache that stays between rollouts. None if there is none.
        """
        total, footprint = self.total_bytes, self.footprint
        # A cache that is dropped after the rollout is None here, so this cache leaves room for offloaded models.
        cache = 0 if wanted is None else wanted.bytes_within(total - footprint.resident - footprint.most_extra_in_use)
        models = {model.name: model for model in footprint.models}
        found: TokenBudgets = {}
        for name, role in self._roles.items():
            model = models[role.owner or name]
            phases = (TRAIN, SCORE) if role.spec.optimizer else (SCORE,)
            found[name] = {phase: choose_token_budget(footprint, model, phase, total, cache) for phase in phases}
        return found

    def _fitting(self, roles: Mapping[str, RoleSpec]) -> Footprint:
        """Compute the memory footprint of several roles together. Raises EngineError if they do not fit the machine."""
        roles = self.spec.with_own_weights(roles)
        configs = {}
        for name, role in roles.items():
            with model_setting(role.key):
                configs[name] = load_config(role.path, role.head, needs_head=role.needs_head)
        itemsize = getattr(torch, self.spec.dtype).itemsize
        footprint = footprint_of(self.spec, configs, roles, itemsize, runs_triton(self.context.device))
        footprint = replace(footprint, host_bytes=self._host_bytes)
        check_fits(footprint, self._device_bytes)
        check_host_memory(footprint, self.spec.n_ranks_on_machine(self.context.rank))
        return footprint

    def _free_host_bytes(self) -> int:
        """Return this rank's share of the free host memory, the smallest of all ranks.

        No rank allocates host memory for its models before all ranks have measured the free memory.
        """
        share = memory.host_bytes_free() // self.spec.n_ranks_on_machine(self.context.rank)
        found = torch.tensor(float(share), dtype=torch.float64, device=self.context.device)
        lowest = torch.distributed.ReduceOp.MIN
        return int(self.context.dp.all_reduce(self.context.tp.all_reduce(found, lowest), lowest).item())

    def trained(self) -> dict[str, Role]:
        """Return the roles that have an optimizer, by name."""
        return {name: role for name, role in self._roles.items() if role.spec.optimizer is not None}

    def release(self, name: str) -> None:
        """Remove a role and free its memory. If other roles use its model, the model stays and one of them owns it."""
        del self._roles[name]
        self._vocabularies.pop(name, None)
        heirs = [other for other, role in self._roles.items() if role.owner == name]
        for heir in heirs:
            self._roles[heir].owner = "" if heir == heirs[0] else heirs[0]
        torch.cuda.empty_cache()

    def largest(self) -> int:
        """Return the size of the largest model: the number of its parameters that this rank holds."""
        return max(sum(p.numel() for p in role.backend.model.parameters()) for role in self._roles.values())

    def _load(self, spec: RoleSpec) -> Role:
        if self.spec.is_base_of_actor(spec):
            return Role(spec, self._roles["actor"].backend, Offload(), is_base=True, owner="actor")
        for name, role in self._roles.items():
            if self.spec.has_base_of(spec, role.spec):
                return _beside(role.owner or name, role, spec)
        context, is_actor = self.context, not self._roles
        key = Key(spec.key)
        options = memory.in_loading(
            self.spec,
            spec,
            [role.spec for role in self._roles.values()],
            has_bf16=not is_before_ampere(context.device),
            can_offload=has_own_memory(context.device),
        )
        with model_setting(spec.key), out_of_memory_hint("loading the model of {}", lambda: options, key):
            config = load_config(spec.path, spec.head, needs_head=spec.needs_head)
            config = replace(config, hf=spec.with_own_fields(config.hf))
            if not is_actor:
                config = self._sized_like_actor(config, spec, key)
            if not is_actor and (problems := layout_problems(config, self.spec.layout, f"the model of {key}")):
                raise ConfigError(problems)
            stays = (
                spec.lora is not None
            )  # frozen weights stay in place; without adapters all weights move to one buffer
            model = build_model(
                config, dtype=getattr(torch, self.spec.dtype), device=context.device, tp=context.tp, placed=stays
            )
            if spec.lora is not None:
                self._fill(model, spec)
                self._adapt(model, spec)
            leaves = spec.offload and has_own_memory(context.device)
            backend = TrainBackend(
                model,
                spec.optimizer,
                attn_backend=self.attn_backend,
                recompute=spec.gradient_checkpointing,
                dp=context.dp,
                context=context.cp,
                data=context.data,
                zero_stage=self.spec.engine.zero_stage,
                sequence_parallel=self.spec.splits_tokens,
                exact=self.spec.engine.exact,
                section=spec.section,
                router_aux_loss_coef=spec.router_aux_loss_coef,
                fill=partial(self._complete, model, spec),
                stays=stays,
                in_host=leaves,
                share_prefixes=self.spec.share_prefixes,
                adapters=spec.lora.adapters if spec.lora else None,
                beside=self._beside,
            )
            return Role(spec, backend, _offload(backend, keeps_weights=is_actor) if leaves else Offload())

    def _sized_like_actor(self, config: TransformerConfig, spec: RoleSpec, key: Key) -> TransformerConfig:
        """Return the shape of a role. A teacher with common ids gets the actor's number of rows in the vocabulary.

        Ranks then have the same token ids of both. Raises EngineError if the sizes of other roles differ.
        """
        theirs, ours = config.vocab_size, self.actor.config.vocab_size
        if theirs == ours or spec.own_tokenizer:
            return config
        if spec.common_ids:
            return replace(config, vocab_size=ours, stored_vocab_size=theirs)
        text = "{} has a vocabulary of {} tokens, the actor one of {}; both must use the same tokenizer"
        raise EngineError(text, key, theirs, ours)

    def _complete(self, model: Transformer, spec: RoleSpec) -> None:
        """Set the weights of a model and, if `engine.exact` is true, choose the kernels of its matrix products.

        The train backend calls this after it has moved the parameters to the memory in which they stay. If the model
        has adapters, its weights are already set, and are not set again.
        """
        if spec.lora is None:
            self._fill(model, spec)
        if self.spec.engine.exact:
            logger.info("exact: %s", make_exact(model, timed=not self.spec.engine.deterministic))

    @torch.no_grad()
    def _fill(self, model: Transformer, spec: RoleSpec) -> None:
        """Set the weights of a model: random, copied from the actor, or read from the model's folder.

        The weights are copied from the actor if the role has the folder of the actor, and no optimizer step has
        changed the actor's weights yet. An actor with adapters never changes its weights. If the role has a head that
        gives scores, which the actor lacks, this head is set to zero.
        """
        own, actor = self.spec.has_folder_of_actor(spec), self._roles.get("actor")
        optimizer = actor.backend.optimizer if actor else None
        if spec.random_init:
            model.init_weights(self.spec.seed)
        elif own and actor and (self.spec.actor.lora or optimizer is None or optimizer.steps == 0):
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

    def _adapt(self, model: Transformer, spec: RoleSpec) -> None:
        lora, key = spec.lora, "actor.init_lora_from" if spec.key == "actor.path" else spec.key
        assert lora is not None
        add_adapters(model, lora.adapters)
        if not self.spec.engine.exact:  # exact mode computes each product separately
            stack_adapters(model)
        if not lora.init_from:
            init_adapters(model, self.spec.seed)
            return
        with model_setting(key):
            load_adapters(model, lora.init_from)
        refresh_adapters(model)


def _beside(owner: str, role: Role, spec: RoleSpec) -> Role:
    """Return a role with its own adapters on the model of another role. `owner` is the role that loaded the model."""
    assert spec.lora is not None
    model = role.backend.model
    with role.on_device():
        if role.adapters is None:
            role.adapters = adapter_weights(model)
        with model_setting(spec.key):
            load_adapters(model, spec.lora.init_from)
        return Role(spec, role.backend, role.offload, owner=owner, adapters=adapter_weights(model))


def has_own_memory(device: torch.device) -> bool:
    """Return whether a device has memory of its own, so that models can be offloaded to host memory."""
    return device.type == "cuda"


def _offload(backend: TrainBackend, keeps_weights: bool) -> Offload:
    """Return the Offload of a model. `keeps_weights` is whether the weights stay on the device."""
    scratch = [] if backend.flat is None else [backend.flat.grads, backend.flat.workspace]
    return Offload([] if keeps_weights else backend.params, scratch)
