"""Continuous batching: which sequences run in the next step, and which blocks they use. No tensors.

Each step advances every running sequence by one token and also prefills up to `max_prefill_tokens` prompt tokens. So
long prompts do not hold up the running sequences, nor the other way round. A sequence with a grammar takes a step only
after its last token has arrived, so every second one. Sequences are admitted first come, first served, so the lists
running, prefilling, waiting are ordered by age, the oldest first.

When blocks run out, the youngest sequence is preempted: it releases its blocks and waits again. The oldest always goes
on, so there is no deadlock as long as each sequence fits on its own, which `RequestLimits` checks.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from areno.engine.decoder.block_manager import BlockManager
from areno.engine.decoder.sequence import Sequence
from areno.types import GenerationRequest


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt that is being computed, for one sample (the leader) and others of the same request (the followers).

    The followers share the leader's full blocks. A last block that is not full is copied for each of them at the end.
    """

    leader: Sequence
    followers: list[Sequence] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [self.leader, *self.followers]

    def slot_pairs(self) -> list[tuple[int, int]]:
        """(source, destination) slots: what the leader's has once the prompt is computed, the followers' need."""
        return [(self.leader.slot, follower.slot) for follower in self.followers]

    def copies(self, block_size: int) -> list[tuple[int, int]]:
        """(source, destination) blocks to copy once the prompt is in the cache."""
        if len(self.leader.tokens) % block_size == 0:
            return []
        return [(self.leader.blocks[-1], follower.blocks[-1]) for follower in self.followers]


@dataclass(slots=True)
class Chunk:
    """The tokens [start, end) of a prefill. The last chunk samples the first token of each of its sequences."""

    prefill: Prefill
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.prefill.leader.tokens)


@dataclass(slots=True)
class Plan:
    """What one step runs: one forward pass over the chunks, then one that samples a token for each of `decode`."""

    chunks: list[Chunk]
    decode: list[Sequence]


