"""The size of the KV cache that a rollout wants, computed from settings and shapes."""

from __future__ import annotations

from dataclasses import dataclass

from areno.config.rollout import DecoderConfig
from areno.cost.kv_layout import KVLayout
from areno.cost.memory import kv_bytes_per_token, state_bytes
from areno.models.config import TransformerConfig
from areno.specs.engine import EngineSpec
from areno.specs.rollout import RolloutSpec

KV_BLOCK = 32  # tokens in a KV block: small enough to waste little, large enough for wide loads
_MORE_FRACTION = 0.1  # of the free memory, up to which an evaluation enlarges the cache that training needs
FIXED_ORDER_KV_BLOCK = 64  # tokens in a KV block: the tile of fixed-order attention


@dataclass(frozen=True)
class WantedCache:
    """The KV cache that a rollout wants if there is enough memory, and the bytes that it takes on a rank.

    Unless `rollout.max_kv_tokens` is smaller, the cache has room for all samples that decode at the same time, each of
    the maximum length.
    """

    blocks: int
    needed: int  # blocks without those for more samples than training decodes
    more_fraction: float  # share of the free memory up to which the cache grows beyond `needed`
    block_bytes: int  # of all layers
    states: int  # bytes of the recurrent states of all samples
    layout: KVLayout
    n_slots: int  # samples that decode at the same time on this data-parallel rank
    max_len: int  # tokens of a prompt and its completion
    mem_fraction: float | None  # of the free memory that the cache may take; None: max_kv_tokens is set

    @staticmethod
    def for_rollout(
        config: TransformerConfig,
        itemsize: int,
        engine: EngineSpec,
        rollout: RolloutSpec,
        *,
        block_size: int,
        route_bytes: int,
    ) -> WantedCache:
        """Return the cache that a rollout wants. `route_bytes` are the bytes of a token's recorded experts, or 0."""
        layout = KVLayout.from_config(
            config, block_size, rollout.max_len, by_window=not engine.records_routes(rollout.role)
        )
        blocks_of_sample = layout.blocks_for(rollout.max_len) + layout.n_tables
        blocks_of_chunk = layout.blocks_of_chunk(rollout.decoder.max_prefill_tokens)
        usual, n_slots = (engine.layout.samples_per_replica(n) for n in (rollout.n_samples_with_cache, rollout.n_slots))
        most = rollout.decoder.max_kv_tokens
        needed, blocks = (layout.full_blocks(n * blocks_of_sample + blocks_of_chunk) + 1 for n in (usual, n_slots))
        is_kept = rollout.keeps_cache and engine.actor.optimizer is not None  # beside the training of the actor
        more = _MORE_FRACTION if is_kept else rollout.decoder.mem_fraction
        if engine.engine.deterministic and not engine.engine.exact:
            more = 0.0  # the free memory would decide which samples decode at the same time
        return WantedCache(
            blocks=blocks if most is None else min(needed, -(-most // block_size) + 1),
            needed=needed,
            more_fraction=more,
            block_bytes=block_size * (kv_bytes_per_token(config, itemsize, engine.layout) + route_bytes),
            states=(n_slots + 1) * state_bytes(config, itemsize, engine.layout),
            layout=layout,
            n_slots=n_slots,
            max_len=rollout.max_len,
            mem_fraction=rollout.decoder.mem_fraction if most is None else None,
        )

    def affordable_blocks(self, free_bytes: int) -> int:
        """Return how many blocks, beside the recurrent states, fit into the share `mem_fraction` of `free_bytes`."""
        assert self.mem_fraction is not None
        return (int(free_bytes * self.mem_fraction) - self.states) // self.block_bytes

    def fitting_blocks(self, free_bytes: int, affordable: int) -> int:
        """Return how many blocks the cache gets, at most `affordable` (the result of `affordable_blocks`)."""
        more = int(free_bytes * self.more_fraction) // self.block_bytes
        return min(max(self.needed, min(self.blocks, more)), affordable)

    def sequence_tokens(self, free_bytes: int) -> int:
        """Return for how many tokens of one sequence the cache has room on a device with `free_bytes`."""
        room = self.affordable_blocks(free_bytes) if self.mem_fraction is not None else self.blocks
        return self.layout.max_sequence_tokens(self.layout.pool_blocks(max(min(room, self.blocks), 0)), self.max_len)

    def bytes_within(self, free_bytes: int) -> int:
        """Return the bytes that the cache and the recurrent states take on a device with `free_bytes`."""
        blocks = self.blocks
        if self.mem_fraction is not None:
            blocks = self.fitting_blocks(free_bytes, self.affordable_blocks(free_bytes))
        return max(0, blocks) * self.block_bytes + self.states


def may_verify_drafts(decoder: DecoderConfig, *, on_cuda: bool) -> bool:
    """Return whether the settings let a decoding step compute several tokens of a sample."""
    return decoder.speculation == "on" or (decoder.speculation == "auto" and on_cuda)


def max_verification_rows(max_running: int) -> int:
    """Return the largest number of rows of a decoding step with drafts."""
    return min(1024, 8 * max_running)
