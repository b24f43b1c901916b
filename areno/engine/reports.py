"""What workers report about themselves. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areno.cost.flops import Cost
from areno.cost.prefix_sharing import Sharing

if TYPE_CHECKING:
    from areno.engine.train.rows import RouteShape  # imports numpy, which takes a tenth of the time of `areno plan`


@dataclass(kw_only=True)
class EngineInfo:
    """Facts about the actor and its device, reported by the first worker after the model is loaded.

    Attributes:
        n_params: Number of parameters without adapters.
        context_len: Context length of the model, in tokens.
        vocab_size: Vocabulary size of the model.
        device: Device of the first worker.
        sharing: When training the actor computes shared prefixes once.
        device_name: Name of the first worker's GPU, such as "NVIDIA H100 80GB HBM3". "" for a CPU.
        dtype: Type of the weights, as the name of a torch dtype.
        attn_backend: Attention kernel of training and prefill.
        memory_gib: Peak memory of the first worker so far, in GiB.
        device_bytes: Whole memory of the first worker's device. For a CPU, the worker's share of the machine's memory.
        cost: FLOPs and bytes that one token costs, over all tensor-parallel ranks.
        routes: Number of layers with experts, experts per token, and experts per layer. None for a model without
            experts.
        n_adapter_params: Number of parameters of the adapters.
        tp_sums: Name of the backend that sums over tensor-parallel ranks in decoding, such as "nccl" or "shared
            memory". "" for tp_size=1.
    """

    n_params: int
    context_len: int
    vocab_size: int
    device: str
    dtype: str
    attn_backend: str
    memory_gib: float
    device_bytes: int
    cost: Cost
    routes: RouteShape | None = None
    n_adapter_params: int = 0
    tp_sums: str = ""
    device_name: str = ""
    sharing: Sharing = field(default_factory=Sharing)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Counters of the decoder of one data-parallel rank. All but `running` and `waiting` count since the phase began.

    Attributes:
        running: Samples in the batch now.
        waiting: Samples that wait for a place in the batch now.
        generated_tokens: Sampled tokens.
        preemptions: Times that a sample left the batch because KV blocks ran out.
        cached_prompt_tokens: Prompt tokens found in the prefix cache, which need no prefill.
        graph_replays: Passes over the model that ran as a CUDA graph: decode steps and prefills.
        drafted_tokens: Drafted tokens that were verified (rollout.speculation).
        accepted_tokens: Drafted tokens that were accepted.
        decode_steps: Decode steps, with or without drafts.
        draft_steps: Decode steps that verified drafts.
    """

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    graph_replays: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_steps: int = 0
    draft_steps: int = 0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of the drafts of a rollout phase so far, summed over the data-parallel ranks (rollout.speculation).

    Attributes:
        drafted: Number of drafted tokens that were verified.
        accepted: Number of drafted tokens that were accepted, which means sampled without a step of their own.
        steps: Number of decode steps, with or without drafts.
        draft_steps: Number of decode steps that verified drafts.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    draft_steps: int = 0

    @staticmethod
    def of(stats: Iterable[RolloutStats]) -> DraftCounts:
        """Sum the counts of all ranks.

        Args:
            stats: The counters of each data-parallel rank.
        """
        found = [(one.drafted_tokens, one.accepted_tokens, one.decode_steps, one.draft_steps) for one in stats]
        return DraftCounts(*map(sum, zip(*found, strict=True)))

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted, 0 without drafts."""
        return self.accepted / max(1, self.drafted)

    @property
    def step_share(self) -> float:
        """Share of the decode steps that verified drafts, 0 without steps."""
        return self.draft_steps / max(1, self.steps)
