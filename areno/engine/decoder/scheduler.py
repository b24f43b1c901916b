"""Continuous batching: which sequences run in the next step, and which KV blocks they get. Contains no tensors.

A step samples one token for every running sequence, and prefills up to `max_prefill_tokens` prompt tokens. Therefore a
long prompt does not stop running sequences, and running sequences do not stop prefill. Sequences are admitted first
come, first served. The lists of running, prefilling and waiting sequences are sorted by age, the oldest first. When the
batch is full, freed slots are filled in bulk, because even a short prefill takes as long as several decode steps. A
sequence with a grammar waits while its last token has not arrived on the host, because its next mask needs the token.

When blocks run out, the youngest sequence is preempted: its blocks are freed, and it waits to be recomputed. The oldest
sequence always continues, so there is no deadlock. This requires that each sequence fits into the cache alone, which
RequestLimits checks.

Layers with a sliding window need only the blocks of the window. During prefill, these blocks are allocated chunk by
chunk, and blocks before the window of the next chunk are freed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from areno.engine.decoder.block_manager import BlockManager, BlockTables, PrefixMatch
from areno.engine.decoder.draft_verification import Drafts, TableDrafts, truncate_draft
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import NEVER, SlotTable
from areno.types import GenerationRequest

_BULK = 8  # a full batch admits sequences again when it has shrunk to (_BULK - 1) / _BULK of its size,
_LONGEST_WAIT = 16  # but after at most this many steps


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt that is being prefilled, once for all samples that share the prefill.

    These are samples of one request, or of requests that differ only in their seeds. The first sample (the leader) owns
    the blocks into which the prompt is computed. When the prompt is complete, the other samples (the followers) share
    its full blocks, and each gets a copy of a partly filled last block.
    """

    leader: Sequence
    followers: list[Sequence] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [self.leader, *self.followers]

    def slot_pairs(self) -> list[tuple[int, int]]:
        """Return (leader's slot, follower's slot) pairs, for copying recurrent states."""
        return [(self.leader.slot, follower.slot) for follower in self.followers]

    def block_copies(self, blocks: BlockManager) -> list[tuple[int, int]]:
        """Return (source, destination) pairs of the partly filled last blocks to copy to followers."""
        if len(self.leader.tokens) % blocks.block_size == 0:
            return []
        found: list[tuple[int, int]] = []
        for group, group_blocks in enumerate(self.leader.block_tables.group_blocks):
            targets = [follower.block_tables.group_blocks[group][-1] for follower in self.followers]
            for table, source in enumerate(blocks.physical_blocks(group_blocks[-1])):
                found += [(source, blocks.physical_blocks(target)[table]) for target in targets]
        return found


@dataclass(slots=True)
class Chunk:
    """The tokens [start, end) of a prompt, which one step prefills.

    After the last chunk, each sequence of the prefill samples its first token in the same step.
    """

    prefill: Prefill
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.prefill.leader.tokens)


@dataclass(slots=True)
class SchedulerOutput:
    """The work of one step: a forward pass over the chunks, then a decode pass."""

    chunks: list[Chunk]
    decode: list[Sequence]
    slots_B: np.ndarray  # of `decode`; the same array as in the last step if the batch is the same
    grown: list[Sequence]  # those of `decode` that got a KV block in this step
    table: SlotTable
    drafts: Drafts | None = None


