"""The models of one worker by role: the actor, and the reference, critic or reward model asked for beside it.

What a role is asked to do has been checked by the engine that commands the workers (`engine/engine.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from areno.config.paths import model_of
from areno.engine.memory import explained_out_of_memory
from areno.engine.parallel import Place
from areno.engine.spec import EngineSpec, RoleSpec
from areno.engine.train.backend import TrainBackend
from areno.engine.train.offload import Offload
from areno.errors import ConfigError, EngineError
from areno.models.config import TransformerConfig
from areno.models.registry import build_model, load_config, tp_problems
from areno.models.transformer import Transformer
from areno.models.weights import load_weights


@dataclass
class Role:
    """One model of this worker. offload: None where it stays on the device."""

    spec: RoleSpec
    backend: TrainBackend
    offload: Offload | None

    @contextmanager
    def on_device(self, training: bool = False) -> Iterator[TrainBackend]:
        """Its backend, with everything that scoring (or training) needs on the device."""
        with self.offload.on_device(training) if self.offload else nullcontext():
            yield self.backend


class Roles:
    """Role name -> model of this worker. Construction loads the actor."""

    def __init__(self, spec: EngineSpec, place: Place, attn_backend: str):
        self.spec, self.place, self.attn_backend = spec, place, attn_backend
        self._roles: dict[str, Role] = {}
        self._roles["actor"] = self._load(spec.actor)

    def __getitem__(self, name: str) -> Role:
        return self._roles[name]

    @property
    def actor(self) -> Transformer:
        return self._roles["actor"].backend.model

    def load(self, name: str, spec: RoleSpec) -> None:
        """Load one more role. A collective call over all ranks: where one of them fails, none has the role."""
        role, failure = None, None
        try:
            role = self._load(spec)
        except Exception as error:  # whatever it is, the other ranks must hear of it before this one answers
            failure = error
        failed = torch.tensor(float(failure is not None), device=self.place.device)
        if self.place.dp.all_reduce(self.place.tp.all_reduce(failed)).item():
            del role
            self._free()
            if failure is not None:
                raise failure
        elif role is not None:
            self._roles[name] = role

    def release(self, name: str) -> None:
        """Forget a role and give its memory back."""
        del self._roles[name]
        self._free()

    def largest(self) -> int:
        """Parameters on this rank of the largest model."""
        return max(sum(p.numel() for p in role.backend.model.parameters()) for role in self._roles.values())

    def _load(self, spec: RoleSpec) -> Role:
        place, is_actor = self.place, not self._roles
        fewer = "" if is_actor else "keep roles in host memory while they are not used (offload), "
        with (
            model_of(spec.key),
            explained_out_of_memory(
                f"loading the model of {spec.key}",
                "raise engine.tp_size to divide the model over more devices, set actor.dtype=bfloat16, "
                f"{fewer}or choose a smaller model ({spec.key})",
            ),
        ):
            config = load_config(spec.path, spec.head, needs_head=spec.needs_head)
            if not is_actor:
                self._check_fit(config, spec.key)
            model = build_model(config, dtype=getattr(torch, self.spec.dtype), device=place.device, tp=place.tp)
            self._fill(model, spec)
            backend = TrainBackend(
                model,
                spec.optimizer,
                attn_backend=self.attn_backend,
                recompute=spec.gradient_checkpointing,
                dp=place.dp,
                section=spec.key.removesuffix(".path") if spec.optimizer else "actor",
            )
            # A CPU has no other memory to move to.
            offload = _offload(backend) if spec.offload and place.device.type == "cuda" else None
            return Role(spec, backend, offload)

    def _check_fit(self, config: TransformerConfig, key: str) -> None:
        """The role reads the actor's tokens and is divided as the actor is."""
        vocab_size = self.actor.config.vocab_size
        if config.vocab_size != vocab_size:
            raise EngineError(
                f"{key} has a vocabulary of {config.vocab_size} tokens, the actor one of {vocab_size}; both must use "
                "the same tokenizer"
            )
        if problems := tp_problems(config, self.place.tp.size, f"the model of {key}"):
            raise ConfigError(problems)

    @torch.no_grad()
    def _fill(self, model: Transformer, spec: RoleSpec) -> None:
        """The weights; those of the starting actor are copied as long as the actor has not been trained."""
        own = spec.path == self.spec.model_path or Path(spec.path).resolve() == Path(self.spec.model_path).resolve()
        actor = self._roles.get("actor")
        if own and actor and (actor.backend.optimizer is None or actor.backend.optimizer.steps == 0):
            theirs = dict(self.actor.named_parameters())
            for name, parameter in model.named_parameters():
                if name in theirs:
                    parameter.copy_(theirs[name])
                else:  # the value head of what was a language model
                    parameter.zero_()
        elif own and self.spec.random_init:
            model.init_weights(self.spec.seed)  # the very weights that the actor had at its start
        else:
            load_weights(model, spec.path)

    def _free(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()


def _offload(backend: TrainBackend) -> Offload:
    flat, optimizer = backend.flat, backend.optimizer
    if flat is None or optimizer is None:
        return Offload(backend.params)
    masters = [flat.masters] if flat.masters is not flat.params else []
    return Offload(flat.params, [*masters, *optimizer.state], [flat.grads])
