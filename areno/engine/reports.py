"""Reports of the workers about the model and its decoder. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areno.cost.flops import TokenCost
from areno.cost.prefix_sharing import PrefixSharing

if TYPE_CHECKING:
    from areno.engine.train.checked_rows import (
        RouteShape,  # imports numpy, which takes a tenth of the time of `areno plan`
    )


@dataclass(kw_only=True)
class EngineInfo:
    """Facts about the actor and its device, reported by the first worker after the model is loaded."""

    n_params: int  # without adapters
    context_len: int  # tokens
    vocab_size: int
    device: str  # of the first worker
    dtype: str  # of the weights: the name of a torch dtype
    attn_backend: str  # of training and prefill
    memory_gib: float  # peak of the first worker so far
    device_bytes: int  # whole memory of the device, or the worker's share of a CPU machine's
    cost: TokenCost  # over all tensor-parallel ranks
    routes: RouteShape | None = None  # layers with experts, experts per token and per layer
    n_adapter_params: int = 0
    tp_sums: str = ""  # backend of decoding, such as "nccl" or "shared memory"; "" for tp_size=1
    device_name: str = ""  # such as "NVIDIA H100 80GB HBM3"; "" for a CPU
    sharing: PrefixSharing = field(
        default_factory=PrefixSharing
    )  # when training the actor computes shared prefixes once


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Counters of a data-parallel rank's decoder. All but `running` and `waiting` count since the phase began."""

    running: int = 0  # samples in the batch now
    waiting: int = 0  # samples that wait for a place in the batch now
    generated_tokens: int = 0
    preemptions: int = 0  # times that a sample left the batch because KV blocks ran out
    cached_prompt_tokens: int = 0  # found in the prefix cache
    graph_replays: int = 0  # decode steps and prefills that ran as a CUDA graph
    drafted_tokens: int = 0  # that were verified
    accepted_tokens: int = 0
    decode_steps: int = 0  # with or without drafts
    draft_steps: int = 0  # that verified drafts


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of the drafts of a rollout phase so far, summed over the data-parallel ranks."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    draft_steps: int = 0

    @staticmethod
    def from_stats(stats: Iterable[RolloutStats]) -> DraftCounts:
        found = [(one.drafted_tokens, one.accepted_tokens, one.decode_steps, one.draft_steps) for one in stats]
        return DraftCounts(*map(sum, zip(*found, strict=True)))

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted, 0 without drafts."""
        return self.accepted / max(1, self.drafted)

    @property
    def drafted_step_share(self) -> float:
        """Share of the decode steps that verified drafts, 0 without steps."""
        return self.draft_steps / max(1, self.steps)
