"""Device memory of the decoder: keys and values with their block tables, recurrent states, and routed experts.

`n_kv_cache_blocks` chooses the size of the KV cache from the free memory of the device.

The experts that each token was routed to are stored in the same blocks as keys and values. So shared prompts, cached
prefixes, chunked prefill and recomputation also cover the experts without extra code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.config.layout import Layout
from areno.cost.kv_cache import WantedCache
from areno.cost.kv_layout import KVLayout
from areno.errors import EngineError, Key
from areno.kernels.backend import HostCopy, to_device, to_host
from areno.kernels.delta import DeltaStates, DeltaWeights, RowChunks, delta_rows, delta_step
from areno.kernels.paged.rows import as_bytes
from areno.layers.routing import Routing
from areno.models.parameters import n_kv_heads
from areno.models.transformer import Transformer
from areno.specs.engine import EngineSpec


def n_kv_cache_blocks(
    model: Transformer,
    engine: EngineSpec,
    wanted: WantedCache,
    free_bytes: Callable[[], int],
    reserved: int,
    beside_actor: bool,
) -> int:
    """Return the number of blocks in the KV cache of a rollout. It is at most the number that `wanted` asks for.

    If `rollout.max_kv_tokens` is null, the cache takes at most the share `rollout.mem_fraction` of the free memory, and
    a smaller share for samples that only an evaluation decodes. `reserved` bytes stay free for offloaded models, which
    are used while the cache is in memory. `beside_actor` changes only the advice in an error. All ranks of a
    tensor-parallel group get the same number, because they must schedule the same samples.

    Raises EngineError if a sample of the maximum length does not fit. Also raises it if `engine.deterministic` is set
    without `engine.exact` and not all samples fit: the free memory would decide which of them decode together.
    """
    layout, max_len = wanted.layout, wanted.max_len
    if wanted.mem_fraction is None:
        return wanted.blocks
    least = torch.tensor([free_bytes() - reserved], device=model.lm_head.weight.device)
    free = int(model.tp.all_reduce(least, torch.distributed.ReduceOp.MIN).item())
    affordable = wanted.affordable_blocks(free)
    room = layout.max_sequence_tokens(layout.pool_blocks(max(affordable, 0)), max_len)
    if room < max_len:
        raise _too_small_error(
            room, max_len, wanted.n_slots if wanted.states else 0, wanted.states, reserved > 0 or beside_actor
        )
    if affordable < wanted.needed and engine.engine.deterministic and not engine.engine.exact:
        fewest_blocks, block_size = layout.full_blocks(layout.blocks_for(max_len)), layout.block_size
        raise EngineError(
            "{} is true, but the KV cache has room for {} of {} tokens, and which samples run together would come "
            "from the free memory: set {}={}, so that it is the same in each run, or lower {}, or also set {}=true",
            Key("engine.deterministic"),
            affordable * block_size,
            wanted.needed * block_size,
            Key("rollout.max_kv_tokens"),
            max(int(0.9 * affordable), fewest_blocks) * block_size,
            Key("rollout.max_concurrent_rollouts"),
            Key("engine.exact"),
        )
    return wanted.fitting_blocks(free, affordable)


def _too_small_error(room: int, max_len: int, n_states: int, state_bytes: int, may_drop: bool) -> EngineError:
    drop, drop_key = (", or set {}=true", [Key("rollout.drop_rollout_state")]) if may_drop else ("", [])
    longest = [Key("gconfig.max_new_tokens"), Key("train_dataset.max_length")]
    if n_states:
        return EngineError(
            "the recurrent states of {} sequences at once take {} GiB, which leaves the KV cache room for {} "
            "tokens, and one sequence may need {}: lower {}, {} or {}, or raise {}" + drop,
            n_states,
            round(state_bytes / 2**30, 2),
            room,
            max_len,
            Key("rollout.max_concurrent_rollouts"),
            *longest,
            Key("rollout.mem_fraction"),
            *drop_key,
        )
    return EngineError(
        "the KV cache has room for {} tokens, one sequence may need {}: lower {} or {}, or raise {}" + drop,
        room,
        max_len,
        *longest,
        Key("rollout.mem_fraction"),
        *drop_key,
    )


class KVCache:
    """Keys and values of all sequences, in the dtype of the model or in FP8, and on its device.

    The layers of the model are divided over T block tables, and all layers of a table have the same sliding window. A
    block of the pool holds the keys and values of Y layers for `block_size` tokens. `kv_blocks` is (Y, 2 for keys and
    values, n_blocks + 1, block_size, K key heads, C head dimension). In FP8 it has codes, and `exponents` (Y, 2,
    n_blocks + 1, K, block_size) has their scales, see `kernels/fp8`. Padding rows write to the last block and to the
    last slot. `tables` (T, n_slots, W) int32 has the block indices of each slot's sequence, in order. Entries before
    the sliding window are outdated or point to the last block. The memory never moves, so a CUDA graph may read it.
    """

    def __init__(self, model: Transformer, n_blocks: int, layout: KVLayout, n_slots: int):
        config, weight = model.config, model.lm_head.weight
        n_heads, size = n_kv_heads(config, Layout.single_replica(model.tp.size)), layout.block_size
        shape = (layout.layers_per_block, 2, n_blocks + 1, size, n_heads, config.head_dim)
        dtype = torch.float8_e4m3fn if config.fp8_kv else weight.dtype
        # Zeros, because what lies beyond a row's length is read with weight 0, and 0 * nan is nan.
        self.kv_blocks = torch.zeros(shape, dtype=dtype, device=weight.device)
        self.exponents: Tensor | None = None
        if config.fp8_kv:
            self.exponents = torch.zeros(*shape[:3], n_heads, size, dtype=torch.uint8, device=weight.device)
        self.block_size, self.n_heads, self.n_blocks = size, n_heads, n_blocks
        self._places = layout.places
        context_len = config.max_position_embeddings
        width = -(-min(context_len, layout.max_sequence_tokens(n_blocks, context_len)) // size)
        self.tables = torch.full((layout.n_tables, n_slots, width), n_blocks, dtype=torch.int32, device=weight.device)

    def token_indices(self, table_TW: Tensor, slots_B: Tensor, positions_B: Tensor) -> Tensor:
        """Return the index of each of B tokens for `kernels.paged.store_rows`, (B,). `table_TW` is one of `tables`."""
        blocks_B = table_TW[slots_B, positions_B // self.block_size].long()
        return blocks_B * self.block_size + positions_B % self.block_size

    def table_index(self, layer: int) -> int:
        return self._places[layer][0]

    def layer_blocks(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return views of a layer's parts of `kv_blocks` and `exponents`, over the whole pool."""
        place = self._places[layer][1]
        return self.kv_blocks[place], None if self.exponents is None else self.exponents[place]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        for each in self._memory():
            each.index_copy_(2, targets, each.index_select(2, sources))

    def clear(self) -> None:
        for each in self._memory():
            each.zero_()

    def _memory(self) -> list[Tensor]:
        return [as_bytes(each) for each in (self.kv_blocks, self.exponents) if each is not None]


