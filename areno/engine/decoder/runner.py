"""Runs the plan of a decoding step on the device: input tensors, forward passes, and sampled tokens back to the host.

On CUDA nothing here waits for the device. Inputs are copied from pinned memory. Results are copied to pinned memory
and marked by an event. The sampled token, which is the input of the next step, stays on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.cost.kv_layout import KVLayout
from areno.engine.decoder.attention_split import PrefixGroups, split_attention
from areno.engine.decoder.block_manager import BlockManager, BlockTables
from areno.engine.decoder.caches import KVCache, RouteCache, StateCache
from areno.engine.decoder.cuda_graphs import DecodeGraphs, GraphCache, GraphCapturer, capture_sizes
from areno.engine.decoder.draft_verification import DraftedRows, NgramStepRunner, TableDrafts
from areno.engine.decoder.prefill import PrefillBatch, PrefillGraphs, PrefillTensors
from areno.engine.decoder.sampler import LogitEdits, PendingTokens, SlotSampler, sample_edited, token_and_top_logprobs
from areno.engine.decoder.scheduler import Chunk, SchedulerOutput
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import SlotTable
from areno.engine.profiling import phase
from areno.kernels.attention import varlen_attention
from areno.kernels.backend import can_use_triton, to_device, to_host
from areno.kernels.delta import DeltaWeights, RowChunks
from areno.kernels.paged import PagedBatch, decode_attention, load_rows, max_group_rows, store_rows
from areno.kernels.sampling import SamplingFlags, can_sample_columns, can_sample_hidden
from areno.layers.adapter import use_stacked_adapters
from areno.layers.attention import Attend, AttentionLayer, CachedAttend
from areno.models.transformer import Transformer
from areno.specs.engine import EngineSpec
from areno.specs.rollout import RolloutSpec

logger = logging.getLogger("areno")

_SCORED_ROWS = 256  # prompt tokens whose logits exist at once


class Runner:
    """The device side of the decoder: runs the model, and holds the KV cache and the sampling settings.

    A sequence has a slot while it is in the batch. For each slot the device holds block tables, sampling settings and
    the last sampled token. The last slot belongs to padding rows. `texts` are ranges (first, end) of the token ids that
    have a text. Only these ids are sampled, or all ids if `texts` is empty.

    In the methods that sample, `slots_B` is the slot of each row and `index_B` the index of the sampled token in its
    completion, both int64. They return (2, B) float64, tokens and log-probabilities. With LogitEdits, more rows
    follow: those of `sample_edited`.
    """

    def __init__(
        self,
        model: Transformer,
        blocks: BlockManager,
        layout: KVLayout,
        spec: EngineSpec,
        rollout: RolloutSpec,
        attn_backend: str,
        texts: Collection[tuple[int, int]],
    ):
        self.model, self.attn_backend, self.is_exact = model, attn_backend, spec.engine.exact
        self.fixed_order = attn_backend == "fixed_order"
        self.device = model.device
        max_running = spec.layout.samples_per_replica(rollout.n_slots)
        n_blocks, n_slots = blocks.n_blocks, max_running + 1
        self.blocks = blocks
        self.cache = KVCache(model, n_blocks, layout, n_slots)
        self.states = None if model.config.delta is None else StateCache(model, n_slots)
        self.routes: RouteCache | None = None
        if spec.records_routes(rollout.role) and model.routing is not None:
            self.routes = RouteCache(model.routing, n_blocks, blocks.block_size, self.device)
        self.sampler = SlotSampler(n_slots, model.config.vocab_size, self.device, texts)
        self._last_groups: tuple[np.ndarray | None, PrefixGroups | None] = (None, None)
        self._verified: dict[int, Sequence] = {}  # by slot: the device does not have their last tokens
        self._uncounted: list[tuple[int, int]] = []  # (slot, token) that the device's counts lack
        on_cuda = self.device.type == "cuda"
        # The torch form of paged attention reads each row by itself, so groups would not help it.
        self.uses_prefix_groups = can_use_triton(self.cache.tables)
        self.group_size = max_group_rows(
            model.config.num_heads // model.tp.size // self.cache.n_heads, self.fixed_order
        )
        self.n_multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count if on_cuda else 1
        self._split = partial(
            split_attention,
            block_size=self.cache.block_size,
            group_size=self.group_size,
            n_multiprocessors=self.n_multiprocessors,
            n_heads=self.cache.n_heads,
            fixed_order=self.fixed_order,
        )
        groups_rows = self.uses_prefix_groups and not self.fixed_order and not blocks.has_windows
        group_size = self.group_size if groups_rows else 0
        self.ngrams = NgramStepRunner(self._decode, self.sampler, self._split, self.cache.block_size, group_size)
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        use_graphs = on_cuda and not rollout.decoder.eager_decode
        if use_graphs and self.uses_prefix_groups:
            captures = GraphCapturer(self.device, may_fail=model.tp.size == 1)
            sizes = sorted({*capture_sizes(max_running), spec.layout.samples_per_replica(rollout.n_samples_with_cache)})
            self.graphs = DecodeGraphs(self._decode, sizes, (max_running, 0, 0, 0), captures)
            if self._pads_prefills:
                scratch = blocks.scratch * blocks.block_size
                n_params = sum(parameter.numel() for parameter in model.layers.parameters())
                self.prefill_graphs = PrefillGraphs(self._prefill_logits, scratch, captures, n_params)
            self.ngrams.captures = captures
        elif use_graphs:  # the torch form of paged attention needs the longest length on the host
            logger.warning("decode without CUDA graphs, which need triton, and a GPU of compute capability 7.0 or more")

    @property
    def _pads_prefills(self) -> bool:
        """Return whether prefills are padded and run as CUDA graphs.

        Graphs do not support attention with "sdpa" and recurrent layers, which divide rows into batches on the host.
        They neither store the experts of tokens nor support sliding windows. With tensor parallelism, a rank without
        memory for a graph could not run the prefill alone.
        """
        config = self.model.config
        can_pad = self.attn_backend != "sdpa" and config.delta is None and self.model.routing is None
        return can_pad and not self.blocks.has_windows and self.model.tp.size == 1

    @property
    def all_graphs(self) -> list[GraphCache[Any]]:
        found = (self.graphs, self.prefill_graphs)
        return [*(each.graphs for each in found if each is not None), *self.ngrams.graphs]

    def _sample(
        self,
        logits_BV: Tensor,
        slots_B: Tensor,
        index_B: Tensor,
        flags: SamplingFlags,
        edits: LogitEdits | None,
        sampler: SlotSampler,
    ) -> Tensor:
        """Sample a token for each row from logits of the whole vocabulary, which may be overwritten."""
        head, first = self.model.lm_head, self.model.lm_head.first
        local_BV = self._logits_to_score(logits_BV[:, first : first + head.n_valid], flags)
        if edits is None:
            out_2B = sampler.sample(logits_BV, slots_B, index_B, flags)
        else:
            out_2B = sample_edited(logits_BV, slots_B, index_B, sampler, flags, edits)
        return self._set_exact_logprobs(out_2B, local_BV, slots_B, sampler)

    def _sample_column_shards(
        self, local_BV: Tensor, slots_B: Tensor, index_B: Tensor, flags: SamplingFlags, sampler: SlotSampler
    ) -> Tensor:
        """Sample a token for each row when each tensor-parallel rank has only some columns of the logits.

        If `can_sample_columns` accepts `flags`, each rank draws from its own columns. Otherwise, as with top-k or
        top-p, the ranks exchange logits, and each rank draws the tokens of some of the rows from the whole vocabulary.
        """
        tp, n_rows, n_valid = self.model.tp, len(slots_B), self.model.lm_head.n_valid
        if can_sample_columns(local_BV, flags):
            valid_BV = self._logits_to_score(local_BV[:, :n_valid], flags)
            out_2B = sampler.sample_columns(tp, local_BV, slots_B, index_B, flags)
            return self._set_exact_logprobs(out_2B, valid_BV, slots_B, sampler)
        if more := -n_rows % tp.size:  # rows of the scratch slot
            local_BV = F.pad(local_BV, (0, 0, 0, more))
            slots_B, index_B = F.pad(slots_B, (0, more), value=sampler.n_slots - 1), F.pad(index_B, (0, more))
        logits_RV = tp.columns_to_rows(local_BV)[:, : self.model.config.vocab_size]
        share = slice(tp.rank * len(logits_RV), (tp.rank + 1) * len(logits_RV))
        out_2R = sampler.sample(logits_RV, slots_B[share], index_B[share], flags)
        out_2B = tp.gather(out_2R, dim=1)[:, :n_rows]
        sampler.record_tokens(out_2B[0].long(), slots_B[:n_rows], share, flags)
        return self._set_exact_logprobs(out_2B, local_BV[:n_rows, :n_valid], slots_B[:n_rows], sampler)

    def _logits_to_score(self, local_BV: Tensor, flags: SamplingFlags) -> Tensor:
        """Return the logits that `_set_exact_logprobs` reads: a copy if sampling or training's stride requires it.

        By the stride, the compiler chooses how many neighbouring columns a thread adds, and so the order of the sums.
        """
        if not self.is_exact:
            return local_BV
        n_columns = len(self.model.lm_head.weight)
        if local_BV.stride(0) == n_columns and not self.sampler.tensors.overwrites_logits(flags):
            return local_BV
        return local_BV.new_empty((len(local_BV), n_columns))[:, : local_BV.shape[1]].copy_(local_BV)

    def _set_exact_logprobs(self, out_2B: Tensor, local_BV: Tensor, slots_B: Tensor, sampler: SlotSampler) -> Tensor:
        """If `is_exact`, replace log-probabilities in place by the values that the training kernel computes."""
        if self.is_exact:
            model = self.model
            out_2B[1] = sampler.logprobs(local_BV, out_2B[0].long(), slots_B, model.tp, model.lm_head.first)
        return out_2B

    @torch.no_grad()
    def launch(self, scheduled: SchedulerOutput) -> list[PendingTokens]:
        """Launch a step without waiting. Returns the pending tokens after complete prompts and of the decode pass."""
        pending: list[PendingTokens] = []
        prefilled = [sequence for chunk in scheduled.chunks if chunk.is_last for sequence in chunk.prefill.sequences]
        table = scheduled.table
        slots_of_prefilled = np.array([sequence.slot for sequence in prefilled], dtype=np.int64)
        self._upload_verified()
        logits_KV: Tensor | None = None
        if scheduled.chunks:  # first, so that the device computes while the host collects the settings of new slots
            with phase("prefill", tokens=sum(chunk.end - chunk.start for chunk in scheduled.chunks)):
                logits_KV = self._prefill(scheduled.chunks)
        self._upload_slots(prefilled, slots_of_prefilled, scheduled)
        masked = prefilled + (scheduled.decode if scheduled.drafts is None else [])  # drafts have a mask for each row
        if (
            self.sampler.has_masks
            or table.has_grammar[scheduled.slots_B].any()
            or table.has_grammar[slots_of_prefilled].any()
        ) and (masks := self.sampler.pack_masks(masked)) is not None:
            self.sampler.assign_masks(*map(self._upload, masks))
        if prefilled and logits_KV is not None:
            out = self._sample_first_tokens(scheduled, prefilled, slots_of_prefilled, logits_KV)
            owners_B = table.owner[slots_of_prefilled]
            pending.append(PendingTokens(prefilled, slots_of_prefilled, owners_B, to_host(out)))
        if scheduled.decode:
            with phase("decode", samples=len(scheduled.decode)):
                out = self._launch_decode(scheduled)
            owners_B = table.owner[scheduled.slots_B]
            sampled = to_host(out)
            pending.append(PendingTokens(scheduled.decode, scheduled.slots_B, owners_B, sampled, scheduled.drafts))
        return pending

    def note_verified(self, sequence: Sequence, n_accepted: int) -> None:
        """Record that a sequence got `n_accepted` tokens from a verification. The next launch tells the device."""
        self._verified[sequence.slot] = sequence
        if sequence.is_penalized:
            self._uncounted += [(sequence.slot, token) for token in sequence.tokens[-n_accepted:]]

    def _upload_verified(self) -> None:
        verified, self._verified = self._verified, {}
        uncounted, self._uncounted = self._uncounted, []
        # A sequence that has left its slot needs nothing: a new one in the slot writes its own values afterwards.
        last = [(slot, each.tokens[-1]) for slot, each in verified.items() if each.slot == slot]
        if last:
            counted = self._upload(np.array(uncounted, dtype=np.int64).reshape(-1, 2).T.copy())
            slots, tokens = self._upload_columns(last)
            self.sampler.apply_verified(slots, tokens, counted)

    def _upload(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)

    def _upload_columns(self, rows: Collection[tuple[int, ...]]) -> tuple[Tensor, ...]:
        return self._upload(np.array(rows, dtype=np.int64).T.copy()).unbind()

    def _upload_slots(self, new: list[Sequence], slots_B: np.ndarray, scheduled: SchedulerOutput) -> None:
        if changed := [*new, *scheduled.grown]:
            slots = [each.slot for each in changed]
            entries = BlockTables.take_new_entries([each.block_tables for each in changed], slots)
            if entries.size:
                in_table, in_row, in_column, blocks = self._upload(entries)
                self.cache.tables[in_table, in_row, in_column] = blocks.int()
        if new:
            self.sampler.assign_settings(self._upload(SlotSampler.pack_settings(new)))
            is_penalized = scheduled.table.is_penalized[slots_B].any()
            if is_penalized and (counts := SlotSampler.pack_counts(new)) is not None:
                self.sampler.assign_counts(*map(self._upload, counts))

    def _prefill(self, chunks: list[Chunk]) -> Tensor | None:
        """Run one forward pass over prompt chunks. Returns the logits of the K prompts that it completes, (K, V)."""
        # Spans of the exact attention are counted from the first token on.
        batch = PrefillBatch.from_chunks(chunks, self.blocks, from_the_first=self.fixed_order)
        if self.prefill_graphs is not None and not any(chunk.prefill.leader.scores_prompt for chunk in chunks):
            logits_KV = self.prefill_graphs.run(batch)
            if logits_KV is not None:
                return logits_KV
        given = PrefillTensors.unpack(self._upload(batch.pack()), batch.shape)
        attend = self._with_recurrent_states(chunks, batch.cu_q, self._prefill_attention(given))
        hidden_ND = self._forward(given.tokens_N, given.positions_N, attend, given.stored[0])
        self._score_prompts(chunks, hidden_ND)
        return self.model.logits(hidden_ND[given.last_K]) if len(batch.last) else None

    def _sample_first_tokens(
        self, scheduled: SchedulerOutput, prefilled: list[Sequence], slots_B: np.ndarray, logits_KV: Tensor
    ) -> Tensor:
        """Copy partly filled blocks and states from leaders to followers, and sample each sequence's first token."""
        complete = [chunk.prefill for chunk in scheduled.chunks if chunk.is_last]
        if copies := [pair for prefill in complete for pair in prefill.block_copies(self.blocks)]:
            sources, targets = self._upload_columns(copies)
            self.cache.copy_blocks(sources, targets)
            if self.routes is not None:
                self.routes.copy_blocks(sources, targets)
        if self.states is not None:
            pairs = [pair for prefill in complete for pair in prefill.slot_pairs()]
            if pairs:
                self.states.copy_slots(*self._upload_columns(pairs))
        prompt_of_row = np.repeat(np.arange(len(complete)), [len(prefill.sequences) for prefill in complete])
        table, edits = scheduled.table, self._logit_edits(prefilled, slots_B, scheduled.table)
        drawn = np.stack([slots_B, table.n_sampled[slots_B] - 1, prompt_of_row])
        on_device_B, index_B, prompts_B = self._upload(drawn)
        flags = self.sampler.flags(table, slots_B)
        return self._sample(logits_KV[prompts_B], on_device_B, index_B, flags, edits, self.sampler)

    def _prefill_attention(self, given: PrefillTensors) -> Attend:
        """Return a function that stores a layer's keys and values in the cache, and computes the layer's attention."""

        def attend(layer: AttentionLayer, q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor) -> Tensor:
            blocks, table = self.cache.layer_blocks(layer.index), self.cache.table_index(layer.index)
            # All rows write before any reads: a row may use blocks that another one fills in this very pass.
            store_rows(k_NKC, v_NKC, *blocks, given.stored[table])
            if (keys_M := given.keys[table]) is not None:  # some chunks also attend to tokens of earlier steps
                k_NKC, v_NKC = load_rows(*blocks, keys_M, q_NHC.dtype)
            how = given.borders[table], self.attn_backend, layer.window, layer.sinks_H
            return varlen_attention(q_NHC, k_NKC, v_NKC, *how)

        return attend

    def _prefill_logits(self, given: PrefillTensors) -> Tensor:
        hidden_ND = self._forward(given.tokens_N, given.positions_N, self._prefill_attention(given), None)
        return self.model.logits(hidden_ND[given.last_K])

    def _with_recurrent_states(self, chunks: list[Chunk], cu_q: np.ndarray, attend: Attend) -> Attend:
        """With recurrent layers, return a CachedAttend that also prefills them and updates states, else `attend`."""
        states = self.states
        if states is None:
            return attend
        rows = RowChunks.from_starts(cu_q.tolist(), self.device)
        slots_R = self._upload(np.array([chunk.prefill.leader.slot for chunk in chunks], dtype=np.int64))
        goes_on = np.array([chunk.start > 0 for chunk in chunks])
        continues_R = self._upload(goes_on) if goes_on.any() else None

        def recur(layer: int, proj_NP: Tensor, weights: DeltaWeights) -> Tensor:
            return states.prefill_rows(layer, proj_NP, weights, rows, slots_R, continues_R)

        return CachedAttend(attend, recur)

    def _forward(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, indices_N: Tensor | None) -> Tensor:
        """Run the layers, and return hidden states (N, D). Store routed experts at `indices_N` of the RouteCache."""
        if self.model.routing is not None:
            self.model.routing.configure(records=self.routes is not None)
        with use_stacked_adapters():
            hidden_ND = self.model(tokens_N, positions_N, attend)
        if self.routes is not None and indices_N is not None:
            self.routes.store(indices_N)
        return hidden_ND

    def _score_prompts(self, chunks: list[Chunk], hidden_ND: Tensor) -> None:
        """Store the log-probabilities of the prompt tokens in these chunks, for requests that want them."""
        start = 0
        for chunk in chunks:
            leader, n_tokens = chunk.prefill.leader, chunk.end - chunk.start
            if leader.scores_prompt:
                targets = leader.tokens[chunk.start + 1 : min(chunk.end, leader.n_prompt - 1) + 1]
                temperature, top = leader.request.scored_temperature, leader.request.top_logprobs
                for at in range(0, len(targets), _SCORED_ROWS):
                    part = targets[at : at + _SCORED_ROWS]
                    logits_KV = self.model.logits(hidden_ND[start + at : start + at + len(part)])
                    leader.prompt_logprobs += token_and_top_logprobs(logits_KV / temperature, part, top)
                for follower in chunk.prefill.followers:
                    follower.prompt_logprobs = leader.prompt_logprobs
            start += n_tokens

    def _launch_decode(self, scheduled: SchedulerOutput) -> Tensor:
        if isinstance(scheduled.drafts, TableDrafts):
            return self.ngrams.launch(scheduled.drafts, scheduled.table)
        if scheduled.drafts is not None:
            return self._launch_verification(scheduled, scheduled.drafts)
        sequences, slots_B, table = scheduled.decode, scheduled.slots_B, scheduled.table
        n_rows, lengths_B = len(sequences), table.n_kv[slots_B]
        rows = np.empty((4, n_rows), dtype=np.int64)
        rows[:3] = slots_B, lengths_B - 1, table.n_sampled[slots_B] - 1
        size = n_rows if self.graphs is None else self.graphs.captured_size_for(n_rows)
        split = self._split(
            sequences,
            max_groups=max(1, 2 * size // self.group_size) if self.uses_prefix_groups else 0,
            has_windows=self.blocks.has_windows,
            lengths_B=lengths_B,
            groups=self._cached_groups(slots_B),
        )
        self._last_groups = slots_B, split.groups
        rows[3] = split.shared_lens_B
        flags = self.sampler.flags(table, slots_B)
        edits = self._logit_edits(sequences, slots_B, table)
        if self.graphs is not None and edits is None:
            return self.graphs.run(rows, split, flags)
        groups = None if split.prefix_groups_GR is None else self._upload(split.prefix_groups_GR)
        max_len = int(rows[1].max()) + 1
        return self._decode(
            self._upload(rows), self._upload(split.split_lens), groups, split.splits, flags, max_len, edits
        )

    def _logit_edits(self, sequences: list[Sequence], slots_B: np.ndarray, table: SlotTable) -> LogitEdits | None:
        return LogitEdits.for_batch(sequences, self._upload) if table.needs_edits[slots_B].any() else None

    def _launch_verification(self, scheduled: SchedulerOutput, drafts: list[list[int]]) -> Tensor:
        """Launch the decode pass that verifies `drafts`. The result has a column for each row of `DraftedRows`."""
        drafted = DraftedRows.for_step(scheduled.decode, drafts, scheduled.table)
        slots_N, table, lengths_N = drafted.slots_N, scheduled.table, drafted.positions_N + 1
        flags = self.sampler.flags(table, slots_N, drafted.index_N)
        needs_edits = table.needs_edits[scheduled.slots_B].any()
        may_group = self.uses_prefix_groups and not self.blocks.has_windows  # rows are not sorted by their own length
        max_groups = max(1, 2 * len(slots_N) // self.group_size) if may_group else 0
        split = self._split(drafted.sequences, max_groups=max_groups, lengths_B=lengths_N)
        rows = np.stack([slots_N, drafted.positions_N, drafted.index_N, split.shared_lens_B, drafted.tokens_N])
        edits = LogitEdits.for_batch(drafted.sequences, self._upload) if needs_edits else None
        groups = None if split.prefix_groups_GR is None else self._upload(split.prefix_groups_GR)
        masks_NW = drafted.grammar_masks(self.sampler.n_mask_words) if flags.masked else None
        rows_5N = self._upload(rows)
        sampler = self.sampler.at_rows(
            rows_5N[0],
            flags,
            self._upload(drafted.drafted_token_pairs()) if flags.penalized else None,
            None if masks_NW is None else self._upload(masks_NW),
        )
        max_len = int(lengths_N.max())
        return self._decode(
            rows_5N, self._upload(split.split_lens), groups, split.splits, flags, max_len, edits, sampler
        )

    def _cached_groups(self, slots_B: np.ndarray) -> PrefixGroups | None:
        """Return the prefix groups of the previous step if `slots_B` is the same array as then: the same batch."""
        last_slots_B, groups = self._last_groups
        return groups if last_slots_B is slots_B and not self.blocks.has_windows else None

    def _decode(
        self,
        rows: Tensor,
        split_lens: Tensor,
        prefix_groups_GR: Tensor | None,
        splits: tuple[int, int],
        flags: SamplingFlags,
        max_len: int | None = None,
        edits: LogitEdits | None = None,
        of_rows: SlotSampler | None = None,
    ) -> Tensor:
        """Run the model on the last token of each row, and sample the next token.

        `rows` is (4, B) int64: slot, position of the input token, index of the sampled token in its completion, length
        of the shared prefix. In a verification of drafts, `of_rows` has the settings of each row, `rows` has a fifth
        entry, the input token, and several rows may belong to one sequence. `max_len` is the length of the longest row,
        None in a captured graph. The other arguments are those of AttentionSplit.
        """
        slots_B, positions_B, index_B, shared_lens_B = rows[:4]
        batch = PagedBatch(
            table_TW=self.cache.tables[0],
            slots_B=slots_B,
            lengths_B=positions_B + 1,
            shared_lens_B=shared_lens_B,
            split_lens=split_lens,
            prefix_groups_GR=prefix_groups_GR,
            splits=splits,
            fixed_order=self.fixed_order,
            pdl=True,
            reads_early=of_rows is None,  # else rows read the keys of rows before them, which this step writes
            max_len=max_len,
        )
        batches = [replace(batch, table_TW=table_TW) for table_TW in self.cache.tables]
        stored = (
            [] if of_rows is None else [self.cache.token_indices(t, slots_B, positions_B) for t in self.cache.tables]
        )

        def attend(layer: AttentionLayer, q_BHC: Tensor, k_BKC: Tensor, v_BKC: Tensor) -> Tensor:
            (blocks, exponents), table = self.cache.layer_blocks(layer.index), self.cache.table_index(layer.index)
            if stored:  # a row attends to rows before it, whose keys the kernel would write at the same time
                store_rows(k_BKC, v_BKC, blocks, exponents, stored[table])
            how = batches[table], layer.window, exponents, layer.sinks_H
            return decode_attention(q_BHC, k_BKC, v_BKC, blocks, *how)

        mix: Attend = attend
        if (states := self.states) is not None:
            mix = CachedAttend(attend, lambda layer, given, weights: states.decode_step(layer, given, weights, slots_B))
        indices_B = None if self.routes is None else self.cache.token_indices(batch.table_TW, slots_B, positions_B)
        tokens_B = self.sampler.tensors.last_token[slots_B] if of_rows is None else rows[4]
        hidden_BD = self._forward(tokens_B, positions_B, mix, indices_B)
        sampler = self.sampler if of_rows is None else of_rows
        drawn_B = slots_B if of_rows is None else torch.arange(len(slots_B), device=slots_B.device)
        may_skip_logits = edits is None and not self.is_exact and self.model.tp.size == 1
        if may_skip_logits and can_sample_hidden(hidden_BD, flags):
            return sampler.sample_hidden(hidden_BD, self.model.lm_head.weight, drawn_B, index_B)
        if self.model.tp.size > 1 and edits is None:
            return self._sample_column_shards(self.model.logit_columns(hidden_BD), drawn_B, index_B, flags, sampler)
        return self._sample(self.model.logits(hidden_BD), drawn_B, index_B, flags, edits, sampler)
