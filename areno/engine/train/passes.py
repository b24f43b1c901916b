"""The forward passes of a model: packed tokens to hidden states, values and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence
from areno.cost.memory import LOGITS_KEPT
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.profiling import phase
from areno.engine.train.moe_routing import StepRouting
from areno.engine.train.packing import LocalTokens, PackedTokens, PrefixPass
from areno.engine.train.recomputation import RecomputationPolicy
from areno.engine.train.teacher import Teachers, entropy_teacher, listed_teacher
from areno.kernels.logprobs import KEEP_BYTES, Teacher, VocabSoftmax, selected_logprobs
from areno.layers.attention import PrefixKeys
from areno.loss_fns.data_pack import DataPack
from areno.models.transformer import Transformer
from areno.specs.role import RoleSpec


class ForwardPasses:
    """`kept_layers` says which layers recompute activations, and `routing` to which experts tokens go."""

    def __init__(
        self,
        model: Transformer,
        role: RoleSpec,
        context: ParallelContext,
        attn_backend: str,
        kept_layers: RecomputationPolicy,
        *,
        split: bool,
    ):
        self.model, self.context, self.attn_backend, self.kept_layers = model, context, attn_backend, kept_layers
        self.device, self.recomputes = model.device, role.gradient_checkpointing
        self.routing = StepRouting(model.routing, role.router_aux_loss_coef, context.dp)
        self._split = split
        self._multiple = model.tp.size if split else 1  # of the number of tokens of a pass
        self.prefix: PrefixPass | None = None  # begun by the last micro-batch
        self.teachers: Teachers | None = None  # of the last call of `train`

    @contextmanager
    def prefix_passes(self) -> Iterator[None]:
        """Free the last prefix pass when a `with` block ends. Passes over micro-batches run in such a block."""
        try:
            yield
        finally:
            self.finish_shared_prefix()
            if self.teachers is not None:
                self.teachers.end()

    def finish_shared_prefix(self) -> None:
        if self.prefix is not None:
            self.prefix.end()
        self.prefix = None

    def hidden_states(self, packed: PackedTokens) -> tuple[Tensor, LocalTokens]:
        """Run the layers on this rank's n of the N tokens of a micro-batch. Returns (n, D) and the n tokens.

        Prefixes that several micro-batches share are computed once, when the first of these micro-batches is passed.
        """
        if packed.prefix is not None and packed.prefix is not self.prefix:
            self.finish_shared_prefix()
            self.prefix = packed.prefix
            with phase("prefixes", tokens=packed.n_prefix_tokens):
                self.prefix.begin(lambda packed, stores: self.run_layers(packed, stores)[0])
            self.routing.count_experts()
        return self.run_layers(packed)

    def run_layers(self, packed: PackedTokens, stores: PrefixKeys | None = None) -> tuple[Tensor, LocalTokens]:
        """Run the layers on packed tokens. `stores` receives the keys and values of these tokens for later passes."""
        share = self.share_of(packed, stores)
        self.routing.begin_pass(packed, share)
        recompute = self.recomputes
        waits = stores is not None  # for the passes that read the keys
        n_kept = self.kept_layers.n_kept_layers(len(share.tokens_n), waits) if recompute else 0
        how = {"recompute": recompute, "n_kept": n_kept, "split": self._split}
        if recompute and not waits:
            how["offload"] = self.kept_layers.begin_offload(len(share.tokens_n))
        return self.model(share.tokens_n, share.positions_n, share.attend, **how), share

    def values(self, packed: PackedTokens) -> Tensor:
        """Compute the value of the state before each predicted token, (U,), from the hidden state of the one before."""
        hidden_nD, share = self.hidden_states(packed)
        indices_T, hidden_TD = share.select_predecessors(hidden_nD, packed.indices_to_predict())
        return share.gather_values(indices_T, self.model.values(hidden_TD))

    def logprobs(
        self,
        packed: PackedTokens,
        sampling: SamplingConfig,
        pack: DataPack | None = None,
        update: Any = None,
        value_teacher: Teacher | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute log-probability, entropy and a third value, (U,) each, 0 at unpredicted tokens.

        The third value is the divergence from a teacher, if there is one, the differentiable negative entropy, or what
        `value_teacher` computes.
        """
        tp, head = self.model.tp, self.model.lm_head
        divergence: Divergence | None = None if update is None else update.divergence
        # The teacher comes first: its activations are gone when those of this model are stored.
        teacher: Teacher | None = entropy_teacher(update) or value_teacher
        lists = pack is not None and pack.teacher_top_tokens is not None
        if divergence is not None and self.teachers is not None and not lists:
            teacher = self.teachers.run(packed)
        hidden_nD, share = self.hidden_states(packed)
        indices_T, hidden_TD = share.select_predecessors(hidden_nD, packed.indices_to_predict())
        if divergence is not None and pack is not None and lists:
            teacher = listed_teacher(packed, pack, indices_T, divergence)
        # None if the head is frozen or the model only scores. While a model scores, its gradients may have no memory.
        grad_VD = head.weight.grad if torch.is_grad_enabled() else None
        softmax = VocabSoftmax(
            temperature=sampling.logprob_temperature,
            first=head.first,
            all_reduce=tp.all_reduce if tp.size > 1 else None,
            weight_grad=None if grad_VD is None else grad_VD[: head.n_valid],
            keep_bytes=LOGITS_KEPT if self.device.type == "cuda" else KEEP_BYTES,
            own_logits=self.model.local_logits,
            most_rows=len(head.weight),
        )
        head_VD = head.weight if torch.is_grad_enabled() else head.weight.detach()  # no gradients of logits are kept
        weight_VD, targets_T = head_VD[: head.n_valid], packed.tokens_N[indices_T]
        found = selected_logprobs(hidden_TD, weight_VD, targets_T, softmax, teacher)
        return tuple(share.gather_values(indices_T, each_T) for each_T in found)

    def share_of(self, packed: PackedTokens, stores: PrefixKeys | None = None) -> LocalTokens:
        return LocalTokens.for_rank(packed, self.context.cp, self.attn_backend, self._multiple, stores)