class Scheduler:
    """Keeps every unfinished sequence and decides what each step runs.

    window: tokens that any layer sees of a sequence, the last ones; None is all. Blocks before them are released while
    the sequence goes on.
    reuses_prefixes: whether the blocks of a prefix are all that is needed to go on from it; else none is found again.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_running: int,
        max_prefill_tokens: int,
        window: int | None = None,
        reuses_prefixes: bool = True,
    ):
        self.blocks, self.window, self.reuses_prefixes = blocks, window, reuses_prefixes
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self._slots = list(range(max_running))[::-1]
        self.n_preemptions = 0
        self.n_cached_tokens = 0

    @property
    def n_running(self) -> int:
        """Sequences that have a slot."""
        return len(self.running) + sum(len(prefill.sequences) for prefill in self.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def is_short_of_blocks(self) -> bool:
        """Whether the running sequences need more blocks than there are, so that `schedule` would preempt some.

        The caller should first wait for the tokens in flight, with which some of them may be finished.
        """
        return sum(map(self._needs_block, self.running)) > self.blocks.n_available

    def schedule(self) -> Plan:
        """Plan the next step. Its positions count as cached from now on."""
        decode = self._grow_running()
        chunks = self._next_chunks()
        for sequence in decode:
            sequence.n_kv += 1
            sequence.n_sampled += 1
        return Plan(chunks, decode)

    def register(self, sequence: Sequence, n_tokens: int) -> None:
        """Make the full blocks among a sequence's first `n_tokens` tokens (known, and cached) findable by content."""
        size = self.blocks.block_size
        if not self.reuses_prefixes:
            return
        for i in range(sequence.n_registered, n_tokens // size):
            content = tuple(sequence.tokens[i * size : (i + 1) * size])
            sequence.prefix_id = self.blocks.register(sequence.blocks[i], sequence.prefix_id, content)
            sequence.n_registered = i + 1

    def remove_finished(self) -> None:
        """Release the slots and blocks of running sequences that have a finish reason."""
        for sequence in self.running:
            if sequence.finish_reason is not None:
                self._release(sequence)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]

    def abort(self, request_id: int) -> list[Sequence]:
        """Remove the unfinished sequences of a request; returns them with the finish reason "abort"."""
        dropped: list[Sequence] = []
        # All samples of a prefill belong to one request, so it is dropped as a whole.
        for prefill in [prefill for prefill in self.prefilling if prefill.leader.request.request_id == request_id]:
            self.prefilling.remove(prefill)
            dropped += prefill.sequences
        for sequence in dropped:
            self._release(sequence)
        dropped += [each for each in (*self.running, *self.waiting) if each.request.request_id == request_id]
        for sequence in dropped:
            sequence.finish_reason = "abort"
        self.remove_finished()
        self.waiting = deque(sequence for sequence in self.waiting if sequence.finish_reason is None)
        return dropped

    def give_back(self, n_samples: int) -> list[GenerationRequest]:
        """Remove whole requests that have not begun, the youngest first, until so many samples are gone."""
        fresh = Counter(each.request.request_id for each in self.waiting if each.is_fresh)
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
        """Send every sequence back to waiting, to be recomputed from its tokens."""
        while self.prefilling or self.running:
            self._preempt_youngest()

    def _needs_block(self, sequence: Sequence) -> bool:
        return not sequence.reached_max_new and sequence.n_kv == len(sequence.blocks) * self.blocks.block_size

    def _grow_running(self) -> list[Sequence]:
        """The running sequences that take a step, oldest first, each with a block for its next position."""
        decode: list[Sequence] = []
        for sequence in list(self.running):
            # slot < 0: preempted for an older one
            if sequence.reached_max_new or sequence.awaits_token or sequence.slot < 0:
                continue
            if self.window is not None:
                self._release_behind_window(sequence, self.window)
            if self._needs_block(sequence):
                while self.blocks.n_available == 0 and sequence.slot >= 0:
                    self._preempt_youngest()
                if sequence.slot < 0:
                    continue
                sequence.blocks.append(self.blocks.allocate())
            decode.append(sequence)
        return decode

    def _release_behind_window(self, sequence: Sequence, window: int) -> None:
        """Release blocks that neither this step nor a later one reads. Those that can be found by content still can."""
        first_seen = sequence.n_kv + 1 - window  # by the query at position n_kv
        n_released = min(first_seen // self.blocks.block_size, sequence.n_registered)
        if n_released > sequence.n_released:
            self.blocks.release(sequence.blocks[sequence.n_released : n_released])
            sequence.n_released = n_released

    def _next_chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        for prefill in self.prefilling:
            if budget:
                budget -= self._add_chunk(chunks, prefill, budget)
        while budget and (prefill := self._admit()) is not None:
            self.prefilling.append(prefill)
            budget -= self._add_chunk(chunks, prefill, budget)
        for prefill in [chunk.prefill for chunk in chunks if chunk.is_last]:
            self.prefilling.remove(prefill)
            leader = prefill.leader
            for follower in prefill.followers:
                follower.n_kv, follower.prefix_id = leader.n_kv, leader.prefix_id
                follower.n_registered = leader.n_registered
            for sequence in prefill.sequences:
                sequence.n_sampled += 1
                self.running.append(sequence)
        return chunks

    def _add_chunk(self, chunks: list[Chunk], prefill: Prefill, budget: int) -> int:
        leader = prefill.leader
        chunk = Chunk(prefill, leader.n_kv, min(len(leader.tokens), leader.n_kv + budget))
        leader.n_kv = chunk.end
        # Findable at once: a forward pass writes the keys and values of all its rows before it reads any.
        self.register(leader, chunk.end)
        chunks.append(chunk)
        return chunk.end - chunk.start

    def _admit(self) -> Prefill | None:
        """Start the oldest waiting sequence, together with samples of its request that can share its prompt."""
        if not self.waiting or not self._slots:
            return None
        leader = self.waiting[0]
        n_tokens, size = len(leader.tokens), self.blocks.block_size
        # The last token is always computed: its hidden state gives the logits of the first sampled token.
        n_matched = 0 if leader.scores_prompt or not self.reuses_prefixes else (n_tokens - 1) // size
        found, prefix_id = self.blocks.match(leader.tokens, n_matched)
        n_new = self.blocks.blocks_for(n_tokens) - len(found)
        # One spare block for each running sequence, or the newcomer would soon be preempted again.
        reserve = len(self.running)
        if not self.blocks.can_allocate(found, n_new, reserve):
            assert self.running or self.prefilling, "a sequence was admitted that can never fit"
            return None
        self.waiting.popleft()
        self.blocks.acquire(found)
        leader.blocks = found + [self.blocks.allocate() for _ in range(n_new)]
        leader.n_kv, leader.n_registered, leader.prefix_id = len(found) * size, len(found), prefix_id
        leader.slot = self._slots.pop()
        self.n_cached_tokens += leader.n_kv
        prefill = Prefill(leader)
        if leader.is_fresh:
            leader.n_cached = leader.n_kv
            n_own = 1 if n_tokens % size else 0
            shared = leader.blocks[: n_tokens // size]
            while self._slots and self._can_follow(leader) and self.blocks.can_allocate((), n_own, reserve):
                follower = self.waiting.popleft()
                self.blocks.acquire(shared)
                follower.blocks = shared + [self.blocks.allocate() for _ in range(n_own)]
                follower.slot = self._slots.pop()
                follower.n_cached = leader.n_cached
                prefill.followers.append(follower)
        return prefill

    def _can_follow(self, leader: Sequence) -> bool:
        return bool(self.waiting) and self.waiting[0].request is leader.request and self.waiting[0].is_fresh

    def _preempt_youngest(self) -> None:
        victims = self.prefilling.pop().sequences if self.prefilling else [self.running.pop()]
        for sequence in reversed(victims):
            assert sequence.n_sampled == len(sequence.logprobs), "preempted with a token in flight"
            self._release(sequence)
            self.waiting.appendleft(sequence)
        self.n_preemptions += len(victims)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks[sequence.n_released :])
        self._slots.append(sequence.slot)
        sequence.leave_cache()