class StateCache:
    """Recurrent states of all sequences, each after the last computed position of the sequence.

    Unlike keys and values, a state cannot be rolled back to an earlier position, and there is no prefix cache for
    states. So the samples of a prompt get copies of the state after the prompt, and a preempted sequence is recomputed
    from its first token. The last slot is for padding rows.
    """

    def __init__(self, model: Transformer, n_slots: int):
        delta, weight, tp = model.config.delta, model.embed.weight, model.tp
        assert delta is not None, "a model without recurrent states"
        n, on = len(delta.layers), weight.device
        heads = (tp.shard_size(delta.n_value_heads, "value heads"), delta.key_dim, delta.value_dim)
        # Zeros, because padding rows read theirs, and a nan would be kept for ever.
        inputs = torch.zeros(
            n, n_slots, tp.shard_size(delta.n_channels, "channels"), delta.width - 1, dtype=weight.dtype, device=on
        )
        matrices = torch.zeros(n, n_slots, *heads, dtype=torch.float32, device=on)
        self.layers = [DeltaStates(inputs[layer], matrices[layer]) for layer in range(n)]
        self._all = (inputs, matrices)

    def decode_step(self, layer: int, proj_BP: Tensor, weights: DeltaWeights, slots_B: Tensor) -> Tensor:
        """Compute a decoding step of recurrent layer `layer`, (B, P) -> (B, I), and update the states in place."""
        return delta_step(proj_BP, weights, self.layers[layer], slots_B)

    def prefill_rows(
        self,
        layer: int,
        proj_NP: Tensor,
        weights: DeltaWeights,
        chunks: RowChunks,
        slots_R: Tensor,
        continues_R: Tensor | None,
    ) -> Tensor:
        """Prefill packed rows, (N, P) -> (N, I), and update the states. New rows, not `continues_R`, begin at 0."""
        states, before = self.layers[layer], None
        if continues_R is not None:
            given = [each.index_select(0, slots_R) for each in states]
            before = DeltaStates(*(_mask_rows(continues_R, each) for each in given))
        out_NI, after = delta_rows(proj_NP, weights, chunks, before, return_states=True)
        assert after is not None
        for mine, new in zip(states, after, strict=True):
            mine.index_copy_(0, slots_R, new)
        return out_NI

    def copy_slots(self, sources: Tensor, targets: Tensor) -> None:
        for states in self._all:
            for of_layer in states:  # one layer at a time, because the copy of all layers would take as much as they do
                of_layer.index_copy_(0, targets, of_layer.index_select(0, sources))


def _mask_rows(kept_R: Tensor, x: Tensor) -> Tensor:
    """Return x with zeros in the rows where `kept_R` is False, even if these rows contain NaN."""
    return torch.where(kept_R.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


class RouteCache:
    """The experts that all cached tokens were routed to, stored in the same blocks as keys and values.

    `routes` is (n_blocks + 1, block_size, L layers with experts, k experts per token). The last block is scratch.
    """

    def __init__(self, routing: Routing, n_blocks: int, block_size: int, device: torch.device):
        self._routing, self._block_size, self._device = routing, block_size, device
        shape = (n_blocks + 1, block_size, routing.n_layers, routing.experts.top_k)
        self.routes = torch.full(shape, routing.unknown_expert, dtype=routing.dtype, device=device)

    def store(self, indices_N: Tensor) -> None:
        """Store the experts of the last forward pass at the indices that `KVCache.token_indices` returns."""
        recorded_NLk = self._routing.recorded_experts()[: len(indices_N)]  # without padding
        self.routes.flatten(0, 1).index_copy_(0, indices_N, recorded_NLk)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        self.routes.index_copy_(0, targets, self.routes.index_select(0, sources))

    def start_read(self, blocks: Any, n_tokens: int) -> HostCopy:
        """Start copying the experts of a sequence's first `n_tokens` tokens to the host, (n_tokens, L, k)."""
        n_blocks = -(-n_tokens // self._block_size)
        chosen = to_device(np.array(blocks[:n_blocks], dtype=np.int64), self._device)
        return to_host(self.routes.index_select(0, chosen).flatten(0, 1)[:n_tokens])
