"""Makes the decoders of a rank: how large their KV caches are, and how they draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from areno.cost import remedies
from areno.cost.kv_cache import FIXED_ORDER_KV_BLOCK, KV_BLOCK, WantedCache, max_verification_rows, may_verify_drafts
from areno.engine import device_memory as memory
from areno.engine.decoder.caches import n_kv_cache_blocks
from areno.engine.decoder.decoder import Decoder
from areno.engine.decoder.draft_length import step_costs
from areno.engine.decoder.ngram_drafts import NgramDrafter
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.roles import Roles
from areno.engine.train.checked_rows import RouteShape
from areno.models.weights import CheckpointEntry, checkpoint_table
from areno.specs.engine import EngineSpec
from areno.specs.rollout import RolloutSpec


class DecoderMaker:
    def __init__(self, roles: Roles, spec: EngineSpec, context: ParallelContext, attn_backend: str):
        self.roles, self.spec, self.context, self.attn_backend = roles, spec, context, attn_backend
        self._block_size = FIXED_ORDER_KV_BLOCK if attn_backend == "fixed_order" else KV_BLOCK

    @property
    def route_shape(self) -> RouteShape | None:
        if (routing := self.roles.actor.routing) is None:
            return None
        return RouteShape(routing.n_layers, routing.experts.top_k, routing.experts.n_experts)

    def new_decoder(self, spec: RolloutSpec, beside_actor: bool = False) -> Decoder:
        """`beside_actor`: whether the decoder of a rollout phase keeps its memory."""
        options = [*remedies.smaller_cache_options(spec.decoder), remedies.FEWER_AT_ONCE]
        model, wanted = self.roles[spec.role].backend.model, self.wanted_cache(spec)
        vocabulary = self.roles.vocabulary(spec.role)
        reserved = self.roles.footprint.max_extra_bytes_in_use if spec.keeps_cache else 0
        with memory.out_of_memory_hint("making the KV cache", lambda: options):
            n_blocks = n_kv_cache_blocks(model, self.spec, wanted, self.free_bytes, reserved, beside_actor=beside_actor)
            return Decoder(
                model,
                vocabulary,
                self.spec,
                spec,
                n_blocks=n_blocks,
                block_size=self._block_size,
                attn_backend=self.attn_backend,
                runs_ahead=self.context.device.type != "cpu",
            )

    def start_drafter(self, spec: RolloutSpec, decoder: Decoder) -> NgramDrafter | None:
        on_cuda = self.context.device.type == "cuda"
        if not may_verify_drafts(spec.decoder, on_cuda=on_cuda):
            return None
        costs = step_costs(
            n_table_elements(checkpoint_table(self.roles.actor)),
            max_verification_rows(self.max_running(spec)),
            on_cuda=on_cuda,
            use_graphs=bool(decoder.runner.all_graphs),
        )
        self._drafter.begin_rollout(costs)
        return self._drafter

    @cached_property
    def _drafter(self) -> NgramDrafter:
        """The drafter of all rollouts. It also drafts from earlier rollouts, unless this may change a resumed run.

        A resumed run lacks these samples. With engine.exact, drafts change no bit. On GPUs without
        engine.deterministic, runs are not reproducible anyway.
        """
        on_cuda, config = self.context.device.type == "cuda", self.spec.engine
        remembers = config.exact or (on_cuda and not config.deterministic)
        return NgramDrafter(self.context.device, remembers=remembers)

    def max_running(self, spec: RolloutSpec) -> int:
        """Return the largest number of samples that decode at the same time on this data-parallel rank."""
        return self.spec.layout.samples_per_replica(spec.max_running)

    def wanted_cache(self, spec: RolloutSpec) -> WantedCache:
        routes = self.route_shape if self.spec.records_routes(spec.role) else None
        return WantedCache.for_rollout(
            self.roles[spec.role].backend.model.config,
            getattr(torch, self.spec.dtype).itemsize,
            self.spec,
            spec,
            block_size=self._block_size,
            route_bytes=0 if routes is None else routes.bytes_per_token,
        )

    def free_bytes(self) -> int:
        """Return the free memory of the device or, on a CPU, this worker's share of the available memory."""
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.context.device)[0]
        return memory.host_bytes_free() // self.spec.n_ranks_on_machine(self.context.rank)


def n_table_elements(table: Sequence[CheckpointEntry]) -> int:
    return sum(math.prod(entry.part.full_shape) for entry in table)