class Scheduler:
    """Holds every unfinished sequence and plans each step.

    `reuses_prefixes` is False for models with recurrent states, which KV blocks do not contain.
    """

    def __init__(self, blocks: BlockManager, max_running: int, max_prefill_tokens: int, reuses_prefixes: bool = True):
        self.blocks, self.reuses_prefixes = blocks, reuses_prefixes
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.table = SlotTable(max_running)
        self._running_slots: np.ndarray | None = None  # of `running`, until it changes
        self._slots = list(range(max_running))[::-1]
        self._n_closed = 0  # slots that stay free, because fewer sequences may run
        self._filled: tuple[int, int] | None = None  # (number of sequences, step) when no more could be admitted
        self._step = 0
        self._prefilled: list[Sequence] = []  # sequences of the last step's chunks, only with windows
        # (blocks, sequence, number of tokens with keys and values) of those that have left the batch. The blocks enter
        # the prefix cache when a prompt may match them or blocks run out, so never if the rollout ends before.
        self._departed: list[tuple[BlockTables, Sequence, int]] = []
        self.n_preemptions = 0
        self.n_cached_tokens = 0

    def limit_running(self, most: int) -> None:
        self._n_closed = max(0, len(self.table.owner) - most)

    @property
    def _has_slot(self) -> bool:
        return len(self._slots) > self._n_closed

    @property
    def n_running(self) -> int:
        return len(self.running) + sum(len(prefill.sequences) for prefill in self.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def is_short_of_blocks(self) -> bool:
        """Return whether the next step would preempt sequences because too few KV blocks are available.

        If so, the caller first reads the tokens of the previous step, which may finish sequences and free their blocks.
        """
        n_needed = int(np.count_nonzero(self.table.needs_block(self._slots_of_running())))
        n_needed *= self.blocks.blocks_over_all_groups
        if n_needed > self.blocks.n_available:
            self.cache_departed()
        return n_needed > self.blocks.n_available

    def schedule(self, propose: Callable[[list[Sequence]], Drafts] | None = None) -> SchedulerOutput:
        """Plan the next step, which the caller must launch.

        `n_kv` and `n_sampled` then include the tokens of the planned step, with all draft tokens. Pass `propose`, which
        drafts tokens, only if all sampled tokens have arrived or `may_draft_ahead` returns True.
        """
        self._step += 1
        self._release_skipped_of_prefilled()
        decode, slots_B, grown = self._allocate_running()
        drafts = None if propose is None or not decode else self._allocate_drafts(decode, propose(decode), grown)
        chunks = self._next_chunks()
        n_rows_B: int | np.ndarray = 1
        if isinstance(drafts, TableDrafts):
            n_rows_B = drafts.n_rows
        elif drafts is not None:
            n_rows_B = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
        self.table.n_kv[slots_B] += n_rows_B
        self.table.n_sampled[slots_B] += n_rows_B
        return SchedulerOutput(chunks, decode, slots_B, grown, self.table, drafts)

    def _append_blocks(self, sequences: list[Sequence], slots: np.ndarray | int) -> None:
        BlockTables.append_blocks([sequence.block_tables for sequence in sequences])
        self.table.capacity[slots] += self.blocks.block_size

    def may_draft_ahead(self) -> bool:
        """Return whether a step may draft while the tokens of a step with TableDrafts are in flight.

        While they are in flight, the host does not know the lengths of the sequences. So there must be plenty of blocks
        and no sliding windows, and no sequence whose settings need drafts by the host, which needs all tokens.
        """
        slots_B, table = self._slots_of_running(), self.table
        # For each sequence one block to grow, one or two for drafts, and one in reserve.
        has_blocks = self.blocks.n_available >= 4 * len(slots_B) * self.blocks.blocks_over_all_groups
        return has_blocks and not self.blocks.has_windows and not table.needs_host_drafts(slots_B)

    def _allocate_drafts(self, decode: list[Sequence], drafts: Drafts, grown: list[Sequence]) -> Drafts | None:
        """Allocate the KV blocks of drafts, and return the drafts, shortened if blocks run out. None if all are empty.

        Sequences that get a block are added to `grown`. Each running sequence can still get one more block in every
        block table, so that drafts preempt no sequence.
        """
        reserve, table = len(self.running) * self.blocks.blocks_over_all_groups, self.table
        if isinstance(drafts, TableDrafts):
            slots_B = drafts.slots_B
            # The last token is sampled, but never an input.
            most_B = table.n_prompt[slots_B] + table.max_new[slots_B] - 1
            wanted_B = np.minimum(table.n_kv[slots_B] + drafts.n_rows, most_B)
            while len(rows := np.flatnonzero(table.capacity[slots_B] < wanted_B)):
                if self.blocks.n_available - len(rows) * self.blocks.blocks_over_all_groups < reserve:
                    break
                needy = [decode[row] for row in rows.tolist()]
                self._append_blocks(needy, slots_B[rows])
                known = set(map(id, grown))
                grown += [sequence for sequence in needy if id(sequence) not in known]
            return replace(drafts, limits_B=np.minimum(table.capacity[slots_B], most_B))
        found: list[list[int]] = []
        for sequence, proposed in zip(decode, drafts, strict=True):
            draft = truncate_draft(sequence, proposed) if proposed else []
            while (room := sequence.block_tables.capacity - sequence.n_kv - 1) < len(draft):
                if self.blocks.n_available - self.blocks.blocks_over_all_groups < reserve:
                    draft = draft[:room]
                    break
                self._append_blocks([sequence], sequence.slot)
                if sequence not in grown[-1:]:
                    grown.append(sequence)
            found.append(draft)
        return found if any(found) else None

    def register(self, sequence: Sequence, n_tokens: int) -> None:
        """Add the full blocks of the first `n_tokens` tokens to the prefix cache. The tokens must be on the host."""
        if self.reuses_prefixes and n_tokens >= self._end_of_next_block(sequence):
            sequence.append_staged()
            sequence.block_tables.register(sequence.tokens, n_tokens)
            self.table.register_at[sequence.slot] = self._next_registration(sequence)

    @property
    def registers_while_decoding(self) -> bool:
        """Whether the blocks of a completion enter the prefix cache while its sequence decodes.

        Blocks before a sliding window can be freed only after they have entered the prefix cache. Other blocks enter
        after their sequence has left the batch.
        """
        return self.reuses_prefixes and self.blocks.has_windows

    def _end_of_next_block(self, sequence: Sequence) -> int:
        return (sequence.block_tables.n_registered + 1) * self.blocks.block_size

    def _next_registration(self, sequence: Sequence) -> int:
        return self._end_of_next_block(sequence) if self.registers_while_decoding else NEVER

    def remove_finished(self) -> None:
        self._release_slots([sequence for sequence in self.running if sequence.finish_reason is not None])
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        self._running_slots = None

    def abort(self, request_id: int) -> list[Sequence]:
        """Remove the unfinished sequences of a request, and return them with the finish reason "abort"."""
        dropped: list[Sequence] = []
        for prefill in list(self.prefilling):
            dropped += [each for each in prefill.sequences if each.request.request_id == request_id]
            prefill.followers = [each for each in prefill.followers if each.request.request_id != request_id]
            if prefill.leader in dropped:  # which owns the blocks; samples of other requests return to the queue
                self.prefilling.remove(prefill)
                self._release_slots(prefill.followers[::-1])
                self._requeue(prefill.followers)
        self._release_slots(dropped)
        dropped += [each for each in (*self.running, *self.waiting) if each.request.request_id == request_id]
        for sequence in dropped:
            sequence.finish_reason = "abort"
        self.remove_finished()
        self.waiting = deque(sequence for sequence in self.waiting if sequence.finish_reason is None)
        return dropped

    def remove_waiting(self, n_samples: int) -> list[GenerationRequest]:
        """Remove requests that have not started, the youngest first, until `n_samples` samples are removed."""
        fresh = Counter(each.request.request_id for each in self.waiting if each.has_only_prompt)
        found: dict[int, GenerationRequest] = {}
        for sequence in reversed(self.waiting):
            request = sequence.request
            if n_samples <= 0:
                break
            if request.request_id not in found and fresh[request.request_id] == request.n_samples:
                found[request.request_id] = request
                n_samples -= request.n_samples
        self.waiting = deque(each for each in self.waiting if each.request.request_id not in found)
        return list(found.values())

    def preempt_all(self) -> None:
        """Preempt every sequence, to be recomputed from its tokens. No more of its blocks enter the prefix cache."""
        while self.prefilling or self.running:
            self._preempt_youngest()
        self.release_departed_blocks()

    def _slots_of_running(self) -> np.ndarray:
        """Return the slots of the running sequences, (B,) int64: the same array object until `running` changes."""
        if self._running_slots is None:
            self._running_slots = np.array([sequence.slot for sequence in self.running], dtype=np.int64)
        return self._running_slots

    def _allocate_running(self) -> tuple[list[Sequence], np.ndarray, list[Sequence]]:
        """Allocate the missing blocks of the sequences that decode, and preempt the youngest if blocks run out.

        Returns the sequences that decode (the oldest first), their slots, and the sequences that got a block.
        """
        running, slots_B, table = self.running, self._slots_of_running(), self.table
        if not running:
            return [], slots_B, []
        decodes_B = ~(table.is_done(slots_B) | table.awaits_token(slots_B))
        rows = np.flatnonzero(decodes_B & table.needs_block(slots_B)).tolist()
        grown: list[Sequence] = []
        if len(rows) * self.blocks.blocks_over_all_groups > self.blocks.n_available:
            self.cache_departed()
        needy = [running[row] for row in rows]
        has_room = len(rows) * self.blocks.blocks_over_all_groups <= self.blocks.n_available
        if needy and has_room and not self.blocks.has_windows:
            self._append_blocks(needy, slots_B[rows])
            grown, needy = needy, []
        for sequence in needy:  # one by one: some may be preempted for others
            if sequence.slot < 0:  # preempted for an older one
                continue
            if self.blocks.has_windows:
                sequence.block_tables.release_skipped(sequence.n_kv)
            while self.blocks.n_available < self.blocks.blocks_over_all_groups and sequence.slot >= 0:
                self._preempt_youngest()
                self.cache_departed()
            if sequence.slot >= 0:
                self._append_blocks([sequence], sequence.slot)
                grown.append(sequence)
        # Those that were preempted are the youngest, so the rows of the others are as before.
        decodes_B, slots_B = decodes_B[: len(running)], self._slots_of_running()
        if decodes_B.all():
            return list(running), slots_B, grown
        return [running[row] for row in np.flatnonzero(decodes_B).tolist()], slots_B[decodes_B], grown

    def _release_skipped_of_prefilled(self) -> None:
        """Free those blocks of the last step's prefill that lie before the sliding window."""
        for sequence in self._prefilled:
            if sequence.slot >= 0:
                sequence.block_tables.release_skipped(sequence.n_kv)
        self._prefilled = []

    def _next_chunks(self) -> list[Chunk]:
        """Return the prompt chunks to compute. Unfinished prompts come before newly admitted prompts."""
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        for prefill in self.prefilling:  # at most one: no prompt is admitted before it is complete
            budget = self._add_chunk(chunks, prefill, budget)
        if self._may_admit():
            n_before = len(self.prefilling)
            while budget and (prefill := self._admit()) is not None:
                self.prefilling.append(prefill)
                budget = self._add_chunk(chunks, prefill, budget)
            admitted = self.prefilling[n_before:]
            pairs = [(each.slot, prefill.leader.slot) for prefill in admitted for each in prefill.followers]
            if pairs:
                self.table.occupy_like(*map(list, zip(*pairs, strict=True)))
            self._filled = (self.n_running, self._step) if budget and self.waiting else None
        if complete := [chunk.prefill for chunk in chunks if chunk.is_last]:
            self._begin_decode(complete)
        if self.blocks.has_windows:
            self._prefilled = [each for chunk in chunks for each in chunk.prefill.sequences]
        return chunks

    def _begin_decode(self, complete: list[Prefill]) -> None:
        """Let the sequences of complete prompts run. Followers get the blocks of their leader's prompt."""
        sequences: list[Sequence] = []
        for prefill in complete:
            of_leader = prefill.leader.block_tables
            followers = [follower.block_tables for follower in prefill.followers]
            of_leader.share_prefix(followers, prefill.leader.n_kv // self.blocks.block_size)
            sequences += prefill.sequences
        for sequence in sequences:
            sequence.enter_phase("decode")
        done = set(complete)
        self.prefilling = [prefill for prefill in self.prefilling if prefill not in done]
        leaders = [prefill.leader for prefill in complete]
        # Followers differ from their leader in nothing that the table has, beside the slot.
        row_of_B = np.repeat(np.arange(len(leaders)), [len(prefill.sequences) for prefill in complete])
        slots_B, table = np.array([sequence.slot for sequence in sequences], dtype=np.int64), self.table
        table.n_kv[slots_B] = table.n_kv[[leader.slot for leader in leaders]][row_of_B]
        table.n_sampled[slots_B] += 1
        table.capacity[slots_B] = np.array([leader.block_tables.capacity for leader in leaders])[row_of_B]
        table.register_at[slots_B] = np.array([self._next_registration(leader) for leader in leaders])[row_of_B]
        self.running += sequences
        self._running_slots = None

    def _may_admit(self) -> bool:
        """Return whether waiting sequences may be admitted in this step.

        A batch that could not take all waiting sequences admits more when an eighth of its sequences has left, or after
        16 steps.
        """
        if self._filled is None or not self.waiting or not self.n_running:
            return True
        n_sequences, step = self._filled
        return self.n_running * _BULK <= n_sequences * (_BULK - 1) or self._step - step >= _LONGEST_WAIT

    def _add_chunk(self, chunks: list[Chunk], prefill: Prefill, budget: int) -> int:
        """Append the next chunk of a prompt. Return the budget for other prompts, 0 if this prompt is incomplete."""
        leader = prefill.leader
        end = min(len(leader.tokens), leader.n_kv + budget)
        if self.blocks.has_windows:
            end = min(end, self._max_prefill_end(leader))
            leader.block_tables.allocate_until(end)
        if end > leader.n_kv:
            chunks.append(Chunk(prefill, leader.n_kv, end))
            budget -= end - leader.n_kv
            leader.n_kv = end
            # Findable at once: a forward pass writes the keys and values of all its rows before it reads any.
            self.register(leader, end)
        return budget if end == len(leader.tokens) else 0

    def _max_prefill_end(self, leader: Sequence) -> int:
        """Return how many leading positions of a prompt can have blocks now. Some blocks stay in reserve."""
        spare = self.blocks.n_available - len(self.running) * self.blocks.blocks_over_all_groups
        return (
            leader.block_tables.capacity
            + max(0, spare // self.blocks.blocks_over_window_groups) * self.blocks.block_size
        )

    def _admit(self) -> Prefill | None:
        """Admit the oldest waiting sequence, with the next samples that share its prompt, if there is room."""
        if not self.waiting or not self._has_slot:
            return None
        self.cache_departed()
        leader = self.waiting[0]
        n_tokens, size = len(leader.tokens), self.blocks.block_size
        # The last token is always computed: its hidden state gives the logits of the first sampled token.
        n_matched = 0 if leader.scores_prompt or not self.reuses_prefixes else (n_tokens - 1) // size
        match = self.blocks.match_prefix(leader.tokens, n_matched)
        # One spare block for each running sequence, or the newcomer would soon be preempted again.
        reserve = len(self.running) * self.blocks.blocks_over_all_groups
        n_new = self._max_new_blocks(match, n_tokens)
        if not self.blocks.can_allocate(match.cached_blocks(), n_new, reserve):
            assert self.running or self.prefilling, "a sequence was admitted that can never fit"
            return None
        self.waiting.popleft()
        leader.block_tables = BlockTables(self.blocks)
        n_taken = leader.block_tables.allocate_prompt(match, n_tokens)
        leader.enter_batch(self.table, self._slots.pop())
        leader.n_kv = match.n_group_blocks * size
        leader.enter_phase("prefill")
        self.n_cached_tokens += leader.n_kv
        prefill = Prefill(leader)
        if leader.has_only_prompt:
            leader.n_cached = leader.n_kv
            n_own = self.blocks.blocks_over_all_groups if n_tokens % size else 0
            reserve += n_new - n_taken  # of which chunks to come take the rest
            prefill.followers = self._admit_followers(leader, n_own, reserve)
            for follower in prefill.followers:
                follower.n_cached = leader.n_cached
                if follower.request is not leader.request and self.reuses_prefixes:
                    follower.n_cached = n_matched * size  # as if the prompt of the leader had been computed before
                    self.n_cached_tokens += follower.n_cached
                follower.enter_phase("prefill")
        return prefill

    def _admit_followers(self, leader: Sequence, n_own: int, reserve: int) -> list[Sequence]:
        """Admit the next sequences that can share the prefill of `leader`. Each needs `n_own` blocks of its own."""
        n_most, n_spare = len(self._slots) - self._n_closed, self.blocks.n_available - reserve
        if n_own:
            n_most = min(n_most, n_spare // n_own)
        elif n_spare < 0:
            n_most = 0
        followers: list[Sequence] = []
        while len(followers) < n_most and self._can_follow(leader):
            followers.append(self.waiting.popleft())
        if followers:
            slots = [self._slots.pop() for _ in followers]
            tables = BlockTables.for_followers(self.blocks, len(followers), has_partial_block=n_own > 0)
            for follower, slot, block_tables in zip(followers, slots, tables, strict=True):
                follower.enter_batch_like(leader, slot, block_tables)
        return followers

    def _max_new_blocks(self, match: PrefixMatch, n_tokens: int) -> int:
        """Return the largest number of blocks that a prefill holds at once, not counting its cached prefix."""
        size, n_blocks = self.blocks.block_size, 0
        for group, n_skipped in zip(self.blocks.groups, match.n_skipped, strict=True):
            n_matched = match.n_group_blocks - n_skipped
            n_blocks += group.n_tables * max(0, group.max_group_blocks_held(n_tokens, size) - n_matched)
        return n_blocks

    def _can_follow(self, leader: Sequence) -> bool:
        if not self.waiting or not self.waiting[0].has_only_prompt:
            return False
        request = self.waiting[0].request
        return request is leader.request or request.shares_prefill(leader.request)

    def _preempt_youngest(self) -> None:
        victims = self.prefilling.pop().sequences if self.prefilling else [self.running.pop()]
        self._running_slots = None
        table, slots = self.table, [sequence.slot for sequence in victims]
        assert (table.n_sampled[slots] == table.n_new[slots]).all(), "preempted with a token in flight"
        self._release_slots(victims[::-1])
        self._requeue(victims)
        self.n_preemptions += len(victims)

    def _requeue(self, sequences: list[Sequence]) -> None:
        for sequence in reversed(sequences):
            sequence.enter_phase("preempted")
            self.waiting.appendleft(sequence)

    def _release_slots(self, sequences: list[Sequence]) -> None:
        """Free slots. Keep blocks for the prefix cache in `_departed`, and release all other blocks."""
        table, slots = self.table, [sequence.slot for sequence in sequences]
        # The last token was sampled and not computed.
        n_tokens_B = np.minimum(table.n_kv[slots], table.n_prompt[slots] + table.n_new[slots] - 1)
        table.owner[slots] = 0
        self._slots += slots
        keeps, released = self.reuses_prefixes and not self.registers_while_decoding, list[BlockTables]()
        for sequence, n_tokens in zip(sequences, n_tokens_B.tolist(), strict=True):
            block_tables = sequence.leave_batch()
            if keeps and sequence.finish_reason != "error":
                self._departed.append((block_tables, sequence, n_tokens))
            else:
                released.append(block_tables)
        BlockTables.release(released)

    def release_departed_blocks(self) -> None:
        """Release the blocks of sequences that have left the batch, without caching them."""
        departed, self._departed = self._departed, []
        BlockTables.release([block_tables for block_tables, _, _ in departed])

    def cache_departed(self) -> None:
        """Add the blocks of sequences that have left the batch to the prefix cache, and release them."""
        for block_tables, sequence, n_tokens in self._departed:
            sequence.append_staged()
            block_tables.register(sequence.tokens, n_tokens)
        self.release_departed_blocks()
